"""The object store that a writer commits to: its objects are put first, then the manifest unless it exists."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry
from tracestore.store.io import fsio
from tracestore.store.io.files import ReadableFiles, RemoteURL, is_same_location
from tracestore.store.io.local_folders import local_dir
from tracestore.store.io.writing_folder import CommitTarget, WritingFolder, remove_abandoned
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.remote.remote_files import RemoteFiles, cache_of_environment

_UPLOADS = 16
# Also the lock of a store on a disk that was uploaded.
_OWN_NAMES = {*paths.TOP_FOLDERS, paths.RECEIPTS, "zarr.json", "lock"}


class RemoteTarget(CommitTarget):
    """A store on an object store, as a writer adds to it; see CommitTarget.

    There is no lock: `manifest/<generation>` is put under the condition that there is no such object. With
    `overwrite` the first generation that is committed has nothing of the ones before it.

    Attributes
    ----------
    path : Path
        The local folder of temporary files.
    """

    def __init__(self, address: RemoteURL, *, overwrite: bool, exist_ok: bool) -> None:
        self._object_store = ObjectStore(address)
        self._object_store.require_writable()
        self.location = address
        self._files = RemoteFiles(self._object_store, cache_of_environment())
        self.path = local_dir(address)
        self._overwrite, self._exist_ok = overwrite, exist_ok
        self._newest = 0
        self._is_behind = False  # another writer has committed since the last look
        self._added: set[str] = set()  # what this writer has put
        self._numbers: list[int] = []  # generations, newest first, after the last commit
        self._known: dict[int, mf.Manifest] = {}
        # zarr.json, if it is known, of generations whose writers have left nothing undone, and of a new store
        self._roots: dict[int | None, bytes | None] = {}
        self._superseded: list[str] = []  # what the last commit has superseded and remove_files() removes

    @property
    def files(self) -> RemoteFiles:
        """The committed files."""
        return self._files

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Create the temporary folder, and look for a store."""
        numbers = self._list()
        if not numbers and set(self._object_store.list_names()) - _OWN_NAMES:
            raise UsageError(f"{self.location}: holds other objects and is not a store")
        if numbers and not self._exist_ok and not self._overwrite:
            raise UsageError(f"{self.location}: the store exists (append=True adds traces, overwrite=True replaces it)")
        with fsio.map_os_errors(self.path):
            fsio.makedirs(self.path)
            remove_abandoned(self.path)
            self._writing = WritingFolder(self.path)
        self._look(numbers)
        yield

    def _list(self) -> list[int]:
        """Return the generations, newest first."""
        found = self._object_store.list_objects("manifest")
        tags = {listed.path.removeprefix("manifest/"): listed.tag for listed in found}
        numbers = sorted(map(int, filter(paths.is_generation, tags)), reverse=True)
        # Most servers give an object the MD5 of its bytes as tag; others are asked.
        expected = hashlib.md5(paths.newest(numbers[0]), usedforsecurity=False).hexdigest() if numbers else ""
        if tags.get("newest") == f'"{expected}"':
            self._roots.setdefault(numbers[0])
        return numbers

    def _look(self, numbers: list[int]) -> None:
        """Begin with the newest generation."""
        number = next(iter(numbers), 0)
        if self._overwrite:
            self.replaced_generation = number
        else:
            self._newest = number
        self._is_behind = False

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """See CommitTarget. Objects that were put stay: an equal segment may be another writer's by now."""
        self.remove_files([])
        yield

    def newest(self) -> int:
        """See CommitTarget."""
        return self._newest

    def has_changed(self, known: mf.Manifest) -> bool:
        """See CommitTarget. Whether another writer was first shows when the manifest is put."""
        if self._is_behind:
            self._look(self._list())
            return True
        return False

    def sync_generations(self) -> None:
        """See CommitTarget. Nothing to do: an object is durable."""

    def sync_segments(self) -> None:
        """See CommitTarget. Nothing to do: an object is durable."""

    def sync_tree(self, folder: Path) -> None:
        """See CommitTarget. Nothing to do: the files are removed when they are uploaded."""

    def add_segment(self, folder: Path, name: str, files: Sequence[tuple[str, int, int]]) -> None:
        """See CommitTarget."""
        path = paths.segment(name)
        if path in self._added:
            return
        with ThreadPoolExecutor(_UPLOADS) as pool:
            # rows.zip, which lists the others, goes last.
            list(pool.map(lambda file: self._object_store.put(f"{path}/{file[0]}", folder / file[0]), files[:-1]))
        self._object_store.put(f"{path}/{files[-1][0]}", folder / files[-1][0])
        self._added.add(path)
        fsio.remove_tree(folder)

    def take_segment(self, files: ReadableFiles, entries: Mapping[str, FileEntry], folder: Path, name: str) -> None:
        """See CommitTarget. The server copies the objects if both stores are in one bucket."""
        path = paths.segment(name)
        if is_same_location(files.location, self._object_store.address):
            self._added.add(path)  # A task has put it.
        elif not isinstance(files, RemoteFiles) or not files.object_store.shares_bucket(self._object_store):
            super().take_segment(files, entries, folder, name)
        elif path not in self._added:
            with ThreadPoolExecutor(_UPLOADS) as pool:
                new = (f"{path}/{inner}" for inner in entries)
                list(pool.map(partial(self._object_store.copy_from, files.object_store), entries.values(), new))
            self._added.add(path)

    def add_file(self, path: str, data: bytes) -> None:
        """See CommitTarget."""
        if path not in self._added:
            self._object_store.put(path, data)
            self._added.add(path)
            self.files.keep(FileEntry(path, len(data), crc32c(data)), data)

    def create_file(self, path: str, data: bytes) -> bool:
        """See CommitTarget."""
        return self._object_store.put_if_absent(path, data)

    def keep_file(self, path: str, data: bytes) -> None:
        """See CommitTarget."""
        self._object_store.put(path, data)

    def remove_files(self, found: Sequence[str]) -> None:
        """See CommitTarget. It is one request."""
        removed, self._superseded = [*self._superseded, *found], []
        self._object_store.delete(removed)

    def create_manifest(self, manifest: mf.Manifest) -> bool:
        """See CommitTarget. The answer of the server may be lost: the bytes tell whose manifest it is."""
        path = paths.manifest(manifest.generation)
        if not self._object_store.put_if_absent(path, manifest.to_bytes()):
            self._is_behind = True
            return False
        # Old manifests are removed. If others have committed and removed the one of this number between the look and
        # the put, the put succeeds, although their newer generations do not have these changes.
        # Such a removal follows the second newer generation.
        self._numbers = self._list()
        if self._numbers and self._numbers[0] > manifest.generation + 1:
            self._object_store.delete([path])
            self._is_behind = True
            return False
        self._overwrite, self._newest = False, manifest.generation
        self.files.own_manifest = manifest
        return True

    def has_manifest(self, manifest: mf.Manifest) -> bool:
        """See CommitTarget. It is unknown where that matters: the server does not answer. The next commit finds it."""
        return False

    def write_root(self, data: bytes) -> None:
        """See CommitTarget."""
        if self._object_store.put_if_absent("zarr.json", data):
            self._roots[0] = data

    def begin(self, manifest: mf.Manifest, root: bytes) -> None:
        """See CommitTarget."""
        self._known[manifest.generation] = manifest
        if self._newest:
            if self._newest not in self._roots and not self._names_newest():
                self._finish(manifest, root)
            self._roots[self._newest] = root

    def settle(self, manifest: mf.Manifest, root: bytes) -> None:
        """See CommitTarget."""
        objects, number = self._object_store, manifest.generation
        self._known[number] = manifest
        newest, previous = (*self._numbers, 0, 0)[:2]
        if newest != number:
            return  # The writer of the newer one does the rest.
        if previous and previous not in self._roots:  # Its writer may have been killed.
            with contextlib.suppress(CorruptStoreError, FileNotFoundError):
                objects.put(paths.manifest_copy(previous), self._manifest(previous).to_bytes())
        self._finish(manifest, root, previous)
        try:
            kept = {file.path for k in self._numbers[:2] for file in self._manifest(k).small_files()}
        except (CorruptStoreError, FileNotFoundError):
            return  # The files that it names are unknown.
        removed: list[str] = []
        for k in self._numbers[2:]:
            with contextlib.suppress(CorruptStoreError, FileNotFoundError):
                removed += [file.path for file in self._manifest(k).small_files() if file.path not in kept]
            removed.append(paths.manifest_copy(k))
        self._superseded = removed + [paths.manifest(k) for k in self._numbers[2:]]

    def _finish(self, manifest: mf.Manifest, root: bytes, previous: int | None = None) -> None:
        """Put what follows a manifest: the root, unless it is that of `previous`, the copy, and last manifest/newest."""
        objects, number = self._object_store, manifest.generation
        if self._roots.get(previous) != root:
            objects.put("zarr.json", root)
        objects.put(paths.manifest_copy(number), manifest.to_bytes())
        objects.put(paths.NEWEST, paths.newest(number))
        self._roots[number] = root

    def _names_newest(self) -> bool:
        """Return whether manifest/newest is that of the newest generation, or of one that came after the listing."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self._object_store.read(paths.NEWEST)) >= self._newest
        return False

    def _manifest(self, number: int) -> mf.Manifest:
        if number not in self._known or number == self.replaced_generation:
            self._known[number] = self.files.load_manifest(number)
        return self._known[number]

    def clear(self) -> None:
        """See CommitTarget. Nothing is begun here."""

    def replace_existing(self) -> bool:
        """See CommitTarget. The first commit has replaced it."""
        return False

    def close(self) -> None:
        """Remove the temporary files, and what the last commit has superseded."""
        if self._writing is not None:
            with fsio.map_os_errors(self.path):
                self._writing.close()
            self._writing = None
        self.remove_files([])
