"""The folder that a writer commits to: a store on this machine, or the replacement of one."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tracestore.errors import CorruptStoreError, StoreLockedError, UsageError
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.manifest import Manifest
from tracestore.store.io import fsio, locks
from tracestore.store.io.files import LocalFiles, ReadableFiles, is_same_location
from tracestore.store.io.ownership import (
    FolderKind,
    classify_folder,
    remove_contents,
    remove_own,
    require_no_loss,
    require_removed,
)
from tracestore.store.io.replacement import Replacement, open_replacement
from tracestore.store.io.writing_folder import CommitTarget, WritingFolder, remove_abandoned, require_no_writer

_ATTEMPTS = 100


class FolderTarget(CommitTarget):
    """A store on this machine, as a writer adds to it; see CommitTarget.

    Parameters
    ----------
    path : Path
    overwrite : bool
        Write a new store next to the existing one, until replace_existing().
    exist_ok : bool
        Whether the store may exist.
    keeps_replacement : bool
        Keep what was committed to a replacement that replaces nothing yet, for the next writer.

    Attributes
    ----------
    path : Path
        The folder in which the files get their names.
    is_begun : bool
        Whether the folder holds a replacement that an interrupted writer has begun.
    """

    def __init__(self, path: Path, *, overwrite: bool, exist_ok: bool, keeps_replacement: bool) -> None:
        self.location = self.path = path
        self._exist_ok, self._overwrite, self._keeps_replacement = exist_ok, overwrite, keeps_replacement
        self._replacement: Replacement | None = None
        self._own_lock: locks.WriterLock | None = None  # of a replacement, held until it replaces the store
        self._is_created = False
        self._added: list[str] = []  # what the commit has added, until it is the newest generation

    @property
    def files(self) -> LocalFiles:
        """The committed files."""
        return LocalFiles(self.path)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder if necessary, and hold its lock during the block."""
        if self._overwrite:
            self._replacement = open_replacement(self.path)
            if self._replacement is not None:
                self.path = self._replacement.folder
        with self._enter() as lock:
            if classify_folder(self.path) is not FolderKind.STORE:
                # Until the first commit these files mark the folder as a store's. They must survive a
                # crash that any later file survives.
                fsio.fsync_path(self.path)
            remove_abandoned(self.path)
            if self._replacement is None:
                require_no_loss(self.files)
            else:
                self._own_lock = lock
                self.is_begun = self._replacement.begin(lock)
                self._writing = WritingFolder(self.path)
            yield

    @contextlib.contextmanager
    def _enter(self) -> Iterator[locks.WriterLock]:
        for _ in range(_ATTEMPTS):
            # Another writer may remove the folder at the same time, if it has committed nothing.
            self._is_created |= self._create()
            try:
                if self._replacement is None:
                    # Before the lock: a writer that replaces the store looks for it while it holds the lock.
                    self._writing = WritingFolder(self.path)
                lock = locks.WriterLock(self.path, wait_s=locks.LOCK_WAIT_S)
                break
            except locks.FolderRemovedError:
                self._close_writing()
            except BaseException:
                self._close_writing()
                raise
        else:
            raise UsageError(f"{self.path}: other writers keep removing the folder; repeat the command")
        try:
            yield lock
        finally:
            if lock is not self._own_lock:
                lock.release()

    def _create(self) -> bool:
        """Create the folder unless it exists; other writers may create and remove it at the same time."""
        with contextlib.suppress(FileExistsError):
            try:
                fsio.retry_eintr(os.mkdir, self.path)
                return True
            except FileNotFoundError:
                raise UsageError(f"{self.path}: the parent folder does not exist") from None
        if classify_folder(self.path) is FolderKind.STORE and not (self._exist_ok or self._overwrite):
            raise UsageError(f"{self.path}: the store exists (append=True adds traces, overwrite=True replaces it)")
        return False

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """See CommitTarget."""
        lock = None if self._own_lock is not None else locks.WriterLock(self.path, wait_s=locks.LOCK_WAIT_S)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # What is left is complete, and `tracestore clean` removes it.
                for path in reversed(self._added):
                    remove_own(self.path, path)
            raise
        finally:
            self._added = []
            if lock is not None:
                lock.release()

    def newest(self) -> int:
        """See CommitTarget."""
        return next(iter(self.files.generations()), 0)

    def has_changed(self, known: Manifest) -> bool:
        """See CommitTarget."""
        newest = self.newest()
        if newest < known.generation:
            raise CorruptStoreError(f"{self.path}: generation {known.generation} is gone; repeat the command")
        return newest > known.generation or (newest > 0 and self._read(paths.manifest(newest)) != known.to_bytes())

    def _read(self, path: str) -> bytes | None:
        try:
            return (self.path / path).read_bytes()
        except FileNotFoundError:
            return None

    def sync_generations(self) -> None:
        """See CommitTarget. The last writer may have been killed between link and fsync."""
        fsio.fsync_path(self.path / "manifest")

    def add_segment(self, folder: Path, name: str, files: Sequence[tuple[str, int, int]]) -> None:
        """See CommitTarget."""
        path = paths.segment(name)
        fsio.makedirs(self.path / "segments")
        # Another writer may add the same one at the same time.
        if not self._is_complete(path, files) and fsio.give_name(folder, self.path / path):
            self._added.append(path)
        elif self._is_complete(path, files):
            os.utime(self.path / path)  # `tracestore clean` goes by the time of the last use.
        else:
            require_removed(self.path, path)  # It was removed in part: no generation names it.
            fsio.retry_eintr(os.rename, folder, self.path / path)
            self._added.append(path)

    def take_segment(self, files: ReadableFiles, entries: Mapping[str, FileEntry], folder: Path, name: str) -> None:
        """See CommitTarget. A segment that a task has written into this store has its name already."""
        if not is_same_location(files.location, self.path):
            super().take_segment(files, entries, folder, name)

    def _is_complete(self, path: str, files: Sequence[tuple[str, int, int]]) -> bool:
        return all(self._size(f"{path}/{inner}") == size for inner, size, _ in files)

    def _size(self, path: str) -> int | None:
        try:
            return os.lstat(self.path / path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sync_segments(self) -> None:
        """See CommitTarget."""
        fsio.fsync_path(self.path / "segments")

    def add_file(self, path: str, data: bytes) -> None:
        """See CommitTarget."""
        if self.create_file(path, data):
            self._added.append(path)
        elif self._read(path) != data:
            require_removed(self.path, path)
            self.create_file(path, data)
            self._added.append(path)

    def create_file(self, path: str, data: bytes) -> bool:
        """See CommitTarget."""
        fsio.makedirs((self.path / path).parent)
        is_new = fsio.give_name(self._folder.write_small(data), self.path / path)
        fsio.fsync_path((self.path / path).parent)
        return is_new

    def keep_file(self, path: str, data: bytes) -> None:
        """See CommitTarget."""
        place = (self.path if self._replacement is None else self._replacement.target) / path
        fsio.makedirs(place.parent)
        self._replace(place, data)

    def remove_files(self, found: Sequence[str]) -> None:
        """See CommitTarget."""
        for path in found:
            remove_own(self.path, path)

    def _replace(self, place: Path, data: bytes) -> None:
        fsio.retry_eintr(os.rename, self._folder.write_small(data), place)
        fsio.fsync_path(place.parent)

    def _replace_file(self, path: str, data: bytes) -> None:
        """Create or replace a file atomically, unless it has these bytes."""
        if self._read(path) != data:
            self._replace(self.path / path, data)

    def create_manifest(self, manifest: Manifest) -> bool:
        """See CommitTarget."""
        if manifest.generation == 1:
            # An earlier writer may have created the folders and stopped before synchronizing them.
            for name in paths.TOP_FOLDERS:
                fsio.makedirs(self.path / name)
            fsio.fsync_path(self.path)
            with contextlib.suppress(PermissionError):
                fsio.fsync_path(self.path.parent)
        added, self._added = self._added, []  # From here on, they may belong to a generation.
        try:
            is_new = self.create_file(paths.manifest(manifest.generation), manifest.to_bytes())
        except BaseException:
            if not self.has_manifest(manifest):
                self._added = added
            raise
        return is_new or self.has_manifest(manifest)

    def has_manifest(self, manifest: Manifest) -> bool:
        """See CommitTarget."""
        return self._read(paths.manifest(manifest.generation)) == manifest.to_bytes()

    def write_root(self, data: bytes) -> None:
        """See CommitTarget."""
        self._replace_file("zarr.json", data)

    def begin(self, manifest: Manifest, root: bytes) -> None:
        """See CommitTarget."""
        self.settle(manifest, root)

    def settle(self, manifest: Manifest, root: bytes) -> None:
        """See CommitTarget."""
        self.write_root(root)
        if manifest.generation == 0:
            return
        # The copy allows `verify --repair` to restore a damaged manifest.
        self._replace_file(paths.manifest_copy(manifest.generation), manifest.to_bytes())
        if self._read(paths.NEWEST) is not None:  # of an object store that was copied into this folder
            self._replace_file(paths.NEWEST, paths.newest(manifest.generation))
        self._remove_old(manifest)

    def _remove_old(self, manifest: Manifest) -> None:
        """Remove the generations before the predecessor of `manifest` that no reader has pinned, and their files."""
        files = self.files
        kept = {file.path for file in manifest.small_files()}
        with contextlib.ExitStack() as stack:
            removed: list[tuple[int, Manifest | None]] = []
            for number in files.generations():
                if number >= manifest.generation:
                    continue
                is_free = stack.enter_context(locks.try_exclusive(files.open(paths.manifest(number))))
                try:
                    old = files.load_manifest(number)
                except CorruptStoreError:
                    old = None
                if is_free and (old is None or number < manifest.generation - 1):
                    removed.append((number, old))
                elif old is None:
                    return  # A reader has pinned this generation, whose files are unknown because it is damaged.
                else:
                    kept |= {file.path for file in old.small_files()}
            gone = {
                path for _, old in removed if old is not None for path in (file.path for file in old.small_files())
            } - kept
            for path in sorted({*gone, *(paths.manifest_copy(number) for number, _ in removed)}):
                remove_own(self.path, path)
            # The manifests go last: neither an interruption nor a power failure leaves files that no manifest names.
            for folder in {path.split("/")[0] for path in gone} | ({"index"} if removed else set()):
                fsio.fsync_path(self.path / folder)
            for number, _ in reversed(removed):
                remove_own(self.path, paths.manifest(number))

    def replace_existing(self) -> bool:
        """Move a replacement to the location of the old store; return False if there is no replacement."""
        if self._replacement is None:
            return False
        assert self._own_lock is not None
        with fsio.map_os_errors(self.path):
            self._close_writing()
            self._replacement.swap(self._own_lock)
            self.path, self._replacement = self._replacement.target, None
            self._writing = WritingFolder(self.path)
        self._own_lock.release()
        self._own_lock = None
        return True

    def clear(self) -> None:
        """Remove everything from a replacement that was begun."""
        self._close_writing()
        remove_contents(self.path, keep_lock=True)
        self._writing = WritingFolder(self.path)

    def close(self) -> None:
        """Release the locks, and remove the folder if it is a store without commits or an unwanted replacement."""
        try:
            with fsio.map_os_errors(self.path):
                self._close_writing()
                if self._replacement is not None or self._is_created:
                    self._remove_unused()
        finally:
            if self._own_lock is not None:
                self._own_lock.release()
            if self._replacement is not None:
                self._replacement.close()

    def _close_writing(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.close()

    def _remove_unused(self) -> None:
        with contextlib.suppress(OSError, StoreLockedError), self.lock():
            # A plan of other processes makes it a store.
            is_empty = not (self.files.generations() or self.files.list_dir(paths.RECEIPTS))
            # A replacement that no later run can resume is useless.
            is_dropped = self._replacement is not None and (is_empty or not self._keeps_replacement)
            if (self._is_created and is_empty) or is_dropped:
                if self._replacement is None:
                    require_no_writer(self.path)
                remove_contents(self.path)
                if not any(self.path.iterdir()):
                    fsio.retry_eintr(os.rmdir, self.path)
