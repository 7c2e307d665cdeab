"""The manifest: the root of a generation, and the index parts it names.

An index part covers a range of traces, segments and sources. Each commit adds
one; parts of like size are merged, so that a commit rewrites O(log) of the
index over time and a reader maps a handful of files.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.index import KeyTable
from tracestore._core.kernels import crc32c
from tracestore.errors import StoreDamagedError
from tracestore.store import schema
from tracestore.store.files import FileEntry
from tracestore.store.ragged import concatenate_ragged, encode_strings

_GENERATION = re.compile(r"\d{10}")

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
        if body["tracestore_manifest"] != schema.FORMAT_VERSION:
            raise ValueError(f"format version {body['tracestore_manifest']}, this is {schema.FORMAT_VERSION}")
        columns = tuple(
            ColumnsRef(c["path"], c["first_trace"], c["num_traces"], tuple(FileEntry(**f) for f in c["files"]))
            for c in body["columns"]
        )
        return cls(
            generation=body["generation"],
            attributes=schema.Attributes.from_json(body["attributes"]),
            parts=tuple(PartRef(**p) for p in body["index"]),
            columns=columns,
            fields=tuple(body["fields"]),
            **{k: body[k] for k in ("num_traces", "num_tokens", "num_scored", "num_labelled", "num_bytes")},
        )


def manifest_name(generation: int) -> str:
    return f"manifest/{generation:010d}"


def index_name(generation: int) -> str:
    """The folder of what a generation's commit writes of the index."""
    return f"index/{generation:010d}"


def columns_name(generation: int) -> str:
    return f"columns/{generation:010d}"


def copy_name(generation: int) -> str:
    """A second copy of the manifest, for repair; it commits nothing."""
    return f"{index_name(generation)}/manifest"


def manifest_path(store: Path, generation: int) -> Path:
    return store / manifest_name(generation)


def copy_path(store: Path, generation: int) -> Path:
    return store / copy_name(generation)


def is_generation(name: str) -> bool:
    """Whether a file in manifest/ is one of a generation."""
    return _GENERATION.fullmatch(name) is not None


def generations(store: Path) -> list[int]:
    """The generations that have a manifest file, newest first."""
    try:
        names = [p.name for p in (store / "manifest").iterdir()]
    except FileNotFoundError:
        return []
    return sorted((int(n) for n in names if is_generation(n)), reverse=True)


def load_manifest(store: Path, generation: int) -> Manifest:
    """StoreDamagedError where the file is not whole; FileNotFoundError where it is gone."""
    try:
        data = manifest_path(store, generation).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreDamagedError(f"{manifest_name(generation)}: {error.strerror}") from None
    return parse_manifest(data, generation)


def parse_manifest(data: bytes, generation: int) -> Manifest:
    """The manifest in the bytes of manifest/<generation>; StoreDamagedError where they are not whole."""
    try:
        manifest = Manifest.from_bytes(data)
        if manifest.generation != generation:
            raise ValueError(f"says it is generation {manifest.generation}")
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamagedError(f"{manifest_name(generation)}: {error}") from None
    return manifest


def empty_columns() -> dict[str, np.ndarray]:
    """The arrays of a part without rows."""
    dtypes = TRACE_COLUMNS | PATCH_COLUMNS | FILE_COLUMNS | SEGMENT_COLUMNS | SOURCE_COLUMNS
    arrays = {name: np.zeros(0, dtype) for name, dtype in dtypes.items()}
    for name in STRINGS:
        arrays[name], arrays[f"{name}_offsets"] = encode_strings([])
    return arrays


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
    size = 0 if n == 0 else 1 << (2 * n - 1).bit_length()
    table = np.zeros(size, "<u4")
    if n:
        keys = KeyTable(np.zeros(0, "<u4") if n == 0 else table, arrays["id_offsets"], arrays["id"], arrays["sample"])
        duplicate = keys.build(table)
        if duplicate >= 0:
            raise ValueError(f"trace {duplicate} of the part repeats a key")
    return arrays | {"key_table": table}
