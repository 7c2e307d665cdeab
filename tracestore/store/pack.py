"""Packing a checked trace: the arrays a segment appends."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracestore._core import kernels
from tracestore.store import schema
from tracestore.store.record import TraceRecord, extras_json, refuse
from tracestore.store.scratch import Scratch


@dataclass
class PackedTrace:
    """What a segment appends: buffers for the large arrays, values for the rest."""

    record: TraceRecord
    layout: int
    arrays: dict[str, list[np.ndarray]]
    edge_counts: np.ndarray | None
    reversed_edges: bool
    num_nonfinite: int
    extras: str
    field_bits: int
    graph_crc: int
    sequence_crc: int
    num_heads: int | None
    hidden_dtype: str
    attention_dtype: str | None

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes for pieces in self.arrays.values() for a in pieces)


def _stored(array: np.ndarray, keep: bool, name: str, scratch: Scratch) -> np.ndarray:
    """The array as it is stored: C-contiguous, float16 unless `keep`."""
    dtype = schema.dtype_name(array.dtype)
    array = np.ascontiguousarray(array)
    if dtype == "float16":
        return array
    if keep:
        if dtype == "float64":
            raise refuse(name, "float64", "float16, float32 or bfloat16 with --dtype keep")
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
        raise refuse(
            name, f"{float(value):g}, which float16 cannot hold", "at most 65504 in size, or the option --dtype keep"
        )
    return out


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view("u1")


def _crc(arrays: Sequence[np.ndarray], start: int = 0) -> int:
    for array in arrays:
        start = kernels.crc32c(_bytes(array), start)
    return start


def _pack_attention(
    layers: Sequence[np.ndarray], mode: str, keep: bool, num_tokens: int, scratch: Scratch
) -> tuple[int, list[np.ndarray], str, int]:
    """-> layout, one array a layer, dtype name, count of NaN and infinite values."""
    layers = [np.ascontiguousarray(a) for a in layers]
    dtype = schema.dtype_name(layers[0].dtype)
    code = schema.dtype_code(dtype)
    num_heads = layers[0].shape[0]
    causal = all(kernels.first_above_diagonal(_bytes(a), code, num_heads, num_tokens) < 0 for a in layers)
    layout = schema.LAYOUT_CAUSAL if causal else schema.LAYOUT_SQUARE
    pairs = schema.num_pairs(num_tokens, layout)
    nonfinite = 0
    packed = []
    for k, layer in enumerate(layers):
        if mode == "mean":
            out = np.empty(pairs, "<f2")
            try:
                kernels.head_mean(_bytes(layer), code, num_heads, num_tokens, causal, _bytes(out))
            except OverflowError:
                raise refuse(f"attentions[{k}]", "a head mean that float16 cannot hold", "at most 65504") from None
            nonfinite += kernels.count_nonfinite(_bytes(out), kernels.F16)
            packed.append(out)
            continue
        stored = _stored(layer, keep, f"attentions[{k}]", scratch)
        if causal:
            out = scratch.empty(num_heads * pairs, stored.dtype)
            kernels.pack_triangle(_bytes(stored), stored.itemsize, num_heads, num_tokens, _bytes(out))
            stored = out
        stored_name = "float16" if not keep else dtype
        nonfinite += kernels.count_nonfinite(_bytes(stored), schema.dtype_code(stored_name))
        packed.append(stored.reshape(-1))
    name = "float16" if mode == "mean" or not keep else dtype
    return layout, packed, name, nonfinite


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
            raise refuse(f"graphs[{k}].edge_attr", f"dtype {weight.dtype}", f"{dtype} as in layer 0")
        if index.size and (index.min() < 0 or index.max() >= num_tokens):
            raise refuse(f"graphs[{k}].edge_index", f"nodes {index.min()} to {index.max()}", f"0 to {num_tokens - 1}")
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
    record: TraceRecord, *, attention: str, keep_dtype: bool, scratch: Scratch | None = None
) -> PackedTrace:
    """Packs a checked trace for a store with these options; what takes much room lies in
    `scratch` (by default in memory). InputRefusedError where a value does not fit."""
    scratch = scratch or Scratch(max_memory=1 << 62)
    scratch.start()
    arrays: dict[str, list[np.ndarray]] = {}
    bits = schema.FIELD_BITS
    present = 0
    nonfinite = 0
    layout, counts, is_reversed, heads, attention_dtype = schema.LAYOUT_NONE, None, False, None, None
    graph_crc = sequence_crc = 0
    if record.hidden is not None:
        present |= bits["hidden_states"]
        source_dtype = schema.dtype_name(record.hidden[0].dtype)
        arrays["hidden_states"] = [
            _stored(h, keep_dtype, f"hidden_states[{k}]", scratch) for k, h in enumerate(record.hidden)
        ]
        graph_crc = _crc(arrays["hidden_states"])
    else:
        assert record.last_token is not None
        source_dtype = schema.dtype_name(record.last_token.dtype)
    hidden_dtype = source_dtype if keep_dtype else "float16"
    code = schema.dtype_code(hidden_dtype)
    nonfinite += sum(kernels.count_nonfinite(_bytes(a), code) for a in arrays.get("hidden_states", ()))
    if record.last_token is not None:
        present |= bits["last_token"]
        arrays["last_token"] = [_stored(record.last_token, keep_dtype, "sequences", scratch)]
        nonfinite += kernels.count_nonfinite(_bytes(arrays["last_token"][0]), code)
    elif record.edges is None:
        arrays["last_token"] = [np.stack([h[-1] for h in arrays["hidden_states"]])]
    if record.attention is not None and attention != "none":
        present |= bits["attentions"]
        heads = int(record.attention[0].shape[0])
        layout, arrays["attention"], attention_dtype, bad = _pack_attention(
            record.attention, attention, keep_dtype, record.num_tokens, scratch
        )
        nonfinite += bad
        graph_crc = _crc(arrays["attention"], graph_crc)
    if record.edges is not None:
        present |= bits["edges"]
        layout = schema.LAYOUT_EDGES
        arrays["edge_index"], arrays["edge_weight"], counts, attention_dtype, is_reversed = _pack_edges(
            record, keep_dtype, scratch
        )
        code = schema.dtype_code(attention_dtype)
        nonfinite += sum(kernels.count_nonfinite(_bytes(a), code) for a in arrays["edge_weight"])
        graph_crc = _crc([*arrays["edge_index"], *arrays["edge_weight"]], graph_crc)
    if "last_token" in arrays:
        sequence_crc = _crc(arrays["last_token"])
    for name, here in (
        ("tokens", record.tokens is not None),
        ("tokens_decoded", record.tokens_decoded is not None),
        ("question_id", record.has_own_id),
        ("prompt_length", record.prompt_length is not None),
        ("label", record.label is not None),
        *((key, True) for key in record.strings),
    ):
        present |= bits[name] if here else 0
    return PackedTrace(
        record=record,
        layout=layout,
        arrays=arrays,
        edge_counts=counts,
        reversed_edges=is_reversed,
        num_nonfinite=nonfinite,
        extras=extras_json(record.extras),
        field_bits=present,
        graph_crc=graph_crc,
        sequence_crc=sequence_crc,
        num_heads=heads,
        hidden_dtype=hidden_dtype,
        attention_dtype=attention_dtype,
    )
