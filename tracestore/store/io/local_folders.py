"""The folders of this machine that hold files of remote stores: the cache, and the scratch of writers."""

import os
from pathlib import Path

from tracestore.errors import UsageError
from tracestore.platform_support import is_in_memory
from tracestore.store.io.files import parse_location
from tracestore.words import format_size

_LEAST_BUDGET = 32 << 20


def cache_dir() -> Path:
    """Return the folder that caches files of remote stores.

    It is $TRACESTORE_CACHE_DIR if that is set, otherwise tracestore/ in the user's cache folder.
    """
    configured = os.environ.get("TRACESTORE_CACHE_DIR")
    if configured:
        return Path(configured)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracestore"
    except RuntimeError:
        raise UsageError("no home folder to cache files of remote stores in: set TRACESTORE_CACHE_DIR") from None


def local_dir(store: str | os.PathLike[str]) -> Path:
    """Return the local folder that writes to a store need space in: the store itself, or the scratch of a remote one.

    That is tracestore-UID/ in $TRACESTORE_SCRATCH if that is set, otherwise .writing/ in the cache folder.
    """
    location = parse_location(store)
    if isinstance(location, Path):
        return location
    configured = os.environ.get("TRACESTORE_SCRATCH")
    return Path(configured) / f"tracestore-{os.getuid()}" if configured else cache_dir() / ".writing"


def budget_beside(scratch: Path, memory_budget: int, num_bytes: int) -> int:
    """Return what a memory budget leaves besides `num_bytes` of segments in a folder: all of it if that is on a disk.

    UsageError if that is too little.
    """
    if not is_in_memory(scratch):
        return memory_budget
    if memory_budget - num_bytes < _LEAST_BUDGET:
        raise UsageError(
            f"{scratch} is in memory, and {format_size(num_bytes)} of segments count as such: state a "
            f"--memory-budget of {format_size(num_bytes + _LEAST_BUDGET)} a process, or set TRACESTORE_SCRATCH to a "
            "folder on a disk"
        )
    return memory_budget - num_bytes
