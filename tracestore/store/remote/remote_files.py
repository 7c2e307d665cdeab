"""The committed files of a remote store, cached on the local disk when they are first used."""

import argparse
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError, StorageError, UsageError
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry, FilesOf, Layers, size_mismatch
from tracestore.store.format.manifest import Manifest
from tracestore.store.io import fsio
from tracestore.store.io.files import FilePrefetcher, ReadableFiles, RemoteURL
from tracestore.store.remote.disk_cache import LAYERS_SUFFIX, DiskCache, NextUse
from tracestore.store.remote.helper import Helper
from tracestore.store.remote.layer_file import LayerFile
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.remote.prefetch_files import RemoteFilePrefetcher
from tracestore.store.remote.threads import in_threads
from tracestore.words import parse_size

_SMALL_AT_ONCE = 16  # requests for the small files that opening needs
_TRIES = 20

T = TypeVar("T")


def cache_of_environment() -> DiskCache:
    """Return the cache in $TRACESTORE_CACHE_DIR, bounded by $TRACESTORE_CACHE_SIZE (such as 100GiB)."""
    text = os.environ.get("TRACESTORE_CACHE_SIZE")
    try:
        return DiskCache(max_bytes=None if text is None else parse_size(text))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"TRACESTORE_CACHE_SIZE: {error}") from None


@dataclass
class _Written:
    """A FileServer of one file, which was written to the object store."""

    address: str
    data: bytes

    def stream(self, path: str, size: int, take: Callable[[Any, int], None]) -> int:
        take(self.data, 0)
        return crc32c(self.data)


