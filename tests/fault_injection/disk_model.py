"""A model of a file system: the states that a crash of the machine may leave of a recorded run.

`Recorder` records creations, writes, truncations, renames, removals and syncs below a folder. Only
synced data is durable: the bytes of a file as of its last fsync, the names in a folder as of the
folder's last fsync. The fsync of a file does not make its name durable. The mode decides which
unsynced changes of names survive:

all        all of them: the process was killed, not the machine
synced     none
journal    those before a random point in time, as in a journaling file system
folders    in each folder, those before a random point
any        a random subset, in order

In the last three modes a file keeps none, all or random sectors of its unsynced bytes.
"""

import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tracestore.store.io import fsio

SECTOR = 512
MODES = ("all", "synced", "journal", "folders", "any")


@dataclass(eq=False)
class File:
    """A file: its current and its durable bytes."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""

    def after_crash(self, mode, rng):
        """Return the bytes after a crash."""
        if mode == "all" or bytes(self.data) == self.durable:
            return bytes(self.data)
        fate = "none" if mode == "synced" else rng.choice(("none", "all", "torn"))
        if fate != "torn":
            return self.durable if fate == "none" else bytes(self.data)
        size = rng.choice((len(self.data), rng.randint(0, len(self.data))))
        out = bytearray(self.durable[:size].ljust(size, b"\0"))
        for begin in range(0, size, SECTOR):
            if rng.random() < 0.5:
                end = min(size, begin + SECTOR)
                out[begin:end] = self.data[begin:end]
        return bytes(out)


@dataclass(eq=False)
class Folder:
    """A folder: its current and its durable names, and the changes between them."""

    names: dict = field(default_factory=dict)
    durable: dict = field(default_factory=dict)
    pending: list = field(default_factory=list)  # (time, change, name, new name or node)

    def change(self, time, kind, name, value=None):
        """Change a name, not yet durably."""
        _apply(self.names, kind, name, value)
        self.pending.append((time, kind, name, value))


def _apply(names, kind, name, value):
    if kind == "link":
        names[name] = value
    elif kind == "unlink":
        names.pop(name, None)
    elif name in names:
        names[value] = names.pop(name)


class Disk:
    """Replay operations one by one. `after_crash` returns a state that a crash may leave now."""

    def __init__(self, files=()):
        self.root, self.time, self.forced = Folder(), 0, 0
        for path, data in sorted(dict(files).items()):
            self.do("mkdir" if data is None else "create", path)
            if data is not None:
                self.do("write", path, 0, data)
        for folder in self._folders(self.root):
            self._sync(folder)
            for node in folder.names.values():
                self._sync(node)

    def _folders(self, folder):
        yield folder
        for node in folder.names.values():
            if isinstance(node, Folder):
                yield from self._folders(node)

    def node(self, path):
        """Return the file or folder at a path."""
        node = self.root
        for part in Path(path).parts:
            node = node.names[part]
        return node

    def _parent(self, path):
        return self.node(Path(path).parent), Path(path).name

    def _sync(self, node):
        if isinstance(node, File):
            node.durable = bytes(node.data)
        else:
            node.durable = dict(node.names)
            self.forced = max([self.forced, *(time for time, *_ in node.pending)])
            node.pending = []

    def do(self, kind, path, *rest):
        """Apply one operation of a recorded log."""
        self.time += 1
        if kind in ("mkdir", "create"):
            parent, name = self._parent(path)
            parent.change(self.time, "link", name, Folder() if kind == "mkdir" else File())
        elif kind in ("unlink", "rmdir"):
            parent, name = self._parent(path)
            assert kind == "unlink" or not self.node(path).names
            parent.change(self.time, "unlink", name)
        elif kind == "rename":
            parent, name = self._parent(path)
            target, new_name = self._parent(rest[0])
            if target is parent:
                parent.change(self.time, "rename", name, new_name)
            else:
                # A rename between two folders may be durable in one of them only, except in mode "journal".
                target.change(self.time, "link", new_name, parent.names[name])
                parent.change(self.time, "unlink", name)
        elif kind == "link":
            parent, name = self._parent(rest[0])
            parent.change(self.time, "link", name, self.node(path))
        elif kind == "write":
            node, (offset, data) = self.node(path), rest
            node.data.extend(bytes(max(0, offset - len(node.data))))
            node.data[offset : offset + len(data)] = data
        elif kind == "truncate":
            node = self.node(path)
            del node.data[rest[0] :]
        elif kind == "fsync":
            self._sync(self.node(path))

    def after_crash(self, mode, rng):
        """Return the tree after a crash: path -> bytes, None for a folder."""
        cut, found = rng.randint(self.forced, self.time), {}

        def visit(folder, path):
            names = dict(folder.names if mode == "all" else folder.durable)
            if mode in ("journal", "folders", "any"):
                point = rng.randint(0, len(folder.pending))
                for k, (time, kind, name, value) in enumerate(folder.pending):
                    if {"journal": time <= cut, "folders": k < point, "any": rng.random() < 0.5}[mode]:
                        _apply(names, kind, name, value)
            for name, node in names.items():
                where = f"{path}/{name}" if path else name
                found[where] = node.after_crash(mode, rng) if isinstance(node, File) else None
                if isinstance(node, Folder):
                    visit(node, where)

        visit(self.root, "")
        return found


def write_tree(files, folder):
    """Write a state that `after_crash` returned into a folder."""
    for path, data in sorted(files.items()):
        if data is None:
            (folder / path).mkdir(parents=True)
        else:
            (folder / path).write_bytes(data)


class Recorder:
    """Patch `os` and record each change as (kind, path below the folder, ...) in `log`."""

    def __init__(self, folder, patch):
        self.folder, self.log, self._fds = Path(folder), [], {}
        self._lock = threading.Lock()
        for name in ("open", "write", "pwritev", "fsync", "close", "mkdir", "rename", "unlink", "rmdir", "truncate"):
            patch.setattr(os, name, self._recorded(getattr(self, f"_{name}"), getattr(os, name)))
        for name in ("ftruncate", "dup"):
            patch.setattr(os, name, self._recorded(getattr(self, f"_{name}"), getattr(os, name)))
        for name in ("pwrite", "writev", "replace", "symlink", "removedirs"):
            patch.setattr(os, name, self._refused)
        patch.setattr(os, "link", self._recorded(self._link, os.link))
        patch.setattr(fsio, "rename_exclusive", self._recorded(self._rename_exclusive, fsio.rename_exclusive))

    def _recorded(self, note, call):
        def recorded(*args, **kwargs):
            with self._lock:
                return note(call, *args, **kwargs)

        return recorded

    def _refused(self, *_, **__):
        raise AssertionError("this call is not modeled")

    def _inside(self, path):
        path = Path(os.fspath(path)) if not isinstance(path, int) else None
        if path is None or not path.is_relative_to(self.folder):
            return None
        return path.relative_to(self.folder).as_posix() if path != self.folder else ""

    def _open(self, call, path, flags, *args, **kwargs):
        inside, fresh = self._inside(path), not os.path.lexists(path)
        fd = call(path, flags, *args, **kwargs)
        if inside is not None:
            if fresh:
                self.log.append(("create", inside))
            assert not flags & (os.O_TRUNC | os.O_APPEND)
            self._fds[fd] = [inside, 0]
        return fd

    def _write(self, call, fd, data):
        done = call(fd, data)
        if fd in self._fds:
            path, position = self._fds[fd]
            self.log.append(("write", path, position, bytes(memoryview(data).cast("B")[:done])))
            self._fds[fd][1] += done
        return done

    def _pwritev(self, call, fd, pieces, offset):
        done = call(fd, pieces, offset)
        if fd in self._fds:
            data = b"".join(bytes(memoryview(p).cast("B")) for p in pieces)[:done]
            self.log.append(("write", self._fds[fd][0], offset, data))
        return done

    def _ftruncate(self, call, fd, size):
        call(fd, size)
        if fd in self._fds:
            self.log.append(("truncate", self._fds[fd][0], size))

    def _dup(self, call, fd):
        other = call(fd)
        if fd in self._fds:
            self._fds[other] = list(self._fds[fd])
        return other

    def _fsync(self, call, fd):
        if fd not in self._fds:
            return call(fd)
        self.log.append(("fsync", self._fds[fd][0]))  # skip the real fsync
        return None

    def _close(self, call, fd):
        self._fds.pop(fd, None)
        return call(fd)

    def _link(self, call, path, new):
        call(path, new)
        if self._inside(new) is not None:
            self.log.append(("link", self._inside(path), self._inside(new)))

    def _rename_exclusive(self, call, path, new):
        done = call(path, new)
        if done and self._inside(new) is not None:
            self.log.append(("rename", self._inside(path), self._inside(new)))
        return done

    def _path_call(kind):
        def note(self, call, path, *args, **kwargs):
            assert not kwargs, f"{kind} relative to a folder descriptor"
            done = call(path, *args)
            inside = self._inside(path)
            if inside is not None:
                rest = [self._inside(args[0])] if kind == "rename" else args if kind == "truncate" else ()
                self.log.append((kind, inside, *rest))
                if kind == "rename":  # open descriptors follow the file
                    for entry in self._fds.values():
                        if entry[0] == inside:
                            entry[0] = rest[0]
            return done

        return note

    _mkdir, _rename, _unlink, _rmdir, _truncate = map(_path_call, ("mkdir", "rename", "unlink", "rmdir", "truncate"))


def sample(log, step, rng):
    """Return positions in a log: every step-th one, and some at or after renames, removals and commits."""
    if step == 1:
        return range(len(log) + 1)
    rare = [k + rng.randint(0, 1) for k, op in enumerate(log) if op[0] in ("link", "rename", "unlink", "commit")]
    return sorted({*range(rng.randrange(step), len(log) + 1, step), *rare[:: max(1, step // 30)], len(log)})


def crash_states(base, log, positions, seeds):
    """Yield (position, mode, seed, state) for each distinct state. `commit` entries are no operations."""
    disk, wanted, seen, at = Disk(base), set(positions), set(), 0
    for k in range(len(log) + 1):
        if k in wanted:
            for mode in MODES:
                for seed in range(1 if mode in MODES[:2] else seeds):
                    state = disk.after_crash(mode, random.Random(f"{k} {mode} {seed}"))
                    key = (at, hash(frozenset(state.items())))
                    if key not in seen:
                        seen.add(key)
                        yield k, mode, seed, state
        if k < len(log):
            if log[k][0] == "commit":
                at = log[k][1]
            else:
                disk.do(*log[k])
