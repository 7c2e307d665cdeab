"""Files that belong together by their names, and values of objects by the names of their keys."""

import json
import pickle
from pathlib import PurePath

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of
from tracestore.errors import InvalidInputError
from tracestore.ingest.layouts.joined_files import are_rows, file_groups
from tracestore.ingest.layouts.parts import Part, Place, join_parts, join_tokens, parse_path

NONE = ("--attention", "none")
RNG = np.random.default_rng(0)
HIDDEN = {"q0": RNG.standard_normal((2, 4, 5)).astype("f2"), "q1": RNG.standard_normal((2, 6, 5)).astype("f2")}

PLACES = {
    "hidden/q1": Place("q1", "hidden_states"),
    "q1_hidden": Place("q1", "hidden_states"),
    "q1/layer_03": Place("q1", "", 3),
    "q1_attn_layer_3": Place("q1", "attentions", 3),
    "states/attn_0": Place("0", "attentions"),
    "layer_8_25": Place("25", "", 8),
    "llama/trivia/hidden/0": Place("llama/trivia/0", "hidden_states"),
    "q0/step_1": Place("q0", token=1),
    "q0_prompt_hidden": Place("q0", "hidden_states", segment="prompt"),
    "shard_0_ids": Place("shard_0", "ids"),
    "question_3/hidden_states": Place("question_3", "hidden_states"),
    "sample_0": Place("sample_0"),
    "q0_attn_2": Place("q0", "attentions", 2),
    "model.layers.3": Place("", "", 3),
}


@pytest.mark.parametrize("name", PLACES)
def test_names_state_a_place(name):
    assert parse_path(*name.split("/")) == PLACES[name]


def test_files_are_grouped_by_what_is_left_of_their_names():
    names = ["hidden/q0.pt", "attn/q0.pt", "hidden/q1.pt", "a/b.pt", "x/layer_0.npy", "x/layer_1.npy", "attn/q2.pt"]
    groups = file_groups([PurePath(name) for name in names])
    assert {name: [p.as_posix() for p in paths] for name, paths in groups.items()} == {
        "q0": ["attn/q0.pt", "hidden/q0.pt"],
        "x": ["x/layer_0.npy", "x/layer_1.npy"],
    }
    assert are_rows(["0", "25", "50"]) and not are_rows(["0", "1", "2"])


def test_parts_need_each_token_of_each_layer_once():
    cells = {(k, t): np.full(3, 10 * k + t, "f4") for k in (4, 8) for t in (1, 2, 3)}
    parts = [Part("q", Place(layer=k, token=t), v) for (k, t), v in cells.items()]
    joined = join_parts(parts)["q"]["hidden_states"]
    assert list(joined) == [4, 8]
    np.testing.assert_array_equal(joined[8][:, 0], [81, 82, 83])
    wrong = {"expected each token": parts[:-1], "two values": [*parts, parts[0]]}
    wrong["without gaps"] = [part for part in parts if part.place.token != 2]
    for text, chosen in wrong.items():
        with pytest.raises(InvalidInputError, match=text):
            join_parts(chosen)


def test_tokens_may_be_vectors_layers_or_passes():
    hidden = HIDDEN["q0"]
    passes = [hidden[:, :2], hidden[:, 2:3], hidden[:, 3:]]
    np.testing.assert_array_equal(join_tokens(list(hidden.transpose(1, 0, 2))), hidden)
    np.testing.assert_array_equal(join_tokens(passes), hidden)
    np.testing.assert_array_equal(join_tokens([p[:, None] for p in passes]), hidden)
    np.testing.assert_array_equal(join_tokens([p[0] for p in passes]), hidden[:1])
    with pytest.raises(InvalidInputError, match="join them"):
        join_tokens([hidden, hidden[0]])


def dump(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, 4))


def assert_stored(tmp_path, source, *flags):
    convert(source, tmp_path / "s.zarr", *NONE, *flags, check=0)
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.question_ids == list(HIDDEN)
        for trace in store:
            np.testing.assert_array_equal(trace.hidden_states, HIDDEN[trace.question_id])
        return [trace.question for trace in store]


