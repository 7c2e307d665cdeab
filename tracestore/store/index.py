"""The index of one generation: from a key to a trace, from a trace to its places."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracestore._core.index import KeyTable, PlaceTable, find_key
from tracestore.errors import StoreDamagedError
from tracestore.store import manifest as mf
from tracestore.store.container import MappedArrays
from tracestore.store.files import FileEntry, StoreFiles


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


def part_files(part: MappedArrays, begin: int = 0, end: int | None = None) -> list[FileEntry]:
    """Files of the segments of one part, in its order."""
    end = part.length("file_size") if end is None else end
    sizes, sums = part.read("file_size", begin, end), part.read("file_crc32c", begin, end)
    paths = part.strings("file_path", begin, end)
    return [FileEntry(*file) for file in zip(paths, sizes.tolist(), sums.tolist(), strict=True)]


class StoreIndex:
    """Maps the index parts of a manifest. Cheap: no Python object a trace."""

    def __init__(self, files: StoreFiles, manifest: mf.Manifest) -> None:
        self.manifest = manifest
        self._parts: list[MappedArrays] = []
        self._kept: dict[tuple[int, str], np.ndarray] = {}  # (part, name); -1: over all parts
        self._keys: list[KeyTable] = []
        self._first_trace = [p.first_trace for p in manifest.parts]
        self._first_segment = [p.first_segment for p in manifest.parts]
        self._first_source = [p.first_source for p in manifest.parts]
        for ref in manifest.parts:
            try:
                mapped = files.map(FileEntry(ref.path, ref.size, ref.crc32c))
                part = MappedArrays(mapped)
                if any(part.length(name) != ref.num_traces for name in mf.TRACE_COLUMNS):
                    raise ValueError("another number of traces than the manifest says")
                arrays = part.views
                keys = KeyTable(arrays["key_table"], arrays["id_offsets"], arrays["id"], arrays["sample"], mapped)
            except FileNotFoundError:
                raise
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StoreDamagedError(f"{ref.path}: {error}") from None
            self._parts.append(part)
            self._keys.append(keys)
        try:
            parts = [(first, p.views, p.mapped) for first, p in zip(self._first_trace, self._parts, strict=True)]
            self._places = PlaceTable(parts)
        except (ValueError, KeyError) as error:
            raise StoreDamagedError(f"generation {manifest.generation}: the index: {error}") from None

    def __len__(self) -> int:
        return self.manifest.num_traces

    def part_arrays(self, number: int) -> dict[str, np.ndarray]:
        """A part as a whole, in memory."""
        part = self._parts[number]
        return {name: part.read(name) for name in part.views}

    def _keep(self, part: int, name: str) -> np.ndarray:
        """An array of a part in memory, read once."""
        if (part, name) not in self._kept:
            self._kept[part, name] = self._parts[part].read(name)
        return self._kept[part, name]

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
        values = {name: [int(arrays.read(name, k, k + 1)[0])] for name in mf.TRACE_COLUMNS}
        for number in range(part + 1, len(self._parts)):
            later = self._parts[number]
            if later.length("patch_trace") == 0:
                continue
            begin, end = np.searchsorted(self._keep(number, "patch_trace"), [index, index + 1])
            for p in range(int(begin), int(end)):
                patch = {name: int(later.read(name, p, p + 1)[0]) for name in mf.PATCH_COLUMNS}
                mf.apply_patch(values, 0, patch)
        return TraceRow(**{name: v[0] for name, v in values.items()})

    def column(self, name: str) -> np.ndarray:
        """One of manifest.TRACE_COLUMNS for all traces, patches applied; read once, read-only."""
        values = self._kept.get((-1, name))
        if values is None:
            values = self._kept[-1, name] = self._read_column(name)
            values.flags.writeable = False
        return values

    def _read_column(self, name: str) -> np.ndarray:
        pieces = [part.read(name) for part in self._parts]
        patched = [part for part in self._parts if part.length("patch_trace")]
        if len(pieces) == 1 and not patched:
            return pieces[0]
        values = np.concatenate(pieces) if pieces else np.zeros(0, mf.TRACE_COLUMNS[name])
        group = mf.GROUP_SEQUENCE if name.startswith(("sequence", "last_token")) else mf.GROUP_GRAPH
        column = "patch_" + name.removeprefix("graph_").removeprefix("sequence_")
        for part in patched:
            if column not in part:
                continue
            patch = part.read(column)
            chosen = part.read("patch_group") == group if name != "nonfinite" else np.ones(len(patch), bool)
            target = part.read("patch_trace")[chosen]
            values[target] = patch[chosen] | (values[target] if name == "nonfinite" else 0)
        return values

    def question_ids(self, indices: np.ndarray) -> list[str]:
        """Those of some traces, all in one call."""
        return self._places.question_ids(np.ascontiguousarray(indices, np.int64))

    def question_id(self, index: int) -> str:
        return self._places.question_ids(np.array([index], np.int64))[0]

    def files(self) -> Iterator[FileEntry]:
        """Every file of every segment."""
        for part in self._parts:
            yield from part_files(part)

    def segment_files(self, segment: int) -> list[FileEntry]:
        part = bisect_right(self._first_segment, segment) - 1
        # Two parts may begin at one segment number where a commit had patches only.
        while part > 0 and self.manifest.parts[part].num_segments == 0:
            part -= 1
        begin, end = np.searchsorted(self._keep(part, "file_segment"), [segment, segment + 1])
        return part_files(self._parts[part], int(begin), int(end))

    def source(self, number: int) -> SourceEntry:
        part = bisect_right(self._first_source, number) - 1
        k = number - self._first_source[part]
        return self._sources(self._parts[part], k, k + 1)[0]

    @staticmethod
    def _sources(part: MappedArrays, begin: int, end: int) -> list[SourceEntry]:
        path, fingerprint = (part.strings(f"source_{name}", begin, end) for name in ("path", "fingerprint"))
        size, traces, skipped = (part.read(f"source_{n}", begin, end).tolist() for n in ("size", "traces", "skipped"))
        return [SourceEntry(*source) for source in zip(path, size, fingerprint, traces, skipped, strict=True)]

    def sources(self) -> Iterator[SourceEntry]:
        for part in self._parts:
            yield from self._sources(part, 0, part.length("source_size"))
