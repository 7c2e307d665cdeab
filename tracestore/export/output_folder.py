"""The folder of an export: which one may be written, and by one process at a time."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tracestore.errors import StoreLockedError, UsageError
from tracestore.ingest.exports.export_manifest import COMPLETE, DATA_FOLDER, ExportManifest
from tracestore.store.format.paths import TEMPORARY_PREFIX
from tracestore.store.io.fsio import remove_tree
from tracestore.store.io.locks import lock_error


@contextlib.contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Keep other processes from exporting into a folder. No-op on a file system without locks of folders.

    Raises
    ------
    StoreLockedError
        If another process exports into it.
    """
    fd = os.open(out, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if lock_error(fd) == errno.EWOULDBLOCK:
            raise StoreLockedError(f"{out}: another process exports into this folder")
        yield
    finally:
        os.close(fd)


def check_folder(out: Path, manifest: ExportManifest) -> bool:
    """Remove the temporary files of an interrupted export, and return whether `manifest` is that of this export.

    Raises
    ------
    UsageError
        If the folder holds anything else.
    """
    found = ExportManifest.read(out)
    if found is not None and found.state == COMPLETE:
        raise UsageError(f"{out}: holds a complete export; use an empty or new folder")
    if found not in (None, manifest):
        raise UsageError(
            f"{out}: holds an unfinished export of another store, of another state of this one, or with other options; "
            "remove the folder, or use a new one"
        )
    for folder in (out, out / DATA_FOLDER) if found is not None or _is_empty(out) else ():
        for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
            remove_tree(path)
    if found is None and any(out.iterdir()):
        raise UsageError(f"{out}: not empty; use an empty or new folder")
    return found is not None


def _is_empty(out: Path) -> bool:
    return all(path.name.startswith(TEMPORARY_PREFIX) for path in out.iterdir())
