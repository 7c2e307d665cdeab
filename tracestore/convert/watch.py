"""Convert the files of folders that grow, until none has been added for a while."""

import time
from dataclasses import replace
from pathlib import Path

from tracestore.console import Output, plural
from tracestore.convert.options import ConvertOptions
from tracestore.convert.report import ConvertReport
from tracestore.convert.runner import Conversion
from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.containers.safetensors_file import is_being_written
from tracestore.ingest.sources import SourceFile, find_sources
from tracestore.store.io.files import local_dir

POLL_INTERVAL_S = 1.0
# A file that looks unfinished is converted, and refused, when it has not changed for this time.
STALE_S = 60.0

# Size and modification time of the files of a source.
State = tuple[tuple[int, int], ...]


class Watch:
    """Repeated conversions of the sources that are new.

    Parameters
    ----------
    sources, store, options, output
        As for `Conversion`.
    timeout_s : float or None
        End when no new source has been found for this time; None: only Ctrl-C ends it.
    """

    def __init__(
        self, sources: list[Path], store: str, options: ConvertOptions, output: Output, timeout_s: float | None
    ) -> None:
        self._arguments, self._store, self._options, self._output = sources, store, options, output
        self._timeout_s = timeout_s
        self._folder = local_dir(store)
        self._seen: dict[Path, tuple[State, float]] = {}  # the last change of each source, and when it was seen
        self._done: dict[Path, State] = {}
        self._report: ConvertReport | None = None
        self._num_traces = 0  # in the store

    def run(self) -> ConvertReport:
        """Convert new sources until the timeout.

        Returns
        -------
        ConvertReport
            The sums over all conversions.

        Raises
        ------
        KeyboardInterrupt
            After Ctrl-C. What is committed stays.
        UsageError
            If no source was found before the timeout, or as for `Conversion`.
        """
        try:
            self._watch()
        except KeyboardInterrupt as error:
            text = f"interrupted: {plural(self._num_traces, 'trace')} committed; run the same command to continue"
            raise KeyboardInterrupt(str(error) or text) from None
        if self._report is None:
            raise UsageError(f"{', '.join(map(str, self._arguments))}: no trace file within {self._timeout_s:g} s")
        return self._report

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            is_last = self._timeout_s is not None and time.monotonic() - last >= self._timeout_s
            ready = self._ready_sources(is_last=is_last)
            if ready:
                self._convert(ready)
                last = time.monotonic()
            elif is_last:
                return
            else:
                time.sleep(POLL_INTERVAL_S)

    def _ready_sources(self, *, is_last: bool) -> dict[Path, State]:
        """Return the new or changed sources that no program seems to be writing."""
        try:
            sources = find_sources(self._arguments, self._folder)
        except (UsageError, InvalidInputError) as error:
            if not all(path.is_dir() for path in self._arguments) or (is_last and isinstance(error, InvalidInputError)):
                raise
            return {}  # folders that are still empty, or in which an export is not finished
        ready, now = {}, time.monotonic()
        for source in sources:
            state = _state(source)
            if not state or self._done.get(source.path) == state:
                continue
            before, since = self._seen.get(source.path, ((), now))
            if before != state:
                self._seen[source.path] = (state, now)
            is_unchanged = before == state
            if is_being_written(source.path):
                is_ready = is_unchanged and now - since >= STALE_S
            else:
                is_ready = is_unchanged or is_last or source.path.suffix == ".safetensors"
            if is_ready:
                ready[source.path] = state
        return ready

    def _convert(self, ready: dict[Path, State]) -> None:
        conversion = Conversion(
            self._arguments, self._store, self._options, self._output, only=lambda source: source.path in ready
        )
        self._done |= ready
        try:
            report = conversion.run()
        except InvalidInputError:
            if not self._options.skip_bad:
                raise
            return  # every source so far was refused
        finally:
            self._num_traces = conversion.report.num_traces or self._num_traces
        self._options = replace(self._options, overwrite=False)
        if self._report is not None:
            report.add_earlier(self._report)
        self._report = report
        if conversion.is_interrupted:  # Ctrl-C after the last trace
            raise KeyboardInterrupt


def _state(source: SourceFile) -> State:
    """Return size and modification time of each file of a source; () if one has gone."""
    try:
        found = [path.stat() for path in source.files]
    except OSError:
        return ()
    return tuple((status.st_size, status.st_mtime_ns) for status in found)
