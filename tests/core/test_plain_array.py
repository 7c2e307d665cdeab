"""The fast path of arrays compared with ingest.pickles.pickled_values, which handles every state."""

import random

import numpy as np
import pytest

from tracestore._core.pickle import plain_array
from tracestore.errors import InvalidInputError
from tracestore.ingest.pickles.pickled_values import PickledArray, PickledDtype, make_array

TEXTS = ["f2", "f4", "f8", "f16", "i1", "i8", "u2", "c8", "c16", "b1", "U3", "S5", "O"]


def dtype_draft(text, order="<"):
    draft = PickledDtype(text)
    draft.build((3, order, None, None, None, -1, -1, 0))
    return draft


def outcome_of_slow_path(state):
    """Return the array or the error of a state without the fast path."""
    state[-3].plain_itemsize = 0
    return outcome(state)


def outcome(state):
    """Return the array or the error of a state."""
    draft = PickledArray()
    try:
        draft.build(state)
        return draft.array
    except (InvalidInputError, TypeError, ValueError, OverflowError) as error:
        return type(error).__name__, str(error)


def is_same(one, other):
    if not isinstance(one, np.ndarray):
        return one == other
    return (
        isinstance(other, np.ndarray)
        and (one.dtype, one.shape, one.strides, one.flags.writeable)
        == (other.dtype, other.shape, other.strides, other.flags.writeable)
        and one.tobytes() == other.tobytes()
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_fast_path_equals_the_slow_one(seed):
    rng = random.Random(seed)
    for _ in range(100):
        text, order = rng.choice(TEXTS), rng.choice("<><|=")
        shape = tuple(rng.choice([0, 1, 2, 3, 5]) for _ in range(rng.randint(0, 4)))
        itemsize = int(text[1:] or 8) * (4 if text[0] == "U" else 1)
        size = itemsize * int(np.prod(shape, dtype=np.int64)) + rng.choice([0, 0, 0, 0, -1, 1])
        data = rng.randbytes(max(0, size)) if text[0] != "U" else bytes(max(0, size))
        if rng.random() < 0.2:
            shape = rng.choice(
                [list(shape), (-1,), (True, 2), (2.0,), (1 << 63,), (1 << 40, 1 << 40), (1,) * 17, 3, None]
            )
        buffer = rng.choice([bytes, bytearray, memoryview, memoryview, memoryview])(data)
        version = rng.choice([(1,), (1,), (1,), ()])
        fortran = rng.choice([False, False, True, 0, 1, None])
        states = [(*version, shape, dtype_draft(text, order), fortran, buffer) for _ in range(2)]
        expected = outcome_of_slow_path(states[0])
        assert is_same(outcome(states[1]), expected), (states[1], expected)


def test_states_of_plain_arrays():
    data = memoryview(bytes(range(24)))
    dtype = np.dtype("<f4")
    array = plain_array((1, (2, 3), None, False, data), dtype, 4)
    assert is_same(array, make_array(data, dtype, (2, 3), "C")) and not array.flags.writeable
    assert np.shares_memory(array, np.frombuffer(data, "u1"))
    assert is_same(plain_array((1, (2, 3), None, True, data), dtype, 4), make_array(data, dtype, (2, 3), "F"))
    for state in (
        (1, (2, 3), None, False),
        (1, [2, 3], None, False, data),
        (1, (2, 4), None, False, data),
        (1, (2, 0), None, False, data[:0]),
        (1, (6, True), None, False, data),
        (1, (1 << 62, 1 << 62), None, False, data),
        (1, (2, 3), None, 0, data),
        (1, (2, 3), None, False, bytes(data) + b"0"),
        (1, (2, 3), None, False, memoryview(bytearray(data))),
        (1, (2, 3), None, False, data[::2]),
        (1, (2, 3), None, False, data.cast("f")),
    ):
        assert plain_array(state, dtype, 4) is None
