"""The manifest: the root of a generation, and the index parts it names.

An index part covers a range of traces, segments and sources. Each commit adds
one; parts of like size are merged, so that a commit rewrites O(log) of the
index over time and a reader maps a handful of files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tracestore._core.index import KeyTable
from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError, escape_unprintable
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.ragged import concatenate_ragged, encode_strings

# A manifest names some tens of parts: their number grows with the logarithm of the commits.
MAX_MANIFEST_BYTES = 4 << 20
# The largest counts of the format: what numbers and offsets of 32 and 64 bits hold.
_MAX_TRACES = (1 << 31) - 1
_MAX_COUNT = 1 << 62

# One value a trace. *_segment is -1 where the trace has no such place.
TRACE_COLUMNS: dict[str, str] = {
    "graph_segment": "<i4",
    "graph_row": "<i4",
    "hidden_row": "<i8",
    "attention_start": "<i8",
    "num_tokens": "<i4",
    "layout": "|u1",
    "sequence_segment": "<i4",
    "sequence_row": "<i4",
    "last_token_row": "<i4",
    "nonfinite": "|u1",
    "sample": "<i4",
    "source": "<i4",
    "source_position": "<i4",
    "graph_crc32c": "<u4",
    "sequence_crc32c": "<u4",
}
# Places that a later source added to a trace of an earlier part, sorted by trace.
PATCH_COLUMNS: dict[str, str] = {
    "patch_trace": "<i8",
    "patch_group": "|u1",
    "patch_segment": "<i4",
    "patch_row": "<i4",
    "patch_hidden_row": "<i8",
    "patch_attention_start": "<i8",
    "patch_num_tokens": "<i4",
    "patch_layout": "|u1",
    "patch_last_token_row": "<i4",
    "patch_nonfinite": "|u1",
    "patch_crc32c": "<u4",
}
GROUP_GRAPH, GROUP_SEQUENCE = 0, 1
FILE_COLUMNS = {"file_segment": "<i4", "file_size": "<i8", "file_crc32c": "<u4"}
SEGMENT_COLUMNS = {"segment_traces": "<i4", "segment_tokens": "<i8"}
SOURCE_COLUMNS = {"source_size": "<i8", "source_traces": "<i8", "source_skipped": "<i8"}
STRINGS = ("id", "file_path", "source_path", "source_fingerprint")
# Every array of an index part, by name.
PART_DTYPES: dict[str, str] = {
    **TRACE_COLUMNS,
    **PATCH_COLUMNS,
    **FILE_COLUMNS,
    **SEGMENT_COLUMNS,
    **SOURCE_COLUMNS,
    **{f"{name}{suffix}": dtype for name in STRINGS for suffix, dtype in (("", "|u1"), ("_offsets", "<i8"))},
    "key_table": "<u4",
}


@dataclass(frozen=True)
class PartRef:
    """An index part as the root names it."""

    path: str
    size: int
    crc32c: int
    first_trace: int
    num_traces: int
    first_segment: int
    num_segments: int
    first_source: int
    num_sources: int


@dataclass(frozen=True)
class ColumnsRef:
    """A columns group and the traces it covers."""

    path: str
    first_trace: int
    num_traces: int
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """A generation of the store."""

    generation: int
    attributes: schema.Attributes
    parts: tuple[PartRef, ...] = ()
    columns: tuple[ColumnsRef, ...] = ()
    num_traces: int = 0
    num_tokens: int = 0
    num_scored: int = 0
    num_labelled: int = 0
    num_bytes: int = 0
    fields: tuple[str, ...] = ()

    @property
    def num_segments(self) -> int:
        return sum(p.num_segments for p in self.parts)

    @property
    def num_sources(self) -> int:
        return sum(p.num_sources for p in self.parts)

    def small_files(self) -> list[FileEntry]:
        """Those of index and columns."""
        parts = [FileEntry(p.path, p.size, p.crc32c) for p in self.parts]
        return parts + [file for columns in self.columns for file in columns.files]

    def to_bytes(self) -> bytes:
        body = {
            "tracestore_manifest": schema.FORMAT_VERSION,
            "generation": self.generation,
            "attributes": self.attributes.to_json(),
            "index": [asdict(p) for p in self.parts],
            "columns": [asdict(c) for c in self.columns],
            "num_traces": self.num_traces,
            "num_tokens": self.num_tokens,
            "num_scored": self.num_scored,
            "num_labelled": self.num_labelled,
            "num_bytes": self.num_bytes,
            "fields": list(self.fields),
        }
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return f"{text}\n{crc32c(text.encode()):08x}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """ValueError where the bytes are not a whole manifest."""
        if len(data) < 11 or data[-1:] != b"\n" or data[-10:-9] != b"\n":
            raise ValueError("not a whole manifest")
        text = data[:-10]
        if f"{crc32c(text):08x}".encode() != data[-9:-1]:
            raise ValueError("checksum mismatch")
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("tracestore_manifest") != schema.FORMAT_VERSION:
            found = body.get("tracestore_manifest") if isinstance(body, dict) else body
            raise ValueError(f"format version {found!r:.40}, this is {schema.FORMAT_VERSION}")
        if body.keys() != _KEYS:
            raise ValueError("not the keys of this format")
        fields = body["fields"]
        if not isinstance(fields, list) or not all(isinstance(f, str) and f in schema.STORED_FIELDS for f in fields):
            raise ValueError(f"fields: found {fields!r:.60}")
        counts = {name: _count(name, body[name]) for name in _COUNTS}
        manifest = cls(
            generation=_count("generation", body["generation"]),
            attributes=schema.Attributes.from_json(body["attributes"]),
            parts=tuple(_part_ref(p) for p in _list("index", body["index"])),
            columns=tuple(_columns_ref(c) for c in _list("columns", body["columns"])),
            fields=tuple(fields),
            **counts,
        )
        manifest._check()
        return manifest

    def _check(self) -> None:
        """ValueError unless parts and columns cover all traces, segments and sources in order."""
        for what in ("trace", "segment", "source"):
            _cover(f"{what}s of the index", self.parts, f"first_{what}", f"num_{what}s")
        _cover("traces of the columns", self.columns, "first_trace", "num_traces")
        for what, refs in (("index", self.parts), ("columns", self.columns)):
            if sum(r.num_traces for r in refs) != self.num_traces:
                raise ValueError(f"{what}: another number of traces than {self.num_traces}")
        if self.num_traces > _MAX_TRACES:
            raise ValueError(f"num_traces: found {self.num_traces}")
        if max(self.num_scored, self.num_labelled) > self.num_traces:
            raise ValueError("more scores or labels than traces")


_COUNTS = ("num_traces", "num_tokens", "num_scored", "num_labelled", "num_bytes")
_KEYS = {"tracestore_manifest", "generation", "attributes", "index", "columns", "fields", *_COUNTS}


def _count(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{name}: found {value!r:.40}, expected a count")
    return value


def _list(name: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name}: found {value!r:.40}, expected a list of objects")
    return value


def _part_ref(data: dict[str, Any]) -> PartRef:
    ref = PartRef(**data)
    FileEntry(ref.path, ref.size, ref.crc32c)
    if not ref.path.startswith("index/") or not ref.path.endswith("/part"):
        raise ValueError(f"index: found {ref.path!r:.60}")
    for name in ("first_trace", "num_traces", "first_segment", "num_segments", "first_source", "num_sources"):
        _count(name, getattr(ref, name))
    return ref


def _columns_ref(data: dict[str, Any]) -> ColumnsRef:
    files = tuple(FileEntry(**f) for f in _list("files", data["files"]))
    ref = ColumnsRef(**data | {"files": files})
    if any(not f.path.startswith(f"{ref.path}/") or not f.path.startswith("columns/") for f in files) or not files:
        raise ValueError(f"columns: files outside of {ref.path!r:.60}")
    _count("first_trace", ref.first_trace)
    _count("num_traces", ref.num_traces)
    return ref


def _cover(what: str, refs: Sequence[Any], first: str, count: str) -> None:
    at = 0
    for ref in refs:
        if getattr(ref, first) != at:
            raise ValueError(f"{what}: one begins at {getattr(ref, first)}, expected {at}")
        at += getattr(ref, count)


def parse_manifest(data: bytes, generation: int) -> Manifest:
    """The manifest in the bytes of manifest/<generation>; CorruptStoreError where they are not whole."""
    try:
        manifest = Manifest.from_bytes(data)
        if manifest.generation != generation:
            raise ValueError(f"says it is generation {manifest.generation}")
    except (ValueError, KeyError, TypeError, RecursionError, CorruptStoreError) as error:
        raise CorruptStoreError(f"{paths.manifest(generation)}: {escape_unprintable(str(error), 300)}") from None
    return manifest


def empty_columns() -> dict[str, np.ndarray]:
    """The arrays of a part without rows."""
    arrays = {name: np.zeros(0, dtype) for name, dtype in PART_DTYPES.items()}
    for name in STRINGS:
        arrays[name], arrays[f"{name}_offsets"] = encode_strings([])
    del arrays["key_table"]  # with_key_table
    return arrays


def check_part(ref: PartRef, lengths: Mapping[str, int]) -> None:
    """ValueError unless the arrays of an index part, by their lengths, are those that the manifest
    says."""
    num_files = lengths["file_size"]
    expected = dict.fromkeys(TRACE_COLUMNS, ref.num_traces)
    expected |= dict.fromkeys(PATCH_COLUMNS, lengths["patch_trace"])
    expected |= dict.fromkeys(FILE_COLUMNS, num_files)
    expected |= dict.fromkeys(SEGMENT_COLUMNS, ref.num_segments)
    expected |= dict.fromkeys(SOURCE_COLUMNS, ref.num_sources)
    counts = {"id": ref.num_traces, "file_path": num_files, "source_path": ref.num_sources}
    counts["source_fingerprint"] = ref.num_sources
    expected |= {f"{name}_offsets": count + 1 for name, count in counts.items()}
    expected["key_table"] = key_table_size(ref.num_traces)
    for name, length in expected.items():
        if lengths[name] != length:
            raise ValueError(f"{name}: {lengths[name]} values, expected {length}")


def key_table_size(num_traces: int) -> int:
    """Slots of the hash table of a part's keys."""
    return 0 if num_traces == 0 else 1 << (2 * num_traces - 1).bit_length()


