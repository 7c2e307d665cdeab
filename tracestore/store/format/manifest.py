"""The manifest, which is the root of a generation, and the layout of the index parts it references.

An index part covers a range of traces, segments and sources. Each commit adds one part and merges
it with preceding parts of similar size. Each trace is therefore rewritten O(log N) times, and a
reader maps only a handful of files.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from tracestore._core.index import build_key_table
from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError, escape_unprintable
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.ragged import concatenate_ragged

# A manifest references some tens of parts: their number grows with the logarithm of the number of commits.
MAX_MANIFEST_BYTES = 4 << 20
# Largest counts that the 32-bit and 64-bit integers of the format can hold.
_MAX_TRACES = (1 << 31) - 1
_MAX_COUNT = 1 << 62

# One value per trace. A column *_segment is -1 if the trace lacks the data of that field group.
TRACE_COLUMNS: dict[str, str] = {
    "graph_segment": "<i4",
    "graph_row": "<i4",
    "sequence_segment": "<i4",
    "sequence_row": "<i4",
    "num_tokens": "<i4",
    "layout": "|u1",
    "nonfinite": "|u1",
    "sample": "<i4",
    "source": "<i4",
    "source_position": "<i4",
}
# Locations that a later source added to a trace of an earlier part, sorted by trace.
PATCH_COLUMNS: dict[str, str] = {
    "patch_trace": "<i8",
    "patch_group": "|u1",
    "patch_segment": "<i4",
    "patch_row": "<i4",
    "patch_num_tokens": "<i4",
    "patch_layout": "|u1",
    "patch_nonfinite": "|u1",
}
# The two field groups of a trace, which may come from different sources; values of patch_group.
GROUP_GRAPH, GROUP_SEQUENCE = 0, 1
GROUP_NAMES = ("graph", "sequence")
# Trace columns that belong to the location of a field group, besides <group>_segment and <group>_row.
LOCATION_COLUMNS = {"graph": ("num_tokens", "layout"), "sequence": ()}
# Name, traces and tokens of each segment, and size and checksum of its rows.zip.
SEGMENT_COLUMNS = {
    "segment_traces": "<i4",
    "segment_tokens": "<i8",
    "segment_size": "<i8",
    "segment_crc32c": "<u4",
}
# `source_provenance` is a position in the attribute `provenance` of the manifest, or -1.
SOURCE_COLUMNS = {
    "source_size": "<i8",
    "source_traces": "<i8",
    "source_skipped": "<i8",
    "source_provenance": "<i4",
}
STRINGS = ("id", "segment_name", "source_path", "source_fingerprint")
# Dtype of every array of an index part.
PART_DTYPES: dict[str, str] = {
    **TRACE_COLUMNS,
    **PATCH_COLUMNS,
    **SEGMENT_COLUMNS,
    **SOURCE_COLUMNS,
    **{f"{name}{suffix}": dtype for name in STRINGS for suffix, dtype in (("", "|u1"), ("_offsets", "<i8"))},
    "key_table": "<u4",
}
# Parts are merged up to this number of traces, so that a reader of one trace need not fetch the whole index.
MAX_PART_TRACES = 1 << 21


@dataclass(frozen=True)
class PartRef(FileEntry):
    """The file of an index part and the ranges it covers."""

    first_trace: int
    num_traces: int
    first_segment: int
    num_segments: int
    first_source: int
    num_sources: int


@dataclass(frozen=True)
class ColumnsRef(FileEntry):
    """The file of a group of columns and the range of traces it covers."""

    first_trace: int
    num_traces: int


@dataclass(frozen=True)
class Manifest:
    """The committed state of one generation of a store."""

    generation: int
    attributes: schema.Attributes
    parts: tuple[PartRef, ...] = ()
    columns: tuple[ColumnsRef, ...] = ()
    num_traces: int = 0
    num_tokens: int = 0
    num_scored: int = 0
    num_labeled: int = 0
    num_bytes: int = 0
    fields: tuple[str, ...] = ()

    @cached_property
    def num_segments(self) -> int:
        """Number of segments of all index parts."""
        return sum(p.num_segments for p in self.parts)

    @cached_property
    def num_sources(self) -> int:
        """Number of sources of all index parts."""
        return sum(p.num_sources for p in self.parts)

    @property
    def content(self) -> str:
        """A name of the traces without their scores, equal in every copy: index parts hold the checksums of segments."""
        sums = [(part.num_traces, part.size, part.crc32c) for part in self.parts]
        return hashlib.blake2b(repr(sums).encode(), digest_size=16).hexdigest()

    def small_files(self) -> list[FileEntry]:
        """Return the files of the index and the columns."""
        return [*self.parts, *self.columns]

    def to_bytes(self) -> bytes:
        """Return the JSON document followed by a line with its CRC-32C."""
        body = {
            "tracestore_manifest": schema.FORMAT_VERSION,
            "attributes": self.attributes.to_json(),
            "index": [asdict(p) for p in self.parts],
            "columns": [asdict(c) for c in self.columns],
            "fields": list(self.fields),
            **{name: getattr(self, name) for name in ("generation", *_COUNTS)},
        }
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return f"{text}\n{crc32c(text.encode()):08x}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Return the manifest in `data`; raise ValueError if it is truncated, damaged or invalid."""
        if len(data) < 11 or data[-1:] != b"\n" or data[-10:-9] != b"\n":
            raise ValueError("the manifest is truncated")
        text = data[:-10]
        if f"{crc32c(text):08x}".encode() != data[-9:-1]:
            raise ValueError("checksum mismatch")
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("tracestore_manifest") != schema.FORMAT_VERSION:
            found = body.get("tracestore_manifest") if isinstance(body, dict) else body
            raise ValueError(f"found format version {found!r:.40}, expected {schema.FORMAT_VERSION}")
        if body.keys() != _KEYS:
            raise ValueError("the keys are not those of this format")
        fields = body["fields"]
        if not isinstance(fields, list) or not all(isinstance(f, str) and f in schema.STORED_FIELDS for f in fields):
            raise ValueError(f"fields: found {fields!r:.60}")
        counts = {name: _count(name, body[name]) for name in _COUNTS}
        manifest = cls(
            generation=_count("generation", body["generation"]),
            attributes=schema.Attributes.from_json(body["attributes"]),
            parts=_refs(PartRef, "index", body["index"]),
            columns=_refs(ColumnsRef, "columns", body["columns"]),
            fields=tuple(fields),
            **counts,
        )
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Raise ValueError unless parts and columns cover all traces, segments and sources in order."""
        for kind in ("trace", "segment", "source"):
            _check_contiguous(f"{kind}s of the index", self.parts, f"first_{kind}", f"num_{kind}s")
        _check_contiguous("traces of the columns", self.columns, "first_trace", "num_traces")
        for name, refs in (("index", self.parts), ("columns", self.columns)):
            found = sum(r.num_traces for r in refs)
            if found != self.num_traces:
                raise ValueError(f"{name}: found {found} traces, expected {self.num_traces}")
        if self.num_traces > _MAX_TRACES:
            raise ValueError(f"num_traces: found {self.num_traces}, expected at most {_MAX_TRACES}")
        if self.attributes.open_sources and self.attributes.open_sources[-1][1] > self.num_sources:
            raise ValueError(f"attributes: open_sources: beyond the {self.num_sources} sources")
        states = {name: getattr(self.attributes, name) for name in ("num_layers", "hidden_dim", "hidden_dtype")}
        if self.num_traces and None in states.values():
            raise ValueError(f"attributes: found {states} in a store with traces")
        lens = self.attributes.lens
        if lens is not None and lens.segment >= self.num_segments:
            raise ValueError(f"attributes: lens: found segment {lens.segment} of {self.num_segments}")
        if max(self.num_scored, self.num_labeled) > self.num_traces:
            raise ValueError("found more scores or labels than traces")


Ref = TypeVar("Ref", PartRef, ColumnsRef)
_COUNTS = ("num_traces", "num_tokens", "num_scored", "num_labeled", "num_bytes")
_KEYS = {"tracestore_manifest", "generation", "attributes", "index", "columns", "fields", *_COUNTS}


def _count(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{name}: found {value!r:.40}, expected a count")
    return value


def _refs(kind: type[Ref], folder: str, value: object) -> tuple[Ref, ...]:
    """Return the references to files in a folder of the store; raise ValueError or TypeError if one is not valid."""
    if not isinstance(value, list):
        raise ValueError(f"{folder}: found {value!r:.40}, expected a list of objects")
    refs = tuple(kind(**item) for item in value)
    for ref in refs:
        if not ref.path.startswith(f"{folder}/"):
            raise ValueError(f"{folder}: found {ref.path!r:.60}")
        for name, count in vars(ref).items():
            if name.startswith(("first_", "num_")):
                _count(name, count)
    return refs


def _check_contiguous(name: str, refs: Sequence[Any], first: str, count: str) -> None:
    expected = 0
    for ref in refs:
        if getattr(ref, first) != expected:
            raise ValueError(f"{name}: a range starts at {getattr(ref, first)}, expected {expected}")
        expected += getattr(ref, count)


def parse_manifest(data: bytes, generation: int) -> Manifest:
    """Return the manifest in the bytes of manifest/<generation>; raise CorruptStoreError if they are invalid."""
    try:
        manifest = Manifest.from_bytes(data)
        if manifest.generation != generation:
            raise ValueError(f"found generation {manifest.generation}, expected {generation}")
    except (ValueError, KeyError, TypeError, RecursionError, CorruptStoreError) as error:
        raise CorruptStoreError(f"{paths.manifest(generation)}: {escape_unprintable(str(error), 300)}") from None
    return manifest


def check_part(ref: PartRef, lengths: Mapping[str, int]) -> None:
    """Raise ValueError unless the arrays of an index part have the lengths that its reference implies."""
    expected = dict.fromkeys(TRACE_COLUMNS, ref.num_traces)
    expected |= dict.fromkeys(PATCH_COLUMNS, lengths["patch_trace"])
    expected |= dict.fromkeys(SEGMENT_COLUMNS, ref.num_segments)
    expected |= dict.fromkeys(SOURCE_COLUMNS, ref.num_sources)
    counts = {"id": ref.num_traces, "segment_name": ref.num_segments}
    counts |= dict.fromkeys(("source_path", "source_fingerprint"), ref.num_sources)
    expected |= {f"{name}_offsets": count + 1 for name, count in counts.items()}
    expected["key_table"] = key_table_size(ref.num_traces)
    for name, length in expected.items():
        if lengths[name] != length:
            raise ValueError(f"{name}: found {lengths[name]} values, expected {length}")


def key_table_size(num_traces: int) -> int:
    """Return the number of slots of a part's hash table of keys."""
    return 0 if num_traces == 0 else 1 << (2 * num_traces - 1).bit_length()


