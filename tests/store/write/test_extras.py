"""Extra fields of a trace: every value that is accepted is read again, and others are refused."""

import types

import numpy as np
import pytest

import tracestore
from tests.helpers import make_trace, write_store
from tests.store.format.store_kinds import EXTRAS
from tests.store.format.zarr_libraries import assert_identical
from tracestore.errors import InvalidInputError
from tracestore.store.maintain.verify import verify_store


def plain(value):
    """Return a value in the form in which it is read: tuples as lists, scalars of numpy as Python's."""
    if isinstance(value, dict):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def assert_equal(found, expected):
    if isinstance(expected, np.ndarray):
        assert_identical(found, expected, "")
    elif isinstance(expected, dict | list):
        assert type(found) is type(expected) and len(found) == len(expected)
        keys = range(len(expected)) if isinstance(expected, list) else expected
        for key in keys:
            assert_equal(found[key], expected[key])
    else:
        assert repr(found) == repr(expected)


@pytest.mark.parametrize("extras", EXTRAS)
def test_extras_are_read_as_they_were_given(tmp_path, extras):
    path = write_store(tmp_path / "s.zarr", [make_trace(0) | extras])
    with tracestore.open(path) as store:
        assert_equal(store[0].extras, plain(extras))
        assert_equal(store[0].copy().extras, plain(extras))
    assert verify_store(path).damaged == {}


@pytest.mark.parametrize("scalar", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_scalars_of_numpy_that_are_not_finite_are_read_as_floats(tmp_path, scalar, text):
    """repr(np.float64("nan")) is no text that float() reads."""
    path = write_store(tmp_path / "s.zarr", [make_trace(0) | {"x": [scalar(text)], "y": {1: scalar(text)}}])
    with tracestore.open(path) as store:
        assert_equal(store[0].extras, {"x": [float(text)], "y": {1: float(text)}})


@pytest.mark.parametrize("value", [{(0, 1): 2}, {"a": [{(): {}}]}, {frozenset(): 1}, {types.NoneType: 1}])
def test_keys_that_no_dict_can_have_when_it_is_read_are_refused(tmp_path, value):
    """A tuple would be read as a list, which cannot be a key."""
    with tracestore.create(tmp_path / "s.zarr") as writer:
        with pytest.raises(InvalidInputError, match=r"x: found a key of type \w+, expected strings, numbers or bytes"):
            writer.append(make_trace(0) | {"x": value})
        writer.append(make_trace(1))
    assert tracestore.open(tmp_path / "s.zarr").question_ids == ["q1"]
