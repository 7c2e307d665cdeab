"""Writing one segment: an immutable Zarr group of arrays."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class SegmentRow:
    """The scalars of one trace in its segment; all but `hidden_row` are arrays of schema.SEGMENT_ARRAYS."""

    hidden_row: int
    num_tokens: int
    sample: int
    source_position: int
    prompt_length: int
    attention_layout: int
    attention_start: int
    last_token_row: int
    num_nonfinite: int
    fields: int
    edges_reversed: bool


class ArrayWriter:
    """Writer of the arrays of one Zarr group, which collects the entries of the files in `files`."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix
        self.files: list[FileEntry] = []

    def stream(self, name: str, dtype: np.dtype, columns: tuple[int, ...], codec: str, chunk_bytes: int) -> ShardWriter:
        """Start an array whose rows have the shape `columns`."""
        path = self.folder / name / "c" / "/".join("0" * (1 + len(columns)))
        return ShardWriter(path, dtype, columns, codec, chunk_bytes)

    def finish(self, name: str, stream: ShardWriter, attributes: dict[str, Any] | None = None) -> None:
        """Finish an array and write its zarr.json."""
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
        self._write_file(f"{name}/zarr.json", meta)
        fsync_path(self.folder / name)

    def write(self, name: str, array: np.ndarray) -> None:
        """Write a complete array without compression."""
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        stream = self.stream(name, array.dtype, array.shape[1:], "none", schema.INNER_CHUNK_BYTES)
        stream.append([array])
        self.finish(name, stream)

    def write_ragged(self, name: str, data: np.ndarray, offsets: np.ndarray) -> None:
        """Write a ragged array and its offsets."""
        self.write(name, data)
        self.write(f"{name}_offsets", offsets)

    def write_group(self, attributes: dict[str, Any]) -> None:
        """Write the zarr.json of the group and synchronize its folder."""
        self._write_file("zarr.json", group_metadata(attributes))
        fsync_path(self.folder)

    def _write_file(self, name: str, data: bytes) -> None:
        write_file(self.folder / name, data)
        self.files.append(FileEntry(f"{self.prefix}/{name}", len(data), crc32c(data)))


class SegmentWriter:
    """Writer that appends packed traces to a segment in a temporary folder."""

    def __init__(self, folder: Path, number: int, attributes: schema.Attributes, codec: str) -> None:
        self.folder, self.number, self.codec = folder, number, codec
        self.attributes = attributes
        self.num_bytes = 0
        self.rows: list[SegmentRow] = []
        self._traces: list[PackedTrace] = []
        self._streams: dict[str, ShardWriter] = {}
        self._hidden_rows = self._attention = self._edge_layers = self._last_rows = 0
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
        """Append a trace, drop its arrays and return its scalars; `attributes` replaces those of the segment."""
        self.attributes = attributes
        dtypes = self._dtype_names()
        assert attributes.num_layers is not None
        record = trace.record
        row = SegmentRow(
            hidden_row=self._hidden_rows,
            num_tokens=trace.num_tokens,
            sample=record.sample,
            source_position=record.position,
            prompt_length=-1 if record.prompt_length is None else record.prompt_length,
            attention_layout=trace.layout,
            attention_start=self._edge_layers if trace.layout == schema.LAYOUT_EDGES else self._attention,
            last_token_row=self._last_rows if "last_token" in trace.arrays else -1,
            num_nonfinite=trace.num_nonfinite,
            fields=trace.field_bits,
            edges_reversed=trace.reversed_edges,
        )
        self.num_bytes += trace.segment_bytes
        for name, rows in trace.arrays.items():
            first = rows if isinstance(rows, SpooledRows) else rows[0]
            stream = self._stream(name, first.dtype, first.shape, dtypes.get(name), num_bytes_of(rows))
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
        self._last_rows += "last_token" in trace.arrays
        trace.arrays = {}
        self.rows.append(row)
        self._traces.append(trace)
        return row

    def _dtype_names(self) -> dict[str, str | None]:
        """Return the dtype names of the arrays whose dtype the attributes of the store give."""
        hidden, attention = self.attributes.hidden_dtype, self.attributes.attention_dtype
        return {"hidden_states": hidden, "last_token": hidden, "attention": attention, "edge_weight": attention}

    def flush(self) -> None:
        """Write the buffered arrays of appended traces, whose memory can be released then."""
        for stream in self._streams.values():
            stream.flush()

    def packed(self, row: int) -> PackedTrace:
        """Return an appended trace, without its arrays."""
        return self._traces[row]

    def savepoint(self) -> tuple[Any, ...]:
        """Return the state that rollback() restores."""
        counters = (self._hidden_rows, self._attention, self._edge_layers, self._last_rows)
        streams = {name: s.savepoint() for name, s in self._streams.items()}
        return len(self.rows), self.num_bytes, counters, len(self._edge_counts), streams, self.attributes

    def rollback(self, savepoint: tuple[Any, ...]) -> None:
        """Remove all traces that were appended after a savepoint."""
        count, self.num_bytes, counters, edges, streams, self.attributes = savepoint
        self._hidden_rows, self._attention, self._edge_layers, self._last_rows = counters
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
        """The values of schema.STORED_FIELDS that the segment has."""
        names = {n for n in ("hidden_states", "attention", "last_token") if n in self._streams}
        return names | ({"edges"} if self._edge_layers else set())

    def close_fd(self) -> None:
        """Close the file descriptors of all arrays; the next write opens them again."""
        for stream in self._streams.values():
            stream.close_fd()

    def finish(self) -> list[FileEntry]:
        """Write the remaining arrays and synchronize all files; the caller renames the folder."""
        writer, dtypes = self._writer, self._dtype_names()
        for name, stream in sorted(self._streams.items()):
            tag = {"tracestore": {"dtype": "bfloat16"}} if dtypes.get(name) == "bfloat16" else {}
            writer.finish(name, stream, tag)
        traces, records = self._traces, [t.record for t in self._traces]
        if self._edge_counts:
            ptr = np.zeros(self._edge_layers + 1, "<i8")
            np.cumsum(np.concatenate(self._edge_counts), out=ptr[1:])
            writer.write("edge_ptr", ptr)
        for name, (shape, dtype) in schema.SEGMENT_ARRAYS.items():
            if shape == schema.ROWS:
                writer.write(name, np.array([getattr(row, name) for row in self.rows], dtype))
        writer.write_ragged("question_id", *encode_strings(r.question_id for r in records))
        for name in schema.TEXT_FIELDS:
            writer.write_ragged(name, *encode_strings(r.strings.get(name, "") for r in records))
        writer.write_ragged("extras", *encode_strings(t.extras for t in traces))
        tokens = [r.tokens if r.tokens is not None else np.zeros(0, "<i4") for r in records]
        offsets = np.cumsum([0, *map(len, tokens)]).astype("<i8")
        writer.write_ragged("tokens", np.concatenate(tokens).astype("<i4"), offsets)
        decoded = [r.tokens_decoded or () for r in records]
        writer.write_ragged("tokens_decoded", *encode_strings(s for d in decoded for s in d))
        writer.write("tokens_decoded_ptr", np.cumsum([0, *map(len, decoded)]).astype("<i8"))
        writer.write_group({"tracestore": {"segment": self.number, "num_traces": len(self.rows)}})
        return writer.files