def merge_parts(older: dict[str, np.ndarray], newer: dict[str, np.ndarray], first_trace: int) -> dict[str, np.ndarray]:
    """Merge two adjacent index parts.

    Patches of the newer part that concern rows of the older part are applied. Patches of rows before
    `first_trace`, the first trace of the merged part, are kept as patches.
    """
    arrays: dict[str, np.ndarray] = {}
    for columns in (TRACE_COLUMNS, SEGMENT_COLUMNS, SOURCE_COLUMNS):
        for name, dtype in columns.items():
            arrays[name] = np.concatenate([older[name], newer[name]]).astype(dtype)
    for name in STRINGS:
        pairs = [(part[name], part[f"{name}_offsets"]) for part in (older, newer)]
        arrays[name], arrays[f"{name}_offsets"] = concatenate_ragged(pairs)
    inside = newer["patch_trace"] >= first_trace
    for k in np.flatnonzero(inside):
        apply_patch(arrays, int(newer["patch_trace"][k]) - first_trace, {n: newer[n][k] for n in PATCH_COLUMNS})
    kept = {name: np.concatenate([older[name], newer[name][~inside]]) for name in PATCH_COLUMNS}
    order = np.argsort(kept["patch_trace"], kind="stable")
    arrays |= {name: values[order].astype(PATCH_COLUMNS[name]) for name, values in kept.items()}
    return arrays


def apply_patch(arrays: dict[str, Any], row: int, patch: dict[str, Any]) -> None:
    """Write the location that a patch adds into row `row` of writable trace columns."""
    group = "graph" if patch["patch_group"] == GROUP_GRAPH else "sequence"
    for name in ("segment", "row"):
        arrays[f"{group}_{name}"][row] = patch[f"patch_{name}"]
    for name in LOCATION_COLUMNS[group]:
        arrays[name][row] = patch[f"patch_{name}"]
    arrays["nonfinite"][row] |= patch["patch_nonfinite"]


def with_key_table(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a part with the hash table of its keys added."""
    num_traces = len(arrays["sample"])
    table = np.zeros(key_table_size(num_traces), "<u4")
    if num_traces:
        duplicate = build_key_table(table, arrays["id_offsets"], arrays["id"], arrays["sample"])
        if duplicate >= 0:
            raise ValueError(f"trace {duplicate} of the part has a duplicate key")
    return arrays | {"key_table": table}
