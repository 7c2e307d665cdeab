"""Looks at the first items of files: a tree stays open until its file is read, so that nothing is inflated again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from tracestore.ingest.files.byte_source import check_regular
from tracestore.ingest.readers.content import READING, refusals
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Items, StreamItems, Value
from tracestore.store.io.scratch import Scratch

# Trees that stay open: the files that two workers read first, whose first items are in memory then, too.
_MAX_OPEN = 2


class FirstLooks:
    """The trees of files that are looked at before they are read."""

    def __init__(self) -> None:
        self._open: dict[Path, _OpenTree] = {}

    @contextmanager
    def look(self, path: Path) -> Iterator[Value]:
        """Open a file, unless an earlier look has left it open.

        Items of a stream begin with the first one in each look. The tree stays open, unless the look has failed or has
        taken a second item.
        """
        opened = self._taken(path) or _opened(path)
        is_kept = False
        try:
            with refusals(READING):
                yield opened.root
            num_items = len(opened.root.seen) if isinstance(opened.root, RepeatedItems) else 0
            is_kept = num_items < 2 and len(self._open) < _MAX_OPEN
        finally:
            if is_kept:
                self._open[path] = opened
            else:
                opened.resources.close()

    @contextmanager
    def take(self, path: Path, scratch: Scratch) -> Iterator[Value]:
        """Open a file to read it; see `open_tree`. A stream keeps no item that has been read."""
        opened = self._taken(path)
        if opened is None:
            with open_tree(path, scratch=scratch) as root:
                yield root
            return
        with opened.resources, refusals(READING):
            yield opened.root.rest() if isinstance(opened.root, RepeatedItems) else opened.root

    def drop(self, path: Path) -> None:
        """Close a file that will not be read."""
        if (opened := self._open.pop(path, None)) is not None:
            opened.resources.close()

    def close(self) -> None:
        """Close all files."""
        for path in list(self._open):
            self.drop(path)

    def _taken(self, path: Path) -> "_OpenTree | None":
        """Return the open tree of a file, None if the file has changed since; it belongs to the caller."""
        opened = self._open.pop(path, None)
        if opened is None or opened.state == _state(path):
            return opened
        opened.resources.close()
        return None


class _OpenTree(NamedTuple):
    """The tree of an open file, with the first items of a stream that looks have taken; what closes it, and its state."""

    root: Value
    resources: ExitStack
    state: tuple[int, ...]


class RepeatedItems(Items):
    """Items of a stream that begin with the first one each time."""

    def __init__(self, items: Items) -> None:
        self._rest, self.seen = iter(items), list[Value]()
        self.attributes, self.is_lent = items.attributes, items.is_lent

    def __iter__(self) -> Iterator[Value]:
        """Yield the items from the first one on, and keep them."""
        for k in count():
            if k == len(self.seen):
                try:
                    self.seen.append(next(self._rest))
                except StopIteration:
                    return
            yield self.seen[k]

    def rest(self) -> StreamItems:
        """Return the items from the first one on, of which none is kept."""
        seen = (self.seen.pop(0) for _ in range(len(self.seen)))
        return StreamItems(chain(seen, self._rest), self.attributes, is_lent=self.is_lent)


def _opened(path: Path) -> _OpenTree:
    resources, state = ExitStack(), _state(path)
    root = resources.enter_context(open_tree(path))
    return _OpenTree(RepeatedItems(root) if isinstance(root, Items) and root.is_stream else root, resources, state)


def _state(path: Path) -> tuple[int, ...]:
    """Return what differs once a file is replaced or written to."""
    status = check_regular(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
