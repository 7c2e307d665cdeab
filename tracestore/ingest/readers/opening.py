"""Open a file of any container as a tree: the container is told by the first bytes, of text by the name.

A tree that is only looked at stays open until its file is read, so that nothing is inflated again.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple, cast

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.ingest.files import byte_source
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.files.npy import NPY_MAGIC, is_npz
from tracestore.ingest.files.safetensors import is_safetensors
from tracestore.ingest.pickles.torch_file import is_legacy
from tracestore.ingest.readers import objects, tensors, text
from tracestore.ingest.readers.content import ARROW_MAGIC, READING, Content, refusals
from tracestore.ingest.readers.tree import Items, StreamItems, Value
from tracestore.store.io.scratch import Scratch

COMPRESSED = re.compile(r"\.(?:gz|bz2|xz|zst|z|zlib)$")
_GZIP_RESERVED = 0xE0
# The module and the function of each reader; a module is imported when a file needs it.
_READERS = {
    NPY_MAGIC: ("objects", "read_npy"),
    b"\x89HDF\r\n\x1a\n": ("hdf5", "read_hdf5"),
    b"PAR1": ("arrow", "read_parquet"),
    ARROW_MAGIC: ("arrow", "read_arrow"),
    b"\xff\xff\xff\xff": ("arrow", "read_arrow"),  # a stream
}
# Containers that are not read: the offset and the bytes by which each is recognized, and what to do.
_NOT_READ = (
    (257, b"ustar", "an archive: unpack it"),
    (0, b"SQLite format 3\0", "a SQLite database: export its tables as CSV or Parquet"),
    (0, b"MATLAB 5.0 MAT-file", "a MATLAB file: load it with scipy.io.loadmat and save its arrays with numpy.savez"),
)
_HEAD_BYTES = 512
_RAW = (".dat", ".bin", ".raw", ".mmap", ".memmap")
PICKLES = (".pkl", ".pickle", ".p", ".pt", ".pth", ".ckpt", ".joblib")
_RAW_WAY = "no format that is read; raw numbers: numpy.fromfile reads them, numpy.save gives them a type and a shape"
_FIRST_OPCODES = b"(]}c"  # of the containers and classes in pickles of protocols 0 and 1
# Trees that stay open: the files that two workers read first, whose first items are in memory then, too.
_MAX_OPEN = 2


@contextmanager
def open_tree(path: Path, *, scratch: Scratch | None = None) -> Iterator[Value]:
    """Open a file as a tree.

    Parameters
    ----------
    path : Path
        A regular file of one of the containers of docs/ingest.md, or one that is compressed.
    scratch : Scratch, optional
        Files for what exceeds some MiB of a value of a compressed file. By default they are in the system's
        temporary folder.

    Yields
    ------
    Value
        The root. Its values are read while the context is open. Arrays that were read are valid afterwards, too.

    Raises
    ------
    InvalidInputError
        Here or when values are used: with one reason, whatever the file holds. Values that are named many times
        count each time they are decoded, against a limit that grows with the file.
    """
    with refusals(READING), ExitStack() as resources:
        with refusals():
            root = _root(path, scratch or Scratch(), resources)
        yield root


def _root(path: Path, scratch: Scratch, resources: ExitStack) -> Value:
    mapped = byte_source.map_file(path)
    if not (disk_bytes := len(mapped)):
        raise InvalidInputError("the file is empty")
    head = mapped.read(0, min(_HEAD_BYTES, len(mapped)))
    # The length of a header may begin like a compressed file does.
    compression = None if is_safetensors(head, len(mapped)) else byte_source.compression_of(head)
    name = path.name
    if compression is not None:
        name = COMPRESSED.sub("", name)
        if compression == "gzip" and len(head) > 3 and head[3] & _GZIP_RESERVED:
            raise InvalidInputError("damaged gzip: reserved flags are set")
    if name.endswith(text.SUFFIXES):
        return text.read_text(path, name, compression, resources)
    if compression is not None:
        value = _streamed_pickle(path, compression, scratch, resources)
        if value is not None:
            return value
        mapped = byte_source.inflate(path, compression, scratch)
        if not len(mapped):
            raise InvalidInputError("the file is empty")
    limits = Limits(mapped.__len__, None if compression is None else disk_bytes)
    content = Content(path, name, mapped, scratch, limits, resources, compression is not None)
    return _reader_of(mapped, name)(content)


def _streamed_pickle(path: Path, compression: str, scratch: Scratch, resources: ExitStack) -> Value | None:
    """Return the tree of a compressed pickle that can be read while it is inflated; None for every other file."""
    chunks = resources.enter_context(closing(byte_source.InflatedChunks(path, compression=compression)))
    first = chunks()
    if not first.startswith(b"\x80") or is_legacy(memoryview(first[:_HEAD_BYTES])):
        chunks.close()
        return None
    pending = [first]
    source = byte_source.value_reader(lambda: pending.pop() if pending else chunks(), chunks.disk_bytes, scratch)
    value = objects.read_pickle(source, Limits(lambda: chunks.inflated_bytes, chunks.disk_bytes), is_list=True)
    if value is None:
        chunks.close()
    elif isinstance(value, Items):
        value.is_lent = True  # of the chunks
    return value


def _reader_of(mapped: MappedFile, name: str) -> Callable[[Content], Value]:
    head = mapped.read(0, min(len(mapped), _HEAD_BYTES))
    if head.startswith(b"PK\x03\x04"):
        return objects.read_npz if is_npz(mapped) else objects.read_torch_zip
    if is_safetensors(head, len(mapped)):
        return tensors.read_safetensors
    found = next((names for magic, names in _READERS.items() if head.startswith(magic)), None)
    if found is None and head[:1] != b"\x80":  # of a pickle
        has_opcode = head[:1] in _FIRST_OPCODES and not name.lower().endswith(_RAW)
        way = "" if has_opcode or name.lower().endswith(PICKLES) else _RAW_WAY
        if way := next((text for at, magic, text in _NOT_READ if head.startswith(magic, at)), way):
            raise InvalidInputError(way)
    module, reader = found or ("objects", "read_mapped_pickle")
    return cast(Callable[[Content], Value], getattr(import_module(f"tracestore.ingest.readers.{module}"), reader))


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
    status = byte_source.check_regular(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
