"""The local folder that a writer works in: the store itself, its replacement, or a remote store's working copy."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format import paths, schema
from tracestore.store.format.manifest import Manifest
from tracestore.store.io import fsio
from tracestore.store.io.files import LocalFiles, RemoteURL, StoreFiles, parse_location
from tracestore.store.io.ownership import FolderKind, classify_folder, remove_contents, remove_own
from tracestore.store.io.replacement import Replacement, open_replacement
from tracestore.store.read.index import SourceEntry

# Options by name. None: the default; a function returns the option of a new store.
Options = Mapping[str, str | Callable[[], str] | None]
# Options of a new store.
_DEFAULTS = {"attention": "mean", "dtype": "float16", "codec": "none"}


def _remote_publisher(url: RemoteURL, overwrite: bool, exist_ok: bool) -> Any:
    # Imported here because remote stores need an extra.
    from tracestore.store.remote.publish import RemotePublisher

    return RemotePublisher(url, overwrite=overwrite, exist_ok=exist_ok)


class WorkingFolder:
    """The folder of a writer, its lock, and the way of a commit from there to the store's location.

    Parameters are those of StoreWriter. open() must be called before anything is written.

    Attributes
    ----------
    location : Path or RemoteURL
        The location that the caller named.
    path : Path
        The local folder in which the writer works.
    is_published : bool
        Whether the last commit is visible at `location`.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        overwrite: bool,
        exist_ok: bool,
        can_resume: Callable[[SourceEntry], bool] | None,
    ) -> None:
        self.location = parse_location(location)
        self._overwrite, self._exist_ok, self._can_resume = overwrite, exist_ok, can_resume
        self._remote = None
        if isinstance(self.location, Path):
            self.path = self.location
            self.files: StoreFiles = LocalFiles(self.path)
        else:
            self._remote = _remote_publisher(self.location, overwrite, exist_ok)
            self.path, self.files = self._remote.folder, self._remote.files
        self.is_published = True
        self._is_created = False
        self._lock: fsio.WriterLock | None = None
        self._replacement: Replacement | None = None

    def open(self) -> bool:
        """Create the folder if necessary and lock it.

        Returns
        -------
        bool
            Whether the folder holds a replacement that an interrupted writer has begun.
        """
        if self._overwrite and self._remote is None:
            self._replacement = open_replacement(self.path)
            if self._replacement is not None:
                self.path = self._replacement.folder
                self.files = LocalFiles(self.path)
        self._is_created = self._create()
        self._lock = fsio.WriterLock(self.path)
        if classify_folder(self.path) is not FolderKind.STORE:
            # Until the first commit these two files mark the folder as a store's. They must survive a
            # crash that any later file survives.
            fsio.fsync_path(self.path)
        remove_own(self.path, paths.SPOOL_FOLDER)  # A killed conversion may have left it.
        return self._replacement is not None and self._replacement.begin(self._lock)

    def _create(self) -> bool:
        """Create the folder unless it exists; other writers may create and remove it at the same time."""
        with contextlib.suppress(FileExistsError):
            try:
                fsio.retry_eintr(os.mkdir, self.path)
                return True
            except FileNotFoundError:
                raise UsageError(f"{self.path}: the parent folder does not exist") from None
        if classify_folder(self.path) is FolderKind.STORE and not (self._exist_ok or self._overwrite):
            raise UsageError(f"{self.path}: the store exists (overwrite=True replaces it)")
        return False

    def load_manifest(self, options: Options) -> Manifest:
        """Return the manifest that a writer continues from, that of generation 0 in a store without commits.

        A function in `options` returns the option of a new store.

        Raises
        ------
        UsageError
            If an option differs from the store's.
        CorruptStoreError
            If the latest manifest is damaged.
        """
        files = LocalFiles(self.path)
        generations = files.generations()
        if not generations:
            given = {name: value() if callable(value) else value for name, value in options.items()}
            chosen = {name: given[name] or default for name, default in _DEFAULTS.items()}
            return Manifest(0, schema.Attributes(attention=chosen["attention"], options=chosen))
        try:
            manifest = files.load_manifest(generations[0])
        except CorruptStoreError as error:
            raise CorruptStoreError(f"{error}. Run: tracestore verify {self.path} --repair") from None
        # The previous writer may have been killed between rename and fsync. Its last generation must survive
        # a power failure before this writer refers to it.
        fsio.fsync_path(self.path / "manifest")
        for name, value in options.items():
            stored = manifest.attributes.options[name]
            if isinstance(value, str) and value != stored:
                raise UsageError(f"{self.location} was created with --{name} {stored}, not {value}")
        return manifest

    def remove_contents(self) -> None:
        """Remove everything from the folder except the lock."""
        remove_contents(self.path, keep_lock=True)

    def publish(self, manifest: Manifest) -> None:
        """Upload the last commit if the store is remote and the commit is not published yet."""
        if self._remote is not None and not self.is_published:
            self._remote.publish(manifest)
            self.is_published = True

    def replace_existing(self) -> bool:
        """Move a replacement to the location of the old store; return False if there is no replacement."""
        if self._replacement is None:
            return False
        assert self._lock is not None
        with fsio.map_os_errors(self.path):
            self._replacement.swap(self._lock)
        self.path, self._replacement = self._replacement.target, None
        self.files = LocalFiles(self.path)
        return True

    def close(self) -> None:
        """Release the locks, and remove the folder if it is a store without commits or an unwanted replacement."""
        try:
            self._close_folder()
        finally:
            if self._replacement is not None:
                self._replacement.close()
            if self._remote is not None:
                self._remote.close()

    def _close_folder(self) -> None:
        if self._lock is None:
            return
        try:
            is_empty = not LocalFiles(self.path).generations()
            # A replacement that no later run can resume is useless.
            is_dropped = self._replacement is not None and (is_empty or self._can_resume is None)
            if (self._is_created and is_empty) or is_dropped:
                remove_contents(self.path)
                if not any(self.path.iterdir()):
                    fsio.retry_eintr(os.rmdir, self.path)
        except OSError:
            pass  # An empty store remains, which the next writer uses.
        finally:
            self._lock.release()
            self._lock = None
