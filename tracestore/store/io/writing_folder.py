"""The temporary folders of writers in a store: a file or segment in one is complete before it gets its final name."""

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tracestore.errors import StoreLockedError
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry
from tracestore.store.io import fsio, locks
from tracestore.store.io.files import ReadableFiles
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


class HasWritingFolder:
    """Base of a commit target that gives its writer a temporary folder while it is opened."""

    _writing: WritingFolder | None = None

    @property
    def scratch(self) -> Path:
        """The temporary folder of this writer."""
        return self._folder.path

    @property
    def _folder(self) -> WritingFolder:
        assert self._writing is not None
        return self._writing

    def new_folder(self) -> Path:
        """See CommitTarget."""
        return self._folder.new_folder()

    def sync_tree(self, folder: Path) -> None:
        """See CommitTarget."""
        fsio.fsync_tree(folder)

    def take_segment(self, files: ReadableFiles, entries: Mapping[str, FileEntry], folder: Path, name: str) -> None:
        """See CommitTarget."""
        for inner, entry in entries.items():
            fsio.makedirs((folder / inner).parent)
            files.link(entry, folder / inner)
        self.sync_tree(folder)


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