def test_a_table_with_the_same_ids_or_order_belongs_to_a_pickle(tmp_path):
    rows = [{"id": q, "question": f"{q}?"} for q in HIDDEN]
    for name, value, table in (
        ("a", list(HIDDEN.values()), rows),
        ("b", HIDDEN, rows[::-1]),
        ("c", [{"id": q, "hidden_states": h} for q, h in HIDDEN.items()], rows[::-1]),
    ):
        dump(tmp_path / name / "in" / "hidden_states.pkl", value)
        (tmp_path / name / "in" / "metadata.json").write_text(json.dumps(table))
        assert assert_stored(tmp_path / name, tmp_path / name / "in") == ["q0?", "q1?"]


def test_files_in_another_order_are_joined_by_id(tmp_path):
    dump(tmp_path / "in" / "hidden_states.pkl", [{"id": q, "hidden": h} for q, h in HIDDEN.items()])
    dump(tmp_path / "in" / "last_token.pkl", [{"id": q, "last_token": h[:, -1]} for q, h in reversed(HIDDEN.items())])
    assert_stored(tmp_path, tmp_path / "in")


def test_files_of_other_ids_are_refused(tmp_path):
    dump(tmp_path / "hidden_states.pkl", [{"id": q, "hidden": h} for q, h in HIDDEN.items()])
    dump(tmp_path / "last_token.pkl", [{"id": f"{q}0", "last_token": h[:, -1]} for q, h in HIDDEN.items()])
    assert "id differs between files" in error_of("convert", tmp_path, tmp_path / "s.zarr", *NONE, code=3)


def tokens_of(hidden):
    return [{"step": k, "hidden": vectors} for k, vectors in enumerate(hidden.transpose(1, 0, 2))]


NESTED = {
    "layers, then ids": {f"layer_{k}": {q: h[k] for q, h in HIDDEN.items()} for k in range(2)},
    "fields, then layers, then ids": {"hidden": {k: {q: h[k] for q, h in HIDDEN.items()} for k in range(2)}},
    "names of id and layer": {f"{q}/layers.{k}": h[k] for q, h in HIDDEN.items() for k in range(2)},
    "tuples of layer and id": {(f"layer_{k}", q): h[k] for q, h in HIDDEN.items() for k in range(2)},
    "records of layers": [{"qid": q, "layer": k, "states": h[k]} for k in range(2) for q, h in HIDDEN.items()],
    "records of tokens": [{"id": q} | token for q, h in HIDDEN.items() for token in tokens_of(h)],
    "lists of steps": [{"id": q, "steps": tokens_of(h)} for q, h in HIDDEN.items()],
    "rows of id, layer, array": [(q, k, h[k]) for q, h in HIDDEN.items() for k in range(2)],
    "columns of id, layer, array": (
        [q for q in HIDDEN for _ in (0, 1)],
        [0, 1] * 2,
        [x for h in HIDDEN.values() for x in h],
    ),
    "prompt and response": [
        {"id": q, "prompt_hidden": h[:, :2], "response_hidden": h[:, 2:]} for q, h in HIDDEN.items()
    ],
}


@pytest.mark.parametrize("name", NESTED)
def test_parts_of_traces_in_one_object(tmp_path, name):
    dump(tmp_path / "in.pkl", NESTED[name])
    assert_stored(tmp_path, tmp_path / "in.pkl")


def test_settings_behind_the_field_in_the_names_of_files(tmp_path):
    states = np.random.default_rng(0).random((3, 8, 2), np.float32)
    settings = "model_gpt2__split_test__token_-1"
    (tmp_path / "in").mkdir()
    np.save(tmp_path / f"in/hidden_states__{settings}.npy", states)
    np.save(tmp_path / f"in/correct__{settings}.npy", np.array([1, 0, 1]))
    assert "--axes NDL" in error_of("convert", tmp_path / "in", tmp_path / "s.zarr", *NONE, code=3)
    convert(tmp_path / "in", tmp_path / "s.zarr", *NONE, "--axes", "NDL")
    with tracestore.open(tmp_path / "s.zarr") as store:
        np.testing.assert_allclose([t.last_token for t in store], states.transpose(0, 2, 1), atol=1e-3)
        assert [t.score for t in store] == [1, 0, 1]
