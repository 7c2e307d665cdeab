"""Test that layers are stored in the order of their numbers, and that attention has those of the states (rule 1)."""

import itertools
import re

import h5py
import numpy as np
import pytest

from tests.ingest.execute.folders import convert, dump, refuse, states, table

DEPTHS = {"from the end": (-1, -3, -5, -8), "mixed": (0, 5, -1), "gaps": (7, 1, 5), "increasing": (2, 4, 6)}
SIZE = 8
ITEM = "a.pkl : [id=id]/"


def layer(number, *shape):
    """Return the values of a layer of the model, which its number from the first one says."""
    return states(*shape, seed=number % SIZE)


def attention(number, size=5):
    """Return causal attention of a layer."""
    weights = np.tril(abs(layer(number, size, size)) + 0.1)
    return (weights / weights.sum(1, keepdims=True)).astype("f4")


def check(traces, numbers, *, is_last=False, has_attention=False, is_numbered=True):
    """Assert that the layers of traces are in their order, each with its own attention."""
    ordered = sorted(k % SIZE for k in numbers)
    assert len(traces) == 2
    for trace in traces.values():
        found = trace.last_token if is_last else trace.hidden_states
        expected = [layer(k, 5, 16)[4 if is_last else slice(None)] for k in ordered]
        np.testing.assert_allclose(np.asarray(found, "f4"), expected, atol=1e-2)
        if has_attention:
            found = np.asarray(trace.attention, "f4").reshape(len(ordered), 5, 5)
            np.testing.assert_allclose(found, [attention(k) for k in ordered], atol=1e-2)
        if is_numbered:
            assert tuple(trace.provenance.layer_ids) == tuple(ordered)


@pytest.mark.parametrize("of_attention", ["arrays", "names", "none"])
@pytest.mark.parametrize("where", ["stated", "file", "item"])
@pytest.mark.parametrize("family", ["hidden_states", "last_token"])
@pytest.mark.parametrize("numbers", DEPTHS.values(), ids=DEPTHS)
def test_layers_are_stored_in_the_order_of_their_numbers(tmp_path, numbers, family, where, of_attention):
    is_last = family == "last_token"
    if is_last and of_attention != "none":
        pytest.skip("last tokens have no attention")
    item = {"hs": np.stack([layer(k, 5, 16) for k in numbers])}
    item["hs"] = item["hs"][:, 4] if is_last else item["hs"]
    item["layers"] = np.array(numbers)
    layout = {family: f"{ITEM}hs", "L.size": SIZE}
    if of_attention == "arrays":
        item["at"] = np.stack([attention(k) for k in numbers])
        layout["attentions"] = f"{ITEM}at -> L S S"
    elif of_attention == "names":
        item |= {f"at{k}": attention(k) for k in sorted(numbers)}
        layout["attentions"] = f"{ITEM}at{{layer}} -> S S"
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}"} | item for k in range(2)])
    table(tmp_path / "in/m.json", {"layers": numbers})
    known = {"L.ids": list(numbers), "ignore": ["m.json", f"{ITEM}layers"]}
    known = known if where == "stated" else {"L.ids": "m.json : layers", "ignore": f"{ITEM}layers"}
    known = known if where != "item" else {"L.ids": f"{ITEM}layers", "ignore": "m.json"}

    traces = convert(tmp_path, layout | known)

    check(traces, numbers, is_last=is_last, has_attention=of_attention != "none")


def test_layers_from_the_end_are_sorted_without_the_size_of_the_model(tmp_path):
    numbers = DEPTHS["from the end"]
    item = {"hs": np.stack([layer(k, 5, 16) for k in numbers])}
    item |= {f"at{k}": attention(k) for k in numbers}
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}"} | item for k in range(2)])
    layout = {"hidden_states": f"{ITEM}hs", "attentions": f"{ITEM}at{{layer}} -> S S", "L.ids": list(numbers)}

    check(convert(tmp_path, layout), numbers, has_attention=True, is_numbered=False)


