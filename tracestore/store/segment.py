"""One segment: an immutable Zarr group of arrays, written once, then mapped."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.errors import StoreDamagedError, printable
from tracestore.store import paths, schema
from tracestore.store.ahead import WrittenRows
from tracestore.store.files import FileEntry, StoreFiles
from tracestore.store.fsio import fsync_path, make_folders, remove_tree, write_file
from tracestore.store.metadata import array_metadata, group_metadata
from tracestore.store.pack import PackedTrace, num_bytes_of
from tracestore.store.ragged import decode_string, encode_strings
from tracestore.store.shard import ArrayReader, ArraySpec, ChunkCache, ShardStream

if TYPE_CHECKING:
    from tracestore.store.index import TraceRow


@dataclass(frozen=True)
class SegmentRow:
    """Where one trace lies in its segment."""

    num_tokens: int
    layout: int
    hidden_row: int
    attention_start: int
    last_token_row: int


class ArrayWriter:
    """Writes the arrays of one Zarr group, streamed or at once, and lists its files."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix
        self.files: list[FileEntry] = []

    def stream(self, name: str, dtype: np.dtype, columns: tuple[int, ...], codec: str, chunk_bytes: int) -> ShardStream:
        path = self.folder / name / "c" / "/".join("0" * (1 + len(columns)))
        return ShardStream(path, dtype, columns, codec, chunk_bytes)

    def finish(self, name: str, stream: ShardStream, attributes: dict[str, Any] | None = None) -> None:
        """Closes a stream and writes the array's zarr.json."""
        shape = (stream.num_rows, *stream.columns)
        make_folders(self.folder / name)
        if stream.num_rows:
            size, crc = stream.finish()
            relative = stream.path.relative_to(self.folder).as_posix()
            self.files.append(FileEntry(f"{self.prefix}/{relative}", size, crc))
            for folder in (stream.path.parent, *stream.path.parents):
                if folder == self.folder / name:
                    break
                fsync_path(folder)
        meta = array_metadata(shape, stream.chunk_rows, stream.dtype, stream.codec, attributes or {})
        self._file(f"{name}/zarr.json", meta)
        fsync_path(self.folder / name)

    def write(self, name: str, array: np.ndarray) -> None:
        """A whole array, uncompressed."""
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        stream = self.stream(name, array.dtype, array.shape[1:], "none", schema.INNER_CHUNK_BYTES)
        stream.append([array])
        self.finish(name, stream)

    def group(self, attributes: dict[str, Any]) -> None:
        self._file("zarr.json", group_metadata(attributes))
        fsync_path(self.folder)

    def _file(self, name: str, data: bytes) -> None:
        write_file(self.folder / name, data)
        self.files.append(FileEntry(f"{self.prefix}/{name}", len(data), crc32c(data)))


