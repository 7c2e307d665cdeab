"""Looks at the first items of files: a tree stays open until its file is read, so that nothing is inflated again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from pathlib import Path

from tracestore.ingest.files.byte_source import check_regular
from tracestore.ingest.readers.content import reading
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.tree import Items, StreamItems, Value
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
        opened, has_failed = self._taken(path) or _OpenTree(path), False
        try:
            with reading():
                yield opened.root
        except Exception:
            has_failed = True
            raise
        finally:
            if has_failed or opened.num_items > 1 or len(self._open) == _MAX_OPEN:
                opened.close()
            else:
                self._open[path] = opened

    @contextmanager
    def take(self, path: Path, scratch: Scratch) -> Iterator[Value]:
        """Open a file to read it; see `open_tree`. A stream keeps no item that has been read."""
        opened = self._taken(path)
        if opened is None:
            with open_tree(path, scratch=scratch) as root:
                yield root
            return
        try:
            with reading():
                yield opened.taken()
        finally:
            opened.close()

    def drop(self, path: Path) -> None:
        """Close a file that will not be read."""
        if (opened := self._open.pop(path, None)) is not None:
            opened.close()

    def close(self) -> None:
        """Close all files."""
        for path in list(self._open):
            self.drop(path)

    def _taken(self, path: Path) -> "_OpenTree | None":
        """Return the open tree of a file, None if the file has changed since; it belongs to the caller."""
        opened = self._open.pop(path, None)
        if opened is None or opened.state == _state(path):
            return opened
        opened.close()
        return None


class _OpenTree:
    """The tree of an open file, with the first items of a stream that looks have taken."""

    def __init__(self, path: Path) -> None:
        self.state, self._resources = _state(path), ExitStack()
        root = self._resources.enter_context(open_tree(path))
        self.root: Value = RepeatedItems(root) if isinstance(root, Items) and root.is_stream else root

    @property
    def num_items(self) -> int:
        """Number of items that looks have taken."""
        return len(self.root.seen) if isinstance(self.root, RepeatedItems) else 0

    def taken(self) -> Value:
        """Return the root for the only reading."""
        return self.root.rest() if isinstance(self.root, RepeatedItems) else self.root

    def close(self) -> None:
        """Close the file."""
        self._resources.close()


class RepeatedItems(Items):
    """Items of a stream that begin with the first one each time."""

    def __init__(self, items: Items) -> None:
        self._rest, self.seen = iter(items), list[Value]()
        self.length, self.attributes, self.is_lent = items.length, items.attributes, items.is_lent

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
        items = StreamItems(chain(self._consumed(), self._rest), self.length, self.attributes)
        items.is_lent = self.is_lent
        return items

    def _consumed(self) -> Iterator[Value]:
        while self.seen:
            yield self.seen.pop(0)


def _state(path: Path) -> tuple[int, ...]:
    """Return what differs once a file is replaced or written to."""
    status = check_regular(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
