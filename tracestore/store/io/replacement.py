"""A store that is written beside another one and takes its place as a whole."""

import contextlib
import os
from pathlib import Path

from tracestore.platform_support import exchange
from tracestore.store.format.paths import TEMPORARY_PREFIX
from tracestore.store.io import fsio
from tracestore.store.io.ownership import REPLACEMENT, FolderKind, classify_folder, remove_contents


def replacement_dir(store: Path) -> Path:
    """Return where a store that is to replace another one is written."""
    return store.parent / f"{TEMPORARY_PREFIX}{store.name}"


class Replacement:
    """A folder beside a store, of which a writer makes what shall take the store's place.

    Holds the lock of the store that is to be replaced, which readers and nobody else use until
    replace_existing(); a stop at any time leaves one of the two under the store's name.
    """

    def __init__(self, target: Path) -> None:
        self.target, self.folder = target, replacement_dir(target)
        self._old_lock = fsio.WriterLock(target)

    def begin(self, lock: fsio.WriterLock) -> bool:
        """Mark the folder, whose lock is held, as a replacement.

        Returns
        -------
        bool
            Whether it was one already: then it holds what a stopped writer had committed. What else
            lies there is a store that was replaced, and is removed.
        """
        if lock.text() == REPLACEMENT:
            return True
        remove_contents(self.folder, keep_lock=True)
        lock.write(REPLACEMENT)
        fsio.fsync_path(self.folder)
        return False

    def replace_existing(self, lock: fsio.WriterLock) -> None:
        """Give the folder the store's name, and remove the store that had it."""
        old = self.folder
        if not exchange(self.folder, self.target):
            # Here a stop between the two calls leaves both stores whole, neither under the name.
            old = self.target.parent / f"{TEMPORARY_PREFIX}old-{self.target.name}"
            fsio.retry_eintr(os.rename, self.target, old)
            fsio.retry_eintr(os.rename, self.folder, self.target)
        fsio.fsync_path(self.target.parent)
        lock.write(b"")
        remove_contents(old)
        with contextlib.suppress(OSError):  # what is no store's stays
            fsio.retry_eintr(os.rmdir, old)
        self.close()

    def close(self) -> None:
        """Let go of the store that is not replaced any more, or not yet."""
        self._old_lock.release()


def open_replacement(path: Path) -> Replacement | None:
    """Return where to write what shall replace the store at `path`; None where there is none.
    Errors as of ownership.examine."""
    if classify_folder(path) is not FolderKind.STORE:
        return None
    classify_folder(replacement_dir(path))
    return Replacement(path)
