"""Writing one segment: an immutable Zarr group of arrays."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.ragged import encode_strings
from tracestore.store.format.zarr_json import array_metadata, group_metadata
from tracestore.store.format.zip_group import pack_group
from tracestore.store.io.fsio import makedirs, remove_tree, write_file
from tracestore.store.io.shard_writer import ShardWriter
from tracestore.store.read.segment import layer_rows
from tracestore.store.write.pack import PackedTrace, num_bytes_of


class SegmentWriter:
    """Writer that appends packed traces to a segment in a temporary folder.

    Attributes
    ----------
    number : int
        Number of the segment in the generation that the next commit creates.
    name : str
        Name of the segment, a hash of its rows.zip, which lists the checksums of its other files. Empty until
        finish().
    files : list of tuple[str, int, int]
        Path in the segment, size and CRC-32C of its files, rows.zip last. Empty until finish().
    """

    def __init__(self, folder: Path, number: int, attributes: schema.Attributes) -> None:
        self.folder, self.number, self.attributes = folder, number, attributes
        self.name, self.files = "", list[tuple[str, int, int]]()
        self.num_bytes = 0
        self._traces: list[PackedTrace] = []
        self._streams: dict[str, ShardWriter] = {}
        self._lens_arrays: Mapping[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def _new_stream(self, name: str, trace_bytes: int) -> ShardWriter:
        """Return a writer of an array, whose first trace has `trace_bytes` bytes in it."""
        dtype, columns, _ = self.attributes.array_type(name)
        codec, chunk_bytes = self.attributes.options["codec"], schema.INNER_CHUNK_BYTES
        if codec != "none":
            chunk_bytes = min(max(trace_bytes // 2, schema.MIN_CODED_CHUNK_BYTES), schema.INNER_CHUNK_BYTES)
        path = self.folder / name / "c" / "/".join("0" * (1 + len(columns)))
        return self._streams.setdefault(name, ShardWriter(path, dtype, columns, codec, chunk_bytes))

    def append(self, trace: PackedTrace, attributes: schema.Attributes) -> None:
        """Append a trace and drop its arrays; `attributes` replaces those of the segment."""
        self.attributes = attributes
        self.num_bytes += trace.metadata_bytes + trace.num_bytes
        self._write_arrays(trace)
        trace.has_states, trace.has_last_token = "hidden_states" in trace.arrays, "last_token" in trace.arrays
        trace.arrays = {}
        self._traces.append(trace)

    def _write_arrays(self, trace: PackedTrace) -> None:
        for name, rows in trace.arrays.items():
            stream = self._streams.get(name) or self._new_stream(name, num_bytes_of(rows))
            stream.append(rows, trace.crcs.get(name))

    def write_lens(self, blocks: Iterable[np.ndarray], small: Mapping[str, np.ndarray]) -> None:
        """Write the arrays of a lens: rows of the unembedding matrix, and those of schema.LENS_ARRAYS in `small`."""
        self._lens_arrays = small
        for block in blocks:
            stream = self._streams.get("unembedding") or self._new_stream("unembedding", block.nbytes)
            stream.append([block])
            stream.flush()
            self.num_bytes += block.nbytes

    def flush(self) -> None:
        """Write the buffered arrays of appended traces, whose memory can be released then."""
        for stream in self._streams.values():
            stream.flush()

    def packed(self, row: int) -> PackedTrace:
        """Return an appended trace, without its arrays."""
        return self._traces[row]

    def savepoint(self) -> tuple[Any, ...] | None:
        """Return the state that rollback() restores; None if it is finished."""
        if self.name:
            return None
        streams = {name: s.savepoint() for name, s in self._streams.items()}
        return len(self._traces), self.num_bytes, streams, self.attributes

    def rollback(self, savepoint: tuple[Any, ...]) -> None:
        """Remove all traces that were appended after a savepoint."""
        count, self.num_bytes, streams, self.attributes = savepoint
        del self._traces[count:]
        for name in list(self._streams):
            if name in streams:
                self._streams[name].rollback(streams[name])
            else:
                stream = self._streams.pop(name)
                stream.close_fd()
                remove_tree(stream.path)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all traces."""
        return sum(t.num_tokens for t in self._traces)

    @property
    def field_names(self) -> set[str]:
        """The values of schema.STORED_FIELDS that the segment has."""
        names = {path.partition("/")[0] for path, _, _ in self.files} & {"hidden_states", "attention", "last_token"}
        return names | ({"edges"} if any(t.layout == schema.LAYOUT_EDGES for t in self._traces) else set())

    def close_fd(self) -> None:
        """Close the file descriptors of all arrays; the next write opens them again."""
        for stream in self._streams.values():
            stream.close_fd()

    def remove(self) -> None:
        """Remove its files."""
        self.close_fd()
        remove_tree(self.folder)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The numbers of rows of each array of a finished segment, and of its inner chunks."""
        return {name: (stream.num_rows, stream.chunk_rows) for name, stream in self._streams.items()}

    @property
    def rows(self) -> FileEntry:
        """The file rows.zip of a finished segment."""
        _, size, crc = self.files[-1]
        return FileEntry(paths.segment_rows(paths.segment(self.name)), size, crc)

    def finish(self, sync: Callable[[Path], None]) -> None:
        """Write the remaining files, and call CommitTarget.sync_tree() with the folder. No-op in a finished segment."""
        if self.name:
            return
        self.files = []
        for name, stream in sorted(self._streams.items()):
            self._finish_array(name, stream)
        self._write_file("zarr.json", group_metadata({}))
        attributes = {"tracestore": {"num_traces": len(self), "files": sorted(self.files)}}
        lens = {name: self._lens_arrays[name] for name in schema.LENS_ARRAYS if name in self._lens_arrays}
        rows = _row_arrays(self._traces)
        data = pack_group(rows | lens | self._layer_crcs(rows), attributes)
        self._write_file("rows.zip", data)
        sync(self.folder)
        self.name = name_of(data)

    def _layer_crcs(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of schema.LAYER_CRCS. Checksums that a trace lacks are computed from the written file."""
        layers = self.attributes.num_layers or 1
        found: dict[str, np.ndarray] = {}
        for name, (has, counts) in layer_rows(self.attributes, rows).items():
            stream = self._streams.get(name)
            least = max(1, counts.size * schema.MIN_LAYER_BYTES)
            if stream is None or stream.codec != "none" or stream.num_bytes < least:
                continue
            mapped, ends = MappedFile(stream.path), np.cumsum([0, *counts.reshape(-1) * stream.row_bytes])
            crcs = np.zeros(counts.shape, "<u4")
            for k, row in enumerate(np.flatnonzero(has).tolist()):
                places = pairwise(ends[k * layers : (k + 1) * layers + 1].tolist())
                known = self._traces[row].layer_crcs.get(name)
                crcs[k] = [crc32c(mapped.read(*place)) for place in places] if known is None else known
            found[schema.LAYER_CRCS[name]] = crcs.reshape(-1)
        return found

    def _finish_array(self, name: str, stream: ShardWriter) -> None:
        makedirs(self.folder / name)
        if stream.num_rows:
            size, crc = stream.finish()
            self.files.append((stream.path.relative_to(self.folder).as_posix(), size, crc))
        _, _, is_bfloat16 = self.attributes.array_type(name)
        attributes = {"tracestore": {"dtype": "bfloat16"}} if is_bfloat16 else {}
        shape = (stream.num_rows, *stream.columns)
        meta = array_metadata(shape, stream.chunk_rows, stream.dtype, stream.codec, attributes)
        self._write_file(f"{name}/zarr.json", meta)

    def _write_file(self, name: str, data: bytes) -> None:
        write_file(self.folder / name, data, is_synced=False)
        self.files.append((name, len(data), crc32c(data)))


