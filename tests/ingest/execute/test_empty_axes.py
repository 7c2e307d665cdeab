"""Test that an axis of length 0 is refused with its reason, in every field and container."""

import numpy as np
import pytest

from tests.ingest.execute.folders import dump, states
from tests.ingest.execute.test_direct import LAYOUT, compare, item, records

AXES = {"hs": "LSD", "attn": "LHSQ", "ids": "S", "words": "S", "layers": "L"}
FIELDS = {"hs": "hidden_states", "attn": "attentions", "ids": "tokens", "words": "tokens_decoded", "layers": "L"}


def emptied(value, axis):
    """Return a value with length 0 on one of its axes."""
    array = np.asarray(value)
    return np.empty((*array.shape[:axis], 0, *array.shape[axis + 1 :]), array.dtype)


def refused(message, *names):
    """Assert that a message is one line of a refusal that names one of the fields, and no fault of the reader.

    Without an item there is no record, which is refused behind the execution: found no trace.
    """
    if message == []:
        return
    assert isinstance(message, str), message
    assert "\n" not in message and "Error" not in message, message
    assert any(name in message for name in names), message


CASES = [(name, axis) for name, letters in AXES.items() for axis in range(len(letters))]


@pytest.mark.parametrize("kind", [np.asarray, list, np.ndarray.tolist])
@pytest.mark.parametrize(("name", "axis"), CASES)
def test_a_field_of_an_item(name, axis, kind, tmp_path, monkeypatch):
    value = kind(emptied(item()[name], axis))
    dump(tmp_path / "in/a.pkl", [item(id="first"), item(**{name: value})])
    if name == "attn" and isinstance(value, list) and not value:  # as a model leaves it that gives no attention
        first, second = compare(LAYOUT, tmp_path / "in", monkeypatch)
        assert first.attention is not None
        assert second.attention is None
        return

    refused(compare(LAYOUT, tmp_path / "in", monkeypatch), FIELDS[name])


N, L, S, D, H = 2, 3, 4, 6, 2
STACK = {
    "h": ("hidden_states", "N L S D", states(N, L, S, D)),
    "a": ("attentions", "N L H S S", np.full((N, L, H, S, S), 1 / S, "f4")),
    "t": ("tokens", "N S", np.arange(N * S).reshape(N, S)),
    "m": ("S.mask", "N S", np.ones((N, S), int)),
    "p": ("token_logprob", "N S", states(N, S)),
}
OTHERS = {
    "last tokens": ("last_token", "N L D", states(N, L, D)),
    "layers and columns": ("hidden_states", "N S (L D)", states(N, S, L * D)),
    "one row of tokens": ("hidden_states", "L (N S) D", states(L, N * S, D)),
    "passes": ("hidden_states", "P L S D", states(S, L, 1, D)),
    "steps": ("hidden_states", "N P L 1 D", states(N, S, L, 1, D)),
}


@pytest.mark.parametrize("suffix", ["npz", "pkl"])
@pytest.mark.parametrize(("name", "axis"), [(name, k) for name, (_, _, a) in STACK.items() for k in range(a.ndim)])
def test_an_array_of_a_stack(name, axis, suffix, tmp_path):
    arrays = {key: array for key, (_, _, array) in STACK.items()}
    arrays[name] = emptied(arrays[name], axis)
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/a.npz", **arrays) if suffix == "npz" else dump(tmp_path / "in/a.pkl", arrays)
    layout = {field: f"a.{suffix} : {key} -> {axes}" for key, (field, axes, _) in STACK.items()}

    refused(records(layout, tmp_path / "in"), STACK[name][0], "hidden_states", "belongs to no trace")


@pytest.mark.parametrize(("kind", "axis"), [(k, axis) for k, (_, _, a) in OTHERS.items() for axis in range(a.ndim)])
def test_an_array_of_other_axes(kind, axis, tmp_path):
    field, axes, array = OTHERS[kind]
    dump(tmp_path / "in/a.pkl", {"x": emptied(array, axis), "n": np.full(N, S)})
    layout = {field: f"a.pkl : x -> {axes}"} | ({"L.size": L} if "(L D)" in axes else {})
    layout |= {"S.lengths": "a.pkl : n -> N"} if "(N S)" in axes else {"ignore": "a.pkl : n"}

    refused(records(layout, tmp_path / "in"), field, "S.lengths")
