"""Traces with equal states, one by one and in blocks."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracestore.convert.described import DescribedRun
from tracestore.errors import InvalidInputError
from tracestore.ingest.score_files import FoundFiles

TRACES = st.tuples(st.integers(0, 5), st.sampled_from(["a", "a (1)", "b", "b_copy", "c", "d", "e", "f"]))


def trace(states, name):
    record = SimpleNamespace(question_id=name, position=0, scores={})
    return SimpleNamespace(record=record, crcs={"hidden_states": states}, num_tokens=3)


@given(st.lists(st.lists(TRACES, min_size=1, max_size=4), max_size=5))
def test_blocks_count_equal_states_as_their_traces_do(blocks):
    one, many = (DescribedRun([], {}, FoundFiles([], [])) for _ in range(2))
    for found in blocks:
        block = SimpleNamespace(states=[(states << 32 | 3, name) for states, name in found], score_names=list)
        is_refused = False
        try:
            for states, name in found:
                one.add_states(trace(states, name))
        except InvalidInputError:
            is_refused = True
        assert many.fits(block) != is_refused
        if is_refused:
            return
        many.add_block(block, None)
        assert many.num_equal == one.num_equal


@pytest.mark.parametrize(
    ("names", "num_equal"),
    [(["a", "b"], 1), (["a", "a"], 0), (["a", "b", "a"], 1), (["a", "b", "b"], 2), (["a", "b", "c"], 2)],
)
def test_equal_states_of_other_ids_fit(names, num_equal):
    run = DescribedRun([], {}, FoundFiles([], []))
    block = SimpleNamespace(states=[(1, name) for name in names], score_names=list)
    assert run.fits(block)
    run.add_block(block, None)
    assert run.num_equal == num_equal