def merge_parts(older: dict[str, np.ndarray], newer: dict[str, np.ndarray], first_trace: int) -> dict[str, np.ndarray]:
    """Two neighbouring parts as one. Patches of the newer part to rows of the older
    are applied; patches to rows before `first_trace` are kept."""
    arrays: dict[str, np.ndarray] = {}
    for columns in (TRACE_COLUMNS, FILE_COLUMNS, SEGMENT_COLUMNS, SOURCE_COLUMNS):
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
    """Fills the place that a patch adds into row `row` of writable trace columns."""
    if patch["patch_group"] == GROUP_GRAPH:
        names = ("segment", "row", "crc32c")
        for name in names:
            arrays[f"graph_{name}"][row] = patch[f"patch_{name}"]
        for name in ("hidden_row", "attention_start", "num_tokens", "layout"):
            arrays[name][row] = patch[f"patch_{name}"]
    else:
        for name in ("segment", "row", "crc32c"):
            arrays[f"sequence_{name}"][row] = patch[f"patch_{name}"]
        arrays["last_token_row"][row] = patch["patch_last_token_row"]
    arrays["nonfinite"][row] |= patch["patch_nonfinite"]


def with_key_table(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds the hash table of the part's keys."""
    n = len(arrays["sample"])
    table = np.zeros(key_table_size(n), "<u4")
    if n:
        keys = KeyTable(np.zeros(0, "<u4") if n == 0 else table, arrays["id_offsets"], arrays["id"], arrays["sample"])
        duplicate = keys.build(table)
        if duplicate >= 0:
            raise ValueError(f"trace {duplicate} of the part repeats a key")
    return arrays | {"key_table": table}
