"""Dicts with a batch of B answers, and padding."""

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of, make_traces, write_pickle

LENGTHS = [3, 5, 4]
SIZE = 5


def padded(array, begin, end, axes):
    """Return the array with zeros before and after, along some axes."""
    return np.pad(array, [(begin, end) if axis in axes else (0, 0) for axis in range(array.ndim)])


def make_batch(traces, *, left, form="list"):
    """Return the traces as one dict with a batch dimension, and an attention mask."""
    pads = [(SIZE - n, 0) if left else (0, SIZE - n) for n in LENGTHS]
    pairs = list(zip(traces, pads, strict=True))
    hidden = [
        np.stack([padded(t["hidden_states"][k], *pad, (0,)) for t, pad in pairs])
        for k in range(len(traces[0]["hidden_states"]))
    ]
    attention = [
        np.stack([padded(t["attentions"][k], *pad, (1, 2)) for t, pad in pairs])
        for k in range(len(traces[0]["attentions"]))
    ]
    if form == "stacked":
        hidden, attention = np.stack(hidden), np.stack(attention)
    return {
        "hidden_states": hidden,
        "attentions": attention,
        "tokens": np.stack([padded(t["tokens"], *pad, (0,)) for t, pad in pairs]),
        "attention_mask": np.stack([padded(np.ones(len(t["tokens"]), "i8"), *pad, (0,)) for t, pad in pairs]),
        "question_id": [t["question_id"] for t in traces],
        "generated_answer_clean": [t["generated_answer_clean"] for t in traces],
        "prompt_length": [1 + pad[0] for _, pad in pairs],
        "score": np.array([0.25, 0.5, 0.75]),
        "model": "m",
    }


def answers():
    return make_traces(3, tokens=lambda k: LENGTHS[k])


def assert_stored(store, traces):
    assert len(store) == len(traces)
    for trace, expected in zip(store, traces, strict=True):
        np.testing.assert_array_equal(trace.hidden_states, np.stack(expected["hidden_states"]))
        np.testing.assert_array_equal(trace.attention, np.stack(expected["attentions"]))
        np.testing.assert_array_equal(trace.tokens, expected["tokens"])
        assert trace.answer == expected["generated_answer_clean"] and trace.extras["model"] == "m"


@pytest.mark.parametrize("form", ["list", "stacked"])
@pytest.mark.parametrize("left", [True, False])
def test_a_batch_with_an_attention_mask_is_a_trace_per_answer(tmp_path, left, form):
    traces = answers()
    path = write_pickle(tmp_path / "a.pkl", [make_batch(traces, left=left, form=form)])
    convert(path, tmp_path / "s.zarr", "--attention", "heads")
    store = tracestore.open(tmp_path / "s.zarr")
    assert_stored(store, traces)
    assert store.question_ids == ["q0", "q1", "q2"]
    assert [trace.prompt_length for trace in store] == [1, 1, 1]
    assert [trace.source[1] for trace in store] == [0, 1, 2]
    np.testing.assert_array_equal(store.scores, [0.25, 0.5, 0.75])


def test_a_batch_with_lengths(tmp_path):
    traces = answers()
    batch = make_batch(traces, left=False) | {"lengths": np.array(LENGTHS), "attention_mask": None}
    convert(write_pickle(tmp_path / "a.pkl", batch), tmp_path / "s.zarr", "--attention", "heads")
    assert_stored(tracestore.open(tmp_path / "s.zarr"), traces)


def test_answers_to_one_question_are_samples(tmp_path):
    batch = make_batch(answers(), left=True) | {"question_id": "q"}
    convert(write_pickle(tmp_path / "a.pkl", [batch]), tmp_path / "s.zarr")
    store = tracestore.open(tmp_path / "s.zarr")
    assert [(t.question_id, t.sample) for t in store] == [("q", 0), ("q", 1), ("q", 2)]


def test_the_padding_of_one_answer_is_removed(tmp_path):
    traces = answers()
    batch = make_batch(traces, left=True)
    one = batch | {
        "hidden_states": [h[:1] for h in batch["hidden_states"]],
        "attentions": [a[:1] for a in batch["attentions"]],
        "tokens": batch["tokens"][:1],
        "attention_mask": batch["attention_mask"][:1],
        "question_id": "q0",
        "generated_answer_clean": traces[0]["generated_answer_clean"],
        "prompt_length": 3,
        "score": 0.5,
    }
    convert(write_pickle(tmp_path / "a.pkl", [one]), tmp_path / "s.zarr", "--attention", "heads")
    store = tracestore.open(tmp_path / "s.zarr")
    assert_stored(store, traces[:1])
    assert store[0].prompt_length == 1


def passes_of_batch(batch, prompt):
    """Return the batch as passes of generate(), whose mask is that of the prompt."""
    ends = [prompt, *range(prompt + 1, SIZE + 1)]
    begins = [0, *ends[:-1]]
    spans = list(zip(begins, ends, strict=True))
    return batch | {
        "hidden_states": [[h[:, a:b] for h in batch["hidden_states"]] for a, b in spans],
        "attentions": [[x[:, :, a:b, :b] for x in batch["attentions"]] for a, b in spans],
        "attention_mask": batch["attention_mask"][:, :prompt],
    }


def test_passes_of_a_batch_with_the_mask_of_the_prompt(tmp_path):
    traces = answers()
    batch = passes_of_batch(make_batch(traces, left=True), 3)
    batch["sequences"] = np.pad(batch.pop("tokens"), [(0, 0), (0, 1)], constant_values=7)
    convert(write_pickle(tmp_path / "a.pkl", [batch]), tmp_path / "s.zarr", "--attention", "heads")
    store = tracestore.open(tmp_path / "s.zarr")
    expected = [t | {"tokens": np.append(t["tokens"], 7)} for t in traces]
    assert_stored(store, expected)


@pytest.mark.parametrize(
    "change,word",
    [
        ({"attention_mask": None}, "expected attention_mask or lengths"),
        ({"attention_mask": np.zeros((3, SIZE), "i8")}, "only padding"),
        ({"attention_mask": np.array([[1, 0, 1, 1, 1]] * 3)}, "a gap"),
        ({"attention_mask": np.ones((3, 9), "i8")}, "attention_mask"),
        ({"lengths": [9, 9, 9]}, "lengths"),
        ({"attentions": [np.zeros((2, 2, SIZE, SIZE), "f2")] * 3}, "attentions"),
    ],
    ids=range(6),
)
def test_a_batch_that_does_not_fit_together_is_refused(tmp_path, change, word):
    path = write_pickle(tmp_path / "a.pkl", [make_batch(answers(), left=True) | change])
    assert word in error_of("convert", path, tmp_path / "s.zarr", code=3)


def test_a_batch_without_padding_needs_an_option(tmp_path):
    traces = make_traces(3, tokens=4)
    batch = {
        "question_id": "q0",
        "hidden_states": [np.stack([t["hidden_states"][k] for t in traces]) for k in range(3)],
        "sequences": np.stack([t["tokens"] for t in traces]),
    }
    path = write_pickle(tmp_path / "a.pkl", batch)
    assert "choose --padding none" in error_of("convert", path, tmp_path / "s.zarr", code=3)
    convert(path, tmp_path / "s.zarr", "--padding", "none")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert [(t.question_id, t.sample) for t in store] == [("q0", 0), ("q0", 1), ("q0", 2)]
        for trace, expected in zip(store, traces, strict=True):
            np.testing.assert_array_equal(trace.hidden_states, np.stack(expected["hidden_states"]))
            np.testing.assert_array_equal(trace.tokens, expected["tokens"])
