"""Packing of a validated trace: conversion to the arrays that a segment appends."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tracestore._core import kernels
from tracestore.store.format import schema
from tracestore.store.format.provenance import Provenance
from tracestore.store.io.scratch import Scratch
from tracestore.store.lens import LensArrays
from tracestore.store.write.field_values import extras_json, field_error
from tracestore.store.write.record import TraceRecord

_Arrays = dict[str, list[np.ndarray]]
# Fields of a record whose names are those of their bits.
_FIELDS_OF_RECORD = ("edges", "last_token", "tokens", "tokens_decoded", "prompt_length", "label")
# Memory of Python's objects of a trace without arrays, and of each of its texts.
_TRACE_OBJECTS, _TEXT_OBJECT = 2048, 64


def num_bytes_of(rows: Sequence[np.ndarray]) -> int:
    """Return the size of the rows of one array in bytes."""
    return sum([a.nbytes for a in rows])


@dataclass
class PackedTrace:
    """A trace as a segment appends it.

    Attributes
    ----------
    record : TraceRecord
        The trace without its arrays and extras.
    num_tokens : int
        Number of tokens, S; 0 if the trace has last tokens only.
    layout : int
        One of schema.LAYOUT_*.
    arrays : Mapping[str, Sequence[np.ndarray]]
        Consecutive parts of each array. hidden_states has either one part ``(S, D)`` per layer or one part ``(L, S, D)``.
    edge_counts : np.ndarray or None
        Number of edges per layer, int64 of shape ``(L,)``.
    reversed_edges : bool
        Whether the source had the edges in reverse direction.
    crcs : dict[str, int]
        CRC-32C of arrays. The writer computes missing ones.
    layer_crcs : dict[str, np.ndarray]
        CRC-32C of each layer of arrays of schema.LAYER_CRCS, uint32 of shape ``(L,)``. Those of small layers are absent.
    graph_crc, sequence_crc : int
        CRC-32C of the arrays of each field group, 0 without them.
    rounded_from : str or None
        Dtype of the source if arrays were rounded to float16 that --dtype keep would keep.
    has_states, has_last_token : bool
        Whether its segment has its hidden states, and its last token. False until it is appended.
    has_texts : bool
        False for last tokens whose trace has the texts of another row, that of its graph.
    source_bytes : int
        Size of its arrays in the source in bytes, if they were read from one.
    segment, row : SegmentWriter or WrittenSegment or None, int
        The row of a segment that holds its arrays, if another thread or process has written them.
    """

    record: TraceRecord
    num_layers: int
    num_tokens: int
    hidden_dim: int
    hidden_dtype: str
    layout: int = schema.LAYOUT_NONE
    arrays: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)
    edge_counts: np.ndarray | None = None
    reversed_edges: bool = False
    num_nonfinite: int = 0
    extras: str = ""
    field_bits: int = 0
    crcs: dict[str, int] = field(default_factory=dict)
    layer_crcs: dict[str, np.ndarray] = field(default_factory=dict)
    graph_crc: int = 0
    sequence_crc: int = 0
    num_heads: int | None = None
    attention_dtype: str | None = None
    rounded_from: str | None = None
    has_states: bool = False
    has_last_token: bool = False
    has_texts: bool = True
    source_bytes: int = 0
    segment: Any = None
    row: int = -1

    @property
    def num_bytes(self) -> int:
        """Size of its arrays in bytes, 0 once a segment has taken them."""
        return self._array_bytes if self.arrays else 0

    @cached_property
    def _array_bytes(self) -> int:
        return sum(map(num_bytes_of, self.arrays.values()))

    def room_for_layer_crcs(self, name: str, num_bytes: int) -> np.ndarray | None:
        """Return the empty `layer_crcs` of an array of so many bytes, None if its layers are small."""
        if num_bytes < self.num_layers * schema.MIN_LAYER_BYTES:
            return None
        return self.layer_crcs.setdefault(name, np.empty(self.num_layers, "<u4"))

    @cached_property
    def metadata_bytes(self) -> int:
        """Size of everything except the arrays in bytes, as it counts for the size of a segment."""
        texts = sum(map(len, self.record.tokens_decoded or ())) + sum(map(len, self.record.strings.values()))
        optional = sum(v.nbytes if isinstance(v, np.ndarray) else len(str(v)) for v in self.record.optional.values())
        return 4 * self.num_tokens + texts + len(self.extras) + optional

    @property
    def memory_bytes(self) -> int:
        """Estimate of the memory it takes, in bytes."""
        objects = _TRACE_OBJECTS + _TEXT_OBJECT * len(self.record.tokens_decoded or ())
        return objects + self.metadata_bytes + self.num_bytes


def _stored(array: np.ndarray, keep: bool, name: str, scratch: Scratch) -> np.ndarray:
    """Return the array in the form in which it is stored: C-contiguous, float16 unless `keep`."""
    dtype = schema.dtype_name(array.dtype)
    array = np.ascontiguousarray(array)
    if dtype == "float16":
        return array
    if keep:
        if dtype == "float64":
            raise field_error(name, "float64", "float16, float32 or bfloat16 with --dtype keep")
        return array.view("<u2") if dtype == "bfloat16" else array
    out = scratch.empty(array.shape, "<f2")
    flat = kernels.to_float16(array.view("u1").reshape(-1), schema.dtype_code(dtype), out.view("u1").reshape(-1))
    if flat >= 0:
        raw = array.reshape(-1)[flat : flat + 1]
        value = schema.as_float32(raw.view("<u2"), dtype)[0] if dtype == "bfloat16" else raw[0]
        raise field_error(
            name, f"{float(value):g}, which float16 cannot hold", "at most 65504 in size, or the option --dtype keep"
        )
    return out


def pack_lens(lens: LensArrays, *, keep_dtype: bool) -> LensArrays:
    """Return a lens whose blocks have the form in which they are stored: float16 unless `keep_dtype`.

    InvalidInputError, from the blocks, if float16 cannot hold a value.
    """

    def blocks() -> Iterator[np.ndarray]:
        for block in lens.blocks():
            yield _stored(block, keep_dtype, "unembedding", Scratch())

    return lens._replace(dtype=lens.dtype if keep_dtype else "float16", blocks=blocks)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view("u1")


def _scan(
    arrays: Sequence[np.ndarray], dtype: str, out: np.ndarray | None = None, layer_crcs: np.ndarray | None = None
) -> tuple[int, int]:
    """Return the number of NaN or infinite values and the CRC-32C of arrays of one shape, stored as `dtype`."""
    return kernels.checksum_scan(arrays, schema.dtype_code(dtype), arrays[0].size, out, layer_crcs)


def _crc(arrays: Sequence[np.ndarray], layer_crcs: np.ndarray | None = None) -> int:
    """Return the CRC-32C of arrays, one after another."""
    crc = 0
    for k, array in enumerate(arrays):
        if layer_crcs is None:
            crc = kernels.crc32c(_bytes(array), crc)
        else:
            layer_crcs[k] = kernels.crc32c(_bytes(array))
            crc = kernels.crc32c_combine(crc, int(layer_crcs[k]), array.nbytes)
    return crc


def _pack_attention(trace: PackedTrace, mode: str, keep: bool, scratch: Scratch) -> list[np.ndarray]:
    """Return the packed attention of all layers, and set its layout, dtype and checksums."""
    assert trace.record.attention is not None
    layers = [np.ascontiguousarray(a) for a in trace.record.attention]
    dtype = schema.dtype_name(layers[0].dtype)
    num_heads, num_tokens = layers[0].shape[0], trace.num_tokens
    stored, name = None, "float16"
    if mode == "heads":
        stored = [_stored(a, keep, f"attentions[{k}]", scratch) for k, a in enumerate(layers)]
        name = dtype if keep else name
    storage, code, as_code = schema.storage_dtype(name), schema.dtype_code(dtype), schema.dtype_code(name)
    for layout in (schema.LAYOUT_CAUSAL, schema.LAYOUT_SQUARE):
        packed, is_causal = None, layout == schema.LAYOUT_CAUSAL
        size = len(layers) * (1 if stored is None else num_heads) * schema.num_pairs(num_tokens, layout)
        if stored is None or is_causal:
            packed = scratch.empty(size, storage)
        crcs = trace.room_for_layer_crcs("attention", size * storage.itemsize)
        try:
            is_packed, nonfinite, crc = kernels.pack_attention(
                layers, code, stored, as_code, num_heads, num_tokens, is_causal, packed, crcs
            )
        except OverflowError as error:
            layer = f"attentions[{error.args[0]}]"
            raise field_error(layer, "a head mean that float16 cannot hold", "at most 65504") from None
        if is_packed:
            break
    trace.layout, trace.attention_dtype, trace.crcs["attention"] = layout, name, crc
    trace.num_nonfinite += nonfinite
    return [packed] if packed is not None else [a.reshape(-1) for a in stored or ()]


def _pack_edges(
    record: TraceRecord, keep: bool, scratch: Scratch
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray, str, bool]:
    """Return (edge_index rows (E, 2) per layer, weights, edges per layer, dtype name, whether they were reversed)."""
    assert record.edges is not None
    num_tokens = record.num_tokens
    indexes, weights = [], []
    backward = forward = False
    dtype = schema.dtype_name(record.edges[0][1].dtype)
    for k, (index, weight) in enumerate(record.edges):
        if schema.dtype_name(weight.dtype) != dtype:
            raise field_error(f"graphs[{k}].edge_attr", f"dtype {weight.dtype}", f"{dtype} as in layer 0")
        if index.size and (index.min() < 0 or index.max() >= num_tokens):
            raise field_error(
                f"graphs[{k}].edge_index", f"nodes {index.min()} to {index.max()}", f"0 to {num_tokens - 1}"
            )
        forward |= bool((index[0] < index[1]).any())
        backward |= bool((index[0] > index[1]).any())
        indexes.append(index)
        weights.append(_stored(weight, keep, f"graphs[{k}].edge_attr", scratch))
    # Edges of the oldest files point from the attending token i to the attended token j <= i.
    is_reversed = backward and not forward if record.edges_reversed is None else record.edges_reversed
    rows = [np.ascontiguousarray((i[::-1] if is_reversed else i).T, dtype="<i4") for i in indexes]
    counts = np.array([i.shape[1] for i in indexes], "<i8")
    return rows, weights, counts, "float16" if not keep else dtype, is_reversed


def _pack_states(trace: PackedTrace, arrays: _Arrays, keep_dtype: bool, scratch: Scratch) -> None:
    """Pack the hidden states and the last token of each layer."""
    record = trace.record
    if record.hidden is not None:
        layers = [_stored(h, keep_dtype, f"hidden_states[{k}]", scratch) for k, h in enumerate(record.hidden)]
        copy = None
        # A large trace is not copied: its size is accounted for, and it may be in files.
        if record.is_borrowed and len(layers) * layers[0].nbytes <= scratch.max_memory // 2:
            copy = scratch.empty((len(layers), *layers[0].shape), layers[0].dtype)
        crcs = trace.room_for_layer_crcs("hidden_states", len(layers) * layers[0].nbytes)
        trace.num_nonfinite, trace.crcs["hidden_states"] = _scan(layers, trace.hidden_dtype, copy, crcs)
        record.hidden, arrays["hidden_states"] = (layers, layers) if copy is None else (list(copy), [copy])
    if record.last_token is not None:
        arrays["last_token"] = [_stored(record.last_token, keep_dtype, "sequences", scratch)]
        bad, trace.crcs["last_token"] = _scan(arrays["last_token"], trace.hidden_dtype)
        trace.num_nonfinite += bad
    elif record.edges is None:
        assert record.hidden is not None
        arrays["last_token"] = [np.array([h[-1] for h in record.hidden])]
        trace.crcs["last_token"] = _crc(arrays["last_token"])
    trace.sequence_crc = trace.crcs.get("last_token", 0)


def _pack_graph(trace: PackedTrace, arrays: _Arrays, attention: str, keep_dtype: bool, scratch: Scratch) -> None:
    """Pack the attention or the edges, and set the checksum of the graph."""
    record = trace.record
    if record.attention is not None:
        if record.is_head_mean and attention == "heads":
            expected = "(H, S, S) per layer; use --attention mean"
            raise field_error("attentions", "attention averaged over heads", expected)
        trace.num_heads = None if record.is_head_mean else int(record.attention[0].shape[0])
        arrays["attention"] = _pack_attention(trace, attention, keep_dtype, scratch)
    if record.edges is not None:
        trace.layout = schema.LAYOUT_EDGES
        arrays["edge_index"], arrays["edge_weight"], trace.edge_counts, trace.attention_dtype, trace.reversed_edges = (
            _pack_edges(record, keep_dtype, scratch)
        )
        trace.num_nonfinite += sum(_scan([a], trace.attention_dtype)[0] for a in arrays["edge_weight"])
        for name in ("edge_index", "edge_weight"):
            crcs = trace.room_for_layer_crcs(name, num_bytes_of(arrays[name]))
            trace.crcs[name] = _crc(arrays[name], crcs)
    for name in ("hidden_states", "attention", "edge_index", "edge_weight"):
        if name in arrays:
            trace.graph_crc = kernels.crc32c_combine(trace.graph_crc, trace.crcs[name], num_bytes_of(arrays[name]))


def pack_record(
    record: TraceRecord, *, attention: str, keep_dtype: bool, scratch: Scratch | None = None
) -> PackedTrace:
    """Pack a validated trace for a store with the given options, and remove the arrays from the record.

    Parameters
    ----------
    record : TraceRecord
        The trace; its arrays are set to None.
    attention : {"mean", "heads", "none"}
        Option of the store.
    keep_dtype : bool
        Whether the store keeps the dtype of the source instead of converting to float16.
    scratch : Scratch, optional
        Allocator for large arrays; by default they are in memory.

    Raises
    ------
    InvalidInputError
        If a value cannot be stored.
    """
    if attention == "none":
        record.attention = record.edges = None
    scratch = scratch or Scratch(max_memory=1 << 62)
    scratch.start()
    states = record.last_token if record.hidden is None else record.hidden[0]
    assert states is not None
    source_dtypes = [schema.dtype_name(states.dtype)]
    # A head mean is computed and has no dtype of a source.
    if attention == "heads" and record.attention is not None:
        source_dtypes.append(schema.dtype_name(record.attention[0].dtype))
    if record.edges is not None:
        source_dtypes.append(schema.dtype_name(record.edges[0][1].dtype))
    arrays: _Arrays = {}
    trace = PackedTrace(
        record,
        record.num_layers,
        record.num_tokens,
        record.hidden_dim,
        hidden_dtype=source_dtypes[0] if keep_dtype else "float16",
        arrays=arrays,
        rounded_from=None if keep_dtype else next((d for d in source_dtypes if d != "float16"), None),
    )
    _pack_states(trace, arrays, keep_dtype, scratch)
    _pack_graph(trace, arrays, attention, keep_dtype, scratch)
    present = {name: getattr(record, name) for name in _FIELDS_OF_RECORD} | record.strings
    present |= {"hidden_states": record.hidden, "attentions": record.attention}
    present["question_id"] = record.question_id if record.has_own_id else None
    trace.field_bits = sum(schema.FIELD_BITS[name] for name, value in present.items() if value is not None)
    # A trace that waits for its turn must not keep the source's arrays alive.
    record.hidden = record.attention = record.edges = record.last_token = None
    trace.extras = extras_json(record.extras, record.dropped)
    if record.extras:
        record.extra_names = tuple(name for name in record.extras if name not in (record.dropped or ()))
        record.extras = {}
    return trace


def fit_attributes(attributes: schema.Attributes, trace: PackedTrace) -> schema.Attributes:
    """Return the attributes of a store after the trace is added to it.

    InvalidInputError if the trace has another size, dtype or kind of attention than the store.
    """
    values: dict[str, Any] = {}
    for name in ("num_layers", "hidden_dim", "num_heads", "hidden_dtype", "attention_dtype"):
        found, stored = getattr(trace, name), getattr(attributes, name)
        if found is not None and stored is not None and found != stored:
            raise field_error(name, str(found), f"{stored} as in the rest of the store")
        if found != stored and stored is None:
            values[name] = found
    num_layers = values.get("num_layers", attributes.num_layers)
    for ids in (p.layer_ids for p in attributes.provenance):
        if ids is not None and len(ids) != num_layers:
            raise field_error("provenance", f"{len(ids)} layer_ids", f"{num_layers}, one per stored layer")
    layout, stored = schema.LAYOUT_NAMES.get(trace.layout), attributes.attention_layout
    if layout is not None and stored is not None and (layout == "edges") != (stored == "edges"):
        raise field_error("attention", f"{layout} attention", f"{stored} as in the rest of the store")
    if layout not in (None, stored) and stored != "square":
        values["attention_layout"] = layout
    return replace(attributes, **values) if values else attributes


def fit_lens(
    attributes: schema.Attributes, lens: LensArrays, provenance: Provenance | None
) -> tuple[schema.Attributes, int]:
    """Return the attributes of a store that a lens is added to, and the position of its provenance, -1 for None.

    InvalidInputError if the lens has another hidden size, or its provenance other layers.
    """
    stored, num_layers = attributes.hidden_dim, attributes.num_layers
    if stored not in (None, lens.shape[1]):
        raise field_error("unembedding", f"the shape {lens.shape}", f"(V, {stored}) as the hidden states of the store")
    ids = None if provenance is None else provenance.layer_ids
    if ids is not None and num_layers not in (None, len(ids)):
        raise field_error("provenance", f"{len(ids)} layer_ids", f"{num_layers}, one per stored layer")
    attributes, number = attributes.with_provenance(provenance)
    return replace(attributes, hidden_dim=lens.shape[1]), number
