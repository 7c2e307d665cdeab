"""A disk cache for whole files of remote stores, bounded in bytes and shared by processes.

A file is fetched under a temporary name, checked against its size and crc32c, and renamed. Its name identifies
store, path and content, so the files of a replaced store have other names. Files are not synced, which would slow
the transfer down: a file that was last used before the machine was started is checked again on its next use.
Eviction takes the least recently opened files first. A process that maps an evicted file can still read it.
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
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format.entries import FileEntry
from tracestore.store.io import fsio, locks
from tracestore.store.io.local_folders import cache_dir

DEFAULT_MAX_BYTES = 64 << 30
# Default fraction of the free disk space that the cache may use.
_SHARE_OF_FREE = 0.5
# Ending of the name of a file that has some layers; see remote.layer_file.
LAYERS_SUFFIX = "-layers"
_PARTIAL = ".part-"
_LOCK = ".lock"
_NAME = re.compile(rf"[0-9a-f]{{32}}-[0-9a-f]{{8}}-\d+({LAYERS_SUFFIX})?")
# Below half of its bound the cache is counted this often: other processes may add to it.
_COUNT_EVERY_S = 1.0
POLL_S = 0.01
# How often a file with a wrong checksum is fetched: the transfer may have damaged it.
ATTEMPTS = 2

# Name, bytes and time of last use of a file in the cache.
_File = tuple[str, int, float]

# Returns when a file is used next, as a number that is smaller for an earlier use; None if unknown.
NextUse = Callable[[str], int | None]


# When this machine was started, in seconds since the epoch; None if unknown.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)
_STARTED_AT = None if _CLOCK is None else time.time() - time.clock_gettime(_CLOCK)


class FileServer(Protocol):
    """An object store as the cache uses it."""

    @property
    def address(self) -> str:
        """Address, a part of the names in the cache."""

    def stream(self, path: str, size: int, take: Callable[[Any, int], None]) -> int:
        """See ObjectStore."""


class DiskCache:
    """Cached files in `folder`, at most max_bytes of them and one more.

    Other files in the folder are neither counted nor changed. Safe to use from threads and processes; a killed
    process leaves the cache usable.
    """

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
        self._counting = threading.Lock()
        self._counted_at = -math.inf
        self._count = 0

    @staticmethod
    @lru_cache(maxsize=1 << 14)
    def name_of(address: str, entry: FileEntry) -> str:
        """Return the name of a file in the cache."""
        place = hashlib.sha256(f"{address}\0{entry.path}".encode()).hexdigest()[:32]
        return f"{place}-{entry.crc32c:08x}-{entry.size}"

    def contains(self, name: str) -> bool:
        """Return whether the cache has a file."""
        return os.path.exists(os.path.join(self.folder, name))

    def mtime(self) -> int:
        """Return a number that changes whenever a file is added or evicted."""
        try:
            return os.stat(self.folder).st_mtime_ns
        except FileNotFoundError:
            return -1

    def get_cached(self, name: str) -> Path | None:
        """Return the path of a file if the cache has it and it needs no check."""
        path = self.folder / name
        try:
            # Last used before this machine was started: some of its bytes may never have reached the disk.
            if _STARTED_AT is not None and path.stat().st_mtime < _STARTED_AT:
                return None
            os.utime(path)  # The access time orders the eviction.
        except FileNotFoundError:
            return None
        return path

    def get(
        self,
        object_store: FileServer,
        entry: FileEntry,
        next_use: NextUse = lambda name: None,
        check: Callable[[], None] = lambda: None,
    ) -> Path:
        """Return the path of a file, and fetch it if the cache lacks it.

        Another process may evict the file before the caller opens it; the caller then repeats the call. `check` is
        called during the transfer and may raise to cancel it.

        Raises
        ------
        CorruptStoreError
            If the bytes on the server are not those committed.
        RemoteError
            If the server keeps failing.
        DiskFullError
            If the disk is full.
        """
        name = self.name_of(object_store.address, entry)
        with fsio.map_os_errors(self.folder, lambda: entry.size):
            while True:
                path = self.get_cached(name) or self._fetch_locked(object_store, entry, name, next_use, check)
                if path is not None:
                    return path

    def _fetch_locked(
        self, object_store: FileServer, entry: FileEntry, name: str, next_use: NextUse, check: Callable[[], None]
    ) -> Path | None:
        """Fetch a file under its lock, unless another thread or process has; None if eviction made room."""
        final, partial = self.folder / name, self.folder / (_PARTIAL + name)
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked_file(partial, os.O_CREAT, check) as fd:
            try:
                if final.exists():
                    if self.get_cached(name) is None and not self._is_whole(final, entry):
                        fsio.remove_tree(final)
                    fsio.remove_tree(partial)
                    return final if final.exists() else None
                if os.fstat(fd).st_size:
                    os.ftruncate(fd, 0)  # Not for an empty file: ext4 then writes it to the disk on close.
                self.make_room(entry.size, next_use, check, lambda: os.ftruncate(fd, entry.size))
                self._fetch(object_store, entry, fd, check)
                if _STARTED_AT is None:
                    os.fsync(fd)
                os.rename(partial, final)
                os.fchmod(fd, 0o444)
                if self.contains(name + LAYERS_SUFFIX):
                    fsio.remove_tree(self.folder / (name + LAYERS_SUFFIX))
                return final
            except BaseException as error:
                fsio.remove_tree(partial)
                if self.frees_disk(error, entry.size, next_use):
                    return None
                raise

    @staticmethod
    def _is_whole(final: Path, entry: FileEntry) -> bool:
        """Return whether a file from before the start of the machine has all its bytes."""
        try:
            mapped = MappedFile(final, entry.size, entry.path)
            is_whole = crc32c(memoryview(mapped)) == entry.crc32c
        except (OSError, ValueError):
            return False
        if is_whole:
            os.utime(final)
        return is_whole

    @staticmethod
    def _fetch(object_store: FileServer, entry: FileEntry, fd: int, check: Callable[[], None]) -> None:
        def take(piece: Any, offset: int) -> None:
            check()
            fsio.pwritev_all(fd, [memoryview(piece)], offset)

        for _ in range(ATTEMPTS):
            try:
                crc = object_store.stream(entry.path, entry.size, take)
            except FileNotFoundError:
                raise CorruptStoreError(f"{entry.path}: missing at {object_store.address}") from None
            if crc == entry.crc32c:
                return
        raise CorruptStoreError(f"{entry.path}: checksum mismatch: damaged at {object_store.address}")

    # Eviction

    def _complete(self) -> list[_File]:
        found = []
        for item in os.scandir(self.folder):
            if _NAME.fullmatch(item.name):
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        has_holes = item.name.endswith(LAYERS_SUFFIX)
                        size = 512 * status.st_blocks if has_holes else status.st_size
                        found.append((item.name, size, status.st_mtime))
        return found

    def _partials(self) -> int:
        """Return the bytes of files that are being fetched, and remove what killed processes left."""
        total = 0
        for item in os.scandir(self.folder):
            if not item.name.startswith(_PARTIAL):
                continue
            try:
                fd = os.open(item.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue  # Removed meanwhile.
            try:
                if not try_lock(fd):
                    total += os.fstat(fd).st_size
                elif locks.is_same_file(fd, Path(item.path)):
                    os.unlink(item.path)
            finally:
                unlock(fd)
        return total

    def make_room(
        self, size: int, next_use: NextUse, check: Callable[[], None], reserve: Callable[[], None] = lambda: None
    ) -> None:
        """Evict files until there is space for `size` bytes, then call `reserve`, which may take it."""
        with self._counting:
            is_fresh = time.monotonic() - self._counted_at < _COUNT_EVERY_S
            if is_fresh and self._count + size < self.max_bytes // 2:
                self._count += size
                reserve()
                return
        while True:
            with locked_file(self.folder / _LOCK, os.O_CREAT, check):
                fetching, whole = self._partials(), self._complete()  # Nothing is reserved yet.
                held = sum(s for _, s, _ in whole)
                over = held + fetching + size - self.max_bytes
                # A single file may be larger than the cache. It waits for other transfers to end.
                if over <= held or fetching == 0:
                    held -= self._evict(whole, over, next_use)
                    reserve()
                    with self._counting:
                        self._counted_at, self._count = time.monotonic(), held + fetching + size
                    return
            check()
            time.sleep(POLL_S)

    def _evict(self, whole: Iterable[_File], num_bytes: int, next_use: NextUse) -> int:
        """Remove files until num_bytes are free or none is left; return the bytes removed."""
        removed = 0
        for name, size, _ in sorted(whole, key=lambda f: self._eviction_key(f, next_use)):
            if removed >= num_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / name)
            removed += size
        return removed

    def frees_disk(self, error: BaseException, num_bytes: int, next_use: NextUse) -> bool:
        """Evict files, whatever the bound, if an error says that the disk is full. Return whether that freed space."""
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return False
        with locked_file(self.folder / _LOCK, os.O_CREAT):
            return self._evict(self._complete(), num_bytes, next_use) > 0

    @staticmethod
    def _eviction_key(file: _File, next_use: NextUse) -> tuple[bool, float]:
        """Return a sort key: files without a known next use by last use, then those whose next use is last."""
        rank = next_use(file[0].removesuffix(LAYERS_SUFFIX))
        return (False, file[2]) if rank is None else (True, -float(rank))


@contextlib.contextmanager
def locked_file(path: Path, flags: int, check: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Open a file under its lock, and yield its descriptor. FileNotFoundError if there is none.

    `check` is called while another thread or process holds the lock.
    """
    pause = POLL_S / 32  # A range may take less time than a poll.
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            while not try_lock(fd):
                check()
                time.sleep(pause)
                pause = min(2 * pause, POLL_S)
            if locks.is_same_file(fd, path):
                yield fd
                return
        finally:
            unlock(fd)


def try_lock(fd: int) -> bool:
    """Lock an open file; False if another thread or process has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Unlock and close a file. Closing alone keeps the lock if a forked process has the file open too."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
