"""Merging stores: every field of every trace, duplicates, scores, refusals."""

import numpy as np
import pytest

import tracestore
from tests.helpers import ROOT, make_trace, make_traces, tree_bytes
from tracestore.errors import InputRefusedError, UsageError
from tracestore.store import schema
from tracestore.store.merge import merge_stores
from tracestore.store.verify import verify_store


def same_value(a, b):
    if isinstance(a, tuple):
        return all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a.view("u1"), b.view("u1"))
    return a == b or (a != a and b != b)


def fields(trace):
    """Every field as a value; the class of the error where the trace has none."""
    names = "question_id sample score label group num_tokens has_nonfinite hidden_states last_token attention_layout"
    names += " attention_packed tokens tokens_decoded question answer prompt_length extras"
    values = {}
    for name in names.split():
        try:
            values[name] = getattr(trace, name)
        except tracestore.TracestoreError as error:
            values[name] = type(error)
    return values | {name: trace.text(name) for name in schema.ANSWER_FIELDS}


def assert_same(store, other):
    for trace in store:
        found = fields(other[other.index_of(trace.question_id, trace.sample)])
        for name, value in fields(trace).items():
            assert same_value(value, found[name]), f"{trace.question_id}: {name}"


@pytest.mark.parametrize("name", ["v1_bfloat16", "v1_edges", "v1_heads"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_every_field_is_kept(tmp_path, name, codec):
    source = ROOT / "tests" / "golden" / f"{name}.zarr"
    report = merge_stores([source], tmp_path / "m.zarr", codec=codec)
    store, merged = tracestore.open(source), tracestore.open(tmp_path / "m.zarr")
    assert report.num_traces_new == len(store) == len(merged) and report.num_duplicates == 0
    assert_same(store, merged)
    assert merged.info()["fields"] == store.info()["fields"] and merged.num_heads == store.num_heads
    assert [t.source[1] for t in merged] == [t.source[1] for t in store]
    assert verify_store(tmp_path / "m.zarr").damaged == {}


def make_store(path, numbers, **options):
    with tracestore.create(path, **options) as writer:
        for k in numbers:
            writer.append(make_trace(k), score=None if k % 3 == 0 else k / 10, group=f"g{k % 2}")
    return path


def test_duplicates_give_their_scores(tmp_path):
    one = make_store(tmp_path / "one.zarr", range(6))
    with tracestore.create(tmp_path / "two.zarr") as writer:
        for k in range(3, 9):
            writer.append(make_trace(k), score=0.75)
    report = merge_stores([one, tmp_path / "two.zarr"], tmp_path / "m.zarr")
    merged = tracestore.open(tmp_path / "m.zarr")
    assert merged.question_ids == [f"q{k}" for k in range(9)]
    np.testing.assert_array_equal(merged.scores, [np.nan, 0.1, 0.2, 0.75, 0.4, 0.5, 0.75, 0.75, 0.75])
    assert (report.num_traces_new, report.num_duplicates) == (9, 3)
    assert (report.num_scores_filled, report.num_scores_differing) == (1, 2)
    before = tree_bytes(tmp_path / "m.zarr")
    again = merge_stores([one], tmp_path / "m.zarr")
    assert again.num_traces_new == 0 and again.num_duplicates == 6
    segments = {k: v for k, v in before.items() if k.startswith("segments/")}
    assert segments == {k: v for k, v in tree_bytes(tmp_path / "m.zarr").items() if k.startswith("segments/")}


def test_what_does_not_fit_is_refused(tmp_path):
    one, heads = make_store(tmp_path / "one.zarr", range(4)), make_store(tmp_path / "h.zarr", [9], attention="heads")
    with pytest.raises(UsageError, match="--attention heads"):
        merge_stores([one, heads], tmp_path / "m.zarr")
    with pytest.raises(UsageError, match="destination"):
        merge_stores([one], one)
    with pytest.raises(UsageError, match="no such store"):
        merge_stores([tmp_path / "nowhere"], tmp_path / "m.zarr")
    with tracestore.create(tmp_path / "other.zarr") as writer:
        for trace in [*make_traces(1, tokens=3), make_trace(2, tokens=9, seed=5)]:
            writer.append(trace | {"question_id": f"q{2 if len(trace['tokens']) == 9 else 8}"})
    with pytest.raises(InputRefusedError, match="other content"):
        merge_stores([one, tmp_path / "other.zarr"], tmp_path / "m.zarr")
    # What came before it stays, and nothing of it that was refused.
    assert tracestore.open(tmp_path / "m.zarr").question_ids == ["q0", "q1", "q2", "q3", "q8"]
    assert verify_store(tmp_path / "m.zarr").damaged == {}