@pytest.mark.parametrize("size", [None, 4, 5, 8])
@pytest.mark.parametrize("where", ["names", "rows", "stated", "file"])
@pytest.mark.parametrize("numbers", [(-1, 0, 1, 2, 3), (0, 1, 2, 3, -1), (-1, 0, 1)])
def test_a_layer_in_front_of_layer_0_is_not_the_last_one(tmp_path, numbers, where, size):
    """[the embeddings as layer -1] It is stated which of both it is, under names in the order of their numbers."""
    own = numbers if where in ("stated", "file") else tuple(sorted(numbers))
    made = {k: layer(k + 1, 5, 16) for k in numbers}
    if where == "names":
        rows, line = [{"id": "q0"} | {f"h{k}": array for k, array in made.items()}], f"{ITEM}h{{layer}} -> S D"
    elif where == "rows":
        rows = [{"id": "q0", "n": k, "h": array} for k, array in made.items()]
        line = "a.pkl : [id=id, layer=n]/h -> S D"
    else:
        rows, line = [{"id": "q0", "h": np.stack([*made.values()])}], f"{ITEM}h"
    dump(tmp_path / "in/a.pkl", rows)
    table(tmp_path / "in/m.json", {"layers": numbers})
    layout = {"hidden_states": line} | ({"L.size": size} if size else {})
    known = {"stated": {"L.ids": list(numbers)}, "file": {"L.ids": "m.json : layers"}}.get(where, {})
    ignored = {"ignore": "m.json"}

    first, last = [k + 1 for k in own], [k % (size or len(own)) for k in own]
    way = re.escape(f"L.ids = {first} gives their numbers in this order, {last} if it is the last one")
    words = "expected each once" if size and size < len(own) else way
    refuse(tmp_path, layout | (known if where == "file" else known | ignored), words)
    if size in (None, 8):
        for stated, order in ((first, sorted(own)), (last, [*sorted(own)[1:], -1])):
            traces = convert(tmp_path, layout | {"L.ids": stated} | ignored, overwrite=True)
            expected = [made[k] for k in order]
            np.testing.assert_allclose(traces["q0", 0].hidden_states, expected, atol=1e-2)
            assert tuple(traces["q0", 0].provenance.layer_ids) == tuple(sorted(stated))


@pytest.mark.parametrize("numbers", [(0, 2, -1), (-1, 0), (1, 2, -1), (-2, -1, 0)])
def test_numbers_from_the_end_with_the_size_of_the_model(tmp_path, numbers):
    dump(tmp_path / "in/a.pkl", [{"id": "q0"} | {f"h{k}": layer(k, 5, 16) for k in numbers}])
    traces = convert(tmp_path, {"hidden_states": f"{ITEM}h{{layer}} -> S D", "L.size": SIZE})
    np.testing.assert_allclose(
        traces["q0", 0].hidden_states, [layer(k, 5, 16) for k in sorted(k % SIZE for k in numbers)], atol=1e-2
    )


@pytest.mark.parametrize("stated", [[0, 7], [1, 2], [0, 1, 2]])
def test_other_numbers_than_those_of_two_layers_in_names(tmp_path, stated):
    """Not the first and the last layer: names are in the order of their numbers, the layer -1 in front."""
    dump(tmp_path / "in/a.pkl", [{"id": "q0"} | {f"h{k}": layer(k, 5, 16) for k in (0, -1)}])
    refuse(tmp_path, {"hidden_states": f"{ITEM}h{{layer}} -> S D", "L.ids": stated}, "found the layers")


@pytest.mark.parametrize("ids", [[-2, -2], [8, 8], [0, 0], [0, -1], [1, 2, 1]])
@pytest.mark.parametrize("where", ["stated", "file"])
def test_numbers_that_give_no_order(tmp_path, ids, where):
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}", "hs": states(len(ids), 4, 8, seed=k)} for k in range(3)])
    table(tmp_path / "in/m.json", {"layers": ids})
    known = {"L.ids": ids, "ignore": ["m.json"]} if where == "stated" else {"L.ids": "m.json : layers"}

    refuse(tmp_path, {"hidden_states": f"{ITEM}hs"} | known, "expected each once|L.size gives")


def test_keys_of_the_schema_that_some_traces_lack_sort_no_layers(tmp_path):
    rows = [
        {"question_id": f"q{k}", "hidden_states": states(2, 4, 8, seed=k), "tokens": [1, 2, 3, 4]} for k in range(3)
    ]
    rows[1]["layer_ids"] = [8, 4]
    dump(tmp_path / "in/a.pkl", rows)

    refuse(tmp_path, None, "layer_ids: found the layers .*in their order")


