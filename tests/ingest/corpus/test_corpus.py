"""Test the corpus itself: enough kinds, and expected traces that a store can hold."""

import numpy as np
import pytest

from tests.helpers import command, write_pickle
from tests.ingest.corpus import measure
from tests.ingest.corpus.registry import load

KINDS = load()


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


def test_the_comparison_finds_a_changed_value(tmp_path):
    (tmp_path / "in").mkdir()
    expected = KINDS["pkl_list_of_dicts"].write(tmp_path / "in")
    command("convert", tmp_path / "in", tmp_path / "s.zarr", check=0)
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


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_expected_traces_fit_into_a_store(name, tmp_path):
    kind = KINDS[name]
    if missing := kind.missing():
        pytest.skip(f"{', '.join(missing)} is not installed")
    (tmp_path / "in").mkdir()

    try:
        expected = kind.write(tmp_path / "in")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))

    assert any(path.is_file() for path in (tmp_path / "in").rglob("*"))
    assert kind.refused == (expected == [])
    states = [t for t in expected if t["hidden_states"] is not None]
    assert all(np.isfinite(t["hidden_states"]).all() and t["hidden_states"].ndim == 3 for t in states)
    assert all(t["last_token"].ndim == 2 for t in expected if t["hidden_states"] is None)
    if states:
        rows = [as_schema(t, k) for k, t in enumerate(states)]
        flags = [] if "attentions" in rows[0] else ["--attention", "none"]
        command("convert", write_pickle(tmp_path / "t.pkl", rows), tmp_path / "s.zarr", *flags, check=0)
        wanted = [{n: v for n, v in t.items() if n not in ("score", "label", "prompt_length")} for t in states]
        measure.check_store(tmp_path / "s.zarr", wanted)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n, k in KINDS.items() if ".containers." in k.write.__module__])
def test_kinds_in_parts_are_converted_without_flags_or_with_the_proposed_one(name, tmp_path):
    result, detail = measure.measure_kind(KINDS[name], tmp_path)

    assert result in ("equal", "equal with proposed flag", "skipped", "refused as it should"), detail
