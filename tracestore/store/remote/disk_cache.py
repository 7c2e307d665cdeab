"""Files of remote stores on this machine's disk: whole ones only, bounded in bytes, shared by processes.

A file is fetched under a name of its own, checked against size and crc32c, and renamed. Its name
says which store, path and content it is of, so that a store that was replaced is another
one. It is not synced, which would take a disk's time out of the network's: what was used before the
machine was last started is checked once more when it is used again. Whoever needs room removes what
was used longest ago; a file that somebody still maps stays readable to them.
"""

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format.entries import FileEntry
from tracestore.store.io import fsio
from tracestore.store.io.files import cache_dir
from tracestore.store.remote.object_store import ObjectStore

DEFAULT_MAX_BYTES = 64 << 30
# Of what the disk would have free without it, how much a cache that was told no size may take.
_SHARE_OF_FREE = 0.5
_PARTIAL = ".part-"
_LOCK = ".lock"
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}-\d+")
# Below half of its bound a cache is counted once in so many seconds: others may add to it meanwhile.
_COUNT_EVERY_S = 1.0
_POLL_S = 0.02
_WAIT_S = 1.0
# How often bytes with another checksum are asked for: they may have been damaged on their way.
_ATTEMPTS = 2

# Name, bytes and time of last use of a file in the cache.
_File = tuple[str, int, float]