def name_of(rows: bytes) -> str:
    """Return the name of the segment with these bytes of rows.zip."""
    return hashlib.blake2b(rows, digest_size=16).hexdigest()


# Arrays with a number of each trace, and the attributes of a packed trace that hold it.
_OF_TRACES = {
    "num_tokens": "num_tokens",
    "attention_layout": "layout",
    "num_nonfinite": "num_nonfinite",
    "fields": "field_bits",
    "edges_reversed": "reversed_edges",
    "graph_crc32c": "graph_crc",
    "sequence_crc32c": "sequence_crc",
}


def _row_arrays(traces: Sequence[PackedTrace]) -> dict[str, np.ndarray]:
    """Return the arrays of schema.ROW_ARRAYS for the traces of a segment."""
    records = [t.record for t in traces]
    has_last = np.array([t.has_last_token for t in traces], bool)
    rows: dict[str, Any] = {
        **{name: [getattr(t, attribute) for t in traces] for name, attribute in _OF_TRACES.items()},
        "sample": [r.sample for r in records],
        "source_position": [r.position for r in records],
        "prompt_length": [-1 if r.prompt_length is None else r.prompt_length for r in records],
        "last_token_row": np.where(has_last, np.cumsum(has_last) - 1, -1),
    }
    tokens = [r.tokens if r.tokens is not None else np.zeros(0, "<i4") for r in records]
    rows["tokens"] = np.concatenate(tokens) if tokens else ()
    rows["tokens_offsets"] = np.cumsum([0, *map(len, tokens)])
    rows["tokens_decoded_ptr"] = np.cumsum([0, *(len(r.tokens_decoded or ()) for r in records)])
    for name, strings in _texts(traces).items():
        rows[name], rows[f"{name}_offsets"] = encode_strings(strings)
    for name in set[str]().union(*(r.optional for r in records)):
        rows |= _optional_arrays(name, [r.optional.get(name) for r in records])
    counts = [t.edge_counts for t in traces if t.edge_counts is not None]
    if counts:
        rows["edge_ptr"] = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return {name: np.asarray(rows[name], dtype) for name, dtype in schema.ROW_DTYPES.items() if name in rows}


def _texts(traces: Sequence[PackedTrace]) -> dict[str, list[str]]:
    """Return the texts of the traces of a segment, by the names of their arrays."""
    records = [t.record for t in traces]
    texts = {name: [r.strings.get(name, "") for r in records] for name in schema.TEXT_FIELDS}
    texts["question_id"] = [r.question_id for r in records]
    texts["extras"] = [t.extras for t in traces]
    texts["tokens_decoded"] = [text for r in records for text in r.tokens_decoded or ()]
    return texts


def _optional_arrays(name: str, values: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a field of schema.OPTIONAL_FIELDS, whose value is None for a trace without it."""
    field = schema.OPTIONAL_FIELDS[name]
    if field.shape == schema.PER_TRACE:
        table = np.full((len(values), len(field.parts) or 1), field.fill, field.dtype)
        for row, value in enumerate(values):
            if value is not None:
                table[row] = value
        return dict(zip(schema.OPTIONAL_ARRAYS[name], table.T, strict=True))
    if field.shape == schema.JSON:
        data, offsets = encode_strings([value or "" for value in values])
    else:
        parts = [np.zeros(0, field.dtype) if value is None else value.reshape(-1) for value in values]
        data, offsets = np.concatenate(parts), np.cumsum([0, *map(len, parts)])
    return {name: data, f"{name}_offsets": offsets}
