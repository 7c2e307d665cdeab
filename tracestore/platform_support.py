"""System interfaces of Linux, each with a fallback for other systems.

Only this module uses these interfaces, and those of the memory limits of a cgroup (container).
"""

import ctypes
import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_CGROUP, _MOUNT = _PROC / "self/cgroup", Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_ZEROS = bytes(1 << 20)
# Name of the system call that renames with a flag, its value for the current folder, and its flags: exchange the two
# paths, and fail if the new one exists.
_RENAME = {"linux": ("renameat2", -100, 2, 1), "darwin": ("renameatx_np", -2, 2, 4)}


def _read(name: str) -> str | None:
    """Return a text of the system, or None if there is no such file."""
    try:
        return (_PROC / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def num_processors() -> int:
    """Return the number of processors that this process may use, or else that of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_features() -> list[str] | None:
    """Return the names of the instruction sets in /proc/cpuinfo, or None without that file."""
    if (text := _read("cpuinfo")) is None:
        return None
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return next((line.split(":", 1)[1].split() for line in lines), [])


def memory_info() -> dict[str, int]:
    """Return the entries of /proc/meminfo in bytes. Return an empty dict without that file."""
    pairs = (line.split(":", 1) for line in (_read("meminfo") or "").splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def max_maps() -> int | None:
    """Return the maximum number of memory maps of a process, or None if unknown."""
    text = (_read("sys/vm/max_map_count") or "").strip()
    return int(text) if text.isdecimal() else None


def is_in_memory(folder: Path) -> bool:
    """Return whether the file system of a folder, or of its nearest parent, keeps files in memory; False if unknown."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    device = folder.stat().st_dev
    lines = (_read("self/mountinfo") or "").splitlines()
    kinds = {line.split()[2]: line.rpartition(" - ")[2].split()[0] for line in lines}
    return kinds.get(f"{os.major(device)}:{os.minor(device)}") in ("tmpfs", "ramfs")


def boot_id() -> bytes | None:
    """Return what names the start of this machine, or None if unknown."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return None


def open_unnamed(folder: Path) -> int | None:
    """Return the descriptor of a new file without a name, or None if the system or the file system has no such files.

    A killed process leaves nothing of it. name_file() gives it a name.
    """
    if not hasattr(os, "O_TMPFILE") or not (_PROC / "self/fd").is_dir():
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:
        return None


def name_file(fd: int, path: Path) -> None:
    """Give a file of open_unnamed() a name, which no other file must have."""
    # With a folder, which an absolute path does not use, Python calls linkat(), which follows the link in /proc.
    os.link(_PROC / f"self/fd/{fd}", path, src_dir_fd=fd)


def shared_memory_folder() -> Path | None:
    """Return the folder of POSIX shared memory, or None if the system has none."""
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None


class MemoryUse(NamedTuple):
    """Memory of this process in bytes."""

    #: Resident and not reclaimable.
    anonymous: int
    #: Resident pages of libraries and mapped stores.
    file: int
    #: VmData, which RLIMIT_DATA limits.
    data: int


def memory_use() -> MemoryUse:
    """Return the memory of this process, read in microseconds.

    Other systems than Linux report the peak of the resident memory, and no pages of files.
    """
    if (text := _read("self/statm")) is None:
        peak = peak_memory()
        return MemoryUse(peak, 0, peak)
    _, resident, shared, _, _, data, _ = map(int, text.split())
    page = resource.getpagesize()
    return MemoryUse((resident - shared) * page, shared * page, data * page)


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_queue_waits() -> dict[str, int]:
    """Return for how many nanoseconds each thread of this process has been ready to run without a processor, by id.

    Return an empty dict if the system does not count this.
    """
    waits: dict[str, int] = {}
    try:
        ids = os.listdir(_PROC / "self/task")
    except OSError:
        return waits
    for thread in ids:
        # A thread may have ended, and a kernel without CONFIG_SCHED_INFO has no such file.
        with suppress(OSError):
            fd = os.open(f"{_PROC}/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                waits[thread] = int(os.read(fd, 100).split()[1])
            finally:
                os.close(fd)
    return waits


def idle_processor_s() -> float | None:
    """Return for how many seconds the processors that this process may use did nothing, in total, or None if unknown.

    The time that a hypervisor gave to others counts as idle.
    """
    if (text := _read("stat")) is None:
        return None
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = [words for line in text.splitlines() if (words := line.split())[0] in allowed]
    # The columns: name, user, nice, system, idle, iowait, irq, softirq, steal.
    return sum(int(row[4]) + int(row[5]) + int(row[8]) for row in rows) / os.sysconf("SC_CLK_TCK")


def preallocate(fd: int, num_bytes: int) -> None:
    """Allocate disk space for an empty file, by writing zeros if the system has no call for it.

    Raises
    ------
    OSError
        ENOSPC if the file system is full.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
        return
    position = 0
    while position < num_bytes:
        position += os.pwrite(fd, _ZEROS[: num_bytes - position], position)


def evict_from_page_cache(fd: int) -> None:
    """Evict the clean pages of a file from the page cache. No-op on other systems than Linux."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def has_memory_files() -> bool:
    """Return whether `create_memory_file` and `open_file_of_process` work on this system."""
    return hasattr(os, "memfd_create") and (_PROC / "self/fd").is_dir()


def create_memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory. Requires `has_memory_files`."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def open_file_of_process(pid: int, fd: int) -> int:
    """Open the file that another process has open as descriptor `fd`. Requires `has_memory_files`."""
    return os.open(_PROC / str(pid) / "fd" / str(fd), os.O_RDWR | os.O_CLOEXEC)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths atomically.

    Returns
    -------
    bool
        False, with nothing changed, if the system or the file system does not support it.

    Raises
    ------
    OSError
        One of the paths cannot be renamed.
    """
    return _rename(one, other, 2)


def rename_exclusive(path: Path, new: Path) -> bool:
    """Rename a file or folder unless the new path exists.

    Returns
    -------
    bool
        False, with nothing changed, if the system or the file system does not support it.

    Raises
    ------
    FileExistsError
        The new path exists.
    OSError
        The path cannot be renamed.
    """
    return _rename(path, new, 3)


def _rename(one: Path, other: Path, kind: int) -> bool:
    """Call the system call of _RENAME; `kind` is the position of the flag."""
    if sys.platform not in _RENAME:
        return False
    name, cwd, flag = _RENAME[sys.platform][0], _RENAME[sys.platform][1], _RENAME[sys.platform][kind]
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return False
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    while function(cwd, os.fsencode(one), cwd, os.fsencode(other), flag) != 0:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), str(one), None, str(other))
    return True


