"""Reading one segment: an immutable Zarr group of arrays."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np

from tracestore.errors import CorruptStoreError
from tracestore.store.format import schema
from tracestore.store.format.entries import FileEntry, Layers
from tracestore.store.format.extra_fields import decode_extras, decode_list
from tracestore.store.format.zip_group import ZipGroup
from tracestore.store.io.files import StoreFiles, reading_committed
from tracestore.store.lens import Lens
from tracestore.store.read.array_reader import ArrayReader, ArraySpec, check_metadata
from tracestore.store.read.chunk_cache import ChunkCache
from tracestore.store.read.index import SegmentEntry, StoreIndex


def row_sizes(attributes: schema.Attributes, tokens: np.ndarray, layouts: np.ndarray) -> dict[str, np.ndarray]:
    """Return how many rows or values each row of a segment has in its large arrays, int64 (R,).

    The size of edges counts layers, which is how far they reach in edge_ptr.
    """
    layers, tokens = attributes.num_layers or 0, tokens.astype(np.int64)
    pairs = np.where(layouts == schema.LAYOUT_CAUSAL, tokens * (tokens + 1) // 2, tokens * tokens)
    is_dense = (layouts == schema.LAYOUT_CAUSAL) | (layouts == schema.LAYOUT_SQUARE)
    return {
        "hidden_states": layers * tokens,
        "attention": np.where(is_dense, layers * attributes.num_stored_heads * pairs, 0),
        "edges": np.where(layouts == schema.LAYOUT_EDGES, layers, 0),
    }


def layer_rows(
    attributes: schema.Attributes, rows: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return which rows of a segment each array of schema.LAYER_CRCS has, and the array rows (n, L) of their layers.

    `rows` holds num_tokens, attention_layout and, with edges, edge_ptr.
    """
    layers, found = attributes.num_layers or 1, {}
    for name, sizes in row_sizes(attributes, rows["num_tokens"], rows["attention_layout"]).items():
        has = sizes > 0
        if name != "edges":
            found[name] = has, np.repeat(sizes[has, None] // layers, layers, axis=1)
        elif "edge_ptr" in rows:
            found |= dict.fromkeys(("edge_index", "edge_weight"), (has, np.diff(rows["edge_ptr"]).reshape(-1, layers)))
    return found


class SegmentReader:
    """The arrays of a committed segment. The file of its small arrays is mapped here, large arrays on first use.

    Parameters
    ----------
    files : StoreFiles
    entry : SegmentEntry
    attributes : schema.Attributes
        Those of the store.
    cache : ChunkCache
        Keeps decoded chunks of compressed arrays.
    reads_layers : bool
        Fetch the layers of large arrays that are needed, instead of whole files, where the files can do that.

    Raises
    ------
    CorruptStoreError
        If the small arrays do not have the form of this format.
    """

    def __init__(
        self,
        files: StoreFiles,
        entry: SegmentEntry,
        attributes: schema.Attributes,
        cache: ChunkCache | None = None,
        reads_layers: bool = True,
    ) -> None:
        self.name, self.num_rows = entry.path, entry.num_traces
        self.rows, self.rows_path = entry.rows, entry.rows.path
        self._files, self._cache, self._attributes = files, cache or ChunkCache(0), attributes
        self._arrays: dict[str, ArrayReader] = {}
        self._reads_layers = reads_layers and files.has_ranges
        with self._checked():
            self.small = ZipGroup(files.map(entry.rows), schema.ROW_DTYPES, schema.OPTIONAL_ROW_ARRAYS)
            self.entries = self._parse_entries(self.small.attributes()["tracestore"])

    def _checked(self, what: str = "") -> AbstractContextManager[None]:
        """Turn the errors of damaged small arrays into CorruptStoreError; `what` precedes the reason."""
        return reading_committed(self.rows_path, what, self._files.prefix)

    def _corrupt(self, text: str) -> CorruptStoreError:
        return CorruptStoreError(self._files.prefix + text)

    def _parse_entries(self, attributes: Any) -> dict[str, FileEntry]:
        """Return the other files of the segment by their path in the store."""
        is_valid = isinstance(attributes, dict) and attributes.keys() == {"num_traces", "files"}
        if not is_valid or attributes["num_traces"] != self.num_rows:
            raise ValueError(f"zarr.json: not the attributes of a segment of {self.num_rows} traces")
        found = [FileEntry(f"{self.name}/{path}", size, crc) for path, size, crc in attributes["files"]]
        entries = {entry.path: entry for entry in found}
        if len(entries) < len(found) or self.rows_path in entries:
            raise ValueError("zarr.json: a file is listed twice")
        return entries

    @cached_property
    def _begins(self) -> dict[str, np.ndarray]:
        with self._checked():
            tokens, layouts, last = map(self.values, ("num_tokens", "attention_layout", "last_token_row"))
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= schema.MAX_TOKENS:
                raise ValueError(f"num_tokens: found {tokens.min()} to {tokens.max()}")
            sizes = row_sizes(self._attributes, tokens, layouts)
            return {name: np.cumsum(size) - size for name, size in sizes.items()} | {"last_token": last}

    def begin(self, name: str, row: int) -> int:
        """Return where a row begins in hidden_states, attention, last_token or, in units of layers, in edge_ptr."""
        if row >= self.num_rows:
            raise self._corrupt(f"{self.rows_path}: row {row} of {self.num_rows}")
        return int(self._begins[name][row])

    def begins(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return where some rows begin, int64; see begin()."""
        return self._of_rows(self._begins[name], rows)

    def values(self, name: str) -> np.ndarray:
        """Return a copy of an array of schema.ROW_ARRAYS."""
        with self._checked():
            values = self.small.read(name)
            expected = {schema.ROWS: self.num_rows, schema.OFFSETS: self.num_rows + 1}.get(schema.ROW_ARRAYS[name][0])
            if expected not in (None, len(values)):
                raise ValueError(f"{name}: found {len(values)} values, expected {expected}")
            return values

    def row_values(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the values of some rows of an array of schema.ROW_ARRAYS with one value per row."""
        return self._of_rows(self.values(name), rows)

    def _of_rows(self, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if len(rows) and rows.max() >= len(values):
            raise self._corrupt(f"{self.rows_path}: row {rows.max()} of {len(values)}")
        found: np.ndarray = values[rows]
        return found

    @cached_property
    def has_answers(self) -> bool:
        """True if rows may tell where their answers are, by more than prompt_length."""
        return not {"answer_span", "generated_mask"}.isdisjoint(self.optional_names)

    @cached_property
    def _prompt_lengths(self) -> np.ndarray:
        return self.values("prompt_length")

    def prompt_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the prompt_length of some rows, which batches need again and again."""
        return self._of_rows(self._prompt_lengths, rows)

    def array(self, name: str) -> ArrayReader:
        """Return the reader of a large array. CorruptStoreError if its files differ from what was committed."""
        reader = self._arrays.get(name)
        if reader is None:
            where = f"{self.name}/{name}"
            spec = self._spec(name)
            layers = self.fetched_layers(name)
            reader = self._arrays[name] = ArrayReader(self._files, self.entries, where, self._cache, spec, layers)
        return reader

    def check_metadata(self, name: str, num_rows: int, chunk_rows: int) -> None:
        """Raise ValueError unless the listed zarr.json of a large array states these numbers of rows. It is not read."""
        check_metadata(self._spec(name), num_rows, chunk_rows, self.entries[f"{self.name}/{name}/zarr.json"])

    def _spec(self, name: str) -> ArraySpec:
        attributes = self._attributes
        try:
            dtype, columns, is_bfloat16 = attributes.array_type(name)
        except ValueError as error:
            raise self._corrupt(f"{self.name}/{name}: {error}") from None
        num_rows = attributes.lens.num_tokens if name == "unembedding" and attributes.lens is not None else None
        return ArraySpec(dtype, columns, attributes.options["codec"], num_rows, is_bfloat16)

    def lens_arrays(self) -> dict[str, np.ndarray]:
        """Return copies of those of schema.LENS_ARRAYS that the segment has.

        CorruptStoreError unless it is a segment of a lens with arrays of the right length.
        """
        lens, hidden_dim = self._attributes.lens, self._attributes.hidden_dim
        with self._checked("lens: "):
            if lens is None or self.num_rows:
                raise ValueError(f"a segment of {self.num_rows} traces")
            found = {name: self.small.read(name) for name in schema.LENS_ARRAYS if name in self.small}
            for name, values in found.items():
                expected = lens.num_tokens if name == "unembedding_bias" else hidden_dim
                if len(values) != expected:
                    raise ValueError(f"{name}: found {len(values)} values, expected {expected}")
            if lens.norm == "none" and found.keys() - {"unembedding_bias"}:
                raise ValueError("found a norm, expected none")
        return found

    def fetched_layers(self, name: str) -> Layers | None:
        """Return the layers of a large array if they are fetched when they are needed."""
        return self.layers.get(name) if self._reads_layers else None

    @cached_property
    def layers(self) -> dict[str, Layers]:
        """The layers of each large array that the segment has checksums of."""
        if self.small.names.isdisjoint(schema.LAYER_CRCS.values()):
            return {}
        found = {}
        rows = {n: self.values(n) for n in ("num_tokens", "attention_layout", "edge_ptr") if n in self.small}
        _ = self._begins  # checks the numbers of tokens
        with self._checked():
            for name, (_, layers) in layer_rows(self._attributes, rows).items():
                if (small := schema.LAYER_CRCS[name]) in self.small:
                    sizes, crcs = layers.reshape(-1), self.values(small)
                    if len(crcs) != len(sizes) or (sizes < 0).any():
                        raise ValueError(f"{small}: found {len(crcs)} values, expected {len(sizes)}, one per layer")
                    found[name] = Layers(np.concatenate([[0], np.cumsum(sizes)]), crcs)
        return found

    def close_array(self, name: str) -> None:
        """Release the maps of an array. The next access opens it again."""
        self._arrays.pop(name, None)

    def has(self, name: str) -> bool:
        """Return whether the segment has a large array."""
        return f"{self.name}/{name}/zarr.json" in self.entries

    @cached_property
    def array_files(self) -> Mapping[str, list[FileEntry]]:
        """The files of each large array."""
        found = defaultdict[str, list[FileEntry]](list)
        for path, entry in self.entries.items():
            found[path.removeprefix(f"{self.name}/").partition("/")[0]].append(entry)
        return found

    def scalar(self, name: str, row: int) -> int:
        """Return one integer of an array with one value per row."""
        with self._checked():
            return int(self.small.read(name, row, row + 1)[0])

    def string(self, name: str, row: int) -> str:
        """Return one string of a ragged array."""
        with self._checked():
            return self.small.strings(name, row, row + 1)[0]

    def tokens(self, row: int) -> np.ndarray:
        """Return a copy of the token ids (T,) int32 of a row."""
        with self._checked():
            begin, end = self.small.read("tokens_offsets", row, row + 2).tolist()
            return self.small.read("tokens", begin, end)

    def tokens_decoded(self, row: int) -> list[str]:
        """Return the text of each token of a row."""
        with self._checked():
            begin, end = self.small.read("tokens_decoded_ptr", row, row + 2).tolist()
            return self.small.strings("tokens_decoded", begin, end)

    @cached_property
    def optional_names(self) -> list[str]:
        """The fields of schema.OPTIONAL_FIELDS that a row may have."""
        return [n for n, arrays in schema.OPTIONAL_ARRAYS.items() if not self.small.names.isdisjoint(arrays)]

    def has_optional(self, name: str) -> np.ndarray:
        """Return which rows have a field of `optional_names`, bool (rows,)."""
        field, arrays = schema.OPTIONAL_FIELDS[name], schema.OPTIONAL_ARRAYS[name]
        if field.shape != schema.PER_TRACE:
            return np.diff(self.values(f"{name}_offsets")) > 0
        values = np.stack([self.values(array) for array in arrays])
        known: np.ndarray = ((values != field.fill) & (values == values)).any(axis=0)
        return known

    def optional(self, name: str, row: int, *, decode: bool = True) -> Any:
        """Return a field of schema.OPTIONAL_FIELDS, or None if the row lacks it; JSON as text without `decode`."""
        if name not in self.optional_names:
            return None
        field = schema.OPTIONAL_FIELDS[name]
        if field.shape == schema.JSON:
            text = self.string(name, row) or None
            with self._checked(f"{name}: "):
                return decode_list(text) if text and decode else text
        with self._checked():
            if field.shape == schema.PER_TRACE:
                return field.known([self.small.read(a, row, row + 1).item() for a in schema.OPTIONAL_ARRAYS[name]])
            begin, end = self.small.read(f"{name}_offsets", row, row + 2).tolist()
            if begin == end:
                return None
            values = self.small.read(name, begin, end)
            count = self.num_ids(row)
            is_whole = count > 0 and len(values) % count == 0
            if not is_whole or (field.shape == schema.PER_TOKEN and len(values) != count):
                raise ValueError(f"{name}: found {len(values)} values of {count} tokens in row {row}")
            return values.reshape(count, -1) if field.shape == schema.TOP_K else values

    def num_ids(self, row: int) -> int:
        """Return the number of tokens T of a row: that of its token ids, S without them."""
        begin, end = self.small.read("tokens_offsets", row, row + 2).tolist()
        return end - begin or self.scalar("num_tokens", row)

    def optional_fields(self, row: int, *, decode: bool = True) -> dict[str, Any]:
        """Return the fields of schema.OPTIONAL_FIELDS that a row has; see optional()."""
        found = {name: self.optional(name, row, decode=decode) for name in self.optional_names}
        return {name: value for name, value in found.items() if value is not None}

    def extras(self, row: int) -> dict[str, Any]:
        """Return the fields of a row without an array of their own."""
        text = self.string("extras", row)
        with self._checked():
            result = json.loads(text) if text else {}
            if not isinstance(result, dict):
                raise ValueError("extras: not an object")
            return decode_extras(result)

    def edge_offsets(self, first_layer: int, num_layers: int) -> np.ndarray:
        """Return a copy of the offsets (L + 1,) of the edges of each layer."""
        with self._checked():
            ptr = self.small.read("edge_ptr", first_layer, first_layer + num_layers + 1)
            if ptr[0] < 0 or (ptr[1:] < ptr[:-1]).any():
                raise ValueError("edge_ptr: not offsets")
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
            raise self._corrupt(f"{self.name}/edge_index: an edge leaves its graph")
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

    def lens(self, matrix: Callable[[], ArrayReader] | None = None) -> Lens:
        """Return the lens of the store, which this segment holds; `matrix` returns the array unembedding.

        CorruptStoreError if the segment does not hold the lens.
        """
        small, a = self.lens_arrays(), self._attributes
        assert a.lens is not None and a.hidden_dim is not None
        provenance = None if a.lens.provenance is None else a.provenance[a.lens.provenance]
        return Lens(a.lens, a.hidden_dim, small, provenance, matrix or (lambda: self.array("unembedding")))


def read_lens(files: StoreFiles, index: StoreIndex, attributes: schema.Attributes) -> Lens | None:
    """Return the lens of a store; None if it has none."""
    if attributes.lens is None:
        return None
    return SegmentReader(files, index.segment(attributes.lens.segment), attributes).lens()
