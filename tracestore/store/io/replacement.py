"""Replacement of a store by a new one that is written in a folder next to it."""

import contextlib
import os
from pathlib import Path

from tracestore.platform_support import exchange
from tracestore.store.format.paths import TEMPORARY_PREFIX
from tracestore.store.io import fsio, locks
from tracestore.store.io.ownership import REPLACEMENT, FolderKind, classify_folder, remove_contents
from tracestore.store.io.writing_folder import require_no_writer


def replacement_dir(store: Path) -> Path:
    """Return the folder in which the replacement of a store is written."""
    return store.parent / f"{TEMPORARY_PREFIX}{store.name}"


class Replacement:
    """A folder next to a store in which a writer prepares the store that replaces it.

    The object holds the lock of the old store until swap(), so that only readers use the old store. After an
    interruption at any time the store's path holds either the old or the new store. StoreLockedError if a writer has
    the old store open.
    """

    def __init__(self, target: Path) -> None:
        self.target, self.folder = target, replacement_dir(target)
        self._old_lock = locks.WriterLock(target)
        try:
            require_no_writer(target)
        except BaseException:
            self.close()
            raise

    def begin(self, lock: locks.WriterLock) -> bool:
        """Mark the folder, whose lock the caller holds, as a replacement.

        Returns
        -------
        bool
            True if it was marked already: it then holds what an interrupted writer has committed. Without
            the mark it holds a store that was replaced, which is removed.
        """
        if lock.read() == REPLACEMENT:
            return True
        remove_contents(self.folder, keep_lock=True)
        lock.write(REPLACEMENT)
        fsio.fsync_path(self.folder)
        return False

    def swap(self, lock: locks.WriterLock) -> None:
        """Move the new store to the path of the old store, and remove the old store."""
        old = self.folder
        if not exchange(self.folder, self.target):
            # The platform has no atomic exchange. An interruption between the two renames leaves both stores
            # intact, but none of them at the target path.
            old = self.target.parent / f"{TEMPORARY_PREFIX}old-{self.target.name}"
            fsio.retry_eintr(os.rename, self.target, old)
            fsio.retry_eintr(os.rename, self.folder, self.target)
        fsio.fsync_path(self.target.parent)
        lock.write(b"")
        remove_contents(old)
        with contextlib.suppress(OSError):  # The folder contains files that are not a store's; keep them.
            fsio.retry_eintr(os.rmdir, old)
        self.close()

    def close(self) -> None:
        """Release the lock of the old store."""
        self._old_lock.release()


def open_replacement(path: Path) -> Replacement | None:
    """Return the replacement of the store at `path`, or None if there is no store to replace.

    Raises the errors of classify_folder().
    """
    if classify_folder(path) is not FolderKind.STORE:
        return None
    classify_folder(replacement_dir(path))
    return Replacement(path)