def _cgroup_limits(proc: Path, mount: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder and the limit in bytes of each memory cgroup (v1 or v2) of this process.

    Limits that are not below the memory of the machine are left out.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = mount / "memory" if controllers else mount
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = root / path.strip("/")
        # In a container the path may be the host's. The mount point is then the container's own cgroup.
        for parent in [folder, *folder.parents]:
            if parent == mount.parent:
                break
            try:
                text = (parent / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < total:
                yield parent, int(text)


def cgroup_limit(proc: Path = _CGROUP, mount: Path = _MOUNT) -> int | None:
    """Return the lowest memory limit in bytes of this process's cgroup and its parents.

    Return None if no limit is below the memory of the machine.
    """
    return min((limit for _, limit in _cgroup_limits(proc, mount)), default=None)


def cgroup_free(proc: Path = _CGROUP, mount: Path = _MOUNT) -> int | None:
    """Return the bytes of anonymous memory that the processes of the cgroup can still allocate.

    Return None if there is no limit. The page cache does not count, because the kernel can reclaim it.
    """
    free = []
    for folder, limit in _cgroup_limits(proc, mount):
        try:
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        stat = dict(line.split() for line in lines if len(line.split()) == 2)
        # Child cgroups are included in total_rss (v1) and in anon (v2).
        used = stat.get("total_rss") or stat.get("anon")
        if used is not None:
            free.append(max(0, limit - int(used)))
    return min(free, default=None)
