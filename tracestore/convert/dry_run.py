"""`tracestore convert --dry-run`: the layouts of the files, their checks, and what would be stored of the first traces."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tracestore.console import Output, Progress
from tracestore.convert.choosing import MAX_TRACES
from tracestore.convert.options import ConvertOptions
from tracestore.convert.refused import SourceNotes
from tracestore.convert.runner import Conversion
from tracestore.convert.summary import ConvertReport
from tracestore.errors import InvalidInputError, escape_unprintable, some_of
from tracestore.ingest.layout.language import parse_layout
from tracestore.ingest.source_streams import TraceStream
from tracestore.store.format import schema
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.trial import TrialWriter
from tracestore.store.write.writer import StoreWriter
from tracestore.store.write.written import TraceBlock
from tracestore.words import plural


@dataclass(eq=False)
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

    def lines(self) -> Iterator[str]:
        """Yield the description as lines of text."""
        shown = some_of(self.files, max_length=60)
        yield f"{shown}: {self.origin}" if self.origin else shown
        for line in parse_layout(self.layout).to_toml().splitlines() if self.layout else ():
            yield f"  {escape_unprintable(line)}"
        for number, text in enumerate(self.stored):
            yield f"  trace {number} would be stored: {text}"
        for reason, names in self.refused.items():
            yield f"  refused: {some_of(names, max_length=60)}: {reason}"


@dataclass
class DryRunReport:
    """The JSON document of `tracestore convert --dry-run --json`."""

    store: str
    attention: str = ""  # mean, heads or none
    num_sources: int = 0
    num_sources_refused: int = 0
    parts: list[DescribedPart] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)  # of all traces: how rows were joined, how many labels there are


def dry_run(sources: list[Path], store: str, options: ConvertOptions, output: Output) -> DryRunReport:
    """Read and check all traces as a conversion does, and describe the first ones of each layout; write nothing.

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
    UsageError, InvalidInputError
        As the conversion; for files that are refused, after all descriptions.
    """
    trial = _Trial(sources, store, options, output, reads_all=True)
    trial.run()
    return trial.description


class _PartNotes(SourceNotes):
    """Describe in the part that is read what is refused of it."""

    part: DescribedPart

    def refuse(self, stream: TraceStream, error: InvalidInputError) -> None:
        """Count a source; its part describes it."""
        self._report.num_sources_skipped += 1

    def list_refused(self, name: str, errors: Sequence[InvalidInputError]) -> None:
        """Describe refused traces, or a refused source."""
        self._report.num_traces_refused += len(errors)
        for error in errors:
            self.part.refused.setdefault(error.reason, []).append(name)

    def print_refused(self, errors: Sequence[InvalidInputError]) -> None:
        """Do nothing: the descriptions follow."""

    def print_without_traces(self) -> None:
        """Do nothing: the descriptions follow."""


class _Trial(Conversion):
    """A conversion that stores nothing, reads the files behind a refused one, too, and describes what it reads."""

    _notes: _PartNotes

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._notes = _PartNotes(self.report, self._options, self._output)
        self.description = DryRunReport(self.report.store, num_sources=len(self.sources))
        self._errors: list[InvalidInputError] = []  # with which a conversion ends
        self._parts: dict[Path, DescribedPart] = {}  # by the paths of their sources
        for part in self.described.parts:
            found = DescribedPart(part.origin, {} if part.layout is None else part.layout.to_entries())
            self._parts |= {source.path: found for _, source in part.sources()}

    def _run(self) -> ConvertReport:
        with closing(self.open_writer(TrialWriter)) as writer:
            writer.is_known = partial(self.is_known, writer)
            self.description.attention = writer.attributes.options["attention"]
            self._begin(writer)
            try:
                self._convert_all(writer, Progress(self._output, "B"))
                self._say(self.default_attention.notes(self.description.attention))
                self._say(self.scoring.lines())
                self._require_traces(writer.manifest.num_traces + writer.num_pending)
            finally:
                refused = f"{self.description.num_sources_refused:,} refused"
                self._output.info(f"{plural(len(self.sources), 'file')}, {refused}; nothing was written")
        return self.report

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.description.summary.append(line)
            self._output.info(line)

    def _budget(self, writer: StoreWriter) -> int:
        return self._options.memory_budget  # there are no segments

    def _convert_one(self, writer: StoreWriter, stream: TraceStream, progress: Progress) -> None:
        self._notes.part = self._parts[stream.source.path]
        self._notes.part.files.append(stream.source.name)
        super()._convert_one(writer, stream, progress)

    def _traces_to_store(self, stream: TraceStream) -> Iterator[PackedTrace | TraceBlock]:
        part = self._notes.part
        is_first = not part.stored
        for number, packed in enumerate(stream):
            if is_first and number < MAX_TRACES:
                part.stored.append(_stored(packed))
            yield packed

    def _refuse(self, writer: StoreWriter, stream: TraceStream, error: InvalidInputError, progress: Progress) -> None:
        self.description.num_sources_refused += 1
        self._notes.list_refused(stream.source.name, stream.refused or [error])
        try:
            super()._refuse(writer, stream, error, progress)
        except InvalidInputError as found:
            self._errors.append(found)

    def _close_accounts(self, writer: StoreWriter) -> None:
        self.description.parts = [found for found in dict.fromkeys(self._parts.values()) if found.files]
        for found in self.description.parts:
            for line in found.lines():
                self._output.info(line)
        if self._errors:
            raise self._errors[0]
        super()._close_accounts(writer)


def _stored(packed: PackedTrace) -> str:
    """Return what a store gets of a trace."""
    record, layout = packed.record, schema.LAYOUT_NAMES.get(packed.layout)
    is_made_up = not record.has_own_id and record.question_id.endswith(f":{record.position}")
    heads = "" if packed.num_heads is None else f" of {plural(packed.num_heads, 'head')}"
    scores = {**record.scores, **record.deferred_scores}
    parts = [
        f"question_id {escape_unprintable(record.question_id, 60)!r}" + " (made up)" * is_made_up,
        f"sample {record.sample}" if record.sample else "",
        f"L {packed.num_layers}",
        f"S {packed.num_tokens}" if packed.num_tokens else "",
        f"D {packed.hidden_dim} {packed.hidden_dtype}",
        "" if record.tokens is None else plural(len(record.tokens), "token"),
        "" if layout is None else f"{layout} attention{heads} {packed.attention_dtype}",
        "" if record.layer_ids is None else f"layers {', '.join(map(str, record.layer_ids))}"[:60],
        *(f"score {escape_unprintable(name, 60)} {score:g}" for name, score in scores.items()),
        "" if record.label is None else f"label {record.label:g}",
        "without the embeddings" if record.is_without_embeddings else "",
        "" if packed.rounded_from is None else f"rounded from {packed.rounded_from}",
    ]
    return ", ".join(filter(None, parts))
