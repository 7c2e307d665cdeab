"""Packing a checked trace: the arrays a segment appends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tracestore._core import kernels
from tracestore.store.format import schema
from tracestore.store.io.scratch import Scratch
from tracestore.store.io.spool_files import SpooledRows
from tracestore.store.write.record import TraceRecord, extras_json, field_error

# Python's own bytes of a trace without arrays, and of each of its texts.
_TRACE_OBJECTS, _TEXT_OBJECT = 2048, 64


def num_bytes_of(rows: Sequence[np.ndarray] | SpooledRows) -> int:
    return rows.nbytes if isinstance(rows, SpooledRows) else sum(a.nbytes for a in rows)


@dataclass
class PackedTrace:
    """What a segment appends: buffers for the large arrays, values for the rest."""

    record: TraceRecord  # without its arrays
    num_layers: int
    num_tokens: int  # 0 where there are only last tokens
    hidden_dim: int
    layout: int
    # Of hidden_states a layer each (S, D), or all (L, S, D); in memory or in a file.
    arrays: Mapping[str, Sequence[np.ndarray] | SpooledRows]
    edge_counts: np.ndarray | None
    reversed_edges: bool
    num_nonfinite: int
    extras: str
    field_bits: int
    crcs: dict[str, int]  # of arrays, their pieces one behind the other; what is not there is computed
    graph_crc: int
    sequence_crc: int
    num_heads: int | None
    hidden_dtype: str
    attention_dtype: str | None

    @property
    def num_bytes(self) -> int:
        """Of its arrays, wherever they are."""
        return sum(map(num_bytes_of, self.arrays.values()))

    @property
    def in_memory_arrays(self) -> dict[str, Sequence[np.ndarray]]:
        """Its arrays in memory."""
        return {name: rows for name, rows in self.arrays.items() if not isinstance(rows, SpooledRows)}

    @cached_property
    def metadata_bytes(self) -> int:
        """Of what there is beside its arrays, as the size of a segment is counted."""
        texts = sum(map(len, self.record.tokens_decoded or ())) + sum(map(len, self.record.strings.values()))
        return 4 * self.num_tokens + texts + len(self.extras)

    @property
    def memory_bytes(self) -> int:
        """About what it takes in memory."""
        objects = _TRACE_OBJECTS + _TEXT_OBJECT * len(self.record.tokens_decoded or ())
        return objects + self.metadata_bytes + sum(map(num_bytes_of, self.in_memory_arrays.values()))

    @property
    def segment_bytes(self) -> int:
        """What a segment grows by with it."""
        return self.metadata_bytes + self.num_bytes


def _stored(array: np.ndarray, keep: bool, name: str, scratch: Scratch) -> np.ndarray:
    """The array as it is stored: C-contiguous, float16 unless `keep`."""
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
        value = (
            (raw.view("<u2").astype("<u4") << 16).view("<f4")[0]
            if dtype == "bfloat16" and raw.dtype == schema.BFLOAT16
            else raw[0]
        )
        raise field_error(
            name, f"{float(value):g}, which float16 cannot hold", "at most 65504 in size, or the option --dtype keep"
        )
    return out


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view("u1")


def _scan(arrays: Sequence[np.ndarray], dtype: str, out: np.ndarray | None = None) -> tuple[int, int]:
    """-> values that are NaN or infinite, crc32c; of arrays of one shape, stored as `dtype`."""
    return kernels.checksum_scan(arrays, schema.dtype_code(dtype), arrays[0].size, out)


def _crc(arrays: Sequence[np.ndarray]) -> int:
    crc = 0
    for array in arrays:
        crc = kernels.crc32c(_bytes(array), crc)
    return crc


def _pack_attention(
    layers: Sequence[np.ndarray], mode: str, keep: bool, num_tokens: int, scratch: Scratch
) -> tuple[int, list[np.ndarray], str, int, int]:
    """-> layout, arrays of all layers, dtype name, count of NaN and infinite values, crc32c."""
    layers = [np.ascontiguousarray(a) for a in layers]
    dtype = schema.dtype_name(layers[0].dtype)
    num_heads = layers[0].shape[0]
    stored, name = None, "float16"
    if mode == "heads":
        stored = [_stored(a, keep, f"attentions[{k}]", scratch) for k, a in enumerate(layers)]
        name = dtype if keep else name
    for layout in (schema.LAYOUT_CAUSAL, schema.LAYOUT_SQUARE):
        packed = None
        if stored is None or layout == schema.LAYOUT_CAUSAL:
            rows = len(layers) * (1 if stored is None else num_heads)
            packed = scratch.empty(rows * schema.num_pairs(num_tokens, layout), schema.storage_dtype(name))
        try:
            is_packed, nonfinite, crc = kernels.pack_attention(
                layers,
                schema.dtype_code(dtype),
                stored,
                schema.dtype_code(name),
                num_heads,
                num_tokens,
                layout == schema.LAYOUT_CAUSAL,
                packed,
            )
        except OverflowError as error:
            layer = f"attentions[{error.args[0]}]"
            raise field_error(layer, "a head mean that float16 cannot hold", "at most 65504") from None
        if is_packed:
            break
    arrays = [packed] if packed is not None else [a.reshape(-1) for a in stored or ()]
    return layout, arrays, name, nonfinite, crc


def _pack_edges(
    record: TraceRecord, keep: bool, scratch: Scratch
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray, str, bool]:
    """-> edge_index rows (E, 2), weights, edges a layer, dtype name, whether the source had them reversed."""
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
    # The oldest files run from the attending token i to the attended j <= i.
    is_reversed = backward and not forward
    rows = [np.ascontiguousarray((i[::-1] if is_reversed else i).T, dtype="<i4") for i in indexes]
    counts = np.array([i.shape[1] for i in indexes], "<i8")
    return rows, weights, counts, "float16" if not keep else dtype, is_reversed


def pack_record(
    record: TraceRecord, *, attention: str, keep_dtype: bool, scratch: Scratch | None = None, can_alias: bool = False
) -> PackedTrace:
    """Packs a checked trace for a store with these options, and takes its arrays from the record;
    what takes much room lies in `scratch` (by default in memory). can_alias: the trace goes
    before the next record is read, so that nothing need be copied of what the record borrows.
    InvalidInputError where a value does not fit."""
    num_layers, num_tokens, hidden_dim = record.num_layers, record.num_tokens, record.hidden_dim
    scratch = scratch or Scratch(max_memory=1 << 62)
    scratch.start()
    arrays: dict[str, list[np.ndarray]] = {}
    bits = schema.FIELD_BITS
    present = 0
    nonfinite = 0
    layout, counts, is_reversed, heads, attention_dtype = schema.LAYOUT_NONE, None, False, None, None
    crcs: dict[str, int] = {}
    if record.hidden is not None:
        present |= bits["hidden_states"]
        source_dtype = schema.dtype_name(record.hidden[0].dtype)
        arrays["hidden_states"] = [
            _stored(h, keep_dtype, f"hidden_states[{k}]", scratch) for k, h in enumerate(record.hidden)
        ]
    else:
        assert record.last_token is not None
        source_dtype = schema.dtype_name(record.last_token.dtype)
    hidden_dtype = source_dtype if keep_dtype else "float16"
    if record.hidden is not None:
        layers, copy = arrays["hidden_states"], None
        # A large trace is a load that its bytes tell; and it may lie in files.
        if record.is_borrowed and not can_alias and len(layers) * layers[0].nbytes <= scratch.max_memory // 2:
            copy = scratch.empty((len(layers), *layers[0].shape), layers[0].dtype)
        nonfinite, crcs["hidden_states"] = _scan(layers, hidden_dtype, copy)
        record.hidden = layers
        if copy is not None:
            record.hidden, arrays["hidden_states"] = list(copy), [copy]
    if record.last_token is not None:
        present |= bits["last_token"]
        arrays["last_token"] = [_stored(record.last_token, keep_dtype, "sequences", scratch)]
        bad, crcs["last_token"] = _scan(arrays["last_token"], hidden_dtype)
        nonfinite += bad
    elif record.edges is None:
        assert record.hidden is not None
        arrays["last_token"] = [np.array([h[-1] for h in record.hidden])]
        crcs["last_token"] = _crc(arrays["last_token"])
    if record.attention is not None and attention != "none":
        present |= bits["attentions"]
        heads = int(record.attention[0].shape[0])
        layout, arrays["attention"], attention_dtype, bad, crcs["attention"] = _pack_attention(
            record.attention, attention, keep_dtype, num_tokens, scratch
        )
        nonfinite += bad
    if record.edges is not None:
        present |= bits["edges"]
        layout = schema.LAYOUT_EDGES
        arrays["edge_index"], arrays["edge_weight"], counts, attention_dtype, is_reversed = _pack_edges(
            record, keep_dtype, scratch
        )
        code = schema.dtype_code(attention_dtype)
        nonfinite += sum(kernels.count_nonfinite(_bytes(a), code) for a in arrays["edge_weight"])
        crcs |= {name: _crc(arrays[name]) for name in ("edge_index", "edge_weight")}
    graph_crc = 0
    for name in ("hidden_states", "attention", "edge_index", "edge_weight"):
        if name in arrays:
            graph_crc = kernels.crc32c_combine(graph_crc, crcs[name], sum(a.nbytes for a in arrays[name]))
    for name, here in (
        ("tokens", record.tokens is not None),
        ("tokens_decoded", record.tokens_decoded is not None),
        ("question_id", record.has_own_id),
        ("prompt_length", record.prompt_length is not None),
        ("label", record.label is not None),
        *((key, True) for key in record.strings),
    ):
        present |= bits[name] if here else 0
    # While the trace waits it holds what is stored of it, not what that was made from.
    record.hidden = record.attention = record.edges = record.last_token = None
    extras, record.extras = extras_json(record.extras), {}
    return PackedTrace(
        record=record,
        num_layers=num_layers,
        num_tokens=num_tokens,
        hidden_dim=hidden_dim,
        layout=layout,
        arrays=arrays,
        edge_counts=counts,
        reversed_edges=is_reversed,
        num_nonfinite=nonfinite,
        extras=extras,
        field_bits=present,
        crcs=crcs,
        graph_crc=graph_crc,
        sequence_crc=crcs.get("last_token", 0),
        num_heads=heads,
        hidden_dtype=hidden_dtype,
        attention_dtype=attention_dtype,
    )
