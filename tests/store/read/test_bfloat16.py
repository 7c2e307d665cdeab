"""Arrays of bfloat16 stores are numbers under their names, and raw bits under names that end with _bits."""

import sys

import numpy as np
import pytest

import tracestore
from tests.helpers import as_torch, make_graphs, make_trace, write_store
from tests.store.read.test_truncation import files_of, truncate
from tracestore import extras
from tracestore.errors import CorruptStoreError
from tracestore.store.format import schema
from tracestore.store.maintain.verify import verify_store
from tracestore.store.trace_fields import PackedEdges

torch = pytest.importorskip("torch")
ARRAYS = ("hidden_states", "last_token", "attention", "attention_packed")


@pytest.fixture(params=["with ml_dtypes", "without ml_dtypes"])
def dtype(request, monkeypatch):
    """Return the dtype that bfloat16 values have with and without the package ml_dtypes."""
    monkeypatch.setattr(extras, "bfloat16_dtype", extras.bfloat16_dtype.__wrapped__)
    if request.param == "without ml_dtypes":
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        return np.dtype("<f4")
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


def make_store(path, kind, *, codec="none"):
    """Write a store of bfloat16 whose first hidden state is 1, and return the source with its values as float32."""
    trace = make_trace(3, tokens=4, dtype="f4", causal=kind != "square")
    trace["hidden_states"][0][0, 0] = 1
    if kind == "edges":
        graphs = make_graphs(trace)
        index = [g.edge_index.numpy() for g in graphs]
        weight = [g.edge_attr[:, 0].bfloat16() for g in graphs]
        source = {k: v for k, v in trace.items() if k != "attentions"} | {
            "edges": list(zip(index, weight, strict=True))
        }
        source["hidden_states"] = [torch.from_numpy(h).bfloat16() for h in trace["hidden_states"]]
    else:
        source = as_torch(trace, torch.bfloat16)
    write_store(path, [source], dtype="keep", attention="mean" if kind == "edges" else "heads", codec=codec)
    hidden = torch.stack(source["hidden_states"]).float().numpy()
    if kind == "edges":
        return hidden, torch.cat([w for _, w in source["edges"]]).float().numpy()
    return hidden, torch.stack(source["attentions"]).float().numpy()


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("kind", ["causal", "square"])
def test_arrays_are_numbers_and_bits_have_another_name(tmp_path, dtype, kind, codec):
    hidden, attention = make_store(tmp_path / "s.zarr", kind, codec=codec)
    expected = {"hidden_states": hidden, "last_token": hidden[:, -1], "attention": attention}
    with tracestore.open(tmp_path / "s.zarr") as store:
        trace = store[0]
        assert trace.hidden_states[0, 0, 0] == 1 and trace.hidden_states_bits[0, 0, 0] == 0x3F80
        for found in (trace, trace.copy(), store.private_trace(0)):
            for name in ARRAYS:
                values, bits = getattr(found, name), getattr(found, f"{name}_bits")
                assert values.dtype == dtype and bits.dtype == np.uint16, name
                assert values.shape == bits.shape
                assert np.array_equal(values.astype("f4"), schema.as_float32(bits, "bfloat16"))
            for name, value in expected.items():
                assert np.array_equal(getattr(found, name).astype("f4"), value), name
                assert np.array_equal(found[name].astype("f4"), value), name
                assert torch.equal(found.to_torch(name)[name], torch.from_numpy(value).bfloat16()), name
        assert np.array_equal(trace.attention_layer(1).astype("f4"), attention[1])
        assert trace.attention_layer(1).dtype == dtype and trace.attention_mean.dtype == np.float16
        is_view = np.shares_memory(trace.hidden_states, trace.hidden_states_bits)
        assert is_view == (dtype != np.float32)
        assert np.array_equal(store.features(1), hidden[None, 1, -1])


def test_edge_weights_are_numbers(tmp_path, dtype):
    _, weight = make_store(tmp_path / "s.zarr", "edges")
    with tracestore.open(tmp_path / "s.zarr") as store:
        for found in (store[0], store[0].copy()):
            packed, bits = found.attention_packed, found.attention_packed_bits
            assert isinstance(packed, PackedEdges) and packed.weight.dtype == dtype and bits.weight.dtype == np.uint16
            assert np.array_equal(packed.weight.astype("f4"), weight)
            dense = found.attention
            assert dense.dtype == dtype and dense.astype("f4").sum() == pytest.approx(weight.sum(), rel=1e-5)


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_other_dtypes_are_the_same_under_both_names(tmp_path, dtype, name):
    write_store(tmp_path / "s.zarr", [make_trace(3, tokens=4, dtype=name)], dtype="keep", attention="heads")
    with tracestore.open(tmp_path / "s.zarr") as store:
        for array in ARRAYS:
            values, bits = getattr(store[0], array), getattr(store[0], f"{array}_bits")
            assert values.dtype == bits.dtype == name and np.array_equal(values, bits)


def test_values_can_be_appended_to_another_store(tmp_path, dtype):
    """Append arrays of a trace, also those of ml_dtypes."""
    make_store(tmp_path / "s.zarr", "causal")
    with tracestore.open(tmp_path / "s.zarr") as store:
        arrays = {"hidden_states": list(store[0].hidden_states), "attentions": list(store[0].attention)}
        write_store(tmp_path / "c.zarr", [arrays], dtype="keep", attention="heads")
        with tracestore.open(tmp_path / "c.zarr") as copy:
            assert copy.hidden_dtype == ("float32" if dtype == np.float32 else "bfloat16")
            assert np.array_equal(copy[0].hidden_states.astype("f4"), store[0].hidden_states.astype("f4"))
    assert verify_store(tmp_path / "c.zarr").damaged == {}


def test_truncated_files_give_an_error_where_values_are_converted(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "bfloat16_dtype", lambda: None)
    make_store(tmp_path / "s.zarr", "causal")
    with tracestore.open(tmp_path / "s.zarr") as store:
        trace = store[0]
        for name in ARRAYS:
            getattr(trace, name)
        for name in files_of(tmp_path / "s.zarr"):
            truncate(tmp_path / "s.zarr" / name, 0)
        for name in ARRAYS:
            with pytest.raises(CorruptStoreError):
                getattr(trace, name)
