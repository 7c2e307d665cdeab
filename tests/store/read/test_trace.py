"""Copies of traces, which do not depend on the files of the store."""

import numpy as np
import pytest

import tracestore
from tests.helpers import as_torch, make_optional, make_traces, write_store
from tests.store.read.test_truncation import CASES, files_of, make_store, truncate
from tracestore.errors import UsageError
from tracestore.store.format import schema
from tracestore.store.read.segment import SegmentReader


@pytest.mark.parametrize("case", CASES)
def test_a_copy_equals_the_trace_and_needs_no_files(tmp_path, case):
    store = tracestore.open(make_store(tmp_path / "s.zarr", **CASES[case]))
    trace = store[3]
    copied = trace.copy()
    names = ("question_id", "sample", "source", "score", "num_tokens", "question", "answer", "extras", "tokens_decoded")
    for name in names:
        assert np.array_equal([getattr(copied, name)], [getattr(trace, name)], equal_nan=name == "score"), name
    arrays = ["hidden_states", "last_token", "attention", "attention_packed", "tokens"]
    for name in arrays[:3] if case == "edges" else arrays:
        mine, theirs = getattr(copied, name), getattr(trace, name)
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs), name
        assert not np.shares_memory(mine, theirs) or name == "attention" or case == "zstd"
    before = copied.hidden_states.tobytes()
    for name in files_of(tmp_path / "s.zarr"):
        truncate(tmp_path / "s.zarr" / name, 0)
    assert copied.hidden_states.tobytes() == before
    assert copied.attention.shape[-2:] == (copied.num_tokens, copied.num_tokens)


def test_a_copy_lacks_the_fields_that_the_trace_lacks(tmp_path):
    copied = tracestore.open(write_store(tmp_path / "s.zarr", make_traces(1), attention="none"))[0].copy()
    assert copied.attention_packed is None and copied.hidden_states is not None and np.isnan(copied.score)
    with pytest.raises(tracestore.errors.MissingFieldError):
        _ = copied.attention


@pytest.mark.parametrize("dtype", ["f4", "bfloat16"])
def test_a_copy_of_last_tokens_has_no_other_array(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    last = torch.ones(3, 8, dtype=torch.bfloat16) if dtype == "bfloat16" else np.ones((3, 8), dtype)
    path = write_store(tmp_path / "s.zarr", [{"question_id": "a", "last_token": last}], dtype="keep")
    copied = tracestore.open(path)[0].copy()
    assert copied.hidden_states is None and copied.attention_packed is None and copied.last_token.shape == (3, 8)


@pytest.fixture(params=["trace", "copy"])
def full(request, tmp_path):
    """A trace with every optional field, or its copy."""
    trace = make_traces(1, tokens=4)[0] | make_optional(4)
    found = tracestore.open(write_store(tmp_path / "s.zarr", [trace], score=0.5))[0]
    return found if request.param == "trace" else found.copy()


def test_fields_are_found_by_name(full):
    keys = full.keys()
    assert (
        list(full) == keys and len(set(keys)) == len(keys) and {"score", "attention", *schema.OPTIONAL_FIELDS} < {*keys}
    )
    for name, value in dict(full).items():
        np.testing.assert_equal(value, getattr(full, name))
    assert "hidden_states" in full and "question" not in full
    for absent in ("question", "nowhere", "copy", "_row"):
        with pytest.raises(KeyError, match=f"{absent}: the trace has index, question_id"):
            full[absent]


def test_keys_are_those_that_the_trace_has(tmp_path):
    trace = tracestore.open(write_store(tmp_path / "s.zarr", make_traces(1), attention="none"))[0]
    for found in (trace, trace.copy()):
        assert "hidden_states" in found and not {"attention", "attention_layout", "token_entropy"} & {*found}
        with pytest.raises(KeyError, match="attention: the trace has"):
            found["attention"]


def test_listing_the_keys_reads_no_large_array(store_path, monkeypatch):
    opened = []
    monkeypatch.setattr(SegmentReader, "array", lambda self, name: opened.append(name))
    assert "hidden_states" in tracestore.open(store_path)[3] and opened == []


@pytest.mark.parametrize("case", CASES)
def test_tensors_hold_the_stored_values(tmp_path, case):
    torch = pytest.importorskip("torch")
    store = tracestore.open(make_store(tmp_path / "s.zarr", **CASES[case]))
    for trace in (store[3], store[3].copy()):
        tensors = trace.to_torch()
        assert {"hidden_states", "last_token", "attention"} <= set(tensors)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor.numpy(), trace[name])
        converted = trace.to_torch("attention", "hidden_states", dtype="float32")
        assert list(converted) == ["attention", "hidden_states"]
        assert torch.equal(converted["hidden_states"], tensors["hidden_states"].float())
    before = tensors["hidden_states"].clone()
    tensors = store[3].to_torch()
    for name in files_of(tmp_path / "s.zarr"):
        truncate(tmp_path / "s.zarr" / name, 0)
    assert torch.equal(tensors["hidden_states"], before)


def test_tensors_of_bfloat16_and_of_optional_fields(tmp_path, full):
    torch = pytest.importorskip("torch")
    tensors = full.to_torch()
    assert tensors["generated_mask"].dtype == torch.uint8 and tensors["token_entropy"].shape == (4,)
    trace = as_torch(make_traces(1, tokens=4, dtype="f4")[0], torch.bfloat16)
    (found,) = tracestore.open(write_store(tmp_path / "b.zarr", [trace], dtype="keep"))
    tensors = found.to_torch()
    assert tensors["hidden_states"].dtype == tensors["last_token"].dtype == torch.bfloat16
    assert torch.equal(tensors["hidden_states"], torch.stack(trace["hidden_states"]))
    assert found.to_torch(dtype="float32")["last_token"].dtype == torch.float32


def test_what_is_no_array_is_no_tensor(full):
    pytest.importorskip("torch")
    with pytest.raises(UsageError, match="question_id is no array; arrays are last_token, hidden_states"):
        full.to_torch("question_id")
    with pytest.raises(UsageError, match="found dtype 'float64', expected 'float32'"):
        full.to_torch(dtype="float64")
    with pytest.raises(KeyError, match="nowhere"):
        full.to_torch("nowhere")


@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_the_store_lacks_is_refused(tmp_path, case):
    """It would be a layer of the trace before or behind this one."""
    store = tracestore.open(make_store(tmp_path / "s.zarr", **CASES[case]))
    count = store.num_layers
    for layer in range(-count, count):
        assert np.array_equal(store[3].attention_layer(layer), store[3].attention[layer])
    for layer in (-count - 1, count):
        with pytest.raises(UsageError, match=f"found layer {layer}, expected -{count} to {count - 1}"):
            store[3].attention_layer(layer)
