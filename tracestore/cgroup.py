"""The memory that a container gives its processes."""

import os
from pathlib import Path


def cgroup_limit(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory limit of this process's cgroup and those above it, version 1 or 2; None
    where there is none below the machine's memory."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    found = []
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
            if text.isdigit():
                found.append(int(text))
    limit = min(found, default=None)
    return None if limit is None or limit >= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") else limit
