"""Checking every byte of a store against its manifest, and repairing the newest manifest."""

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from tracestore._core.kernels import crc32c, crc32c_combine
from tracestore.errors import CorruptStoreError, StoreLockedError, UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry, size_mismatch
from tracestore.store.io import fsio, locks
from tracestore.store.io.files import MAX_ROOT_BYTES, LocalFiles, parse_location
from tracestore.store.io.ownership import has_manifest, lost_generations, require_no_loss
from tracestore.store.maintain.consistency import reason_of
from tracestore.store.maintain.verifier import StoreVerifier, VerifyReport
from tracestore.store.read.columns import read_columns
from tracestore.store.read.generation import ATTEMPTS, backoff, open_generation
from tracestore.store.read.index import StoreIndex
from tracestore.store.write.commit import root_metadata
from tracestore.words import plural

# Size of a read, and of the chunks that threads share.
_READ_BYTES = 1 << 20
_PIECE_BYTES = 64 << 20


class _FileVerifier(StoreVerifier):
    """Verification of a folder. Files are read, not mapped: a bad sector or a truncation is then an error."""

    files: LocalFiles

    def start(self, pool: ThreadPoolExecutor, entry: FileEntry) -> Callable[[], int]:
        """See StoreVerifier. The threads share a large file."""
        begins = range(0, 1 if self.quick else max(1, entry.size), _PIECE_BYTES)
        pieces = [pool.submit(self._piece, entry, begin) for begin in begins]

        def crc() -> int:
            total = 0
            for begin, piece in zip(begins, pieces, strict=True):
                total = crc32c_combine(total, piece.result(), min(_PIECE_BYTES, entry.size - begin))
            return total

        return crc

    def _piece(self, entry: FileEntry, begin: int) -> int:
        """Return the CRC-32C of the piece of a file that begins at `begin`; 0 if only the size is checked."""
        num_bytes = min(_PIECE_BYTES, entry.size - begin)
        fd = self.files.open(entry.path)
        try:
            size = os.fstat(fd).st_size
            if size != entry.size:
                raise size_mismatch(entry, size)
            crc, end = 0, begin if self.quick else begin + num_bytes
            buffer = memoryview(bytearray(min(_READ_BYTES, end - begin)))
            while begin < end:
                count = os.preadv(fd, [buffer[: end - begin]], begin)
                if count == 0:
                    raise CorruptStoreError(f"{entry.path}: cut short while it was read")
                crc = crc32c(buffer[:count], crc)
                begin += count
            return crc
        finally:
            os.close(fd)
            self.advance(num_bytes)

    def list_all(self) -> list[str]:
        """See StoreVerifier."""
        root = self.files.root
        return [Path(folder, name).relative_to(root).as_posix() for folder, _, names in os.walk(root) for name in names]

    def existing(self, found: list[str]) -> list[str]:
        """See StoreVerifier. A running writer may have removed or renamed a file."""
        return [path for path in found if os.path.lexists(self.files.root / path)]


def _pin_newest(files: LocalFiles, stack: ExitStack) -> list[int]:
    """Pin the newest generation and its predecessor, so that a writer removes no file that is being read."""
    for attempt in range(ATTEMPTS):
        numbers = files.generations()[:2] if files.root.is_dir() else []
        if not numbers:
            if files.has_root():
                require_no_loss(files)
            raise files.no_store_error()
        try:
            for path in map(paths.manifest, numbers):
                stack.enter_context(closing(locks.Pin(files.open(path), files.root / path)))
            return numbers
        except FileNotFoundError:
            backoff(attempt)
    raise CorruptStoreError(f"{files.root}: generations change faster than they can be read")


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
    location = parse_location(store)
    if not isinstance(location, Path):
        # Imported here because remote stores need an optional library.
        from tracestore.store.maintain.verify_remote import verify_remote

        return verify_remote(location, quick=quick, progress=progress)
    files = LocalFiles(location)
    verifier = _FileVerifier(files, quick, num_threads or min(8, os.cpu_count() or 1), progress)
    with ExitStack() as stack:
        return verifier.run(_pin_newest(files, stack))


@contextmanager
def _unread(files: LocalFiles, number: int) -> Iterator[None]:
    """Keep readers from opening a damaged generation during the block; StoreLockedError if one has it open."""
    with ExitStack() as stack:
        with suppress(FileNotFoundError):  # Of a lost generation there is nothing to open.
            if not stack.enter_context(locks.try_exclusive(files.open(paths.manifest(number)))):
                raise StoreLockedError(f"{files.root}: a reader has the damaged generation {number} open")
        yield


def _restore(store: Path, number: int) -> bool:
    """Replace a damaged or missing manifest by its copy, if every file that the copy names exists."""
    files = LocalFiles(store)
    try:
        data = files.read_small(paths.manifest_copy(number), mf.MAX_MANIFEST_BYTES)
        manifest = mf.parse_manifest(data, number)
        StoreIndex(files, manifest)
        read_columns(files, manifest)
    except (OSError, CorruptStoreError):
        return False
    path = store / paths.manifest(number)
    with _unread(files, number):
        fsio.makedirs(path.parent)
        fsio.replace_file(path, data)
    return True


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
    """Make a store with a damaged or lost newest manifest writable again.

    The manifest is restored from its copy. If the copy is damaged too, the manifest, or the copy of a lost one, is
    renamed, so that its predecessor becomes the newest. Other damage is reported, not repaired.
    """
    path = parse_location(store)
    if not isinstance(path, Path):
        raise UsageError(f"{path}: --repair is for stores on this machine: merge the intact traces into a new store")
    files = LocalFiles(path)
    is_store = path.is_dir() and (files.has_root() or has_manifest(path))
    if not is_store or not (files.generations() or lost_generations(files)):
        raise UsageError(f"{path}: no such store")
    with fsio.map_os_errors(path):
        lock = locks.WriterLock(path)
    repaired = []
    try:
        lost = lost_generations(files)
        whole, aside = None, dict[int, str]()
        for number in [*lost, *files.generations()]:
            try:
                whole = _readable(path, number)
                break
            except (CorruptStoreError, FileNotFoundError) as error:
                reason = reason_of(error)
            if _restore(path, number):
                repaired.append(f"{paths.manifest(number)} restored from its copy: {reason}")
                whole = _readable(path, number)
                break
            aside[number] = paths.manifest_copy(number) if number in lost else paths.manifest(number)
            repaired.append(f"{aside[number]} set aside: {'no manifest' if number in lost else reason}")
        if whole is None:
            raise CorruptStoreError(f"{path}: no generation is readable; nothing was changed")
        for number, name in aside.items():
            place = path / paths.manifest(number)
            with _unread(files, number):
                fsio.retry_eintr(os.rename, path / name, place.with_name(f"{paths.DAMAGED_PREFIX}{place.name}"))
            fsio.fsync_path(place.parent)
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
