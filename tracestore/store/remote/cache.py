"""Files of remote stores on this machine's disk: whole ones only, bounded in bytes, shared by processes.

A file is fetched under a name of its own, checked against size and crc32c, and renamed. Its name
says which store, path and content it is of, so that a store that was replaced is another
one. It is not synced, which would take a disk's time out of the network's: what was used before the
machine was last started is checked once more when it is used again. Whoever needs room removes what was used longest ago; a file that somebody still maps stays
readable to them.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.errors import StoreDamagedError, UsageError
from tracestore.store import fsio
from tracestore.store.files import FileEntry, cache_folder
from tracestore.store.remote.bucket import Bucket

DEFAULT_MAX_BYTES = 64 << 30
# Of the free space, how much a cache that was told no size may take.
_SHARE_OF_FREE = 0.5
_PARTIAL = ".part-"
_LOCK = ".lock"
_POLL_S = 0.02
# How often bytes with another checksum are asked for: they may have been damaged on their way.
_ATTEMPTS = 2

# When a file of the cache is needed next, as a rank: smaller is sooner; None: not known.
NeededAt = Callable[[str], int | None]


def _started_at() -> float | None:
    """When this machine was started, in seconds since the epoch; None where it does not say."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.time() - time.clock_gettime(clock)


_STARTED_AT = _started_at()


def _may_be_torn(file: Path) -> bool:
    """Whether a file was last used before the machine was started: a part of it may never have
    reached the disk."""
    return _STARTED_AT is not None and file.stat().st_mtime < _STARTED_AT


class DiskCache:
    """The files in `folder`, at most max_bytes of them and one more. Safe to use from threads
    and processes, and to be killed."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, max_bytes: int | None = None) -> None:
        self.folder = cache_folder() if folder is None else Path(folder)
        with fsio.translated_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if max_bytes is None:
            held = sum(size for _, size, _ in self._complete())
            max_bytes = min(DEFAULT_MAX_BYTES, held + int(_SHARE_OF_FREE * fsio.free_bytes(self.folder)))
        if max_bytes < 1:
            raise UsageError(f"found a cache of {max_bytes} bytes, expected at least 1")
        self.max_bytes = max_bytes
        self.num_fetched = 0

    @staticmethod
    def name_of(address: str, entry: FileEntry) -> str:
        place = hashlib.sha256(f"{address}\0{entry.path}".encode()).hexdigest()[:32]
        return f"{place}-{entry.crc32c:08x}-{entry.size}"

    def holds(self, name: str) -> bool:
        return (self.folder / name).exists()

    def get(
        self,
        bucket: Bucket,
        entry: FileEntry,
        needed_at: NeededAt = lambda name: None,
        check: Callable[[], None] = lambda: None,
    ) -> Path:
        """Where the file lies, fetched if it was not there. It may be gone the next moment,
        for somebody else's room: then ask again. StoreDamagedError where the server's bytes are not those
        committed, RemoteError where it fails for long, NoSpaceError where the disk is full. `check` is called now and then and may end it."""
        name = self.name_of(bucket.address, entry)
        final, partial = self.folder / name, self.folder / (_PARTIAL + name)
        while True:
            with contextlib.suppress(FileNotFoundError):
                if not _may_be_torn(final):
                    os.utime(final)  # what was used last goes last
                    return final
            with fsio.translated_errors(self.folder, lambda: entry.size):
                fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # somebody else may be fetching it
                if not fsio.has_name(fd, partial):
                    continue
                if final.exists():
                    self._check_again(final, entry)
                    continue
                try:
                    with fsio.translated_errors(self.folder, lambda: entry.size):
                        self._make_room(fd, entry.size, needed_at, check)
                        self._fetch(bucket, entry, fd, check)
                        os.fchmod(fd, 0o444)
                        if _STARTED_AT is None:
                            os.fsync(fd)
                        os.rename(partial, final)
                    self.num_fetched += 1
                except BaseException:
                    fsio.remove_tree(partial)
                    raise
                return final
            finally:
                os.close(fd)

    @staticmethod
    def _check_again(final: Path, entry: FileEntry) -> None:
        """Of a file that lay here when the machine stopped: removed unless it is whole."""
        try:
            mapped = MappedFile(final, entry.size, entry.path)
            if crc32c(memoryview(mapped)) == entry.crc32c:
                os.utime(final)
                return
        except (OSError, ValueError):
            pass
        fsio.remove_tree(final)

    @staticmethod
    def _fetch(bucket: Bucket, entry: FileEntry, fd: int, check: Callable[[], None]) -> None:
        for _ in range(_ATTEMPTS):
            if DiskCache._fetched_crc(bucket, entry, fd, check) == entry.crc32c:
                return
        raise StoreDamagedError(f"{entry.path}: checksum mismatch: damaged at {bucket.address}")

    @staticmethod
    def _fetched_crc(bucket: Bucket, entry: FileEntry, fd: int, check: Callable[[], None]) -> int:
        crc = 0

        def take(piece: Any, offset: int) -> None:
            nonlocal crc
            check()
            view = memoryview(piece)
            crc = crc32c(view, crc)
            fsio.write_pieces(fd, [view], offset)

        try:
            bucket.stream(entry.path, entry.size, take)
        except FileNotFoundError:
            raise StoreDamagedError(f"{entry.path}: missing at {bucket.address}") from None
        return crc

    # Room

    def _complete(self) -> list[tuple[str, int, float]]:
        """Name, bytes and time of last use of each whole file."""
        found = []
        for item in os.scandir(self.folder):
            if not item.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    stat = item.stat()
                    found.append((item.name, stat.st_size, stat.st_mtime))
        return found

    def _partials(self, own: int) -> int:
        """Bytes of the files that are being fetched elsewhere; what a killed process left goes."""
        total = 0
        for item in os.scandir(self.folder):
            if not item.name.startswith(_PARTIAL):
                continue
            try:
                fd = os.open(item.path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                if os.path.samestat(os.fstat(fd), os.fstat(own)):
                    continue
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    total += os.fstat(fd).st_size
                    continue
                if fsio.has_name(fd, Path(item.path)):
                    os.unlink(item.path)
            finally:
                os.close(fd)
        return total

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _make_room(self, fd: int, size: int, needed_at: NeededAt, check: Callable[[], None]) -> None:
        """Gives the file behind fd its size, which keeps the room for it."""
        os.ftruncate(fd, 0)
        while True:
            with self._locked():
                fetching = self._partials(fd)
                whole = self._complete()
                held = sum(s for _, s, _ in whole)
                for name, bytes_of_it, _ in sorted(whole, key=lambda f: self._worth(f, needed_at)):
                    if held + fetching + size <= self.max_bytes:
                        break
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self.folder / name)
                    held -= bytes_of_it
                # Alone it may be larger than the cache; beside others that come in, it waits for them.
                if held + fetching + size <= self.max_bytes or fetching == 0:
                    os.ftruncate(fd, size)
                    return
            check()
            time.sleep(_POLL_S)

    @staticmethod
    def _worth(file: tuple[str, int, float], needed_at: NeededAt) -> tuple[bool, float]:
        """What sorts files so that the first is missed least: not needed soon and used longest
        ago, then those needed last."""
        rank = needed_at(file[0])
        return (False, file[2]) if rank is None else (True, -float(rank))
