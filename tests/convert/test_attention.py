"""The default of convert --attention: what the traces have."""

import json

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of, make_traces, tree_bytes, write_pickle

NOTE = "no attention in the source: stored without edges; detectors that need graphs cannot train on it"


def without_attention(traces):
    return [{key: value for key, value in trace.items() if key != "attentions"} for trace in traces]


@pytest.mark.parametrize("value", ["absent", None, (), [None, None, None]])
def test_traces_without_attention_are_stored_without_it_and_the_summary_says_so(tmp_path, value):
    traces = without_attention(make_traces(3))
    if value != "absent":
        traces = [trace | {"attentions": value} for trace in traces]
    path = write_pickle(tmp_path / "a.pkl", traces)

    done = convert(path, tmp_path / "s.zarr")

    assert NOTE in done.stdout
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.attention_mode == "none"
        assert np.array_equal(store[2].hidden_states, traces[2]["hidden_states"])
    dry = convert(path, tmp_path / "t.zarr", "--dry-run", "--json")
    assert json.loads(dry.stdout)["attention"] == "none" and NOTE in dry.stderr


@pytest.mark.parametrize("mode", ["mean", "heads"])
def test_an_explicit_option_refuses_traces_without_attention(tmp_path, mode):
    path = write_pickle(tmp_path / "a.pkl", without_attention(make_traces(1)))
    assert "--attention none" in error_of("convert", path, tmp_path / "s.zarr", "--attention", mode, code=3)


@pytest.mark.parametrize("number", [0, 1])
def test_if_some_traces_have_attention_those_without_are_refused(tmp_path, number):
    traces = make_traces(2)
    traces[number] = without_attention(traces)[number]
    path = write_pickle(tmp_path / "a.pkl", traces)
    message = error_of("convert", path, tmp_path / "s.zarr", code=3)
    assert f"trace {number}, attentions: missing key" in message and "--attention none" in message


def test_the_files_decide_together(tmp_path):
    write_pickle(tmp_path / "a.pkl", without_attention(make_traces(2)))
    write_pickle(tmp_path / "b.pkl", make_traces(4)[2:])
    assert "a.pkl, trace 0" in error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)
    convert(tmp_path, tmp_path / "s.zarr", "--skip-bad", "--workers", "4")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.attention_mode == "mean" and list(store.question_ids) == ["q2", "q3"]


def test_attention_after_the_first_traces_is_refused_also_by_the_run_that_continues(tmp_path):
    traces = make_traces(8)
    write_pickle(tmp_path / "a.pkl", without_attention(traces[:4]))
    write_pickle(tmp_path / "b.pkl", [*without_attention(traces[4:7]), traces[7]])
    for _ in range(2):
        message = error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)
        assert "b.pkl, trace 3, attentions: found attention" in message and "--attention none" in message
        assert len(tracestore.open(tmp_path / "s.zarr")) == 4
    convert(tmp_path, tmp_path / "s.zarr", "--attention", "none")
    assert len(tracestore.open(tmp_path / "s.zarr")) == 8


def test_the_store_does_not_depend_on_the_number_of_workers(tmp_path):
    folder = tmp_path / "in"
    for k in range(6):
        write_pickle(folder / f"{k}.pkl", without_attention(make_traces(2 * k + 2)[2 * k :]))
    for workers in (1, 4):
        convert(folder, tmp_path / f"{workers}.zarr", "--workers", workers)
    assert tree_bytes(tmp_path / "1.zarr") == tree_bytes(tmp_path / "4.zarr")


def test_a_store_that_exists_keeps_its_attention(tmp_path):
    traces = make_traces(4)
    bare = write_pickle(tmp_path / "a.pkl", without_attention(traces[:2]))
    path = write_pickle(tmp_path / "b.pkl", traces[2:])
    convert(bare, tmp_path / "none.zarr")
    done = convert(path, tmp_path / "none.zarr")
    assert "the store has no attention: that of the source was left out" in done.stdout
    assert len(tracestore.open(tmp_path / "none.zarr")) == 4
    convert(path, tmp_path / "mean.zarr")
    assert "missing key" in error_of("convert", bare, tmp_path / "mean.zarr", code=3)


def test_last_tokens_alone_leave_room_for_graphs(tmp_path):
    traces = [{"last_token": np.ones((3, 8), "f2"), "question_id": "a"}]
    done = convert(write_pickle(tmp_path / "a.pkl", traces), tmp_path / "s.zarr")
    assert NOTE not in done.stdout and tracestore.open(tmp_path / "s.zarr").attention_mode == "mean"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"tokens": np.array([1.5])}, "tokens"),
        ({"tokens": np.arange(90)}, "tokens"),
        ({"tokens_decoded": ["a"]}, "tokens_decoded"),
        ({"label": 0.3}, "label"),
        ({"is_correct": "maybe"}, "is_correct"),
        ({"sample": -1}, "sample"),
        ({"question_id": 1.5}, "question_id"),
        ({"prompt_length": 90}, "prompt_length"),
        ({"prompt_length": -1}, "prompt_length"),
        ({"token_logprob": np.zeros(90, "f4")}, "token_logprob"),
    ],
)
def test_what_is_wrong_with_traces_without_attention_is_reported_and_not_that_they_have_none(tmp_path, changed, field):
    traces = [trace | changed for trace in without_attention(make_traces(3))]
    lines = ["--field", "hidden_states = *.pkl : []/hidden_states -> L S D"]
    lines += ["--field", f"{field} = *.pkl : []/{field}", "--field", "records = *.pkl : []"]

    error = error_of("convert", write_pickle(tmp_path / "a.pkl", traces), tmp_path / "s.zarr", *lines, code=3)

    assert field in error and "--attention" not in error
