"""Consistency between the files of a store, which correct checksums do not prove.

Readers check the values that they use; `tracestore verify` checks all values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError, InvalidInputError, escape_unprintable
from tracestore.store.format import paths, schema
from tracestore.store.format.manifest import Manifest
from tracestore.store.format.ragged import is_offsets
from tracestore.store.io.files import StoreFiles
from tracestore.store.read.columns import Columns, read_columns
from tracestore.store.read.index import SegmentEntry, StoreIndex, grouped
from tracestore.store.read.segment import SegmentReader, row_sizes
from tracestore.store.write.field_values import optional_fields
from tracestore.store.write.record import read_record

_LOCATIONS = (("graph_segment", "graph_row"), ("sequence_segment", "sequence_row"))


class ConsistencyChecker:
    """Check of one generation: its index and columns at once, its segments one by one.

    Parameters
    ----------
    files : StoreFiles
        The files of the index and the columns.
    manifest : Manifest

    Attributes
    ----------
    damaged : dict
        Path in the store -> what is wrong there.
    """

    def __init__(self, files: StoreFiles, manifest: Manifest) -> None:
        self.manifest = manifest
        self.damaged: dict[str, str] = {}
        self._index: StoreIndex | None = None
        self._segments: dict[str, list[tuple[int, SegmentEntry]]] = {}
        self._traces: dict[str, dict[int, np.ndarray]] = {}  # those in each segment, by the column of the index
        generation = paths.manifest(manifest.generation)
        with collect_damage(self.damaged, generation):
            _check_counts(manifest, read_columns(files, manifest))
        with collect_damage(self.damaged, generation):
            index = StoreIndex(files, manifest)
            _check_index(index, manifest)
            self._traces = {name: dict(grouped(index.read_column(name))) for name, _ in _LOCATIONS}
            for number, entry in enumerate(index.segments()):
                self._segments.setdefault(entry.path, []).append((number, entry))
            self._index = index

    def check_segment(self, files: StoreFiles, path: str) -> None:
        """Check the arrays of a segment, which `files` gives, and the index against its rows.

        Nothing is checked if the generation has no such segment or its index is damaged.
        """
        if self._index is None:
            return
        for number, entry in self._segments.get(path, ()):
            with collect_damage(self.damaged, entry.path):
                segment = SegmentReader(files, entry, self.manifest.attributes)
                _check_segment(segment, self.manifest.attributes)
                _check_lens(segment, self.manifest.attributes, number)
                for segment_column, row_column in _LOCATIONS:
                    traces = self._traces[segment_column].get(number, np.zeros(0, np.int64))
                    _check_locations(self._index, segment, traces, row_column)


def reason_of(error: Exception) -> str:
    """Return what is wrong with a file, for a report that names the file itself."""
    if isinstance(error, CorruptStoreError):
        return str(error).split(": ", 1)[-1]
    if isinstance(error, FileNotFoundError):
        return "missing"
    reason = error.strerror if isinstance(error, OSError) else None
    return escape_unprintable(reason or str(error), 300)


@contextmanager
def collect_damage(found: dict[str, str], where: str) -> Iterator[None]:
    """Add an error of the block to `found`, unless its file is there, under the file that it names or `where`."""
    try:
        yield
    except CorruptStoreError as error:
        path, separator, _ = str(error).partition(": ")
        found.setdefault(path if separator else where, reason_of(error))
    except (OSError, ValueError, KeyError, TypeError) as error:
        found.setdefault(where, reason_of(error))


def _require(holds: bool, where: str, name: str, reason: str) -> None:
    if not holds:
        raise CorruptStoreError(f"{where}: {name}: {reason}")


def _check_counts(manifest: Manifest, columns: Columns) -> None:
    where = paths.manifest(manifest.generation)
    _require(len(columns) == manifest.num_traces, where, "num_traces", "not the length of the columns")
    num_scored = columns.num_scored(manifest.attributes.default_score)
    _require(num_scored == manifest.num_scored, where, "num_scored", "not the number of scores")
    _require(columns.num_labeled == manifest.num_labeled, where, "num_labeled", "not the number of labels")


def _check_index(index: StoreIndex, manifest: Manifest) -> None:
    for name in ("sample", "source", "source_position", "nonfinite", "num_tokens", "layout"):
        index.read_column(name)
    count = manifest.num_traces
    locations = index.locations(np.arange(count))
    tokens = int(locations[locations[:, 0] >= 0, 2].sum())
    where = paths.manifest(manifest.generation)
    _require(tokens == manifest.num_tokens, where, "num_tokens", f"{tokens} in the index")
    num_sources = sum(1 for _ in index.sources())
    _require(num_sources == manifest.num_sources, where, "num_sources", f"{num_sources} in the index")
    index.check_key_tables()
    samples = index.read_column("sample").tolist()
    for k, question_id in enumerate(index.question_ids(np.arange(count))):
        is_found = index.find(question_id, samples[k]) == k
        _require(is_found, index.name, "key_table", f"trace {k} is not found by its id")


def _check_segment(segment: SegmentReader, attributes: schema.Attributes) -> None:
    rows = {name: segment.values(name) for name in schema.ROW_ARRAYS if name in segment.small}
    for name in schema.LARGE_ARRAYS:
        if segment.has(name):
            segment.array(name).check_chunks()
    where = segment.rows_path
    tokens, layout = rows["num_tokens"], rows["attention_layout"]
    _require(bool((tokens >= 0).all()), where, "num_tokens", "negative")
    allowed = np.array([bool(attributes.allowed_layouts >> k & 1) for k in range(256)])
    _require(bool(allowed[layout].all()), where, "attention_layout", "not a layout of the store")
    sizes = {name: int(size.sum()) for name, size in row_sizes(attributes, tokens, layout).items()}
    stored = {name: _length(segment, name) for name in ("hidden_states", "attention")}
    stored["edges"] = max(0, len(rows.get("edge_ptr", ())) - 1)
    for name, size in sizes.items():
        _require(size == stored[name], where, "num_tokens", f"{size} rows of {name}, found {stored[name]}")
    last = rows["last_token_row"]
    holds = (last >= -1).all() and np.array_equal(last[last >= 0], np.arange(_length(segment, "last_token")))
    _require(bool(holds), where, "last_token_row", "not the rows of last_token")
    _check_texts(segment, rows)
    _check_optional(segment, rows)
    if "edge_ptr" in rows:
        _check_edges(segment, attributes, rows)
    check_layers(segment)


def _check_lens(segment: SegmentReader, attributes: schema.Attributes, number: int) -> None:
    if attributes.lens is not None and attributes.lens.segment == number:
        segment.lens_arrays()
        segment.array("unembedding")
        return
    where = segment.rows_path
    _require(segment.small.names.isdisjoint(schema.LENS_ARRAYS), where, "lens", "the store names another segment")
    _require(not segment.has("unembedding"), where, "unembedding", "the store names another segment")


def _length(segment: SegmentReader, name: str) -> int:
    return segment.array(name).shape[0] if segment.has(name) else 0


def _check_texts(segment: SegmentReader, rows: dict[str, np.ndarray]) -> None:
    counts = {f"{name}_offsets": len(rows[name]) for name in (*schema.STRING_FIELDS, "tokens", "tokens_decoded")}
    counts["tokens_decoded_ptr"] = len(rows["tokens_decoded_offsets"]) - 1
    for name, count in counts.items():
        _require(is_offsets(rows[name], count), segment.rows_path, name, f"not offsets of {count} values")
    for row in range(segment.num_rows):
        segment.tokens_decoded(row)
        segment.extras(row)
        for name in schema.STRING_FIELDS:
            segment.string(name, row)


def _check_optional(segment: SegmentReader, rows: dict[str, np.ndarray]) -> None:
    where, counts = segment.rows_path, np.diff(rows["tokens_offsets"])
    more = counts - rows["num_tokens"]
    is_aligned = (counts == 0) | (rows["num_tokens"] == 0) | (more == 0) | (more == 1)
    _require(bool(is_aligned.all()), where, "tokens", "not one per hidden state, or one more")
    counts = np.where(counts > 0, counts, rows["num_tokens"])
    decoded = np.diff(rows["tokens_decoded_ptr"])
    _require(bool(((decoded == 0) | (decoded == counts)).all()), where, "tokens_decoded", "not one text per token")
    for name in segment.optional_names:
        if f"{name}_offsets" in rows:
            is_valid = is_offsets(rows[f"{name}_offsets"], len(rows[name]))
            _require(is_valid, where, f"{name}_offsets", f"not offsets of {len(rows[name])} values")
    for row, reason in impossible_values(segment):
        raise CorruptStoreError(f"{where}: row {row}: {reason}")


def impossible_values(segment: SegmentReader) -> Iterator[tuple[int, str]]:
    """Yield rows with a value that no trace can have, and what is wrong with it."""
    ids, offsets = segment.values("tokens"), segment.values("tokens_offsets")
    lengths = np.diff(offsets)
    counts = np.where(lengths > 0, lengths, segment.values("num_tokens"))
    most = np.where(counts > 0, counts, schema.MAX_TOKENS)
    prompt = segment.values("prompt_length")
    for row in np.flatnonzero((prompt > most) | (prompt < -1)).tolist():
        yield row, f"prompt_length: found {prompt[row]}, expected 0 to {most[row]}, the number of tokens"
    for position in np.flatnonzero(ids < 0)[:1].tolist():
        row = int(np.searchsorted(offsets, position, side="right")) - 1
        yield row, f"tokens: found the token id {ids[position]}, expected 0 or greater"
    for row in range(segment.num_rows) if segment.optional_names else ():
        try:
            optional_fields(segment.optional_fields(row), int(counts[row]), read_record(segment, row).answer)
        except InvalidInputError as error:
            yield row, str(error)


def _check_edges(segment: SegmentReader, attributes: schema.Attributes, rows: dict[str, np.ndarray]) -> None:
    layers, ptr = attributes.num_layers or 0, rows["edge_ptr"]
    holds = is_offsets(ptr, _length(segment, "edge_index")) and _length(segment, "edge_weight") == ptr[-1]
    _require(holds, segment.rows_path, "edge_ptr", "not the offsets of edge_index and edge_weight")
    for row in np.flatnonzero(rows["attention_layout"] == schema.LAYOUT_EDGES).tolist():
        first = segment.begin("edges", row)
        begin, end = int(ptr[first]), int(ptr[first + layers])
        if end > begin:
            nodes = segment.array("edge_index").copy(begin, end)
            is_inside = bool(0 <= nodes.min() <= nodes.max() < rows["num_tokens"][row])
            _require(is_inside, f"{segment.name}/edge_index", f"row {row}", "an edge leaves its graph")


def check_layers(segment: SegmentReader) -> None:
    """Compare the checksums of the layers of a segment with those of its files, whose bytes are not read.

    CorruptStoreError names the first layer that has another one.
    """
    for name, layers in segment.layers.items():
        array, where, small = segment.array(name), segment.rows_path, schema.LAYER_CRCS[name]
        _require(int(layers.ends[-1]) == array.shape[0], where, small, f"not of the layers of {name}")
        if array.shape[0] and array.crc_of_layers(layers) != array.entry.crc32c:
            for k, (begin, end) in enumerate(pairwise(layers.ends.tolist())):
                is_same = crc32c(array.copy(begin, end)) == layers.crcs[k]
                _require(is_same, where, small, f"layer {k}: not its checksum")
            raise CorruptStoreError(f"{array.entry.path}: its checksum is not that of its layers")


def check_rows(index: StoreIndex, segment: SegmentReader, traces: np.ndarray, row_column: str) -> np.ndarray:
    """Require that the index agrees with the numbers of a segment about the traces in it, and return their rows.

    Parameters
    ----------
    index : StoreIndex
    segment : SegmentReader
    traces : ndarray of int64, (n,)
        Indices of traces whose `row_column` refers to the segment.
    row_column : {"graph_row", "sequence_row"}

    Raises
    ------
    CorruptStoreError
        If they differ.
    """
    found: np.ndarray = index.read_column(row_column)[traces]
    where = index.name
    _require(bool((found < segment.num_rows).all()), where, row_column, f"beyond the rows of {segment.name}")
    repeated = {"sample": "sample"}
    if row_column == "graph_row":
        repeated |= {"num_tokens": "num_tokens", "layout": "attention_layout"}
    else:
        has_one = segment.values("last_token_row")[found] >= 0
        _require(bool(has_one.all()), where, row_column, f"{segment.name} has no last token there")
    for name, stored in repeated.items():
        agrees = index.read_column(name)[traces] == segment.values(stored)[found]
        _require(bool(agrees.all()), where, name, f"differs from {segment.name}")
    return found


def _check_locations(index: StoreIndex, segment: SegmentReader, traces: np.ndarray, row_column: str) -> None:
    """Require that the index agrees with a segment about the traces in it and their ids."""
    found = check_rows(index, segment, traces, row_column)
    for question_id, row in zip(index.question_ids(traces), found.tolist(), strict=True):
        agrees = segment.string("question_id", row) == question_id
        _require(agrees, index.name, "id", f"differs from {segment.name}")
