"""Reading one segment: an immutable Zarr group of arrays."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracestore.errors import CorruptStoreError, escape_unprintable
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.ragged import decode_string
from tracestore.store.io.files import StoreFiles
from tracestore.store.read.array_reader import ArrayReader, ArraySpec
from tracestore.store.read.chunk_cache import ChunkCache
from tracestore.store.read.index import TraceRow


class SegmentReader:
    """The arrays of a committed segment, opened on first use."""

    def __init__(
        self,
        files: StoreFiles,
        number: int,
        entries: Mapping[str, FileEntry],
        cache: ChunkCache,
        attributes: schema.Attributes,
        num_rows: int,
    ) -> None:
        self.name = paths.segment(number)
        self._files, self._entries, self._cache = files, entries, cache
        self._attributes, self._num_rows = attributes, num_rows
        self._arrays: dict[str, ArrayReader] = {}

    def array(self, name: str) -> ArrayReader:
        """Return the reader of an array. CorruptStoreError if its files differ from what was committed."""
        reader = self._arrays.get(name)
        if reader is None:
            where = f"{self.name}/{name}"
            spec = self._spec(name)
            reader = self._arrays[name] = ArrayReader(self._files, self._entries, where, self._cache, spec)
        return reader

    def _spec(self, name: str) -> ArraySpec:
        kind, dtype = schema.SEGMENT_ARRAYS[name]
        a, count = self._attributes, None
        if kind == schema.ROWS:
            count = self._num_rows
        elif kind == schema.OFFSETS:
            count = self._num_rows + 1
        codec = a.options["codec"] if name in schema.CODED_ARRAYS else "none"
        if dtype is not None:
            return ArraySpec(np.dtype(dtype), (2,) if name == "edge_index" else (), codec, count)
        stored = a.hidden_dtype if name in ("hidden_states", "last_token") else a.attention_dtype
        columns: tuple[int | None, ...] = ()
        if name == "hidden_states":
            columns = (a.hidden_dim,)
        elif name == "last_token":
            columns = (a.num_layers, a.hidden_dim)
        if stored is None or None in columns:
            raise CorruptStoreError(f"{self.name}/{name}: the attributes of the store define no such array")
        shape = tuple(n for n in columns if n is not None)
        return ArraySpec(schema.storage_dtype(stored), shape, codec, count, stored == "bfloat16")

    def close_array(self, name: str) -> None:
        """Release the maps of an array. The next access opens it again."""
        self._arrays.pop(name, None)

    def has(self, name: str) -> bool:
        """Return whether the segment has an array."""
        return f"{self.name}/{name}/zarr.json" in self._entries

    def scalar(self, name: str, row: int) -> int:
        """Return one integer of an array."""
        return int(self.array(name).copy(row, row + 1)[0])

    def require_location(self, row: TraceRow) -> None:
        """Raise CorruptStoreError unless this segment holds the hidden states that an index row refers to."""
        num_layers = self._attributes.num_layers or 0
        end, stored = row.hidden_row + num_layers * row.num_tokens, self.array("hidden_states").shape[0]
        if end > stored:
            raise CorruptStoreError(f"{self.name}/hidden_states: rows {row.hidden_row} to {end} of {stored}")

    def string(self, name: str, row: int) -> str:
        """Return one string of a ragged array."""
        begin, end = (int(v) for v in self.array(f"{name}_offsets").copy(row, row + 2))
        return self._text(self.array(name).copy(begin, end), name)

    def _text(self, data: np.ndarray, name: str) -> str:
        try:
            return data.tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptStoreError(f"{self.name}/{name}: {error}") from None

    def tokens(self, row: int, copy: bool = False) -> np.ndarray:
        """Return the token ids (S,) int32 of a row."""
        begin, end = (int(v) for v in self.array("tokens_offsets").copy(row, row + 2))
        tokens = self.array("tokens")
        return tokens.copy(begin, end) if copy else tokens.flat(begin, end)

    def tokens_decoded(self, row: int) -> list[str]:
        """Return the text of each token of a row."""
        begin, end = (int(v) for v in self.array("tokens_decoded_ptr").copy(row, row + 2))
        offsets = self.array("tokens_decoded_offsets").copy(begin, end + 1)
        if len(offsets) == 0:
            return []
        first = int(offsets[0])
        data = self.array("tokens_decoded").copy(first, int(offsets[-1]))
        try:
            return [decode_string(data, offsets - first, k) for k in range(end - begin)]
        except ValueError as error:
            raise CorruptStoreError(f"{self.name}/tokens_decoded: {error}") from None

    def extras(self, row: int) -> dict[str, Any]:
        """Return the JSON object of a row."""
        text = self.string("extras", row)
        try:
            result = json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            raise CorruptStoreError(f"{self.name}/extras: {escape_unprintable(str(error), 100)}") from None
        if not isinstance(result, dict):
            raise CorruptStoreError(f"{self.name}/extras: not an object")
        return result

    def edge_offsets(self, first_layer: int, num_layers: int) -> np.ndarray:
        """Return a copy of the offsets (L + 1,) of the edges of each layer."""
        ptr = self.array("edge_ptr").copy(first_layer, first_layer + num_layers + 1)
        if ptr[0] < 0 or (ptr[1:] < ptr[:-1]).any():
            raise CorruptStoreError(f"{self.name}/edge_ptr: not offsets")
        return ptr

    def edges(
        self, first_layer: int, num_layers: int, num_tokens: int, copy: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ptr (L + 1,) from 0, edge_index (E, 2) and weight (E,) of a trace.

        CorruptStoreError if an edge leaves the num_tokens nodes.
        """
        ptr = self.edge_offsets(first_layer, num_layers)
        begin, end = int(ptr[0]), int(ptr[-1])
        if end == begin:
            weight = self.array("edge_weight") if self.has("edge_weight") else None
            empty = np.zeros(0, weight.dtype if weight is not None else "<f2")
            return ptr - begin, np.zeros((0, 2), "<i4"), empty
        index, weights = self.array("edge_index"), self.array("edge_weight")
        nodes = index.copy(begin, end)
        if nodes.min() < 0 or nodes.max() >= num_tokens:
            raise CorruptStoreError(f"{self.name}/edge_index: an edge leaves its graph")
        if copy:
            return ptr - begin, index.copy(begin, end), weights.copy(begin, end)
        return ptr - begin, index.rows(begin, end), weights.rows(begin, end)

    def edge_sources(self, first_layer: int, num_layers: int) -> tuple[np.ndarray, Any, Any]:
        """Return ptr, and edge_index and weight as sources of a gather."""
        ptr = self.edge_offsets(first_layer, num_layers)
        begin, end = int(ptr[0]), int(ptr[-1])
        if end == begin:
            return ptr - begin, b"", b""
        index, weight = (self.array(name).copy_sources(begin, end) for name in ("edge_index", "edge_weight"))
        # The gather needs the edges of a trace in one piece.
        index, weight = (found if len(found) == 1 else [np.concatenate(found)] for found in (index, weight))
        return ptr - begin, index[0], weight[0]
