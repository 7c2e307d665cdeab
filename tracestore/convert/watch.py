"""Convert the files of folders that grow, until none has been added for a while."""

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tracestore.console import Output
from tracestore.convert.choosing import NoSourceError
from tracestore.convert.options import ConvertOptions
from tracestore.convert.runner import Conversion
from tracestore.convert.summary import ConvertReport
from tracestore.errors import InvalidInputError, NoTracesError, UsageError
from tracestore.ingest.execute.claims import is_other, list_files
from tracestore.ingest.files.byte_source import map_file
from tracestore.ingest.files.safetensors import stored_tensors
from tracestore.store.format import paths
from tracestore.store.format.manifest import MAX_MANIFEST_BYTES
from tracestore.store.io.local_folders import local_dir
from tracestore.store.io.locks import is_locked
from tracestore.store.write.plan_files import open_plan_files
from tracestore.words import plural

POLL_INTERVAL_S = 1.0
# A file that looks unfinished is converted, and refused, when it has not changed for this time.
STALE_S = 60.0

# Size and modification time of a file.
State = tuple[int, int]


class Watch:
    """Repeated conversions of the sources that are new.

    Parameters
    ----------
    sources, store, options, output
        As for `Conversion`.
    timeout_s : float or None
        End when no new file has been found for this time; None: only Ctrl-C ends it.
    """

    def __init__(
        self, sources: list[Path], store: str, options: ConvertOptions, output: Output, timeout_s: float | None
    ) -> None:
        self._arguments, self._store, self._options, self._output = sources, store, options, output
        self._timeout_s = timeout_s
        self._folder = local_dir(store)
        self._seen: dict[Path, tuple[State, float]] = {}  # the last change of each file, and when it was seen
        self._tried: dict[Path, State] = {}  # the whole files of the last conversion
        self._done: dict[Path, State] = {}  # those that were converted
        self._newest: bytes | None = None  # manifest of the store after the last conversion
        self._last: Conversion | None = None
        self._report: ConvertReport | None = None
        self._error: NoTracesError | None = None  # of the last conversion
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
        if self._error is not None:
            raise self._error
        return self._report

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            is_last = self._timeout_s is not None and time.monotonic() - last >= self._timeout_s
            whole = self._whole_files(is_last=is_last)
            if (is_last or whole != self._tried) and self._read_newest() != self._newest:
                self._done = {}  # The store may have been replaced.
            if whole != self._tried or (is_last and whole != self._done):
                self._convert(whole, is_last=is_last)
                last, self._newest = time.monotonic(), self._read_newest()
            elif is_last:
                if self._last is not None:
                    self._last.check_ids()
                return
            else:
                time.sleep(POLL_INTERVAL_S)

    def _read_newest(self) -> bytes | None:
        """Return the newest manifest of the store, None if there is none."""
        files = open_plan_files(self._store).files
        with suppress(FileNotFoundError):
            for number in files.generations():
                return files.read_small(paths.manifest(number), MAX_MANIFEST_BYTES)
        return None

    def _whole_files(self, *, is_last: bool) -> dict[Path, State]:
        """Return the files that no program seems to be writing."""
        whole, now = {}, time.monotonic()
        for name, path in list_files(self._arguments, self._folder).items():
            if is_other(name):
                continue
            try:
                found = path.stat()
            except OSError:  # it has gone
                continue
            state = found.st_size, found.st_mtime_ns
            before, since = self._seen.get(path, (None, now))
            if before != state:
                self._seen[path] = (state, now)
            is_unchanged, is_whole = before == state, self._tried.get(path) == state
            if not is_whole and is_being_written(path):
                is_whole = is_unchanged and now - since >= STALE_S
            elif is_unchanged or is_last or path.suffix == ".safetensors":
                is_whole = True
            if is_whole:
                whole[path] = state
        return whole

    def _convert(self, whole: dict[Path, State], *, is_last: bool) -> None:
        """Convert the sources of which a file is new. Files that do not fit yet wait for others until the end."""
        new = {path for path, state in whole.items() if self._done.get(path) != state}
        self._tried = whole
        try:
            conversion = Conversion(self._arguments, self._store, self._options, self._output, whole.keys(), new)
        except NoSourceError:
            self._done = whole
            return
        except InvalidInputError as error:
            if is_last:
                raise
            self._output.info(f"waiting for other files: {error}")
            return
        self._error = None
        try:
            conversion.run()
            self._options = replace(self._options, overwrite=False)
        except NoTracesError as error:
            if not self._options.skip_bad:
                raise
            self._error = error  # every source so far was refused
        finally:
            self._num_traces = conversion.report.num_traces or self._num_traces
        self._done, report = whole, conversion.report
        if self._report is not None:
            report.add_earlier(self._report)
        self._last, self._report = conversion, report
        if conversion.is_interrupted:  # Ctrl-C after the last trace
            raise KeyboardInterrupt


def is_being_written(path: Path) -> bool:
    """Return whether a .safetensors file is shorter than its header states, or the lock of its writer is held."""
    if path.suffix != ".safetensors":
        return False
    try:
        stored_tensors(map_file(path))
    except InvalidInputError as error:
        return "truncated" in error.reason or is_locked(f"{path}.lock")
    return is_locked(f"{path}.lock")