class SegmentWriter:
    """Appends packed traces to a segment under a temporary name."""

    def __init__(self, folder: Path, number: int, attributes: schema.Attributes, codec: str) -> None:
        self.folder, self.number, self.codec = folder, number, codec
        self.attributes = attributes
        self.num_bytes = 0
        self.rows: list[SegmentRow] = []
        self._traces: list[PackedTrace] = []
        self._streams: dict[str, ShardStream] = {}
        self._hidden_rows = self._attention = self._edge_layers = self._last_rows = 0
        self._edge_total = 0
        self._edge_counts: list[np.ndarray] = []
        make_folders(folder)
        self._writer = ArrayWriter(folder, paths.segment(number))

    def __len__(self) -> int:
        return len(self.rows)

    def _stream(
        self, name: str, dtype: np.dtype, shape: tuple[int, ...], dtype_text: str | None, trace_bytes: int
    ) -> ShardStream:
        if name not in self._streams:
            dtype = dtype if dtype_text is None else schema.storage_dtype(dtype_text)
            chunk_bytes = schema.INNER_CHUNK_BYTES
            if self.codec != "none":
                chunk_bytes = min(max(trace_bytes // 2, schema.MIN_CODED_CHUNK_BYTES), schema.INNER_CHUNK_BYTES)
            columns = tuple(shape[1:])
            if name == "hidden_states":
                columns = (shape[-1],)
            elif name == "last_token":
                assert self.attributes.num_layers is not None
                columns = (self.attributes.num_layers, shape[-1])
            self._streams[name] = self._writer.stream(name, dtype, columns, self.codec, chunk_bytes)
        return self._streams[name]

    def append(self, trace: PackedTrace, attributes: schema.Attributes) -> SegmentRow:
        self.attributes = attributes
        dtypes = {
            "hidden_states": attributes.hidden_dtype,
            "last_token": attributes.hidden_dtype,
            "attention": attributes.attention_dtype,
            "edge_weight": attributes.attention_dtype,
            "edge_index": None,
        }
        assert attributes.num_layers is not None
        row = SegmentRow(
            num_tokens=trace.num_tokens,
            layout=trace.layout,
            hidden_row=self._hidden_rows,
            attention_start=self._edge_layers if trace.layout == schema.LAYOUT_EDGES else self._attention,
            last_token_row=self._last_rows if "last_token" in trace.arrays else -1,
        )
        self.num_bytes += trace.segment_bytes
        for name, rows in trace.arrays.items():
            first = rows if isinstance(rows, WrittenRows) else rows[0]
            stream = self._stream(name, first.dtype, first.shape, dtypes[name], num_bytes_of(rows))
            if isinstance(rows, WrittenRows):
                stream.append_written(rows, trace.crcs[name])
            else:
                stream.append(rows, trace.crcs.get(name))
        self._hidden_rows += attributes.num_layers * trace.num_tokens
        if "attention" in trace.arrays:
            rows = trace.arrays["attention"]
            self._attention += rows.size if isinstance(rows, WrittenRows) else sum(a.size for a in rows)
        if trace.edge_counts is not None:
            self._edge_counts.append(trace.edge_counts)
            self._edge_layers += len(trace.edge_counts)
            self._edge_total += int(trace.edge_counts.sum())
        self._last_rows += "last_token" in trace.arrays
        trace.arrays = {}
        self.rows.append(row)
        self._traces.append(trace)
        return row

    def flush(self) -> None:
        """Writes what waits of the arrays that were appended: they may go then."""
        for stream in self._streams.values():
            stream.flush()

    def packed(self, row: int) -> PackedTrace:
        """A trace as it was appended, without its arrays."""
        return self._traces[row]

    def mark(self) -> tuple[Any, ...]:
        counters = (self._hidden_rows, self._attention, self._edge_layers, self._last_rows, self._edge_total)
        streams = {name: s.mark() for name, s in self._streams.items()}
        return len(self.rows), self.num_bytes, counters, len(self._edge_counts), streams, self.attributes

    def rollback(self, mark: tuple[Any, ...]) -> None:
        count, self.num_bytes, counters, edges, streams, self.attributes = mark
        self._hidden_rows, self._attention, self._edge_layers, self._last_rows, self._edge_total = counters
        del self.rows[count:], self._traces[count:], self._edge_counts[edges:]
        for name in list(self._streams):
            if name in streams:
                self._streams[name].rollback(streams[name])
            else:
                stream = self._streams.pop(name)
                stream.suspend()
                remove_tree(stream.path)

    @property
    def field_names(self) -> set[str]:
        """Which of hidden_states, last_token, attention and edges it holds."""
        names = {n for n in ("hidden_states", "attention", "last_token") if n in self._streams}
        return names | ({"edges"} if self._edge_layers else set())

    def suspend(self) -> None:
        for stream in self._streams.values():
            stream.suspend()

    def finish(self) -> list[FileEntry]:
        """Writes what is left and syncs everything; the caller renames the folder."""
        a, writer = self.attributes, self._writer
        extra = {"hidden_states": a.hidden_dtype, "last_token": a.hidden_dtype}
        extra |= {"attention": a.attention_dtype, "edge_weight": a.attention_dtype}
        for name, stream in sorted(self._streams.items()):
            tag = {"tracestore": {"dtype": "bfloat16"}} if extra.get(name) == "bfloat16" else {}
            writer.finish(name, stream, tag)
        traces, records = self._traces, [t.record for t in self._traces]
        if self._edge_counts:
            ptr = np.zeros(self._edge_layers + 1, "<i8")
            np.cumsum(np.concatenate(self._edge_counts), out=ptr[1:])
            writer.write("edge_ptr", ptr)
        starts = [r.attention_start for r in self.rows]
        scalars = {
            "num_tokens": ("<i4", [r.num_tokens for r in self.rows]),
            "sample": ("<i4", [r.sample for r in records]),
            "source_position": ("<i4", [r.position for r in records]),
            "prompt_length": ("<i4", [-1 if r.prompt_length is None else r.prompt_length for r in records]),
            "attention_layout": ("|u1", [t.layout for t in traces]),
            "attention_start": ("<i8", starts),
            "last_token_row": ("<i4", [r.last_token_row for r in self.rows]),
            "num_nonfinite": ("<i8", [t.num_nonfinite for t in traces]),
            "fields": ("<u4", [t.field_bits for t in traces]),
            "edges_reversed": ("|u1", [t.reversed_edges for t in traces]),
        }
        for name, (dtype, values) in scalars.items():
            writer.write(name, np.array(values, dtype))
        for name in schema.STRING_FIELDS:
            if name == "question_id":
                data, offsets = encode_strings(r.question_id for r in records)
            elif name == "extras":
                data, offsets = encode_strings(t.extras for t in traces)
            else:
                data, offsets = encode_strings(r.strings.get(name, "") for r in records)
            writer.write(name, data)
            writer.write(f"{name}_offsets", offsets)
        tokens = [r.tokens if r.tokens is not None else np.zeros(0, "<i4") for r in records]
        writer.write("tokens", np.concatenate(tokens).astype("<i4"))
        writer.write("tokens_offsets", np.cumsum([0, *map(len, tokens)]).astype("<i8"))
        decoded = [r.tokens_decoded or () for r in records]
        data, offsets = encode_strings(s for d in decoded for s in d)
        writer.write("tokens_decoded", data)
        writer.write("tokens_decoded_offsets", offsets)
        writer.write("tokens_decoded_ptr", np.cumsum([0, *map(len, decoded)]).astype("<i8"))
        writer.group({"tracestore": {"segment": self.number, "num_traces": len(self.rows)}})
        return writer.files


class SegmentReader:
    """Lazily opened arrays of a committed segment."""

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
        """The array; StoreDamagedError where its files are not what was committed."""
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
            raise StoreDamagedError(f"{self.name}/{name}: the store's attributes know of no such array")
        shape = tuple(n for n in columns if n is not None)
        return ArraySpec(schema.storage_dtype(stored), shape, codec, count, stored == "bfloat16")

    def forget(self, name: str) -> None:
        """Lets go of an array's maps; it is opened anew when it is asked for."""
        self._arrays.pop(name, None)

    def has(self, name: str) -> bool:
        return f"{self.name}/{name}/zarr.json" in self._entries

    def scalar(self, name: str, row: int) -> int:
        return int(self.array(name).copy(row, row + 1)[0])

    def require_place(self, row: "TraceRow") -> None:
        """StoreDamagedError unless the hidden states that a row of the index places here are here."""
        num_layers = self._attributes.num_layers or 0
        end, stored = row.hidden_row + num_layers * row.num_tokens, self.array("hidden_states").shape[0]
        if end > stored:
            raise StoreDamagedError(f"{self.name}/hidden_states: rows {row.hidden_row} to {end} of {stored}")

    def string(self, name: str, row: int) -> str:
        begin, end = (int(v) for v in self.array(f"{name}_offsets").copy(row, row + 2))
        return self._text(self.array(name).copy(begin, end), name)

    def _text(self, data: np.ndarray, name: str) -> str:
        try:
            return data.tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise StoreDamagedError(f"{self.name}/{name}: {error}") from None

    def tokens(self, row: int, copy: bool = False) -> np.ndarray:
        begin, end = (int(v) for v in self.array("tokens_offsets").copy(row, row + 2))
        tokens = self.array("tokens")
        return tokens.copy(begin, end) if copy else tokens.flat(begin, end)

    def tokens_decoded(self, row: int) -> list[str]:
        begin, end = (int(v) for v in self.array("tokens_decoded_ptr").copy(row, row + 2))
        offsets = self.array("tokens_decoded_offsets").copy(begin, end + 1)
        if len(offsets) == 0:
            return []
        first = int(offsets[0])
        data = self.array("tokens_decoded").copy(first, int(offsets[-1]))
        try:
            return [decode_string(data, offsets - first, k) for k in range(end - begin)]
        except ValueError as error:
            raise StoreDamagedError(f"{self.name}/tokens_decoded: {error}") from None

    def extras(self, row: int) -> dict[str, Any]:
        text = self.string("extras", row)
        try:
            result = json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            raise StoreDamagedError(f"{self.name}/extras: {printable(str(error), 100)}") from None
        if not isinstance(result, dict):
            raise StoreDamagedError(f"{self.name}/extras: not an object")
        return result

    def edge_offsets(self, first_layer: int, num_layers: int) -> np.ndarray:
        """Where the edges of each layer begin (L + 1); a copy."""
        ptr = self.array("edge_ptr").copy(first_layer, first_layer + num_layers + 1)
        if ptr[0] < 0 or (ptr[1:] < ptr[:-1]).any():
            raise StoreDamagedError(f"{self.name}/edge_ptr: not offsets")
        return ptr

    def edges(
        self, first_layer: int, num_layers: int, num_tokens: int, copy: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """-> ptr (L + 1) from 0, edge_index (E, 2), weight (E,). StoreDamagedError where an edge joins others
        than num_tokens nodes."""
        ptr = self.edge_offsets(first_layer, num_layers)
        begin, end = int(ptr[0]), int(ptr[-1])
        if end == begin:
            weight = self.array("edge_weight") if self.has("edge_weight") else None
            empty = np.zeros(0, weight.dtype if weight is not None else "<f2")
            return ptr - begin, np.zeros((0, 2), "<i4"), empty
        index, weights = self.array("edge_index"), self.array("edge_weight")
        nodes = index.copy(begin, end)
        if nodes.min() < 0 or nodes.max() >= num_tokens:
            raise StoreDamagedError(f"{self.name}/edge_index: an edge leaves its graph")
        if copy:
            return ptr - begin, index.copy(begin, end), weights.copy(begin, end)
        return ptr - begin, index.rows(begin, end), weights.rows(begin, end)

    def edge_sources(self, first_layer: int, num_layers: int) -> tuple[np.ndarray, Any, Any]:
        """The same with edge_index and weight as sources of a gather."""
        ptr = self.edge_offsets(first_layer, num_layers)
        begin, end = int(ptr[0]), int(ptr[-1])
        if end == begin:
            return ptr - begin, b"", b""
        index, weight = (self.array(name).sources(begin, end) for name in ("edge_index", "edge_weight"))
        # A trace's edges must lie together; only those of compressed chunks do not.
        index, weight = (found if len(found) == 1 else [np.concatenate(found)] for found in (index, weight))
        return ptr - begin, index[0], weight[0]
