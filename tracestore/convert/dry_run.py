"""`tracestore convert --dry-run`: the layouts of the files, their checks, and what would be stored of the first traces."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tracestore.console import Output
from tracestore.convert.choosing import MAX_TRACES, DefaultAttention, described_run, has_attention
from tracestore.convert.described import DescribedRun, Find
from tracestore.convert.options import ConvertOptions
from tracestore.convert.runner import ADVICE
from tracestore.convert.scoring import Scoring
from tracestore.errors import InvalidInputError, NoTracesError, escape_unprintable, some_of
from tracestore.ingest.builtin.parts import Part
from tracestore.ingest.layout.language import Layout
from tracestore.ingest.packing import PackOptions, packed_traces
from tracestore.ingest.sources import SourceFile
from tracestore.store.format import schema
from tracestore.store.io.local_folders import local_dir
from tracestore.store.read.store import open_store
from tracestore.store.write.pack import PackedTrace, fit_attributes
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
    summary: list[str] = field(default_factory=list)  # of all traces: how rows were joined, how many labels there are


def dry_run(sources: list[Path], store: str, options: ConvertOptions, output: Output) -> DryRunReport:
    """Read and check all traces as a conversion does, and describe the first ones of each source; write nothing.

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
        After all descriptions, if a conversion would be refused.
    """
    folder = local_dir(store)
    run = described_run(sources, folder, options, output)
    scoring = Scoring(run, options, output)
    attention: str | None
    attention, dtype = options.attention, options.dtype or "float16"
    find: Find = _find_nothing
    attributes, is_labeled = schema.Attributes(), False
    with ExitStack() as resources:
        resources.callback(run.release)
        if "://" not in store and (folder / "zarr.json").is_file() and not options.overwrite:
            internals = resources.enter_context(open_store(store)).internals
            attributes, find = internals.attributes, internals.index.find
            is_labeled = bool(internals.manifest.num_scored or internals.manifest.num_labeled)
            stored = attributes.options
            attention, dtype = options.attention or stored["attention"], options.dtype or stored["dtype"]
        stated = run.states_attention()
        default = DefaultAttention((lambda: stated) if stated is not None else partial(has_attention, run.probes()))
        attention = attention or default.of_new_store()
        pack_options = PackOptions(
            attention=attention,
            keep_dtype=dtype == "keep",
            skip_bad=options.skip_bad,
            refuse_attention=options.attention is None and default.is_refused(attention),
        )
        report = DryRunReport(store, attention=attention, num_sources=len(run.sources))
        check = _Check(run, scoring, options, attributes, find, is_labeled=is_labeled)
        for part in run.parts:
            found = _described(part, pack_options, check)
            report.parts += [found] if found.files else []
            for line in found.lines(part.layout) if found.files else ():
                output.info(line)
        refused = report.num_sources_refused = len(check.refused)
        errors = [error for error in check.refused if not isinstance(error, NoTracesError)]
        is_refused = refused and not options.skip_bad and (errors or refused == len(run.sources))
        for line in () if is_refused else check.close():
            report.summary.append(line)
            output.info(line)
    if options.attention is None and (note := default.note(attention)):
        output.info(note)
    output.info(f"{plural(len(run.sources), 'file')}, {refused:,} refused; nothing was written")
    if is_refused:
        raise (errors or check.refused)[0]
    return report


def _find_nothing(*_: object) -> int:
    return -1


class _Check:
    """Check the traces of all sources together, as a conversion does.

    Parameters
    ----------
    run : DescribedRun
    scoring : Scoring
    options : ConvertOptions
    attributes : Attributes
        Those of the existing store.
    find : callable
        Return the position of an id and sample in the existing store, or -1.
    is_labeled : bool
        Whether a trace of the existing store has a label or a score.

    Attributes
    ----------
    refused : list of InvalidInputError
        The errors of refused sources.
    """

    def __init__(
        self,
        run: DescribedRun,
        scoring: Scoring,
        options: ConvertOptions,
        attributes: schema.Attributes,
        find: Find,
        *,
        is_labeled: bool,
    ) -> None:
        self._run, self._scoring, self._options, self._find = run, scoring, options, find
        self._attributes, self._is_labeled = attributes, is_labeled
        self._layer_ids: tuple[int, ...] | None = None  # of the first trace of the source
        self.refused: list[InvalidInputError] = []
        self._seen: dict[tuple[str, int], dict[str, int]] = {}  # checksums of the arrays

    def begin(self, source: SourceFile) -> SourceFile:
        """Begin a source; return it without the values that a scores file replaces."""
        source = source if self._options.scores is None else source.without_values()
        self._scoring.begin_source(source)
        return source

    def add(self, packed: PackedTrace, *, is_first: bool) -> None:
        """Check a trace of the source."""
        record, key = packed.record, (packed.record.question_id, packed.record.sample)
        if is_first:
            self._run.check_layers(record)
            self._layer_ids = record.layer_ids
        if record.layer_ids not in (None, self._layer_ids):
            found = f"found {record.layer_ids!s:.80}, expected {self._layer_ids!s:.80} as in the first trace"
            raise InvalidInputError(found, position=record.position, field="layer_ids")
        try:
            self._attributes = fit_attributes(self._attributes, packed)
        except InvalidInputError as error:
            raise error.with_location(position=record.position) from None
        known = self._seen.setdefault(key, packed.crcs)
        if known != packed.crcs and self._options.on_conflict == "error":
            found = f"{escape_unprintable(key[0], 60)}, sample {key[1]}, occurs twice with other values"
            raise InvalidInputError(found, position=record.position, field="question_id")
        if not self._scoring.is_of_export:
            self._run.add_states(packed)
            if self._scoring.file is not None:
                self._scoring.join(packed, self._scoring.file)
        self._is_labeled |= record.label is not None or bool(record.scores or record.deferred_scores)
        self._run.added(record, self._find, is_new=known is packed.crcs)

    def close(self) -> Iterator[str]:
        """Close the accounts of all sources, and yield what a conversion prints of them."""
        yield from self._run.close(lambda text: self._find(text, 0) >= 0)
        file, is_whole = self._scoring.file, not self._options.skip_bad
        message = self._scoring.check_joined(self._find, is_whole=is_whole)
        if file is not None and message is not None:
            if is_whole and not self._is_labeled:
                raise InvalidInputError(message, source=file.path.name)
            yield f"{file.path.name}: {message}"
        yield from self._run.lines()


def _described(part: Part, options: PackOptions, check: _Check) -> DescribedPart:
    """Return the description of a part, all traces of which are checked."""
    found = DescribedPart(part.origin, {} if part.layout is None else part.layout.to_entries())
    for _, source in part.sources():
        source = check.begin(source)
        found.files.append(source.name)
        texts: list[str] = []
        bad: list[InvalidInputError] = []
        try:
            with closing(packed_traces(source, options, bad)) as traces:  # type: ignore[type-var]
                for number, packed in enumerate(traces):
                    texts += [_stored(packed)] if number < MAX_TRACES else []
                    try:
                        check.add(packed, is_first=not number)
                    except InvalidInputError as error:
                        error.reason += ADVICE.get(error.field or "", "")
                        if not options.skip_bad:
                            raise
                        bad.append(error)
        except InvalidInputError as error:
            check.refused.append(error.with_location(source=source.name))
            bad.append(error)
        for one in bad:
            reason = one.with_location(source=source.name).reason
            found.refused.setdefault(reason, []).append(source.name)
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
