"""Checking every byte of a store against its manifest, and repairing the newest manifest."""

import os
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

from tracestore._core.kernels import crc32c, crc32c_combine
from tracestore.console import plural
from tracestore.errors import CorruptStoreError, StoreLockedError, UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.zip_group import ZipGroup
from tracestore.store.io import fsio
from tracestore.store.io.files import MAX_ROOT_BYTES, LocalFiles, parse_location
from tracestore.store.io.ownership import has_manifest
from tracestore.store.maintain.consistency import collect_damage, find_inconsistencies
from tracestore.store.maintain.leftovers import find_leftovers
from tracestore.store.maintain.verify_report import VerifyReport
from tracestore.store.read.columns import read_columns
from tracestore.store.read.generation import ATTEMPTS, backoff, open_generation
from tracestore.store.read.index import SegmentEntry, StoreIndex, part_segments
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.commit import root_metadata

# Size of a read, and of the chunks that threads share.
_READ_BYTES = 1 << 20
_PIECE_BYTES = 64 << 20


class _FileVerifier:
    """Compares files with their committed sizes and checksums, in several threads."""

    def __init__(
        self,
        store: Path,
        report: VerifyReport,
        quick: bool,
        num_threads: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._files, self._report, self._quick = LocalFiles(store), report, quick
        self._num_threads, self._progress = num_threads, progress
        self._lock, self._local = threading.Lock(), threading.local()
        self._done = self._total = 0

    def check(self, entries: Iterable[FileEntry]) -> None:
        """Verify files and add the result to the report. Large files go first, which balances the threads."""
        report, chosen = self._report, sorted(entries, key=lambda e: (-e.size, e.path))
        report.num_files += len(chosen)
        report.num_bytes += sum(e.size for e in chosen)
        self._total = report.num_bytes
        with ThreadPoolExecutor(self._num_threads) as pool:
            pieces = [[pool.submit(self._piece, e, begin) for begin in self._begins(e.size)] for e in chosen]
            for entry, futures in zip(chosen, pieces, strict=True):
                problem = self._verdict(entry, [f.result() for f in futures])
                if problem is not None:
                    report.damaged[entry.path] = problem

    def _begins(self, size: int) -> range:
        return range(0, 1 if self._quick else max(1, size), _PIECE_BYTES)

    def _verdict(self, entry: FileEntry, found: list[int | str]) -> str | None:
        crc = 0
        for begin, value in zip(self._begins(entry.size), found, strict=True):
            if isinstance(value, str):
                return value
            crc = crc32c_combine(crc, value, min(_PIECE_BYTES, entry.size - begin))
        return None if self._quick or crc == entry.crc32c else "checksum mismatch"

    def _piece(self, entry: FileEntry, begin: int) -> int | str:
        """Return the crc32c of a chunk, or the problem with it.

        The file is read, not mapped: a bad sector or a truncation is then an error instead of a signal.
        """
        end = min(begin + _PIECE_BYTES, entry.size)
        try:
            fd = self._files.open(entry.path)
        except CorruptStoreError as error:
            return str(error).split(": ", 1)[-1]
        except OSError as error:
            return error.strerror or str(error)
        try:
            size = os.fstat(fd).st_size
            if size != entry.size:
                return f"{size} bytes where {entry.size} were committed"
            return 0 if self._quick else self._crc(fd, begin, end)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            os.close(fd)
            self._tell(end - begin)

    def _crc(self, fd: int, begin: int, end: int) -> int | str:
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(bytearray(_READ_BYTES))
        crc = 0
        while begin < end:
            count = os.preadv(fd, [buffer[: min(_READ_BYTES, end - begin)]], begin)
            if count == 0:
                return "cut short while it was read"
            crc = crc32c(buffer[:count], crc)
            begin += count
        return crc

    def _tell(self, num_bytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += num_bytes
                self._progress(self._done, self._total)


def _pin_newest(store: Path, stack: ExitStack) -> dict[int, fsio.Pin]:
    """Pin the newest generation and its predecessor, so that a writer removes no file that is being read."""
    for attempt in range(ATTEMPTS):
        files = LocalFiles(store)
        numbers = files.generations() if store.is_dir() else []
        if not numbers:
            raise UsageError(
                f"{store}: no such store" if not store.exists() else f"{store}: not a store, or nothing committed"
            )
        try:
            with ExitStack() as held:
                pins = {}
                for number in numbers[:2]:
                    name = paths.manifest(number)
                    pins[number] = held.enter_context(closing(fsio.Pin(files.open(name), store / name)))
                stack.push(held.pop_all())
                return pins
        except FileNotFoundError:
            backoff(attempt)
    raise CorruptStoreError(f"{store}: generations change faster than they can be read")


def verify_store(
    store: str | os.PathLike[str],
    *,
    quick: bool = False,
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Compare every file of the newest two generations with its size and, unless `quick`, its crc32c.

    Nothing is changed, and a writer may work at the same time. `progress` receives the bytes done and the total, from
    any thread. UsageError if there is no store.
    """
    place = parse_location(store)
    if not isinstance(place, Path):
        # Imported here because remote stores need an optional library.
        from tracestore.store.maintain.verify_remote import verify_remote

        return verify_remote(place, quick=quick, progress=progress)
    path, report = place, VerifyReport()
    checker = _FileVerifier(path, report, quick, num_threads or min(8, os.cpu_count() or 1), progress)
    good: list[mf.Manifest] = []
    with ExitStack() as stack:
        for number, pin in _pin_newest(path, stack).items():
            try:
                good.append(mf.parse_manifest(pin.read(mf.MAX_MANIFEST_BYTES), number))
                report.num_files += 1
            except OSError as error:
                report.damaged[paths.manifest(number)] = error.strerror or str(error)
            except ValueError as error:
                report.damaged[paths.manifest(number)] = str(error)
            except CorruptStoreError as error:
                report.damaged[paths.manifest(number)] = str(error).split(": ", 1)[-1]
        report.generation = good[0].generation if good else None
        small = {f.path: f for m in good for f in m.small_files()}
        checker.check((small | {f.path: f for m in good for f in _copy_of(path, m)}).values())
        segments: dict[str, SegmentEntry] = {}
        for part in {part.path: part for m in good for part in m.parts if part.path not in report.damaged}.values():
            with collect_damage(report.damaged, part.path):
                group = ZipGroup(LocalFiles(path).map(small[part.path]), mf.PART_DTYPES)
                segments |= {s.path: s for s in part_segments(group)}
        checker.check(s.rows for s in segments.values())
        entries: dict[str, FileEntry] = {}
        for segment in segments.values():
            if segment.rows.path not in report.damaged:
                with collect_damage(report.damaged, segment.rows.path):
                    entries |= SegmentReader(LocalFiles(path), segment, good[0].attributes).entries
        checker.check(entries.values())
        known = {*small, *entries, *(s.rows.path for s in segments.values())}
        for manifest in good:
            if not report.damaged:
                # Correct checksums prove that nothing changed after writing, not that correct values were written.
                report.damaged |= _inconsistencies(path, manifest, quick)
        _check_root(path, good, report)
        report.leftovers = _leftovers(path, known, report.generation or 0)
    return report


def _inconsistencies(store: Path, manifest: mf.Manifest, quick: bool) -> dict[str, str]:
    if not quick:
        return find_inconsistencies(LocalFiles(store), manifest)
    try:
        StoreIndex(LocalFiles(store), manifest)
    except (OSError, CorruptStoreError) as error:
        return {paths.manifest(manifest.generation): str(error)}
    return {}


def _copy_of(store: Path, manifest: mf.Manifest) -> list[FileEntry]:
    """Return the entry of the manifest's copy, if the store has one."""
    copy, data = paths.manifest_copy(manifest.generation), manifest.to_bytes()
    return [FileEntry(copy, len(data), crc32c(data))] if os.path.lexists(store / copy) else []


def _restore(store: Path, number: int) -> bool:
    """Replace a damaged manifest by its copy, if every file that the copy names exists."""
    files = LocalFiles(store)
    try:
        data = files.read_small(paths.manifest_copy(number), mf.MAX_MANIFEST_BYTES)
        manifest = mf.parse_manifest(data, number)
        StoreIndex(files, manifest)
        read_columns(files, manifest)
    except (OSError, CorruptStoreError):
        return False
    path = paths.manifest(number)
    with fsio.try_exclusive(files.open(path)) as free:
        if not free:
            raise StoreLockedError(f"{store}: a reader has the damaged generation {number} open")
        fsio.replace_file(store / path, data)
    return True


def _check_root(store: Path, good: list[mf.Manifest], report: VerifyReport) -> None:
    try:
        found = LocalFiles(store).read_small("zarr.json", MAX_ROOT_BYTES)
    except CorruptStoreError as error:
        report.damaged["zarr.json"] = str(error).split(": ", 1)[-1]
        return
    except OSError as error:
        report.damaged["zarr.json"] = (
            "missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        )
        return
    if not good or found in {root_metadata(m.attributes) for m in good}:
        return
    for number in LocalFiles(store).generations():  # Includes generations that a writer has added meanwhile.
        try:
            if found == root_metadata(LocalFiles(store).load_manifest(number).attributes):
                return
        except (CorruptStoreError, FileNotFoundError):
            continue
    report.damaged["zarr.json"] = "not what the manifest says"


def _leftovers(store: Path, known: set[str], verified: int) -> list[str]:
    """Return the files of interrupted or running writers."""
    found = []
    for folder, _, names in os.walk(store):
        found += [Path(folder, name).relative_to(store).as_posix() for name in names]
    files = LocalFiles(store)
    left = find_leftovers(found, known, verified, files.generations(), files.load_manifest, files)
    # A running writer may have removed or renamed a file.
    damaged = f"manifest/{paths.DAMAGED_PREFIX}"
    return [path for path in left if not path.startswith(damaged) and os.path.lexists(store / path)]


def _is_root(files: LocalFiles, expected: bytes) -> bool:
    try:
        return files.read_small("zarr.json", MAX_ROOT_BYTES) == expected
    except (OSError, CorruptStoreError):
        return False


def _readable(store: Path, number: int) -> mf.Manifest:
    generation = open_generation(LocalFiles(store), number)
    generation.close()
    return generation.manifest


def repair_store(store: str | os.PathLike[str]) -> VerifyReport:
    """Make a store with a damaged newest manifest writable again.

    The manifest is restored from its copy. If the copy is damaged too, the manifest is renamed, so that its
    predecessor becomes the newest. Other damage is reported, not repaired.
    """
    path = parse_location(store)
    if not isinstance(path, Path):
        raise UsageError(f"{path}: --repair is for stores on this machine: merge the intact traces into a new store")
    files = LocalFiles(path)
    if not path.is_dir() or not (LocalFiles(path).has_root() or has_manifest(path)) or not files.generations():
        raise UsageError(f"{path}: no such store")
    with fsio.map_os_errors(path):
        lock = fsio.WriterLock(path)
    repaired = []
    try:
        numbers = files.generations()
        whole = None
        for number in numbers:
            try:
                whole = _readable(path, number)
                break
            except (CorruptStoreError, FileNotFoundError) as error:
                reason = str(error).split(": ", 1)[-1]
            if _restore(path, number):
                repaired.append(f"{paths.manifest(number)} restored from its copy: {reason}")
                whole = _readable(path, number)
                break
            repaired.append(f"{paths.manifest(number)} set aside: {reason}")
        if whole is None:
            raise CorruptStoreError(f"{path}: no generation is readable; nothing was changed")
        for number in numbers:
            if number > whole.generation:
                name = path / paths.manifest(number)
                with fsio.try_exclusive(files.open(paths.manifest(number))) as free:
                    if not free:
                        raise StoreLockedError(f"{path}: a reader has the damaged generation {number} open")
                    fsio.retry_eintr(os.rename, name, name.with_name(f"{paths.DAMAGED_PREFIX}{name.name}"))
                fsio.fsync_path(name.parent)
        expected = root_metadata(whole.attributes)
        if not _is_root(files, expected):
            if (path / "zarr.json").is_dir():
                raise CorruptStoreError(f"{path}/zarr.json: found a folder, expected a file; move it out of the store")
            fsio.replace_file(path / "zarr.json", expected)
            repaired.append("zarr.json restored from the manifest")
        if repaired:
            repaired.append(f"generation {whole.generation} with {plural(whole.num_traces, 'trace')} is kept")
    finally:
        lock.release()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify_store(path)
    report.repaired = repaired
    return report
