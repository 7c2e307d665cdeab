"""Keys that other programs use for ids, texts, arrays and layers."""

import pickle

import numpy as np
import pytest

import tracestore
from tests.helpers import convert

HIDDEN = np.random.default_rng(0).random((3, 4, 8), np.float32).astype("f2")


def convert_trace(tmp_path, trace):
    """Convert one trace without attention and return the trace of the store."""
    (tmp_path / "in.pkl").write_bytes(pickle.dumps([trace]))
    convert(tmp_path / "in.pkl", tmp_path / "s.zarr", "--attention", "none")
    return tracestore.open(tmp_path / "s.zarr")[0]


@pytest.mark.parametrize("name", ["hs", "activations", "representations", "all_hidden_states"])
def test_names_of_hidden_states(tmp_path, name):
    trace = convert_trace(tmp_path, {"qid": "q7", name: list(HIDDEN), "response": "Paris", "prompt": "where?"})
    np.testing.assert_array_equal(trace.hidden_states, HIDDEN)
    assert (trace.question_id, trace.question, trace.answer) == ("q7", "where?", "Paris")


@pytest.mark.parametrize("name", ["layer_{}", "model.layers.{}", "blocks.{}.hook_resid_post"])
def test_a_key_for_each_layer(tmp_path, name):
    layers = {name.format(k): HIDDEN[k] for k in (2, 0, 1)}
    trace = convert_trace(tmp_path, {"id": 5, **layers})
    np.testing.assert_array_equal(trace.hidden_states, HIDDEN)
    assert trace.question_id == "5"


def test_a_number_that_may_count_the_traces_of_a_file_is_no_id(tmp_path):
    assert convert_trace(tmp_path, {"idx": 3, "hidden_states": list(HIDDEN)}).question_id == "in.pkl:0"


def test_fields_of_the_schema_take_precedence(tmp_path):
    given = {"question_id": "a", "id": "b", "hidden_states": list(HIDDEN), "hs": "kept", "generated_answer": "x"}
    trace = convert_trace(tmp_path, given | {"response": "y"})
    assert (trace.question_id, trace.answer) == ("a", "x")
    assert trace.extras == {"id": "b", "hs": "kept", "response": "y"}


def test_the_output_of_a_model_is_merged_into_its_trace(tmp_path):
    output = {"hidden_states": list(HIDDEN), "attentions": None, "logits": np.ones(3)}
    trace = convert_trace(tmp_path, {"question_id": "q", "output": output, "k": 3})
    np.testing.assert_array_equal(trace.hidden_states, HIDDEN)
    assert trace.question_id == "q" and trace.extras["k"] == 3


def test_two_nested_dicts_with_hidden_states_are_refused(tmp_path):
    (tmp_path / "in.pkl").write_bytes(pickle.dumps([{k: {"hidden_states": list(HIDDEN)} for k in ("a", "b")}]))
    error = convert(tmp_path / "in.pkl", tmp_path / "s.zarr", check=3).stderr
    assert "missing key" in error and "--map hidden_states=a.hidden_states" in error
