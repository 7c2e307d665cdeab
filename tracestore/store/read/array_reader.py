"""Reading of Zarr v3 arrays of one shard file each, which are mapped. store.io.shard_writer writes them."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tracestore._core.gather import ArrayView
from tracestore._core.kernels import crc32c, crc32c_combine
from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError, StorageError
from tracestore.store.format import schema
from tracestore.store.format.codecs import ChunkCodec
from tracestore.store.format.entries import FileEntry, Layers, PartialFile
from tracestore.store.format.zarr_json import array_metadata, contiguous_index, sharded_array
from tracestore.store.io.files import StoreFiles, reading_committed
from tracestore.store.read.chunk_cache import ChunkCache, ChunkKey

_MAX_METADATA_BYTES = 1 << 16  # of an array's zarr.json
_TRIES = 20
_INDEX_BLOCK = 1 << 16  # inner chunks that are compared at once
# After as many fetches of neighboring rows the file is fetched whole.
_SEQUENTIAL = 3


def _array(
    spec: "ArraySpec", num_rows: Any, chunk_rows: Any
) -> tuple[tuple[int, ...], int, np.dtype, str, dict[str, Any]]:
    """Return the arguments of array_metadata(); ValueError if the numbers of rows are not valid."""
    if type(num_rows) is not int or type(chunk_rows) is not int or not 0 <= num_rows < 1 << 48 or chunk_rows < 1:
        raise ValueError(f"{num_rows!r:.40} rows in chunks of {chunk_rows!r:.40}")
    if chunk_rows > 1 and chunk_rows * spec.row_items * spec.dtype.itemsize > schema.INNER_CHUNK_BYTES:
        raise ValueError(f"inner chunks of {chunk_rows} rows")
    if spec.num_rows is not None and num_rows != spec.num_rows:
        raise ValueError(f"{num_rows} rows, expected {spec.num_rows}")
    attributes = {"tracestore": {"dtype": "bfloat16"}} if spec.is_bfloat16 else {}
    return (num_rows, *spec.columns), chunk_rows, spec.dtype, spec.codec, attributes


def check_metadata(spec: "ArraySpec", num_rows: Any, chunk_rows: Any, entry: FileEntry) -> None:
    """Raise ValueError unless a zarr.json with these numbers of rows has the size and checksum of `entry`."""
    data = array_metadata(*_array(spec, num_rows, chunk_rows))
    if (len(data), crc32c(data)) != (entry.size, entry.crc32c):
        raise ValueError(f"{entry.path}: not the metadata of this array")


def _entry(entries: Mapping[str, FileEntry], path: str) -> FileEntry:
    if path not in entries:
        raise CorruptStoreError(f"{path}: not a committed file")
    return entries[path]


class ArraySpec(NamedTuple):
    """The properties that the format gives an array.

    Attributes
    ----------
    dtype : np.dtype
        As stored.
    columns : tuple of int
        The shape after axis 0.
    codec : str
        "none" if the array is not compressed.
    num_rows : int or None
        The number of rows, if it is known.
    is_bfloat16 : bool
    """

    dtype: np.dtype
    columns: tuple[int, ...] = ()
    codec: str = "none"
    num_rows: int | None = None
    is_bfloat16: bool = False

    @property
    def row_items(self) -> int:
        """Number of values of one row."""
        return math.prod(self.columns)


class _Opened(NamedTuple):
    """The mapped file of an array, and the rows of an uncompressed one."""

    mapped: MappedFile | None
    flat: np.ndarray
    view: ArrayView
    partial: PartialFile | None = None


def read_metadata(files: StoreFiles, entries: Mapping[str, FileEntry], name: str, spec: ArraySpec) -> tuple[int, int]:
    """Return the rows of an array, and those of its inner chunks.

    CorruptStoreError unless its zarr.json has exactly the metadata of `spec`; key order and white space are free.
    """
    with reading_committed(f"{name}/zarr.json", prefix=files.prefix):
        entry = _entry(entries, f"{name}/zarr.json")
        if entry.size > _MAX_METADATA_BYTES:
            raise ValueError(f"{entry.size} bytes")
        meta = json.loads(files.read(entry))
        num_rows, chunk_rows = meta["shape"][0], meta["codecs"][0]["configuration"]["chunk_shape"][0]
        if meta != sharded_array(*_array(spec, num_rows, chunk_rows)):
            raise ValueError("not the metadata of this array")
        return num_rows, chunk_rows


class ArrayReader:
    """The rows of one array.

    Rows of an uncompressed array are read-only views of the map, which they keep alive; reading such a view after
    the file was truncated ends the process (SIGBUS). Rows of a compressed array are copied from decoded chunks.
    Opening checks the size of the file, the index of the shard and the metadata.

    Parameters
    ----------
    files : StoreFiles
    entries : Mapping
        The committed files by path.
    name : str
        Path of the array in the store.
    cache : ChunkCache
    spec : ArraySpec
    layers : Layers, optional
        The layers of the array, if they may be fetched one by one.

    Attributes
    ----------
    key : tuple of int and str
        What a key of a chunk in the cache begins with.
    entry : FileEntry
        The file of an array with rows.
    """

    def __init__(
        self,
        files: StoreFiles,
        entries: Mapping[str, FileEntry],
        name: str,
        cache: ChunkCache,
        spec: ArraySpec,
        layers: Layers | None = None,
    ) -> None:
        self.name, self.dtype, self.row_items = files.prefix + name, spec.dtype, spec.row_items
        self.key = id(files), name  # in the cache, which stores that are opened as one share
        self._cache, self._codec = cache, None if spec.codec == "none" else ChunkCodec(spec.codec, spec.dtype.itemsize)
        num_rows, self.chunk_rows = read_metadata(files, entries, name, spec)
        self.shape = (num_rows, *spec.columns)
        self._offsets: np.ndarray | None = None
        self._files, self._layers = files, layers
        self._next_row = self._num_sequential = 0
        self._opened = _Opened(None, np.zeros(0, self.dtype), ArrayView(np.zeros(0, self.dtype), 0, 1))
        # The view of an uncompressed array that has every row: its accesses test nothing else.
        self._whole: ArrayView | None = None
        if num_rows > 0:
            self._path = f"{name}/c/" + "/".join("0" * len(self.shape))
            with reading_committed(self._path, prefix=files.prefix):
                self.entry = _entry(entries, self._path)
            self._open()

    def _open(self) -> None:
        self._opened = self._mapped_file()
        if self._offsets is None and self._opened.partial is None:
            self._whole = self._opened.view

    def _mapped_file(self) -> _Opened:
        num_rows, row_bytes = self.shape[0], self.row_items * self.dtype.itemsize
        num_chunks, chunk_bytes = -(-num_rows // self.chunk_rows), self.chunk_rows * row_bytes
        entry, partial = self.entry, None
        with reading_committed(self._path, prefix=self._files.prefix):
            if self._codec is None and entry.size != num_chunks * (chunk_bytes + 16) + 4:
                raise ValueError(f"{entry.size} bytes for {num_chunks} inner chunks of {chunk_bytes}")
            if entry.size < 16 * num_chunks + 4:
                raise ValueError("shorter than its index")
            if self._codec is None and self._layers is not None and self._layers.ends[-1] == num_rows:
                layers = self._layers._replace(ends=self._layers.ends * row_bytes)
                partial = self._files.map_layers(entry, layers, num_chunks * chunk_bytes)
            mapped = self._files.map(entry) if partial is None else partial.mapped
            if self._codec is not None:
                self._offsets = self._coded_index(mapped, num_chunks, chunk_bytes)
                return _Opened(mapped, np.zeros(0, self.dtype), ArrayView(np.zeros(0, self.dtype), 0, 1))
            if partial is None:
                _check_contiguous(mapped, num_chunks, chunk_bytes)
            flat = np.frombuffer(memoryview(mapped), self.dtype, num_rows * self.row_items)
            return _Opened(mapped, flat, ArrayView(mapped, num_rows, row_bytes), partial)

    @property
    def is_partial(self) -> bool:
        """True if layers are fetched when they are needed."""
        return self._opened.partial is not None

    def _ready(self, begin: int, end: int) -> _Opened:
        """Return the open file, with the rows begin .. end - 1 in it. Every access to rows passes here."""
        opened = self._opened
        if opened.partial is None or not opened.partial.missing(self._bytes([(begin, end)])):
            return opened
        self._num_sequential = self._num_sequential + 1 if begin == self._next_row else 0
        self._next_row = end
        if self._num_sequential == _SEQUENTIAL:  # a caller reads the whole array
            self._layers = None
            self._open()
        return self.fetch([(begin, end)])

    def _bytes(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        row_bytes = self.row_items * self.dtype.itemsize
        return [(begin * row_bytes, end * row_bytes) for begin, end in rows]

    def fetch(self, rows: Sequence[tuple[int, int]], check: Callable[[], None] = lambda: None) -> _Opened:
        """Return the open file, with some ranges of rows in it; `check` may raise to cancel the fetch."""
        for _ in range(_TRIES):
            opened = self._opened
            if opened.partial is None or opened.partial.fetch(self._bytes(rows), check):
                return opened
            self._open()
        raise StorageError(f"{self._path}: files go from the cache faster than they can be read")

    def view(self, rows: np.ndarray) -> ArrayView:
        """Return the whole array as a source of gathers of some rows; other rows of it may be missing."""
        if not self.is_partial:
            return self._opened.view
        self.require_rows(0, int(rows.max(initial=-1)) + 1)
        return self.fetch([(row, row + 1) for row in np.unique(rows).tolist()]).view

    @staticmethod
    def _coded_index(mapped: MappedFile, num_chunks: int, chunk_bytes: int) -> np.ndarray:
        end = len(mapped) - 4
        begin = end - 16 * num_chunks
        index = mapped.read(begin, end)
        if crc32c(index) != int.from_bytes(mapped.read(end, end + 4), "little"):
            raise ValueError("shard: checksum mismatch")
        offsets = np.frombuffer(index, "<u8").reshape(num_chunks, 2)
        # Chunks are contiguous, and incompressible data bounds their size.
        if (offsets > begin).any() or (offsets[:, 1] > chunk_bytes + chunk_bytes // 8 + 1024).any():
            raise ValueError("shard: offset out of bounds")
        ends = offsets[:, 0] + offsets[:, 1]
        if offsets[0, 0] != 0 or (offsets[1:, 0] != ends[:-1]).any() or ends[-1] != begin:
            raise ValueError("shard: inner chunks are not contiguous")
        return offsets

    def _decode(self, chunk: int) -> np.ndarray:
        mapped = self._opened.mapped
        assert self._offsets is not None and self._codec is not None and mapped is not None
        offset, size = (int(v) for v in self._offsets[chunk])
        try:
            data = mapped.read(offset, offset + size)
            return self._codec.decode(data, self.chunk_rows * self.row_items * self.dtype.itemsize).view(self.dtype)
        except ValueError as error:
            raise CorruptStoreError(f"{self.name}: inner chunk {chunk}: {error}") from None

    def require_rows(self, begin: int, end: int) -> None:
        """Raise CorruptStoreError unless the array has the rows begin .. end - 1."""
        if not 0 <= begin <= end <= self.shape[0]:
            raise CorruptStoreError(f"{self.name}: rows {begin} to {end} of {self.shape[0]}")

    def slices(self, begin: int, end: int) -> list[np.ndarray]:
        """Return rows begin .. end - 1 as flat arrays in order, without a copy.

        These are one view of the map, or views of decoded inner chunks.
        """
        self.require_rows(begin, end)
        items = self.row_items
        if self._offsets is None:
            opened = self._opened if self._whole is not None else self._ready(begin, end)
            return [opened.flat[begin * items : end * items]]
        found = []
        for chunk in range(begin // self.chunk_rows, -(-end // self.chunk_rows)):
            data = self._cache.get((*self.key, chunk), lambda c=chunk: self._decode(c))  # type: ignore[misc]
            first = chunk * self.chunk_rows
            lo, hi = max(begin, first), min(end, first + self.chunk_rows)
            found.append(data[(lo - first) * items : (hi - first) * items])
        return found

    def chunk_keys(self, begin: int, end: int) -> list[ChunkKey]:
        """Return the cache keys of the inner chunks of rows begin .. end - 1; none if uncompressed."""
        if self._offsets is None or end <= begin:
            return []
        self.require_rows(begin, end)
        return [(*self.key, k) for k in range(begin // self.chunk_rows, -(-end // self.chunk_rows))]

    def copy_sources(self, begin: int, end: int) -> list[Any]:
        """Return rows begin .. end - 1 as sources of a gather: a RowRange, or flat uint8 arrays."""
        if self._whole is None or not 0 <= begin <= end <= self.shape[0]:
            self.require_rows(begin, end)
            if self._offsets is not None:
                return [piece.view("u1") for piece in self.slices(begin, end)]
            return [self._ready(begin, end).view.rows(begin, end)]
        return [self._whole.rows(begin, end)]

    def flat(self, begin: int, end: int) -> np.ndarray:
        """Return rows begin .. end - 1 as one flat, read-only array."""
        pieces = self.slices(begin, end)
        if len(pieces) == 1:
            return pieces[0]
        out = np.concatenate(pieces) if pieces else np.empty(0, self.dtype)
        out.flags.writeable = False
        return out

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Return rows begin .. end - 1 in the shape of the array, read-only."""
        return self.flat(begin, end).reshape(end - begin, *self.shape[1:])

    def copy(self, begin: int, end: int) -> np.ndarray:
        """Return rows begin .. end - 1 in memory of their own.

        CorruptStoreError if the file was truncated meanwhile, never a signal.
        """
        if self._offsets is None and 0 <= begin <= end <= self.shape[0] and self.shape[0]:
            row_bytes, mapped = self.row_items * self.dtype.itemsize, self._ready(begin, end).mapped
            assert mapped is not None
            flat = np.frombuffer(mapped.read(begin * row_bytes, end * row_bytes), self.dtype)
        else:
            flat = self.flat(begin, end).copy()
            flat.flags.writeable = False
        return flat.reshape(end - begin, *self.shape[1:])

    def crc_of_layers(self, layers: Layers) -> int:
        """Return the CRC-32C that the file of this uncompressed array has if its layers have these checksums."""
        num_rows, row_bytes = self.shape[0], self.row_items * self.dtype.itemsize
        num_chunks, chunk_bytes, crc = -(-num_rows // self.chunk_rows), self.chunk_rows * row_bytes, 0
        for layer, num_layer_rows in zip(layers.crcs.tolist(), np.diff(layers.ends).tolist(), strict=True):
            crc = crc32c_combine(crc, layer, num_layer_rows * row_bytes)
        crc = crc32c(bytes(num_chunks * chunk_bytes - num_rows * row_bytes), crc)
        return crc32c(contiguous_index(num_chunks, chunk_bytes), crc)

    def check_chunks(self) -> None:
        """Decode every inner chunk of a compressed array. CorruptStoreError names the first that is damaged."""
        if self._offsets is not None:
            for chunk in range(len(self._offsets)):
                self._decode(chunk)

    def check_intact(self) -> None:
        """Raise CorruptStoreError if the file was truncated. Call it after views of the array were read."""
        if self._opened.mapped is not None:
            self._opened.mapped.check_intact()


def _check_contiguous(mapped: MappedFile, num_chunks: int, chunk_bytes: int) -> None:
    """Raise ValueError unless a file is a shard whose inner chunks have this size and lie behind each other."""
    at, crc = num_chunks * chunk_bytes, 0
    if len(mapped) != at + 16 * num_chunks + 4:
        raise ValueError(f"shard: found {len(mapped)} bytes, expected {at + 16 * num_chunks + 4}")
    for first in range(0, num_chunks, _INDEX_BLOCK):
        k = np.arange(first, min(first + _INDEX_BLOCK, num_chunks))
        block = np.stack([k * chunk_bytes, np.full(len(k), chunk_bytes)], axis=1).astype("<u8").tobytes()
        if mapped.read(at, at + len(block)) != block:
            raise ValueError("shard: the index is not that of contiguous inner chunks")
        at, crc = at + len(block), crc32c(block, crc)
    if mapped.read(at, len(mapped)) != crc.to_bytes(4, "little"):
        raise ValueError("shard: checksum mismatch")
