"""Refused traces: their list next to a store, STORE.refused.jsonl, and what a conversion says about its sources."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tracestore.console import Output
from tracestore.convert.options import ON_CONFLICT, ConvertOptions
from tracestore.convert.summary import MAX_REFUSED_LINES, ConvertReport
from tracestore.errors import InvalidInputError, NoTracesError, UsageError, some_of
from tracestore.ingest.source_streams import TraceStream
from tracestore.store.format.entries import Fingerprint
from tracestore.store.io import fsio
from tracestore.store.io.files import RemoteURL
from tracestore.words import plural

SUFFIX = ".refused.jsonl"
KEPT = "kept"
_KEYS = {"source", "position", "field", "reason"}
_MAX_BYTES = 1 << 30


def partial_fingerprint(fingerprint: str, what: str = "partial") -> str:
    """Return the fingerprint of a source of which some traces were refused, so that it is read again.

    With KEPT that of a source of which others were stored before ("keep-first"): "keep-last" reads it again.
    """
    needed = hashlib.blake2b(f"{what} {fingerprint}".encode(), digest_size=8).hexdigest()
    return "".join(Fingerprint.parse(fingerprint)._replace(needed=needed))


class RefusedTraces:
    """The refused traces of all conversions into a store, one JSON object per line.

    A source that is read again replaces its lines. For a store at a URL the file is in the current folder, and its name
    has a hash of the URL: stores in several places may have one name.

    Parameters
    ----------
    store : Path or RemoteURL
        The store.
    is_new : bool
        Whether the store is new, so that lines of an older one are dropped.

    Raises
    ------
    UsageError
        If there is a file of this name with other content.
    """

    def __init__(self, store: Path | RemoteURL, *, is_new: bool) -> None:
        if isinstance(store, RemoteURL):
            url_hash = hashlib.blake2b(store.rstrip("/").encode(), digest_size=4).hexdigest()
            store = Path(f"{store.name}-{url_hash}")
        self.path = store.with_name(f"{store.name}{SUFFIX}")
        self._lines: dict[str, list[str]] = {}
        self._is_outdated = False  # the file has lines of an older store
        if self.path.exists():
            self._read()
            if is_new:
                self._is_outdated, self._lines = bool(self._lines), {}

    def _read(self) -> None:
        try:
            if self.path.stat().st_size > _MAX_BYTES:
                raise ValueError
            for line in self.path.read_text("utf-8").splitlines():
                entry = json.loads(line)
                if not isinstance(entry, dict) or entry.keys() != _KEYS:
                    raise ValueError
                self._lines.setdefault(str(entry["source"]), []).append(line)
        except (OSError, ValueError, RecursionError):
            raise UsageError(f"{self.path}: not a list of refused traces; move it away") from None

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def replace(self, source: str, errors: Sequence[InvalidInputError]) -> None:
        """Set the refused traces of a source, and write the file atomically if they are others than it has.

        An error without a position refuses the rest of the source. The file is removed if no trace is refused any more.
        """
        entries = ({"source": source, "position": e.position, "field": e.field, "reason": e.reason} for e in errors)
        lines = list(map(json.dumps, entries))
        if lines == self._lines.get(source, []) and not self._is_outdated:
            return
        self._lines[source], self._is_outdated = lines, False
        if not len(self):
            self.path.unlink(missing_ok=True)
            return
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with fsio.map_os_errors(self.path.parent):
            try:
                temporary.write_text("".join(f"{line}\n" for lines in self._lines.values() for line in lines), "utf-8")
                os.replace(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)


class SourceNotes:
    """Notes and lists of sources.

    Parameters
    ----------
    report : ConvertReport
        Counts what is refused.
    options : ConvertOptions
    output : Output
        Receives the notes.

    Attributes
    ----------
    without_traces : list of NoTracesError
        One for each file without traces that was found in a folder.
    """

    _refused: RefusedTraces

    def __init__(self, report: ConvertReport, options: ConvertOptions, output: Output) -> None:
        self._report, self._options, self._output = report, options, output
        self.without_traces: list[NoTracesError] = []
        self._known: dict[str, list[str]] = {}  # names of sources that the store has, by the note
        # Files without a stored trace, by the reason and name.
        self._refused_files: dict[str, dict[str, list[InvalidInputError]]] = {}

    def begin(self, store: Path | RemoteURL, *, is_new: bool) -> None:
        """Open the list of refused traces; see RefusedTraces."""
        self._refused = RefusedTraces(store, is_new=is_new)

    @property
    def refused_file(self) -> str | None:
        """The path of the list of refused traces, None if it is empty."""
        return str(self._refused.path) if len(self._refused) else None

    def known(self, name: str, text: str) -> None:
        """Note something of a source that the store has."""
        self._known.setdefault(text, []).append(name)

    def read_again(self, name: str, reason: str) -> None:
        """Note that a source is read though the store has it."""
        self.known(
            name,
            f"{reason}; new traces are added, changed scores, groups and labels of tables replace stored ones, a trace with "
            f"another label or content is {ON_CONFLICT[self._options.on_conflict]}",
        )

    def refuse(self, stream: TraceStream, error: InvalidInputError) -> None:
        """Note a source of which no trace is stored."""
        name = stream.source.name
        self._report.num_sources_skipped += 1
        self._report.skipped.append({"source": name, "reason": str(error)})
        refused = [e.with_location(source=name) for e in stream.refused] or [error]
        self.list_refused(name, refused)
        first = refused[0]
        reason = first.reason if first.field is None else f"{first.field}: {first.reason}"
        reason = reason if first.source == name else f"{first.source}: {reason}"  # a table of several files
        self._refused_files.setdefault(reason, {})[name] = refused

    def list_refused(self, name: str, errors: Sequence[InvalidInputError]) -> None:
        """Add the refused traces of a source to the list next to the store."""
        self._refused.replace(name, errors)
        self._report.num_traces_refused += len(errors)

    def print_refused(self, errors: Sequence[InvalidInputError]) -> None:
        """Print the first refused traces of a source."""
        for error in errors[:MAX_REFUSED_LINES]:
            self._output.info(f"skipped {error}")
        if len(errors) > MAX_REFUSED_LINES:
            more = plural(len(errors) - MAX_REFUSED_LINES, "more trace")
            self._output.info(f"skipped {more} of {errors[0].source}")

    def print_without_traces(self) -> None:
        """Print the files without traces in one line."""
        if self.without_traces:
            names = some_of([str(error.source) for error in self.without_traces], max_length=60)
            count, reason = plural(len(self.without_traces), "file"), self.without_traces[0].reason
            self._output.info(f"skipped {count} without traces ({names}): {reason}")

    def print_sources(self) -> None:
        """Print the notes of sources that the store has, and those that were refused: all of one reason in one line."""
        for text, names in self._known.items():
            self._output.info(f"{some_of(names, max_length=60)}: {text}")
        groups = list(self._refused_files.items())
        for reason, files in groups[:MAX_REFUSED_LINES]:
            if len(files) == 1:
                self.print_refused(*files.values())
            else:
                shown = some_of(list(files), max_length=60)
                self._output.info(f"skipped {plural(len(files), 'file')} ({shown}): {reason}")
        if rest := sum(len(files) for _, files in groups[MAX_REFUSED_LINES:]):
            self._output.info(f"skipped {plural(rest, 'more file')}; {self._refused.path} lists all")
