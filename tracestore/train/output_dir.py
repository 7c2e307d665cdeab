"""The output directory of a training run: its lock, and atomic JSON files."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tracestore.errors import OutputDirLockedError
from tracestore.store.io import fsio


@contextmanager
def lock_output_dir(folder: Path) -> Iterator[None]:
    """Create an output directory and hold its lock. A new directory into which nothing is written is removed again.

    Two runs in one directory would test and resume from each other's checkpoints. The lock
    belongs to the process, and its workers do not inherit it. On a file system without locks
    this is a no-op.

    Raises
    ------
    OutputDirLockedError
        If another process writes into this directory.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise OutputDirLockedError(f"{folder}: another run writes there; pass another --output") from None
        try:
            yield
        finally:
            if created and os.listdir(folder) == [".lock"]:
                os.unlink(folder / ".lock")
                with suppress(OSError):  # another run has written next to it
                    for path in created:
                        path.rmdir()
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a JSON document, atomically and durably."""
    fsio.write_atomic(path, (json.dumps(value, indent=1) + "\n").encode())
