"""`tracestore convert --dry-run`: the layouts of the files, and what would be stored of their first traces."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tracestore.console import Output
from tracestore.convert.choosing import MAX_TRACES, DefaultAttention, described_run, has_attention
from tracestore.convert.options import ConvertOptions
from tracestore.convert.scoring import Scoring
from tracestore.errors import InvalidInputError, NoTracesError, escape_unprintable, some_of
from tracestore.ingest.builtin.parts import Part
from tracestore.ingest.layout.language import Layout
from tracestore.ingest.packing import PackOptions, packed_traces
from tracestore.store.format import schema
from tracestore.store.io.local_folders import local_dir
from tracestore.store.read.store import open_store
from tracestore.store.write.pack import PackedTrace
from tracestore.words import plural


@dataclass
class DescribedPart:
    """Files that one layout reads.

    Attributes
    ----------
    origin : str
        Where the layout comes from.
    layout : dict
        Its entries; none for an export, and for files that nothing describes.
    files : list of str
        Their names.
    stored : list of str
        What would be stored of the first traces of the first file.
    refused : dict of list of str
        Files that are refused, by the reason.
    """

    origin: str
    layout: dict[str, Any]
    files: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def lines(self, layout: Layout | None) -> Iterator[str]:
        """Yield the description as lines of text."""
        shown = some_of(self.files, max_length=60)
        yield f"{shown}: {self.origin}" if self.origin else shown
        for line in "" if layout is None else layout.to_toml().splitlines():
            yield f"  {escape_unprintable(line)}"
        for number, text in enumerate(self.stored):
            yield f"  trace {number} would be stored: {text}"
        for reason, names in self.refused.items():
            yield f"  refused: {some_of(names, max_length=60)}: {reason}"


@dataclass
class DryRunReport:
    """The JSON document of `tracestore convert --dry-run --json`."""

    store: str
    attention: str  # mean, heads or none
    num_sources: int = 0
    num_sources_refused: int = 0
    parts: list[DescribedPart] = field(default_factory=list)


def dry_run(sources: list[Path], store: str, options: ConvertOptions, output: Output) -> DryRunReport:
    """Describe the first traces of each source without writing anything.

    Parameters
    ----------
    sources : list of Path
        Trace files, and folders that are searched for them.
    store : str
        The destination, whose options apply if it exists.
    options : ConvertOptions
        Options of the conversion.
    output : Output
        Receives the descriptions.

    Raises
    ------
    InvalidInputError
        After all descriptions, if a source is refused and `skip_bad` is false.
    """
    folder = local_dir(store)
    run = described_run(sources, folder, options, output)
    Scoring(run, options, output)  # refuses scores files that a conversion refuses
    attention: str | None
    attention, dtype = options.attention, options.dtype or "float16"
    if "://" not in store and (folder / "zarr.json").is_file() and not options.overwrite:
        with open_store(store) as existing:
            stored = existing.internals.attributes.options
            attention, dtype = options.attention or stored["attention"], options.dtype or stored["dtype"]
    stated = run.states_attention()
    default = DefaultAttention((lambda: stated) if stated is not None else partial(has_attention, run.probes()))
    attention = attention or default.of_new_store()
    pack_options = PackOptions(
        attention=attention,
        keep_dtype=dtype == "keep",
        refuse_attention=options.attention is None and default.is_refused(attention),
    )
    report = DryRunReport(store, attention=attention, num_sources=len(run.sources))
    refused: list[InvalidInputError] = []
    for part in run.parts:
        found = _described(part, pack_options, refused)
        report.parts += [found] if found.files else []
        for line in found.lines(part.layout) if found.files else ():
            output.info(line)
        if part.execution is not None:
            part.execution.release()
    report.num_sources_refused = len(refused)
    if options.attention is None and (note := default.note(attention)):
        output.info(note)
    output.info(f"{plural(len(run.sources), 'file')}, {len(refused):,} refused; nothing was written")
    errors = [error for error in refused if not isinstance(error, NoTracesError)]
    if refused and not options.skip_bad and (errors or len(refused) == len(run.sources)):
        raise (errors or refused)[0]
    return report


def _described(part: Part, options: PackOptions, refused: list[InvalidInputError]) -> DescribedPart:
    """Return the description of a part; append the errors of its sources."""
    found = DescribedPart(part.origin, {} if part.layout is None else part.layout.to_entries())
    for _, source in part.sources():
        found.files.append(source.name)
        texts: list[str] = []
        try:
            with closing(packed_traces(source, options)) as traces:  # type: ignore[type-var]
                texts += map(_stored, islice(traces, MAX_TRACES))
        except InvalidInputError as error:
            located = error.with_location(source=source.name)
            refused.append(located)
            found.refused.setdefault(located.reason, []).append(source.name)
        found.stored = found.stored or texts
    return found


def _stored(packed: PackedTrace) -> str:
    """Return what a store gets of a trace."""
    record = packed.record
    parts = [f"question_id {escape_unprintable(record.question_id, 60)!r}"]
    if not record.has_own_id and record.question_id.endswith(f":{record.position}"):
        parts[0] += " (made up)"
    if record.sample:
        parts.append(f"sample {record.sample}")
    parts.append(f"L {packed.num_layers}")
    if packed.num_tokens:
        parts.append(f"S {packed.num_tokens}")
    parts.append(f"D {packed.hidden_dim} {packed.hidden_dtype}")
    if record.tokens is not None:
        parts.append(plural(len(record.tokens), "token"))
    layout = schema.LAYOUT_NAMES.get(packed.layout)
    if layout is not None:
        heads = "" if packed.num_heads is None else f" of {plural(packed.num_heads, 'head')}"
        parts.append(f"{layout} attention{heads} {packed.attention_dtype}")
    if record.layer_ids is not None:
        parts.append(f"layers {', '.join(map(str, record.layer_ids))}"[:60])
    scores = {**record.scores, **record.deferred_scores}
    parts += [f"score {escape_unprintable(name, 60)} {score:g}" for name, score in scores.items()]
    if record.label is not None:
        parts.append(f"label {record.label:g}")
    if record.is_without_embeddings:
        parts.append("without the embeddings")
    if packed.rounded_from is not None:
        parts.append(f"rounded from {packed.rounded_from}")
    return ", ".join(parts)
