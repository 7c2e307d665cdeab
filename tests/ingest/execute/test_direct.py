"""Test that layouts whose fields are keys of one item give the same records with and without a plan for each set of keys."""

import tomllib
from dataclasses import fields

import numpy as np
import pytest

from tests.helpers import ROOT
from tests.ingest.corpus.registry import load
from tests.ingest.execute.folders import dump, states
from tracestore.errors import InvalidInputError
from tracestore.ingest.execute import execution
from tracestore.ingest.execute.claims import list_files
from tracestore.ingest.execute.direct import direct_step
from tracestore.ingest.execute.execution import Execution
from tracestore.ingest.layout.language import parse_layout
from tracestore.ingest.layout.places import plan_of
from tracestore.store.io.scratch import Scratch

KINDS = load()
LAYOUTS = tomllib.loads((ROOT / "tests/ingest/corpus/layouts.toml").read_text())
DIRECT = [name for name, lines in LAYOUTS.items() if direct_step(plan_of(parse_layout(lines))) is not False]


def records(layout, folder):
    """Return the records of a folder, or the message of the refusal."""
    found = Execution(plan_of(parse_layout(layout)), list_files([folder], folder / "none"))
    try:
        return [record for group in found.groups for record in found.read(group, None, Scratch())]
    except InvalidInputError as error:
        return str(error)


def same(one, two):
    """Return whether two values of records are equal."""
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and one.dtype == two.dtype and one.tobytes() == two.tobytes()
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return one == two or (one != one and two != two)


def compare(layout, folder, monkeypatch):
    """Assert that both ways give the same; return the records."""
    found = records(layout, folder)
    with monkeypatch.context() as patched:
        patched.setattr(execution, "direct_step", lambda _: False)
        expected = records(layout, folder)
    assert type(found) is type(expected), (found, expected)
    if isinstance(found, str):
        return found
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        # Labels in items are stored at once either way.
        different = [f.name for f in fields(one) if not same(getattr(one, f.name), getattr(two, f.name))]
        assert different == []
    return found


def test_many_layouts_have_all_fields_in_one_item():
    assert len(DIRECT) > 60


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] if k % 4 else []) for k, n in enumerate(DIRECT)]
)
def test_kinds_of_the_corpus(name, tmp_path, monkeypatch):
    if missing := KINDS[name].missing():
        pytest.skip(f"{', '.join(missing)} is not installed")
    (tmp_path / "in").mkdir()
    KINDS[name].write(tmp_path / "in")

    assert compare(LAYOUTS[name], tmp_path / "in", monkeypatch)


LAYOUT = {
    "hidden_states": "*.pkl : [id=id]/hs -> L S D",
    "attentions": "*.pkl : [id=id]/attn -> L H S S",
    "tokens": "*.pkl : [id=id]/ids -> S",
    "tokens_decoded": "*.pkl : [id=id]/words -> S",
    "question": "*.pkl : [id=id]/question",
    "prompt_length": "*.pkl : [id=id]/prompt",
    "is_correct": "*.pkl : [id=id]/ok",
    "hallucination.judge": "*.pkl : [id=id]/judge",
    "L.ids": "*.pkl : [id=id]/layers",
    "ignore": ["*.pkl : [id=id]/logits"],
}


def item(**changes):
    """Return an item of the layout: L 2, H 2, S 4, D 8; a value of None takes the key away."""
    attention = np.tril(np.abs(states(2, 2, 4, 4))) + 0.1
    found = {
        "id": "q0",
        "hs": list(states(2, 4, 8)),
        "attn": list((np.tril(attention) / np.tril(attention).sum(-1, keepdims=True)).astype("f2")),
        "ids": np.arange(4),
        "words": list("abcd"),
        "question": "why?",
        "prompt": 2,
        "ok": 1,
        "judge": 0.25,
        "layers": [8, 16],
        "logits": states(4, 30),
    } | changes
    return {name: value for name, value in found.items() if value is not None}


CHANGES = [
    {},
    {"attn": None, "ids": None, "words": None, "question": None, "ok": None, "judge": None, "layers": None},
    {"hs": states(2, 4, 8)},
    {"hs": [layer.tolist() for layer in states(2, 4, 8)]},
    {"ids": list(range(4)), "prompt": 2.0, "ok": "yes", "judge": "0.5"},
    {"ok": float("nan"), "judge": None},
    {"hs": states(4, 8)},
    {"hs": list(states(2, 1, 4, 8))},
    {"hs": [states(4, 8), states(3, 8)]},
    {"hs": [states(4, 8), states(4, 8).astype("f2")]},
    {"hs": list(np.ones((2, 4, 8), "i4"))},
    {"hs": [np.zeros((4, 8), "f4")] * 2},
    {"hs": "text"},
    {"ids": np.arange(5)},
    {"ids": np.ones((1, 4), int)},
    {"words": ["a", 1, "c", "d"]},
    {"words": list("abc")},
    {"attn": [np.full((2, 4, 4), 7, "f4")] * 2},
    {"attn": [a.transpose(0, 2, 1) for a in item()["attn"]]},
    {"attn": list(states(2, 4, 4))},
    {"ok": 0.3},
    {"ok": [1]},
    {"judge": "high"},
    {"layers": [8, 16, 24]},
    {"layers": [16, 8]},
    {"prompt": 9},
    {"prompt": [1, 2]},
    {"label": 1},
    {"other": states(3, 3)},
    {"note": "kept out"},
]


@pytest.mark.parametrize("change", CHANGES, ids=[str(k) for k in range(len(CHANGES))])
def test_changed_items(change, tmp_path, monkeypatch):
    dump(tmp_path / "in/a.pkl", [item(id="first"), item(**change)])

    compare(LAYOUT, tmp_path / "in", monkeypatch)


def test_an_item_without_states_is_refused(tmp_path):
    dump(tmp_path / "in/a.pkl", [item(id="first"), item(hs=None)])

    assert records(LAYOUT, tmp_path / "in") == "a.pkl, trace 1, hidden_states: missing key"


def test_attention_of_some_layers_is_refused(tmp_path):
    dump(tmp_path / "in/a.pkl", [item(attn=[None, item()["attn"][1]])])

    assert "expected the axes H S S" in records(LAYOUT, tmp_path / "in")


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_scores_file_makes_extras_of_labels_and_scores(is_direct, tmp_path, monkeypatch):
    dump(tmp_path / "in/a.pkl", [item()])
    if not is_direct:
        monkeypatch.setattr(execution, "direct_step", lambda _: False)
    files = list_files([tmp_path / "in"], tmp_path / "none")
    found = Execution(plan_of(parse_layout(LAYOUT)), files, has_scores_file=True)

    (record,) = found.read(found.groups[0], None, Scratch())

    assert (record.label, record.scores) == (None, {})
    assert record.extras == {"is_correct": 1, "judge": 0.25}
