"""Writing one segment: an immutable Zarr group of arrays."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.ragged import encode_strings
from tracestore.store.format.zarr_json import array_metadata, group_metadata
from tracestore.store.io.fsio import fsync_path, makedirs, remove_tree, write_file
from tracestore.store.io.spool_files import SpooledRows
from tracestore.store.write.pack import PackedTrace, num_bytes_of
from tracestore.store.write.shard_writer import ShardWriter

if TYPE_CHECKING:
    pass


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

    def stream(self, name: str, dtype: np.dtype, columns: tuple[int, ...], codec: str, chunk_bytes: int) -> ShardWriter:
        path = self.folder / name / "c" / "/".join("0" * (1 + len(columns)))
        return ShardWriter(path, dtype, columns, codec, chunk_bytes)

    def finish(self, name: str, stream: ShardWriter, attributes: dict[str, Any] | None = None) -> None:
        """Closes a stream and writes the array's zarr.json."""
        shape = (stream.num_rows, *stream.columns)
        makedirs(self.folder / name)
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
        self._streams: dict[str, ShardWriter] = {}
        self._hidden_rows = self._attention = self._edge_layers = self._last_rows = 0
        self._edge_total = 0
        self._edge_counts: list[np.ndarray] = []
        makedirs(folder)
        self._writer = ArrayWriter(folder, paths.segment(number))

    def __len__(self) -> int:
        return len(self.rows)

    def _stream(
        self, name: str, dtype: np.dtype, shape: tuple[int, ...], dtype_text: str | None, trace_bytes: int
    ) -> ShardWriter:
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
            first = rows if isinstance(rows, SpooledRows) else rows[0]
            stream = self._stream(name, first.dtype, first.shape, dtypes[name], num_bytes_of(rows))
            if isinstance(rows, SpooledRows):
                stream.append_spooled(rows, trace.crcs[name])
            else:
                stream.append(rows, trace.crcs.get(name))
        self._hidden_rows += attributes.num_layers * trace.num_tokens
        if "attention" in trace.arrays:
            rows = trace.arrays["attention"]
            self._attention += rows.size if isinstance(rows, SpooledRows) else sum(a.size for a in rows)
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

    def savepoint(self) -> tuple[Any, ...]:
        counters = (self._hidden_rows, self._attention, self._edge_layers, self._last_rows, self._edge_total)
        streams = {name: s.savepoint() for name, s in self._streams.items()}
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
                stream.close_fd()
                remove_tree(stream.path)

    @property
    def field_names(self) -> set[str]:
        """Which of hidden_states, last_token, attention and edges it holds."""
        names = {n for n in ("hidden_states", "attention", "last_token") if n in self._streams}
        return names | ({"edges"} if self._edge_layers else set())

    def close_fd(self) -> None:
        for stream in self._streams.values():
            stream.close_fd()

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
