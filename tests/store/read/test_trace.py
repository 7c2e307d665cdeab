"""Copies of traces, which do not depend on the files of the store."""

import numpy as np
import pytest

import tracestore
from tests.helpers import make_traces, write_store
from tests.store.read.test_truncation import CASES, files_of, make_store, truncate


@pytest.mark.parametrize("case", CASES)
def test_a_copy_equals_the_trace_and_needs_no_files(tmp_path, case):
    store = tracestore.open(make_store(tmp_path / "s.zarr", **CASES[case]))
    trace = store[3]
    copied = trace.copy()
    for name in [
        "question_id",
        "sample",
        "source",
        "score",
        "num_tokens",
        "question",
        "answer",
        "extras",
        "tokens_decoded",
    ]:
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
