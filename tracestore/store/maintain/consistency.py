"""Consistency between the files of a store, which correct checksums do not prove.

Readers check the values that they use; `tracestore verify` checks all values.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tracestore.errors import CorruptStoreError
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.manifest import Manifest
from tracestore.store.io.files import StoreFiles
from tracestore.store.read.chunk_cache import ChunkCache
from tracestore.store.read.columns import Columns, join_columns, read_columns
from tracestore.store.read.index import StoreIndex
from tracestore.store.read.segment import SegmentReader

# Columns of the index, and the arrays of a segment that hold the same values.
_REPEATED = {"num_tokens": "num_tokens", "layout": "attention_layout", "attention_start": "attention_start"}
_PLACES = (("graph_segment", "graph_row"), ("sequence_segment", "sequence_row"))


def find_inconsistencies(files: StoreFiles, manifest: Manifest) -> dict[str, str]:
    """Compare all values of a generation whose checksums are correct.

    Returns
    -------
    dict
        Path in the store -> description of the contradiction. Empty for a consistent store.
    """
    checker = ConsistencyChecker(files, manifest)
    for number in range(manifest.num_segments):
        checker.check_segment(files, number)
    return checker.damaged


class ConsistencyChecker:
    """Checks one generation: index and columns on construction, segments one by one.

    Parameters
    ----------
    files : StoreFiles
        The files of the index and the columns.
    manifest : Manifest

    Attributes
    ----------
    damaged : dict
        Path in the store -> description of the contradiction.
    """

    def __init__(self, files: StoreFiles, manifest: Manifest) -> None:
        self.manifest = manifest
        self.damaged: dict[str, str] = {}
        self._index: StoreIndex | None = None
        self._traces: dict[str, _TracesBySegment] = {}
        generation = paths.manifest(manifest.generation)
        with _collecting(self.damaged, generation):
            columns = join_columns([read_columns(files, ref) for ref in manifest.columns])
            _check_counts(manifest, columns)
        with _collecting(self.damaged, generation):
            index = StoreIndex(files, manifest)
            _check_index(index, manifest)
            self._traces = {name: _TracesBySegment(index.read_column(name)) for name, _ in _PLACES}
            self._index = index

    def segment_files(self, number: int) -> list[FileEntry]:
        """Return the files of a segment; none if the generation has no such segment or its index is damaged."""
        if self._index is not None and number < self.manifest.num_segments:
            with _collecting(self.damaged, self._index.name):
                return list(self._index.segment_files(number))
        return []

    def check_segment(self, files: StoreFiles, number: int) -> None:
        """Check the arrays of a segment, which `files` gives, and the entries of the index for its rows."""
        if self._index is not None and number < self.manifest.num_segments:
            with _collecting(self.damaged, paths.segment(number)):
                _check_segment(files, self._index, self.manifest, number, self._traces)


class _TracesBySegment:
    """Trace numbers grouped by the segment that a column of the index gives."""

    def __init__(self, segments: np.ndarray) -> None:
        self._order = np.argsort(segments, kind="stable")
        self._sorted = segments[self._order]

    def of(self, number: int) -> np.ndarray:
        begin, end = np.searchsorted(self._sorted, [number, number + 1])
        return self._order[begin:end]


@contextmanager
def _collecting(found: dict[str, str], where: str) -> Iterator[None]:
    try:
        yield
    except CorruptStoreError as error:
        path, _, reason = str(error).partition(": ")
        found.setdefault(path if reason else where, reason or path)
    except (OSError, ValueError) as error:
        found.setdefault(where, str(error))


def _require(holds: bool, where: str, reason: str) -> None:
    if not holds:
        raise CorruptStoreError(f"{where}: {reason}")


def _check_counts(manifest: Manifest, columns: Columns) -> None:
    where = paths.manifest(manifest.generation)
    _require(len(columns) == manifest.num_traces, where, "num_traces: not the length of the columns")
    _require(columns.num_scored == manifest.num_scored, where, "num_scored: not the number of scores")
    _require(columns.num_labeled == manifest.num_labelled, where, "num_labelled: not the number of labels")


def _check_index(index: StoreIndex, manifest: Manifest) -> None:
    for name in ("sample", "source", "source_position", "nonfinite", "num_tokens", "layout"):
        index.read_column(name)
    count = manifest.num_traces
    places = index.locations(np.arange(count))
    tokens = int(places[places[:, 0] >= 0, 3].sum())
    where = paths.manifest(manifest.generation)
    _require(tokens == manifest.num_tokens, where, f"num_tokens: {tokens} in the index")
    _require(sum(1 for _ in index.sources()) == manifest.num_sources, where, "num_sources: another number in the index")
    index.check_key_tables()
    samples = index.read_column("sample").tolist()
    for k, question_id in enumerate(index.question_ids(np.arange(count))):
        _require(index.find(question_id, samples[k]) == k, index.name, f"key_table: trace {k} is not found by its id")


def _check_segment(
    files: StoreFiles, index: StoreIndex, manifest: Manifest, number: int, traces_by: dict[str, _TracesBySegment]
) -> None:
    attributes, num_rows = manifest.attributes, index.segment_rows(number)
    entries = {f.path: f for f in index.segment_files(number)}
    segment = SegmentReader(files, number, entries, ChunkCache(0), attributes, num_rows)
    rows: dict[str, np.ndarray] = {}
    for name, (kind, _) in schema.SEGMENT_ARRAYS.items():
        if not segment.has(name):
            _require(name in schema.OPTIONAL_ARRAYS, f"{segment.name}/{name}", "missing")
            continue
        array = segment.array(name)
        array.check_chunks()
        if kind != schema.VALUES:
            rows[name] = array.copy(0, array.shape[0])
    _check_rows(segment, attributes, rows)
    _check_texts(segment, num_rows, rows)
    if segment.has("edge_ptr"):
        _check_edges(segment, attributes, rows)
    for segment_column, row_column in _PLACES:
        _check_places(index, segment, rows, traces_by[segment_column].of(number), row_column)


def _length(segment: SegmentReader, name: str) -> int:
    return segment.array(name).shape[0] if segment.has(name) else 0


def _check_rows(segment: SegmentReader, attributes: schema.Attributes, rows: dict[str, np.ndarray]) -> None:
    layers, heads = attributes.num_layers or 0, attributes.num_stored_heads
    tokens, layout = rows["num_tokens"].astype("<i8"), rows["attention_layout"]
    _require(bool((tokens >= 0).all()), f"{segment.name}/num_tokens", "negative")
    _require(
        layers * int(tokens.sum()) == _length(segment, "hidden_states"),
        f"{segment.name}/num_tokens",
        "not the tokens of hidden_states",
    )
    allowed = np.array([bool(attributes.allowed_layouts >> k & 1) for k in range(256)])
    _require(bool(allowed[layout].all()), f"{segment.name}/attention_layout", "not a layout of the store")
    pairs = np.where(layout == schema.LAYOUT_CAUSAL, tokens * (tokens + 1) // 2, tokens * tokens)
    sizes = np.where((layout == schema.LAYOUT_CAUSAL) | (layout == schema.LAYOUT_SQUARE), pairs * layers * heads, 0)
    where = f"{segment.name}/attention_start"
    dense = sizes > 0
    ends = np.cumsum(sizes)
    _require(bool((rows["attention_start"][dense] == (ends - sizes)[dense]).all()), where, "not where attention begins")
    _require(int(sizes.sum()) == _length(segment, "attention"), where, "not the attention that is stored")
    last = rows["last_token_row"]
    has_one = last[last >= 0]
    _require(
        bool((last >= -1).all()) and (has_one == np.arange(len(has_one))).all()
        and len(has_one) == _length(segment, "last_token"),
        f"{segment.name}/last_token_row",
        "not the rows of last_token",
    )  # fmt: skip


def _check_texts(segment: SegmentReader, num_rows: int, rows: dict[str, np.ndarray]) -> None:
    for name in (*schema.STRING_FIELDS, "tokens", "tokens_decoded"):
        offsets = rows.get(f"{name}_offsets")
        if offsets is None:
            array = segment.array(f"{name}_offsets")
            offsets = array.copy(0, array.shape[0])
        _check_offsets(offsets, _length(segment, name), f"{segment.name}/{name}_offsets")
    strings = segment.array("tokens_decoded_offsets").shape[0] - 1
    _check_offsets(rows["tokens_decoded_ptr"], strings, f"{segment.name}/tokens_decoded_ptr")
    for row in range(num_rows):
        segment.tokens_decoded(row)
        segment.extras(row)
        for name in schema.STRING_FIELDS:
            segment.string(name, row)


def _check_offsets(offsets: np.ndarray, count: int, where: str) -> None:
    holds = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == count and (offsets[1:] >= offsets[:-1]).all()
    _require(bool(holds), where, f"not offsets of {count} values")


def _check_edges(segment: SegmentReader, attributes: schema.Attributes, rows: dict[str, np.ndarray]) -> None:
    layers = attributes.num_layers or 0
    ptr = segment.array("edge_ptr").copy(0, segment.array("edge_ptr").shape[0])
    _check_offsets(ptr, _length(segment, "edge_index"), f"{segment.name}/edge_ptr")
    _require(_length(segment, "edge_weight") == ptr[-1], f"{segment.name}/edge_weight", "not one weight an edge")
    at = 0
    for row in np.flatnonzero(rows["attention_layout"] == schema.LAYOUT_EDGES):
        where = f"{segment.name}/attention_start"
        _require(rows["attention_start"][row] == at and at + layers < len(ptr), where, "not where edges begin")
        begin, end = int(ptr[at]), int(ptr[at + layers])
        if end > begin:
            nodes = segment.array("edge_index").copy(begin, end)
            inside = nodes.min() >= 0 and nodes.max() < rows["num_tokens"][row]
            _require(bool(inside), f"{segment.name}/edge_index", f"row {row}: an edge leaves its graph")
        at += layers
    _require(at == len(ptr) - 1, f"{segment.name}/edge_ptr", "more layers than the rows have")


def _check_places(
    index: StoreIndex, segment: SegmentReader, rows: dict[str, np.ndarray], traces: np.ndarray, row_column: str
) -> None:
    """Require that the index and a segment agree on the traces in the segment."""
    found = index.read_column(row_column)[traces]
    num_rows = len(rows["num_tokens"])
    _require(bool((found < num_rows).all()), index.name, f"{row_column}: beyond the rows of {segment.name}")
    if row_column == "graph_row":
        for name, stored in _REPEATED.items():
            agrees = (index.read_column(name)[traces] == rows[stored][found]).all()
            _require(bool(agrees), index.name, f"{name}: not what {segment.name} says")
        tokens = rows["num_tokens"].astype("<i8")
        starts = np.cumsum(tokens) - tokens
        layers = index.manifest.attributes.num_layers or 0
        agrees = (index.read_column("hidden_row")[traces] == layers * starts[found]).all()
        _require(bool(agrees), index.name, f"hidden_row: not where {segment.name} has the rows")
    else:
        agrees = (index.read_column("last_token_row")[traces] == rows["last_token_row"][found]).all()
        _require(bool(agrees), index.name, f"last_token_row: not what {segment.name} says")
    _require(
        bool((index.read_column("sample")[traces] == rows["sample"][found]).all()),
        index.name,
        "sample: not the segment's",
    )
    for question_id, row in zip(index.question_ids(traces), found.tolist(), strict=True):
        _require(segment.string("question_id", row) == question_id, index.name, "id: not what the segment says")