WRONG = {
    "from the end": ((-1, -3, -5, -8), {}, "attentions has the layers .*hidden_states has no numbers: L.ids"),
    "gaps": ((8, 1, 5), {}, "attentions has the layers .*hidden_states has no numbers: L.ids"),
    "behind the first": ((5, 6, 7), {}, "attentions has the layers .*hidden_states has no numbers: L.ids"),
    "other numbers": ((8, 1, 5), {"L.ids": [1, 4, 8]}, "found the layers"),
    "signs lost": ((1, 3, 5, 8), {"L.ids": [-1, -3, -5, -8]}, "found the layers"),
    "signs added": ((-1, -3, -5, -8), {"L.ids": [1, 3, 5, 8]}, "found the layers"),
    "places of another order": ((0, 1, 2), {"L.ids": [6, 4, 2]}, "found the layers"),
    "a layer twice": ((1, 2, 3), {"L.ids": [1, 2, 2]}, "each once"),
    "a layer twice from both ends": ((1, 2, 7), {"L.ids": [1, -1, 7], "L.size": 8}, "each once"),
    "beyond the model": ((1, 2, 3), {"L.ids": [1, 2, -9], "L.size": 8}, "fewer than 8"),
    "too few": ((1, 2, 3), {"L.ids": [2, 1]}, "found 3 layers|found the layers"),
    "too many": ((1, 2, 3), {"L.ids": [4, 3, 2, 1]}, "found 3 layers|found the layers"),
}


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize(("numbers", "known", "words"), WRONG.values(), ids=WRONG)
def test_numbers_of_one_field_say_nothing_about_the_other(tmp_path, numbers, known, words, is_swapped):
    """[states from the top down, attention sorted by the numbers in its names]"""
    stacked, named = ("at", "hs") if is_swapped else ("hs", "at")
    made = {"hs": lambda k: layer(k, 5, 16), "at": attention}
    item = {stacked: np.stack([made[stacked](k) for k in numbers])} | {f"{named}{k}": made[named](k) for k in numbers}
    dump(tmp_path / "in/a.pkl", [{"id": "q0"} | item])
    axes = {"hs": "S D", "at": "S S"}
    field = {"hs": "hidden_states", "at": "attentions"}
    layout = {
        field[stacked]: f"{ITEM}{stacked} -> L {axes[stacked]}",
        field[named]: f"{ITEM}{named}{{layer}} -> {axes[named]}",
    }
    if is_swapped and not known:
        words = (
            words.replace("attentions has", "X has")
            .replace("hidden_states", "attentions")
            .replace("X", "hidden_states")
        )

    refuse(tmp_path, layout | known, words)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("known", [{}, {"L.ids": [2, 4, 6]}])
def test_names_that_count_are_places(tmp_path, first, known):
    item = {"hs": np.stack([layer(k, 5, 16) for k in range(3)])}
    item |= {f"at{k + first}": attention(k) for k in range(3)}
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}"} | item for k in range(2)])

    traces = convert(tmp_path, {"hidden_states": f"{ITEM}hs", "attentions": f"{ITEM}at{{layer}} -> S S"} | known)

    check(traces, range(3), has_attention=True, is_numbered=False)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_names_that_count_in_another_order_than_stated(tmp_path, is_stacked):
    """Stated numbers of a stack order it. Next to names alone they may be other numbers, or those of the names."""
    item = {f"hs{k}": layer(k, 5, 16) for k in range(3)} | {"at": np.stack([attention(k) for k in (2, 0, 1)])}
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}"} | item for k in range(2)])
    layout = {"hidden_states": f"{ITEM}hs{{layer}} -> S D", "L.ids": [2, 0, 1]}

    if is_stacked:
        check(convert(tmp_path, layout | {"attentions": f"{ITEM}at -> L S S"}), range(3), has_attention=True)
    else:
        refuse(tmp_path, layout | {"ignore": f"{ITEM}at"}, r"\(0, 1, 2\) in names, and \[2, 0, 1\]; remove it if")


@pytest.mark.parametrize("number", [1, 8])
def test_rule_04_a_layer_without_attention_is_not_the_embeddings(tmp_path, number):
    numbers = (number, number + 1, number + 2)
    item = {f"hs{k}": layer(k, 5, 16) for k in numbers} | {f"at{k}": attention(k) for k in numbers[1:]}
    dump(tmp_path / "in/a.pkl", [{"id": "q0"} | item])

    refuse(
        tmp_path,
        {"hidden_states": f"{ITEM}hs{{layer}}", "attentions": f"{ITEM}at{{layer}} -> S S"},
        "attentions: found the layers",
    )


