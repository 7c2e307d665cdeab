"""Test that an axis of length 0 is refused with its reason, in every field and container."""

import numpy as np
import pytest

from tests.ingest.execute.folders import dump, save, states
from tests.ingest.execute.test_direct import LAYOUT, compare, item, records

AXES = {"hs": "LSD", "attn": "LHSQ", "ids": "S", "words": "S", "layers": "L"}
FIELDS = {"hs": "hidden_states", "attn": "attentions", "ids": "tokens", "words": "tokens_decoded", "layers": "L.ids"}


def emptied(value, axis):
    """Return a value without what lies on one of its axes."""
    array = np.asarray(value)
    return np.empty((*array.shape[:axis], 0, *array.shape[axis + 1 :]), array.dtype)


def refused(message, *names):
    """Assert that a message is one line of a refusal that names one of the fields, and no fault of the reader."""
    assert isinstance(message, str), message
    assert "\n" not in message and "Error" not in message, message
    assert any(name in message for name in names), message


CASES = [(name, axis) for name, letters in AXES.items() for axis in range(len(letters))]


@pytest.mark.parametrize("kind", [np.asarray, list, np.ndarray.tolist])
@pytest.mark.parametrize(("name", "axis"), CASES)
def test_a_field_of_an_item(name, axis, kind, tmp_path, monkeypatch):
    dump(tmp_path / "in/a.pkl", [item(id="first"), item(**{name: kind(emptied(item()[name], axis))})])

    refused(compare(LAYOUT, tmp_path / "in", monkeypatch), FIELDS[name])
