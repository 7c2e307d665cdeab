"""Memory limits of the cgroup (container) of this process."""

import os
from collections.abc import Iterator
from pathlib import Path

_PROC, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def _limits(proc: Path, mount: Path) -> Iterator[tuple[Path, int]]:
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


def cgroup_limit(proc: Path = _PROC, mount: Path = _MOUNT) -> int | None:
    """Return the lowest memory limit in bytes of this process's cgroup and its parents.

    Return None if no limit is below the memory of the machine.
    """
    return min((limit for _, limit in _limits(proc, mount)), default=None)


def cgroup_free(proc: Path = _PROC, mount: Path = _MOUNT) -> int | None:
    """Return the bytes of anonymous memory that the processes of the cgroup can still allocate.

    Return None if there is no limit. The page cache does not count, because the kernel can reclaim it.
    """
    free = []
    for folder, limit in _limits(proc, mount):
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