@pytest.mark.parametrize("numbers", list(itertools.permutations((0, 1, 2, 3)))[1::5])
def test_embeddings_and_layers_in_another_order_are_refused(tmp_path, numbers):
    """Refuse to guess which of L + 1 arrays are the embeddings."""
    item = {"hs": np.stack([layer(k, 5, 16) for k in numbers]), "at": np.stack([attention(k) for k in (1, 2, 3)])}
    dump(tmp_path / "in/a.pkl", [{"id": "q0"} | item])
    layout = {"hidden_states": f"{ITEM}hs", "attentions": f"{ITEM}at -> L S S", "L.ids": list(numbers)}

    refuse(tmp_path, layout, "expected 4 as L.ids says")


def test_traces_of_which_only_some_say_their_layers(tmp_path):
    rows = [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k), "layers": [8, 4]} for k in range(3)]
    del rows[1]["layers"]
    dump(tmp_path / "in/a.pkl", rows)
    refuse(tmp_path, {"hidden_states": f"{ITEM}hs", "L.ids": f"{ITEM}layers"}, "layer")

    table(tmp_path / "in/t.json", [{"id": row["id"], "layers": [8, 4]} for row in rows[:2]])
    dump(tmp_path / "in/a.pkl", [{k: v for k, v in row.items() if k != "layers"} for row in rows])

    refuse(tmp_path, {"hidden_states": f"{ITEM}hs", "L.ids": "t.json : [id=id]/layers"}, "layer")


def test_groups_of_layers_from_the_end(tmp_path):
    numbers = DEPTHS["from the end"]
    (tmp_path / "in").mkdir()
    with h5py.File(tmp_path / "in/s.hdf5", "w") as file:
        for name in ("q0", "q1"):
            file[f"{name}/states"] = np.stack([layer(k, 5, 16) for k in numbers])
            for k in numbers:
                file[f"{name}/attention/layer{k}"] = attention(k)
    layout = {
        "hidden_states": "s.hdf5 : {id}/states -> L S D",
        "attentions": "s.hdf5 : {id}/attention/layer{layer:-d} -> S S",
    }
    refuse(tmp_path, layout, "L.ids states them in the order of its arrays")

    check(convert(tmp_path, layout | {"L.ids": [-1, -3, -5, -8], "L.size": SIZE}), numbers, has_attention=True)


@pytest.mark.parametrize("key", ["layers", "kept_layers", "layer_idx"])
@pytest.mark.parametrize("form", ["list", "array"])
def test_a_list_of_the_file_that_the_layout_states_needs_no_line(key, form, tmp_path):
    numbers = [0, 8, 16]
    dump(tmp_path / "in/a.pkl", {"h": states(2, 3, 4, 8), key: numbers if form == "list" else np.array(numbers)})
    layout = {"hidden_states": "a.pkl : h -> N L S D"}
    refuse(tmp_path, layout, f"a.pkl : {key}: no line of the layout names numbers")

    traces = convert(tmp_path, layout | {"L.ids": numbers})

    assert len(traces) == 2
    for other in ([0, 8, 24], [8, 0, 16], [0, 4, 8, 12]):
        text = rf"a.pkl : {key} holds \[0, 8, 16\], and L.ids is \[{', '.join(map(str, other))}\]"
        refuse(tmp_path, layout | {"L.ids": other}, text, overwrite=True)
    refuse(tmp_path, layout | {"L.ids": [0, 8, 24]}, "ignore = ", overwrite=True)


def test_other_numbers_of_layers_need_a_line(tmp_path):
    layout = {"hidden_states": "a.pkl : h -> N L S D", "L.ids": [0, 8, 16]}
    for name, value in (("layer_norms", [0.5, 1.0, 2.0]), ("layers", [[0, 8, 16]]), ("rows", [0, 8, 16])):
        dump(tmp_path / "in/a.pkl", {"h": states(2, 3, 4, 8), name: value})
        refuse(tmp_path, layout, f"a.pkl : {name}: no line of the layout names numbers", overwrite=True)
