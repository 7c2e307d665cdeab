"""The index of one generation: from a key to a trace, from a trace to its places."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracestore._core.index import KeyTable, PlaceTable, find_key
from tracestore._core.mapping import MappedFile
from tracestore.errors import StoreDamagedError
from tracestore.store import manifest as mf
from tracestore.store.container import map_arrays
from tracestore.store.ragged import decode_string
from tracestore.store.segment import FileEntry


@dataclass(frozen=True)
class TraceRow:
    """Where the parts of one trace lie. A segment of -1: the trace has no such place."""

    graph_segment: int
    graph_row: int
    hidden_row: int
    attention_start: int
    num_tokens: int
    layout: int
    sequence_segment: int
    sequence_row: int
    last_token_row: int
    nonfinite: int
    sample: int
    source: int
    source_position: int
    graph_crc32c: int
    sequence_crc32c: int

    @property
    def home(self) -> tuple[int, int]:
        """Segment and row that hold the trace's texts."""
        if self.graph_segment >= 0:
            return self.graph_segment, self.graph_row
        return self.sequence_segment, self.sequence_row


@dataclass(frozen=True)
class SourceEntry:
    """A committed input file: its path under SRC, its size, and a digest of samples of it."""

    path: str
    size: int
    fingerprint: str
    num_traces: int
    num_skipped: int


def _file(arrays: dict[str, np.ndarray], k: int) -> FileEntry:
    path = decode_string(arrays["file_path"], arrays["file_path_offsets"], k)
    return FileEntry(path, int(arrays["file_size"][k]), int(arrays["file_crc32c"][k]))


def part_files(arrays: dict[str, np.ndarray]) -> Iterator[FileEntry]:
    """Every file of the segments of one part."""
    return (_file(arrays, k) for k in range(len(arrays["file_size"])))


class StoreIndex:
    """Maps the index parts of a manifest. Cheap: no Python object a trace."""

    def __init__(self, store: Path, manifest: mf.Manifest) -> None:
        self.manifest = manifest
        self._parts: list[dict[str, np.ndarray]] = []
        self._keys: list[KeyTable] = []
        self._first_trace = [p.first_trace for p in manifest.parts]
        self._first_segment = [p.first_segment for p in manifest.parts]
        self._first_source = [p.first_source for p in manifest.parts]
        for ref in manifest.parts:
            try:
                arrays = map_arrays(MappedFile(store / ref.path, ref.size))
                if len(arrays["sample"]) != ref.num_traces or any(
                    len(arrays[name]) != ref.num_traces for name in mf.TRACE_COLUMNS
                ):
                    raise ValueError("another number of traces than the manifest says")
                keys = KeyTable(arrays["key_table"], arrays["id_offsets"], arrays["id"], arrays["sample"])
            except FileNotFoundError:
                raise
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StoreDamagedError(f"{ref.path}: {error}") from None
            self._parts.append(arrays)
            self._keys.append(keys)
        try:
            self._places = PlaceTable(list(zip(self._first_trace, self._parts, strict=True)))
        except (ValueError, KeyError) as error:
            raise StoreDamagedError(f"{store}: the index: {error}") from None

    def __len__(self) -> int:
        return self.manifest.num_traces

    def part_arrays(self, number: int) -> dict[str, np.ndarray]:
        return self._parts[number]

    def find(self, question_id: str, sample: int = 0) -> int:
        """Store index of the key, or -1."""
        part, row = find_key(self._keys, question_id.encode("utf-8", "surrogatepass"), sample)
        return -1 if part < 0 else self._first_trace[part] + row

    def places(self, indices: np.ndarray) -> np.ndarray:
        """(n, 7) int64, see PlaceTable.look_up: where some traces lie, all in one call."""
        out = np.empty((len(indices), 7), np.int64)
        self._places.look_up(np.ascontiguousarray(indices, np.int64), out)
        return out

    def _locate(self, index: int) -> tuple[int, int]:
        part = bisect_right(self._first_trace, index) - 1
        return part, index - self._first_trace[part]

    def row(self, index: int) -> TraceRow:
        """The places of trace `index` (0 <= index < N), patches of later parts applied."""
        part, k = self._locate(index)
        arrays = self._parts[part]
        values = {name: [int(arrays[name][k])] for name in mf.TRACE_COLUMNS}
        for later in self._parts[part + 1 :]:
            traces = later["patch_trace"]
            if len(traces) == 0:
                continue
            begin, end = np.searchsorted(traces, [index, index + 1])
            for p in range(int(begin), int(end)):
                mf.apply_patch(values, 0, {name: int(later[name][p]) for name in mf.PATCH_COLUMNS})
        return TraceRow(**{name: v[0] for name, v in values.items()})

    def column(self, name: str) -> np.ndarray:
        """One of manifest.TRACE_COLUMNS for all traces, patches applied; a copy where it must be."""
        pieces = [part[name] for part in self._parts]
        patched = any(len(part["patch_trace"]) for part in self._parts)
        if len(pieces) == 1 and not patched:
            return pieces[0]
        values = {name: np.concatenate(pieces) if pieces else np.zeros(0, mf.TRACE_COLUMNS[name])}
        if patched:
            group = mf.GROUP_SEQUENCE if name.startswith(("sequence", "last_token")) else mf.GROUP_GRAPH
            column = "patch_" + name.removeprefix("graph_").removeprefix("sequence_")
            for part in self._parts:
                if column not in part:
                    continue
                chosen = part["patch_group"] == group if name != "nonfinite" else np.ones(len(part[column]), bool)
                target = part["patch_trace"][chosen]
                values[name][target] = part[column][chosen] | (values[name][target] if name == "nonfinite" else 0)
        return values[name]

    def question_ids(self, indices: np.ndarray) -> list[str]:
        """Those of some traces, all in one call."""
        return self._places.question_ids(np.ascontiguousarray(indices, np.int64))

    def question_id(self, index: int) -> str:
        part, k = self._locate(index)
        arrays = self._parts[part]
        return decode_string(arrays["id"], arrays["id_offsets"], k)

    def files(self) -> Iterator[FileEntry]:
        """Every file of every segment."""
        for arrays in self._parts:
            yield from part_files(arrays)

    def segment_files(self, segment: int) -> list[FileEntry]:
        part = bisect_right(self._first_segment, segment) - 1
        # Two parts may begin at one segment number where a commit had patches only.
        while part > 0 and self.manifest.parts[part].num_segments == 0:
            part -= 1
        arrays = self._parts[part]
        begin, end = np.searchsorted(arrays["file_segment"], [segment, segment + 1])
        return [_file(arrays, k) for k in range(int(begin), int(end))]

    def source(self, number: int) -> SourceEntry:
        part = bisect_right(self._first_source, number) - 1
        arrays, k = self._parts[part], number - self._first_source[part]
        return SourceEntry(
            decode_string(arrays["source_path"], arrays["source_path_offsets"], k),
            int(arrays["source_size"][k]),
            decode_string(arrays["source_fingerprint"], arrays["source_fingerprint_offsets"], k),
            int(arrays["source_traces"][k]),
            int(arrays["source_skipped"][k]),
        )

    def sources(self) -> Iterator[SourceEntry]:
        return (self.source(k) for k in range(self.manifest.num_sources))
