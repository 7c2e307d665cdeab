"""Test the corpus: enough kinds, expected traces that a store can hold, and no kind that is converted wrongly."""

import numpy as np
import pytest

import tracestore
from tests.helpers import write_store
from tests.ingest.corpus import measure
from tests.ingest.corpus.registry import LAYOUTS, load

KINDS = load()
# The kinds of every run; the others are marked long.
EVERY = 20


def as_schema(trace, k):
    """Return an expected trace in the pickle schema, with stand-ins for the fields that it lacks."""
    hidden, attention = trace["hidden_states"], trace.get("attention")
    num_tokens = hidden.shape[1]
    row = {
        "hidden_states": list(hidden),
        "tokens": trace.get("tokens") or [0] * num_tokens,
        "tokens_decoded": trace.get("tokens_decoded") or ["t"] * num_tokens,
        "generated_answer_clean": trace.get("answer") or "",
        "question": trace.get("question") or "",
        "question_id": trace["question_id"] or f"unnamed {k}",
        "sample": trace.get("sample", 0),
    }
    return (
        row
        if attention is None
        else row | {"attentions": list(attention if attention.ndim == 4 else attention[:, None])}
    )


def test_the_corpus_is_large_and_every_kind_is_described():
    assert len(load("main")) >= 150
    assert len(load("unseen")) >= 20
    descriptions = {kind.write.__doc__ for kind in KINDS.values()}
    assert len(descriptions) == len(KINDS)


def test_layouts_are_those_of_kinds():
    assert set(LAYOUTS) <= set(KINDS)
    assert len(LAYOUTS) >= 500


def test_the_comparison_finds_a_changed_value(tmp_path):
    (tmp_path / "in").mkdir()
    expected = KINDS["pkl_list_of_dicts"].write(tmp_path / "in")
    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", layout=LAYOUTS["pkl_list_of_dicts"])
    changes = {
        "hidden_states": 1 + expected[1]["hidden_states"],
        "answer": "another",
        "question_id": "q99",
        "score": 1.0,
    }

    measure.check_store(tmp_path / "s.zarr", expected)

    for name, value in changes.items():
        with pytest.raises(measure.Difference):
            measure.check_store(tmp_path / "s.zarr", [expected[0], expected[1] | {name: value}, *expected[2:]])


def names():
    """Return the names of the kinds as parameters."""
    return [pytest.param(name, marks=[pytest.mark.long] if k % EVERY else []) for k, name in enumerate(KINDS)]


def check_expected(expected, path):
    """Check that a store can hold the expected traces, and that their comparison with it finds no difference."""
    states = [t for t in expected if t["hidden_states"] is not None]
    assert all(np.isfinite(t["hidden_states"]).all() and t["hidden_states"].ndim == 3 for t in states)
    assert all(t["last_token"].ndim == 2 for t in expected if t["hidden_states"] is None)
    if states:
        rows = [as_schema(t, k) for k, t in enumerate(states)]
        write_store(path, rows, attention="mean" if "attentions" in rows[0] else "none")
        measure.check_store(
            path, [{n: v for n, v in t.items() if n not in ("score", "label", "prompt_length")} for t in states]
        )


@pytest.mark.parametrize("name", names())
def test_a_kind_is_equal_by_its_layout_and_equal_or_refused_without(name, tmp_path):
    kind = KINDS[name]
    if missing := kind.missing():
        pytest.skip(f"{', '.join(missing)} is not installed")

    try:
        source, expected = measure.written(kind, tmp_path)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))

    assert any(path.is_file() for path in source.rglob("*"))
    assert kind.refused == (expected == [])
    if name in LAYOUTS:
        assert measure.attempt(source, tmp_path / "layout.zarr", expected, layout=LAYOUTS[name]) == ("equal", "")
    else:
        check_expected(expected, tmp_path / "expected.zarr")
    result, detail = measure.attempt(source, tmp_path / "alone.zarr", expected)
    assert result == "refused" or (result == "equal" and not kind.refused), detail
