"""System interfaces of Linux, each with its fallback for other systems.

Nothing else in the package calls these system interfaces, cgroup.py aside.
"""

import ctypes
import errno
import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")
_ZEROS = bytes(1 << 20)


def num_processors() -> int:
    """Return how many processors this process may run on; elsewhere, how many the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_features() -> list[str] | None:
    """Return the names of the processor's instruction sets as /proc/cpuinfo has them, or None."""
    try:
        text = (_PROC / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return next((line.split(":", 1)[1].split() for line in lines), [])


def memory_info() -> dict[str, int]:
    """Return the bytes of /proc/meminfo by name; elsewhere, nothing."""
    try:
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def max_maps() -> int | None:
    """Return how many maps a process may have, or None where the system does not say."""
    try:
        return int((_PROC / "sys/vm/max_map_count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def shared_memory_folder() -> Path | None:
    """Return the folder of POSIX shared memory, where it is one."""
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None


class ProcessMemory(NamedTuple):
    """Bytes of this process: resident in all, resident and shared, and what RLIMIT_DATA counts."""

    resident: int
    shared: int
    data: int


def process_memory() -> ProcessMemory:
    """Return the memory of this process, read in microseconds.

    Elsewhere it is the largest resident memory so far, none of it shared.
    """
    try:
        _, resident, shared, _, _, data, _ = map(int, (_PROC / "self/statm").read_text().split())
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return ProcessMemory(peak, 0, peak)
    page = resource.getpagesize()
    return ProcessMemory(resident * page, shared * page, data * page)


def reserve(fd: int, num_bytes: int) -> None:
    """Give an empty file its size and the disk space for it; elsewhere, by writing zeros.

    Raises
    ------
    OSError
        ENOSPC where the file system has no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
        return
    position = 0
    while position < num_bytes:
        position += os.pwrite(fd, _ZEROS[: num_bytes - position], position)


def drop_cached(fd: int) -> None:
    """Let the page cache forget a file that is on disk; a no-op elsewhere."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def has_sendable_files() -> bool:
    """Return whether `unnamed_file` and `open_of_process` work; else torch shares memory in its own way."""
    return hasattr(os, "memfd_create") and (_PROC / "self/fd").is_dir()


def unnamed_file(name: str) -> int:
    """Return a descriptor of a new file in memory. Requires `has_sendable_files`."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def open_of_process(pid: int, number: int) -> int:
    """Open a file that another process has open as `number`. Requires `has_sendable_files`."""
    return os.open(_PROC / str(pid) / "fd" / str(number), os.O_RDWR | os.O_CLOEXEC)


_EXCHANGE = {"linux": ("renameat2", -100, 2), "darwin": ("renameatx_np", -2, 2)}


def exchange(one: Path, other: Path) -> bool:
    """Give two files or folders each other's names at once.

    Returns
    -------
    bool
        False, and nothing is changed, where the system or the file system cannot do so.

    Raises
    ------
    OSError
        Where one of them cannot be renamed.
    """
    name, here, flag = _EXCHANGE.get(sys.platform, ("", 0, 0))
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None) if name else None
    if function is None:
        return False
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    while function(here, os.fsencode(one), here, os.fsencode(other), flag) != 0:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), str(one), None, str(other))
    return True
