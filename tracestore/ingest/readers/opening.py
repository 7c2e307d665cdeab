"""Open a file of any container as a tree: the container is told by the first bytes, of text by the name."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import cast

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.ingest.files.byte_source import InflatedChunks, check_regular, inflate, map_file, value_reader
from tracestore.ingest.files.decompress import compression_of
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.files.npy import NPY_MAGIC, is_npz
from tracestore.ingest.files.safetensors import is_safetensors
from tracestore.ingest.pickles.torch_file import is_legacy
from tracestore.ingest.readers import objects, tensors, text
from tracestore.ingest.readers.content import ARROW_MAGIC, READING, Content, refusals
from tracestore.ingest.readers.tree import Items, Value
from tracestore.store.io.scratch import Scratch

COMPRESSED = re.compile(r"\.(?:gz|bz2|xz|zst|z|zlib)$")
_GZIP_RESERVED = 0xE0
# The module and the function of each reader; a module is imported when a file needs it.
_READERS = {
    NPY_MAGIC: ("numpy_arrays", "read_npy"),
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
    disk_bytes = check_regular(path).st_size
    if disk_bytes == 0:
        raise InvalidInputError("the file is empty")
    mapped = map_file(path)
    head = mapped.read(0, min(_HEAD_BYTES, len(mapped)))
    # The length of a header may begin like a compressed file does.
    compression = None if is_safetensors(head, len(mapped)) else compression_of(head)
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
        mapped = inflate(path, compression, scratch)
        if not len(mapped):
            raise InvalidInputError("the file is empty")
    limits = Limits(mapped.__len__, None if compression is None else disk_bytes)
    content = Content(path, name, mapped, scratch, limits, resources, compression is not None)
    return _reader_of(mapped, name)(content)


def _streamed_pickle(path: Path, compression: str, scratch: Scratch, resources: ExitStack) -> Value | None:
    """Return the tree of a compressed pickle that can be read while it is inflated; None for every other file."""
    chunks = resources.enter_context(closing(InflatedChunks(path, compression=compression)))
    first = chunks()
    if not first.startswith(b"\x80") or is_legacy(memoryview(first[:_HEAD_BYTES])):
        chunks.close()
        return None
    pending = [first]
    source = value_reader(lambda: pending.pop() if pending else chunks(), chunks.disk_bytes, scratch)
    value = objects.read_pickle(source, Limits(lambda: chunks.inflated_bytes, chunks.disk_bytes), is_list=True)
    if value is None:
        chunks.close()
    elif isinstance(value, Items):
        value.is_lent = True  # of the chunks
    return value


def _reader_of(mapped: MappedFile, name: str) -> Callable[[Content], Value]:
    head = mapped.read(0, min(len(mapped), _HEAD_BYTES))
    if head.startswith(b"PK\x03\x04"):
        return _reader("numpy_arrays", "read_npz") if is_npz(mapped) else objects.read_torch_zip
    if is_safetensors(head, len(mapped)):
        return tensors.read_safetensors
    found = next((names for magic, names in _READERS.items() if head.startswith(magic)), None)
    if found is None and head[:1] != b"\x80":  # of a pickle
        way = next((text for at, magic, text in _NOT_READ if head.startswith(magic, at)), None)
        may_be_pickle = head[:1] in _FIRST_OPCODES and not name.lower().endswith(_RAW)
        if way is None and not (may_be_pickle or name.lower().endswith(PICKLES)):
            way = _RAW_WAY
        if way is not None:
            raise InvalidInputError(way)
    return objects.read_mapped_pickle if found is None else _reader(*found)


def _reader(module: str, name: str) -> Callable[[Content], Value]:
    return cast(Callable[[Content], Value], getattr(import_module(f"tracestore.ingest.readers.{module}"), name))
