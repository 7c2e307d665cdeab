"""The memory that a container gives its processes."""

import os
from collections.abc import Iterator
from pathlib import Path

_PROC, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def _limits(proc: Path, mount: Path) -> Iterator[tuple[Path, int]]:
    """Yield this process's memory cgroups of version 1 or 2 that have a limit below the
    machine's memory, and the limits in bytes."""
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
        # In a container the path may be the host's; then its root is the container's own.
        for place in [folder, *folder.parents]:
            if place == mount.parent:
                break
            try:
                text = (place / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < total:
                yield place, int(text)


def cgroup_limit(proc: Path = _PROC, mount: Path = _MOUNT) -> int | None:
    """Return the memory limit in bytes of this process's cgroup and those above it, version 1
    or 2; None where there is none below the machine's memory."""
    return min((limit for _, limit in _limits(proc, mount)), default=None)


def cgroup_free(proc: Path = _PROC, mount: Path = _MOUNT) -> int | None:
    """Return the bytes of anonymous memory that all processes of the cgroup can still take;
    None where there is no limit. The page cache does not count: it can be reclaimed."""
    free = []
    for folder, limit in _limits(proc, mount):
        try:
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        stat = dict(line.split() for line in lines if len(line.split()) == 2)
        # Version 1 counts the groups below in total_rss only, version 2 in anon.
        used = stat.get("total_rss") or stat.get("anon")
        if used is not None:
            free.append(max(0, limit - int(used)))
    return min(free, default=None)