class RemoteFiles(ReadableFiles):
    """The committed files of a remote store, read through the disk cache.

    Object stores have no locks, so a generation is not pinned. Its segments stay until the store is replaced, and
    index and columns are in the cache once the store is open.
    """

    keeps_generations = True

    def __init__(self, object_store: ObjectStore, cache: DiskCache) -> None:
        self.object_store, self.cache = object_store, cache
        self.location, self.cache_bytes = object_store.address, cache.max_bytes
        self.next_use: NextUse = lambda name: None
        self.on_miss: Callable[[], None] = lambda: None
        self.own_manifest: Manifest | None = None  # that of the last commit here
        self._mapped: dict[str, str] = {}  # name in the cache -> path in the store
        self._mtime = -1  # of the cache folder, when the mapped files were last compared with it
        self._lock = threading.Lock()
        self._helper: Helper | None = None

    @classmethod
    def open(cls, url: RemoteURL) -> "RemoteFiles":
        """Return the files of a store, with the cache that the environment selects."""
        return cls(ObjectStore(url), cache_of_environment())

    def reopen(self) -> "RemoteFiles":
        """See ReadableFiles."""
        files = RemoteFiles(self.object_store, self.cache)
        files.prefix = self.prefix
        return files

    def generations(self) -> list[int]:
        """See ReadableFiles."""
        return list_generations(self.object_store)

    def read_manifest(self, generation: int, max_bytes: int) -> tuple[bytes, None]:
        """See ReadableFiles."""
        if self.own_manifest is not None and self.own_manifest.generation == generation:
            return self.own_manifest.to_bytes(), None
        return self.read_small(paths.manifest(generation), max_bytes), None

    def list_dir(self, folder: str) -> list[str]:
        """See ReadableFiles."""
        return self.object_store.list_dir(folder) if self.object_store.can_list else []

    def read_small(self, path: str, max_bytes: int) -> bytes:
        """See ReadableFiles."""
        return self.object_store.read(path, max_bytes)

    def no_store_error(self) -> Exception:
        """See ReadableFiles."""
        if self.object_store.size("zarr.json") is None:
            return UsageError(f"{self.location}: no such store")
        if not self.object_store.can_list:
            return UsageError(
                f"{self.location}: a web server that does not list its folders: the file manifest/newest is missing"
            )
        return UsageError(f"{self.location}: not a store")

    def require_root(self) -> None:
        """Accept any root: the manifest decides."""

    def prefetch(self, files_of: FilesOf, start: int, total: int) -> FilePrefetcher:
        """See ReadableFiles."""
        return RemoteFilePrefetcher(self, files_of, start, total)

    def _use(self, entry: FileEntry, use: Callable[[str | os.PathLike[str]], T]) -> T:
        for _ in range(_TRIES):
            path = self._get(entry)
            try:
                return use(path)
            except FileNotFoundError:
                continue  # evicted meanwhile
        raise StorageError(f"{self.cache.folder}: files go from the cache faster than they can be opened")

    def _get(self, entry: FileEntry) -> Path:
        name = DiskCache.name_of(self.object_store.address, entry)
        path = self.cache.get_cached(name)
        if path is not None:
            return path
        self.on_miss()
        if not self.object_store.is_forked:
            return self.cache.get(self.object_store, entry, self.next_use)
        with self._lock:
            if self._helper is None or not self._helper.is_of_this_process:
                self._helper = Helper(self.object_store.address, self.cache)
            helper = self._helper
        helper.fetch(entry)
        return self.cache.folder / name

    def keep(self, entry: FileEntry, data: bytes) -> None:
        """Put a file into the cache that was just written to the store."""
        self.cache.get(_Written(self.object_store.address, data), entry, self.next_use)

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Fetch several files into the cache at once, if it has room for all of them."""
        address = self.object_store.address
        with fsio.map_os_errors(self.cache.folder):
            missing = [e for e in entries if self.cache.get_cached(DiskCache.name_of(address, e)) is None]
        if len(missing) < 2 or sum(e.size for e in missing) > self.cache.max_bytes or self.object_store.is_forked:
            return

        def get(entry: FileEntry, check: Callable[[], None]) -> None:
            self.cache.get(self.object_store, entry, self.next_use, check)

        for _ in in_threads(get, missing, _SMALL_AT_ONCE):
            pass

    def close(self) -> None:
        """Stop the helper process, if there is one."""
        with self._lock:
            if self._helper is not None:
                self._helper.close()
            self._helper = None

    def read(self, entry: FileEntry) -> bytes:
        """See StoreFiles."""
        data = self._use(entry, lambda path: Path(path).read_bytes())
        if len(data) != entry.size:
            raise size_mismatch(entry, len(data))
        return data

    def link(self, entry: FileEntry, path: Path) -> None:
        """See ReadableFiles. A cached file that was damaged after its fetch is removed."""

        def link(cached: str | os.PathLike[str]) -> None:
            with open(cached, "rb") as file:
                try:
                    fsio.copy_file(file.fileno(), path, entry)
                except CorruptStoreError as error:
                    fsio.remove_tree(Path(cached))
                    raise CorruptStoreError(f"{error} in the cache; run the command again to fetch the file") from None

        self._use(entry, link)

    def map(self, entry: FileEntry) -> MappedFile:
        """See StoreFiles."""
        mapped = self._use(entry, lambda path: MappedFile(path, entry.size, self.prefix + entry.path))
        with self._lock:
            self._mapped[self.cache.name_of(self.object_store.address, entry)] = entry.path
        return mapped

    @property
    def has_ranges(self) -> bool:
        """See StoreFiles. A forked process, which cannot send requests, fetches whole files."""
        return self.object_store.has_ranges and not self.object_store.is_forked

    def map_layers(self, entry: FileEntry, layers: Layers, data_bytes: int) -> LayerFile | None:
        """See StoreFiles."""
        name = self.cache.name_of(self.object_store.address, entry)
        has_room = len(layers.crcs) <= entry.size - data_bytes - 4
        if not self.has_ranges or not has_room or self.cache.get_cached(name) is not None:
            return None
        found = LayerFile(self, entry, layers, data_bytes)
        with self._lock:
            self._mapped[name + LAYERS_SUFFIX] = entry.path
        return found

    def evicted(self) -> Sequence[str]:
        """See ReadableFiles. Unmapping these files gives the disk its space back."""
        mtime = self.cache.mtime()
        if self._mtime == mtime:
            return ()
        with self._lock:
            self._mtime = mtime
            names = [name for name in self._mapped if not self.cache.contains(name)]
            return [self._mapped.pop(name) for name in names]


def list_generations(object_store: ObjectStore) -> list[int]:
    """Return the generations that have a manifest, newest first."""
    names = [n for n in object_store.list_dir("manifest") if paths.is_generation(n)]
    if not names and not object_store.can_list:
        with contextlib.suppress(FileNotFoundError):
            newest = object_store.read(paths.NEWEST, 64).decode("ascii", "replace").strip()
            names = [newest] if paths.is_generation(newest) else []
    return sorted(map(int, names), reverse=True)