# When a file of the cache is needed next, as a rank: smaller is sooner; None: not known.
NextUse = Callable[[str], int | None]


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
    """The files in `folder`, at most max_bytes of them and one more. Nothing else in the folder is
    counted or touched. Safe to use from threads and processes, and to be killed."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, max_bytes: int | None = None) -> None:
        self.folder = cache_dir() if folder is None else Path(folder)
        with fsio.map_os_errors(self.folder):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, FileNotFoundError) as error:
                raise UsageError(f"cannot keep files of remote stores in {self.folder}: {error.strerror}") from None
            if max_bytes is None:
                free = sum(size for _, size, _ in self._complete()) + fsio.free_bytes(self.folder)
                max_bytes = max(1, min(DEFAULT_MAX_BYTES, int(_SHARE_OF_FREE * free)))
        if max_bytes < 1:
            raise UsageError(f"found a cache of {max_bytes} bytes, expected at least 1")
        self.max_bytes = max_bytes
        self._fetching: dict[str, threading.Event] = {}  # what threads of this process fetch, until they have
        self._beginning = threading.Lock()
        self._counting = threading.Lock()
        self._counted_at = -math.inf
        self._count = 0

    @staticmethod
    def name_of(address: str, entry: FileEntry) -> str:
        place = hashlib.sha256(f"{address}\0{entry.path}".encode()).hexdigest()[:32]
        return f"{place}-{entry.crc32c:08x}-{entry.size}"

    def contains(self, name: str) -> bool:
        return (self.folder / name).exists()

    def mtime(self) -> int:
        """What is another number after a file has come or gone."""
        try:
            return os.stat(self.folder).st_mtime_ns
        except FileNotFoundError:
            return -1

    def get_cached(self, name: str) -> Path | None:
        """Where the file lies, if it is there and need not be looked at first."""
        path = self.folder / name
        try:
            if _may_be_torn(path):
                return None
            os.utime(path)  # what was used last goes last
        except FileNotFoundError:
            return None
        return path

    def get(
        self,
        object_store: ObjectStore,
        entry: FileEntry,
        next_use: NextUse = lambda name: None,
        check: Callable[[], None] = lambda: None,
    ) -> Path:
        """Where the file lies, fetched if it was not there. It may be gone the next moment,
        for somebody else's room: then ask again. CorruptStoreError where the server's bytes are not those
        committed, RemoteError where it fails for long, DiskFullError where the disk is full. `check` is
        called now and then and may end it."""
        name = self.name_of(object_store.address, entry)
        with fsio.map_os_errors(self.folder, lambda: entry.size):
            while True:
                path = self.get_cached(name)
                if path is not None:
                    return path
                with self._beginning:
                    other = self._fetching.get(name)
                    if other is None:
                        mine = self._fetching[name] = threading.Event()
                if other is not None:
                    check()
                    other.wait(_WAIT_S)
                    continue
                try:
                    path = self._fetch_locked(object_store, entry, name, next_use, check)
                finally:
                    del self._fetching[name]
                    mine.set()
                if path is not None:
                    return path

    def _fetch_locked(
        self, object_store: ObjectStore, entry: FileEntry, name: str, next_use: NextUse, check: Callable[[], None]
    ) -> Path | None:
        """None: somebody else was quicker, or there is more room now."""
        final, partial = self.folder / name, self.folder / (_PARTIAL + name)
        self.folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _try_lock(fd):  # another process is fetching it
                check()
                time.sleep(_POLL_S)
            if not fsio.is_same_file(fd, partial):
                return None
            try:
                if final.exists():
                    if self.get_cached(name) is None and not self._is_whole(final, entry):
                        fsio.remove_tree(final)
                    fsio.remove_tree(partial)
                    return final if final.exists() else None
                self._make_room(fd, entry.size, next_use, check)
                self._fetch(object_store, entry, fd, check)
                if _STARTED_AT is None:
                    os.fsync(fd)
                os.rename(partial, final)
                os.fchmod(fd, 0o444)
                return final
            except BaseException as error:
                fsio.remove_tree(partial)
                is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
                if is_full and self._free(entry.size, next_use):
                    return None
                raise
        finally:
            _unlock(fd)

    @staticmethod
    def _is_whole(final: Path, entry: FileEntry) -> bool:
        """Of a file that lay here when the machine stopped."""
        try:
            mapped = MappedFile(final, entry.size, entry.path)
            is_whole = crc32c(memoryview(mapped)) == entry.crc32c
        except (OSError, ValueError):
            return False
        if is_whole:
            os.utime(final)
        return is_whole

    @staticmethod
    def _fetch(object_store: ObjectStore, entry: FileEntry, fd: int, check: Callable[[], None]) -> None:
        for _ in range(_ATTEMPTS):
            if DiskCache._fetched_crc(object_store, entry, fd, check) == entry.crc32c:
                return
        raise CorruptStoreError(f"{entry.path}: checksum mismatch: damaged at {object_store.address}")

    @staticmethod
    def _fetched_crc(object_store: ObjectStore, entry: FileEntry, fd: int, check: Callable[[], None]) -> int:
        def take(piece: Any, offset: int) -> None:
            check()
            fsio.pwritev_all(fd, [memoryview(piece)], offset)

        try:
            return object_store.stream(entry.path, entry.size, take)
        except FileNotFoundError:
            raise CorruptStoreError(f"{entry.path}: missing at {object_store.address}") from None

    # Room

    def _complete(self) -> list[_File]:
        found = []
        for item in os.scandir(self.folder):
            if _NAME.fullmatch(item.name):
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append((item.name, status.st_size, status.st_mtime))
        return found

    def _partials(self, own: int) -> int:
        """Bytes of the files that are being fetched elsewhere; what a killed process left goes."""
        total = 0
        for item in os.scandir(self.folder):
            if not item.name.startswith(_PARTIAL):
                continue
            try:
                fd = os.open(item.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue  # gone meanwhile
            try:
                if os.path.samestat(os.fstat(fd), os.fstat(own)):
                    os.close(fd)
                    fd = -1
                elif not _try_lock(fd):
                    total += os.fstat(fd).st_size
                elif fsio.is_same_file(fd, Path(item.path)):
                    os.unlink(item.path)
            finally:
                if fd >= 0:
                    _unlock(fd)
        return total

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            _unlock(fd)

    def _make_room(self, fd: int, size: int, next_use: NextUse, check: Callable[[], None]) -> None:
        """Gives the file behind fd its size, which keeps the room for it."""
        if os.fstat(fd).st_size:
            os.ftruncate(fd, 0)  # not of an empty file: ext4 then writes it to the disk when it is closed
        with self._counting:
            is_fresh = time.monotonic() - self._counted_at < _COUNT_EVERY_S
            if is_fresh and self._count + size < self.max_bytes // 2:
                self._count += size
                os.ftruncate(fd, size)
                return
        while True:
            with self._locked():
                fetching, whole = self._partials(fd), self._complete()
                held = sum(s for _, s, _ in whole)
                over = held + fetching + size - self.max_bytes
                # Alone a file may be larger than the cache; beside others that come in, it waits for them.
                if over <= held or fetching == 0:
                    held -= self._evict(whole, over, next_use)
                    os.ftruncate(fd, size)
                    with self._counting:
                        self._counted_at, self._count = time.monotonic(), held + fetching + size
                    return
            check()
            time.sleep(_POLL_S)

    def _evict(self, whole: Iterable[_File], num_bytes: int, next_use: NextUse) -> int:
        """Removes files until num_bytes have gone, or all; the bytes that went."""
        removed = 0
        for name, size, _ in sorted(whole, key=lambda f: self._eviction_key(f, next_use)):
            if removed >= num_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / name)
            removed += size
        return removed

    def _free(self, num_bytes: int, next_use: NextUse) -> int:
        """Makes room on a disk that is full, whatever the bound."""
        with self._locked():
            return self._evict(self._complete(), num_bytes, next_use)

    @staticmethod
    def _eviction_key(file: _File, next_use: NextUse) -> tuple[bool, float]:
        """What sorts files so that the first is missed least: not needed soon and used longest
        ago, then those needed last."""
        rank = next_use(file[0])
        return (False, file[2]) if rank is None else (True, -float(rank))


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(fd: int) -> None:
    """Closes the file. Not by closing alone: a process that was forked meanwhile has it open, too."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
