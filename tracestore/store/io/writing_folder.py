"""The places that writers commit to, and their temporary folders: files are complete before they get their names."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from tracestore.errors import StoreLockedError
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.manifest import Manifest
from tracestore.store.io import fsio, locks
from tracestore.store.io.files import ReadableFiles, RemoteURL
from tracestore.store.io.ownership import remove_own


class WritingFolder:
    """A new temporary folder. Its lock shows other writers that this one is alive.

    locks.FolderRemovedError if the store's folder does not exist.
    """

    def __init__(self, store: Path) -> None:
        self._store, self._numbers = store, itertools.count(1)
        while True:
            self.name = f"{paths.TEMPORARY_PREFIX}{os.urandom(8).hex()}"
            self.path = store / self.name
            try:
                fsio.retry_eintr(os.mkdir, self.path)
                self._lock = locks.WriterLock(self.path)
                return
            except FileNotFoundError:
                raise locks.FolderRemovedError(f"{store}: another writer has just removed its empty store") from None
            except (FileExistsError, StoreLockedError):
                continue  # Another writer took it for one that was left behind.

    def new_folder(self) -> Path:
        """Return the path of a folder for a segment, which does not exist."""
        return self.path / f"{next(self._numbers):08d}"

    def write_small(self, data: bytes) -> Path:
        """Write a synchronized file, which replaces the last one, and return its path."""
        path = self.path / "small"
        fsio.remove_tree(path)
        fsio.write_file(path, data)
        return path

    def close(self) -> None:
        """Remove the folder and release its lock."""
        try:
            remove_own(self._store, self.name)
        finally:
            self._lock.release()


class CommitTarget(Protocol):
    """The destination of a writer's commits: a folder or an object store. No file that was added is changed or renamed.

    Attributes
    ----------
    location : Path or RemoteURL
        As the caller named it.
    path : Path
        The folder that limits the space.
    is_begun : bool
        Whether there is an unfinished store of an interrupted writer with `overwrite`.
    replaced_generation : int
        Number of the generation that the first one of a new store follows.
    """

    location: Path | RemoteURL
    path: Path
    is_begun: bool = False
    replaced_generation: int = 0
    _writing: WritingFolder | None = None

    @property
    def _folder(self) -> WritingFolder:
        assert self._writing is not None
        return self._writing

    @property
    def scratch(self) -> Path:
        """The folder for temporary files of this writer."""
        return self._folder.path

    @property
    def files(self) -> ReadableFiles:
        """The committed files."""

    def opened(self) -> AbstractContextManager[None]:
        """Prepare the location; the block loads the newest generation."""

    def new_folder(self) -> Path:
        """Return the path of a temporary folder for a segment, which does not exist."""
        return self._folder.new_folder()

    def lock(self) -> AbstractContextManager[None]:
        """Exclude other commits where that is possible; if the block fails, remove what was added and not committed.

        StoreLockedError if another process holds the lock for locks.LOCK_WAIT_S.
        """

    def has_changed(self, known: Manifest) -> bool:
        """Return whether the newest generation is another one."""

    def sync_generations(self) -> None:
        """Make the manifests durable that others have created."""

    def newest(self) -> int:
        """Return the number of the newest generation; 0 if the writer begins a store."""

    def sync_tree(self, folder: Path) -> None:
        """Make the files in a temporary folder durable, if add_segment() gives them their names."""
        fsio.fsync_tree(folder)

    def take_segment(self, files: ReadableFiles, entries: Mapping[str, FileEntry], folder: Path, name: str) -> None:
        """Prepare a segment of another store for add_segment(); `entries` has its files by their paths in it."""
        for inner, entry in entries.items():
            fsio.makedirs((folder / inner).parent)
            files.link(entry, folder / inner)
        self.sync_tree(folder)

    def add_segment(self, folder: Path, name: str, files: Sequence[tuple[str, int, int]]) -> None:
        """Add a complete segment unless it exists; `files` has path in the segment, size and CRC-32C of each file."""

    def sync_segments(self) -> None:
        """Make the names of the segments durable."""

    def add_file(self, path: str, data: bytes) -> None:
        """Add a small file unless it exists."""

    def create_file(self, path: str, data: bytes) -> bool:
        """Create a file that no generation names. Return False, with nothing changed, if another process has done so."""

    def keep_file(self, path: str, data: bytes) -> None:
        """Create or replace a file that no generation names, with `overwrite` in the store that is to be replaced."""

    def remove_files(self, found: Sequence[str]) -> None:
        """Remove files that no generation names, if they exist, with those that the last commit has superseded."""

    def create_manifest(self, manifest: Manifest) -> bool:
        """Make a manifest the newest generation. Return False, with nothing changed, if another one has its number."""

    def has_manifest(self, manifest: Manifest) -> bool:
        """Return whether exactly this manifest is a generation."""

    def write_root(self, data: bytes) -> None:
        """Write the root zarr.json of a store without commits."""

    def begin(self, manifest: Manifest, root: bytes) -> None:
        """Complete what the writer of the newest generation may have left undone; `root` is zarr.json."""

    def settle(self, manifest: Manifest, root: bytes) -> None:
        """Complete the newest generation: zarr.json, the copy of the manifest, and removal of earlier generations."""

    def clear(self) -> None:
        """Remove what an interrupted writer has left."""

    def replace_existing(self) -> bool:
        """Let the new store replace the existing one. Return False if that has happened or is not wanted."""

    def close(self) -> None:
        """Remove the temporary files."""


def _locks(store: Path) -> Iterator[tuple[str, locks.WriterLock | None]]:
    """Yield the temporary folders of a store, with the lock of those whose writer has ended."""
    for name in sorted(filter(paths.is_writing_folder, os.listdir(store))):
        try:
            yield name, locks.WriterLock(store / name)
        except locks.FolderRemovedError:
            continue
        except StoreLockedError:
            yield name, None


def remove_abandoned(store: Path) -> None:
    """Remove the temporary folders whose writers have ended."""
    for name, lock in _locks(store):
        if lock is not None:
            try:
                remove_own(store, name)
            finally:
                lock.release()


def require_no_writer(store: Path) -> None:
    """Raise StoreLockedError if a writer has the store open."""
    for _, lock in _locks(store):
        if lock is None:
            raise StoreLockedError(f"{store}: another writer has the store open")
        lock.release()
