"""Test folders in which values and extents seem to prove an order of axes, layers or tokens, and do not.

Each test has the number of the rule that catches the trap in its name.
"""

import numpy as np
import pytest

from tests.ingest.execute.folders import dump, states, table
from tests.ingest.propose.folders import accept, refuse
from tests.ingest.propose.test_traps import attention

SIZES = (6, 4, 5)


def padded(arrays, axis=-2, *, width=6, side="right"):
    """Return a stack of arrays, with zeros behind or before their tokens."""
    found = []
    for array in arrays:
        missing = width - array.shape[axis]
        pads = [(0, 0)] * array.ndim
        pads[axis] = (0, missing) if side == "right" else (missing, 0)
        found.append(np.pad(array, pads))
    return np.stack(found)


def batch(*, layers=3, heads=2, sizes=SIZES, dim=8, **more):
    """Return a padded batch of as many traces as layers: states (N, L, S, D), attention, mask and ids."""
    weights = [padded(list(attention(layers, heads, n, n).reshape(-1, n, n)), width=6) for n in sizes]
    weights = [np.pad(w, [(0, 0), (0, 0), (0, 6 - w.shape[-1])]).reshape(layers, heads, 6, 6) for w in weights]
    found = {
        "hidden_states": padded([states(layers, n, dim, seed=n) for n in sizes]),
        "attentions": np.stack(weights),
        "attention_mask": (np.arange(6) < np.array(sizes)[:, None]).astype("i8"),
        "ids": [f"q{k}" for k in range(len(sizes))],
    }
    return {**found, **more}


def listed(count=3, key="hidden_states", **more):
    """Return records with states (L, S, D) whose S differs, and further values."""
    return [
        {"id": f"q{k}", key: states(3, 4 + k, 8, seed=k), **{name: values[k] for name, values in more.items()}}
        for k in range(count)
    ]


ANSWERS = ["It is one.", "It is two.", "It is three."]


# Padding shows the order of N and L


def test_zeros_and_whole_rows_of_attention_prove_n(tmp_path):
    found = batch()
    dump(tmp_path / "in/a.pkl", found)
    traces = accept(tmp_path)
    assert [traces[f"q{k}", 0].num_tokens for k in range(3)] == [6, 4, 5]
    np.testing.assert_allclose(traces["q1", 0].hidden_states, found["hidden_states"][1][:, :4], rtol=2e-3, atol=1e-3)


def test_a_mask_and_whole_rows_of_attention_prove_n_without_ids(tmp_path):
    found = batch()
    del found["ids"]
    dump(tmp_path / "in/a.pkl", found)
    assert sorted(trace.num_tokens for trace in accept(tmp_path).values()) == [4, 5, 6]


def test_a_mask_without_padding_rule_15(tmp_path):
    dump(tmp_path / "in/a.pkl", batch(sizes=(6, 6, 6)))
    refuse(tmp_path)


def test_a_mask_in_another_order_than_the_states_rule_15(tmp_path):
    found = batch()
    dump(tmp_path / "in/a.pkl", {**found, "attention_mask": found["attention_mask"][[1, 2, 0]]})
    refuse(tmp_path)


def test_padding_that_is_not_zero_rule_15(tmp_path):
    """A token that a crash left zero must not choose the other order."""
    found = batch()
    del found["attentions"]
    hidden = np.where(found["hidden_states"] == 0, 0.5, found["hidden_states"])
    hidden[0, 1, 4:] = 0
    dump(tmp_path / "in/a.pkl", {**found, "hidden_states": hidden})
    refuse(tmp_path)


def test_transposed_attention_of_a_padded_batch_rule_6a(tmp_path):
    found = batch()
    dump(tmp_path / "in/a.pkl", {**found, "attentions": found["attentions"].swapaxes(-1, -2)})
    refuse(tmp_path)


def test_a_mask_without_ids_and_attention_rule_15(tmp_path):
    """Zeros and mask agree in both orders of N and S."""
    found = batch()
    dump(tmp_path / "in/a.pkl", {name: found[name] for name in ("hidden_states", "attention_mask")})
    refuse(tmp_path)


def test_a_table_in_another_order_beside_a_padded_batch_rule_13(tmp_path):
    found = batch()
    del found["ids"]
    dump(tmp_path / "in/a.pkl", found)
    table(tmp_path / "in/labels.csv", [{"qid": f"q{k}", "is_correct": k % 2} for k in range(4)])
    refuse(tmp_path)


def test_heads_in_place_of_layers_rule_6a(tmp_path):
    """Attention (N, H, L, S, S) with as many heads as layers."""
    found = batch(heads=3)
    dump(tmp_path / "in/a.pkl", {**found, "attentions": found["attentions"].swapaxes(1, 2)})
    refuse(tmp_path)


# One length a trace


def test_one_length_of_a_trace_proves_layers_rule_18(tmp_path):
    found = batch(layers=2)
    lengths = {"hidden_states": found["hidden_states"], "lengths": list(SIZES), "ids": found["ids"]}
    dump(tmp_path / "in/a.pkl", lengths)
    assert accept(tmp_path)["q1", 0].hidden_states.shape == (2, 4, 8)


@pytest.mark.parametrize("name", ["lengths", "attention_mask"])
def test_lengths_of_the_longest_answer_rule_18(tmp_path, name):
    """Answers (N, K, S, D), and the length of the longest of each question."""
    hidden = padded([padded([states(n - k, 8, seed=n + k) for k in range(2)], width=n) for n in SIZES])
    known = {"lengths": list(SIZES), "attention_mask": batch()["attention_mask"]}
    dump(tmp_path / "in/a.pkl", {"hidden_states": hidden, "ids": ["a", "b", "c"], name: known[name]})
    refuse(tmp_path, "zero in some layers alone")


def test_lengths_beside_states_of_samples_rule_18(tmp_path):
    found = batch(layers=2)
    dump(
        tmp_path / "in/samples.pkl",
        {n: v for n, v in found.items() if n in ("hidden_states", "ids")} | {"lengths": list(SIZES)},
    )
    refuse(tmp_path)


def test_lengths_beside_other_states_rule_18(tmp_path):
    found = batch(layers=2)
    dump(tmp_path / "in/a.pkl", {"acts": found["hidden_states"], "ids": found["ids"], "lengths": list(SIZES)})
    refuse(tmp_path)


def test_lengths_and_padding_that_is_not_zero_rule_17a(tmp_path):
    found = batch(layers=2)
    hidden = found["hidden_states"] + 1
    dump(tmp_path / "in/a.pkl", {"hidden_states": hidden, "ids": found["ids"], "lengths": list(SIZES)})
    refuse(tmp_path)


@pytest.mark.parametrize("shape", [(14, 15, 20), (3, 14, 15)])
def test_a_row_too_few_where_another_axis_has_as_many_rule_9(tmp_path, shape):
    """Lengths of 15 rows in all: one row of the states is lost."""
    dump(tmp_path / "in/a.pkl", {"hidden_states": states(*shape), "ids": ["a", "b", "c"], "lengths": list(SIZES)})
    refuse(tmp_path)


def test_a_layer_cut_where_traces_have_one_length_rule_11(tmp_path):
    """Lists (L, N) of tensors, of which all of one layer lost a token: in the order (N, L) each trace has one length."""
    hidden = [[states(5 if layer == 1 else 6, 8, seed=9 * layer + n) for n in range(3)] for layer in range(3)]
    dump(tmp_path / "in/a.pkl", {"hidden_states": hidden, "ids": ["a", "b", "c"], "answers": ANSWERS})
    refuse(tmp_path)


# Numbers of keys


@pytest.mark.parametrize("numbers", [(0, 1, 2), (8, 16, 24)])
def test_numbers_below_hidden_states_of_one_answer_rule_18(tmp_path, numbers):
    found = listed(answer=ANSWERS)
    for row in found:
        row["hidden_states"] = dict(zip(numbers, row["hidden_states"], strict=True))
    dump(tmp_path / "in/a.pkl", found)
    assert accept(tmp_path)["q2", 0].hidden_states.shape == (3, 6, 8)


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("hidden_states", {}),
        ("hidden_states", {"answers": [ANSWERS] * 3}),
        ("hs", {"answer": ANSWERS}),
        ("sampled_hidden_states", {"answer": ANSWERS}),
        ("hidden_states_of_heads", {"answer": ANSWERS}),
    ],
)
def test_numbers_of_keys_that_may_be_answers_or_heads_rule_18(tmp_path, key, more):
    found = listed(key=key, **more)
    for row in found:
        row[key] = dict(enumerate(row[key]))
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


# Numbers of answers


def test_the_number_of_an_answer_leaves_layers_rule_18(tmp_path):
    found = [{**row, "sample_id": k % 2} for k, row in enumerate(listed(4, answer=[*ANSWERS, "It is four."]))]
    for k, row in enumerate(found):
        row["id"] = f"q{k // 2}"
    dump(tmp_path / "in/sampled.pkl", found)
    assert accept(tmp_path)["q1", 1].hidden_states.shape == (3, 7, 8)


@pytest.mark.parametrize("more", [{}, {"answers": [ANSWERS] * 4}, {"beams": {"answer": "It is one."}}])
def test_the_number_of_an_answer_and_several_texts_rule_18(tmp_path, more):
    found = [{**row, "sample_id": k % 2} for k, row in enumerate(listed(4))]
    for k, row in enumerate(found):
        row |= {"id": f"q{k // 2}"} | {n: v[k] if isinstance(v, list) else v for n, v in more.items()}
        if "beams" in more:
            row["beams"] = {**row["beams"], "hidden_states": row.pop("hidden_states")}
    dump(tmp_path / "in/sampled.pkl", found)
    refuse(tmp_path)


# Objects of transformers


def outputs(**fields):
    """Return an output object of transformers with torch tensors."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.modeling_outputs")

    def tensors(value):
        return tuple(map(tensors, value)) if isinstance(value, list) else torch.from_numpy(value)

    return modeling.BaseModelOutput(**{name: tensors(value) for name, value in fields.items()})


def test_an_output_object_has_layers_in_front_rule_18(tmp_path):
    found = [
        {"id": f"q{k}", "out": outputs(hidden_states=[states(1, 4 + k, 8, seed=9 * k + n) for n in range(3)])}
        for k in range(3)
    ]
    dump(tmp_path / "in/a.pkl", found)
    assert accept(tmp_path)["q2", 0].hidden_states.shape == (3, 6, 8)


@pytest.mark.parametrize("name", ["hidden_states", "last_hidden_state"])
def test_one_tensor_in_an_output_object_rule_18(tmp_path, name):
    """The states of a batch, without an axis for the layers."""
    found = [{"id": f"q{k}", "out": outputs(**{name: states(3, 4 + k, 8, seed=k)})} for k in range(3)]
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def test_a_stack_with_the_batch_in_front_in_an_output_object_rule_18(tmp_path):
    found = [{"id": f"q{k}", "out": outputs(hidden_states=states(1, 3, 4 + k, 8, seed=k))} for k in range(3)]
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def right_padded(found):
    """Return the states and attention of a batch with layers in front, as an output object has them."""
    return {name: list(found[name].swapaxes(0, 1)) for name in ("hidden_states", "attentions")}


def test_attention_of_an_output_object_has_layers_in_front_rule_6a(tmp_path):
    """Use as many traces as layers, padded on the right: rows of attention are whole in both orders."""
    found = batch()
    weights = np.broadcast_to(attention(6, 6), (3, 3, 2, 6, 6))
    known = {name: found[name] for name in ("attention_mask", "ids")}
    dump(tmp_path / "in/a.pkl", known | {"out": outputs(**right_padded({**found, "attentions": weights.copy()}))})
    assert accept(tmp_path)["q1", 0].num_tokens == 4


@pytest.mark.parametrize("trap", ["a dict", "no ids and no mask", "a mask of other rows"])
def test_attention_that_may_have_another_order_rule_6a(tmp_path, trap):
    found = batch()
    own = right_padded({**found, "attentions": np.broadcast_to(attention(6, 6), (3, 3, 2, 6, 6)).copy()})
    known = {name: found[name] for name in ("attention_mask", "ids") if trap != "no ids and no mask"}
    if trap == "a mask of other rows":
        known["input_ids"] = np.where(found["attention_mask"], np.arange(18).reshape(3, 6) + 5, 0)
        known["attention_mask"] = found["attention_mask"][[1, 2, 0]]
    dump(tmp_path / "in/a.pkl", known | {"out": own if trap == "a dict" else outputs(**own)})
    refuse(tmp_path)


# Passes


def passes(count, *, first, layers=3):
    """Return passes of generation: of several tokens, then of one."""
    return [[states(size, 8, seed=9 * size + n) for n in range(layers)] for size in (first, *[1] * count)]


def test_passes_of_an_answer_give_its_tokens_rule_16(tmp_path):
    found = [{"id": f"q{k}", "hidden_states": passes(2 + k, first=4 + k), "answer": ANSWERS[k]} for k in range(3)]
    dump(tmp_path / "in/a.pkl", found)
    assert [trace.num_tokens for trace in accept(tmp_path).values()] == [6, 8, 10]


@pytest.mark.parametrize(
    ("sizes", "more", "key"),
    [
        ([(2, 4), (2, 5), (2, 6)], {"answer": ANSWERS}, "hidden_states"),  # states of the prompt, and of two answers
        ([(2, 4), (3, 5), (4, 6)], {}, "hidden_states"),
        ([(2, 4), (3, 5), (4, 6)], {"answers": [ANSWERS] * 3}, "hidden_states"),
        ([(2, 4), (3, 5), (4, 6)], {"answer": ANSWERS}, "acts"),
        ([(2, 4), (3, 5), (4, 6)], {"answer": ANSWERS}, "sampled_hidden_states"),
    ],
)
def test_lists_of_states_that_may_be_no_passes_rule_16(tmp_path, sizes, more, key):
    found = [
        {"id": f"q{k}", key: passes(count, first=first), **{n: v[k] for n, v in more.items()}}
        for k, (count, first) in enumerate(sizes)
    ]
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


# An axis of one


def test_an_axis_of_one_is_n_or_none(tmp_path):
    """Each file of one sequence: as an axis N of one trace, it gives the same."""
    found = [
        {"input_ids": np.arange(4 + k)[None] + 5, "hidden_states": states(2, 1, 4 + k, 8, seed=k),
         "attentions": attention(2, 1, 3, 4 + k, 4 + k)}
        for k in range(3)
    ]  # fmt: skip
    dump(tmp_path / "in/a.pkl", found)
    assert len(accept(tmp_path)) == 3


def test_a_batch_of_two_beside_batches_of_one_rule_17(tmp_path):
    found = [
        {"input_ids": np.arange(n * (4 + k)).reshape(n, -1) + 5, "hidden_states": states(2, n, 4 + k, 8, seed=k),
         "attentions": attention(2, n, 3, 4 + k, 4 + k)}
        for k, n in enumerate((1, 1, 2))
    ]  # fmt: skip
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def test_one_layer_and_one_trace_rule_18(tmp_path):
    """States (1, 1, S, D): both axes of one are equal, and a file of two layers may come."""
    dump(tmp_path / "in/a.pkl", {"hidden_states": states(1, 1, 5, 8), "input_ids": np.arange(5)[None]})
    refuse(tmp_path)


# Steps that names number


def steps(sizes, seed=0):
    """Return the layers of each step by name."""
    return {
        f"step_{n}": {f"layer_{k}": states(size, 8, seed=99 * seed + 9 * n + k) for k in (3, 7)}
        for n, size in enumerate(sizes)
    }


def test_steps_by_name_are_passes_rule_16(tmp_path):
    found = [{"id": f"q{k}", "answer": ANSWERS[k], "states": steps([4 + k, *[1] * (2 + k)])} for k in range(3)]
    dump(tmp_path / "in/a.pkl", found)
    assert [trace.num_tokens for trace in accept(tmp_path).values()] == [6, 8, 10]


@pytest.mark.parametrize("more", [0, 1])
def test_tokens_of_steps_by_name_rule_3(tmp_path, more):
    found = [{"id": f"q{k}", "states": steps([4, 1, 1], k), "tokens": np.arange(6 + more) + k} for k in range(3)]
    dump(tmp_path / "in/a.pkl", found)
    assert [trace.num_tokens for trace in accept(tmp_path).values()] == [6, 6, 6]


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ([[4, 1, 1], [5, 1, 1], [6, 1, 1]], {"answer": ANSWERS}),  # the prompt, and two answers by their last tokens
        ([[4, 3], [5, 2, 2], [6, 4]], {"answer": ANSWERS}),  # steps of reasoning
        ([[4, 1, 1], [5, 1], [6, 1, 1, 1]], {}),
        ([[4, 1, 1], [5, 1], [6, 1, 1, 1]], {"answers": [ANSWERS] * 3}),
        ([[4, 1, 1]] * 3, {"tokens": [np.arange(5)] * 3}),
    ],
)
def test_steps_by_name_that_may_be_no_passes_rule_16(tmp_path, sizes, more):
    found = [{"id": f"q{k}", "states": steps(own), **{n: v[k] for n, v in more.items()}} for k, own in enumerate(sizes)]
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


# Columns of lists


def columns(key="hidden", lengths=SIZES, **more):
    """Return columns of traces, with a list of states (L, S, D) of different S."""
    found = {"id": ["a", "b", "c"], key: [states(2, n, 8, seed=n) for n in lengths], "response": ANSWERS}
    return {name: value for name, value in (found | more).items() if value is not None}


def test_a_column_of_states_of_different_lengths_rule_16(tmp_path):
    dump(tmp_path / "in/a.pkl", columns())
    assert [trace.num_tokens for trace in accept(tmp_path).values()] == list(SIZES)


@pytest.mark.parametrize(
    "found",
    [
        columns(lengths=(5, 5, 5)),
        columns(id=None),
        columns("sentence_hidden"),
        columns("acts"),
        columns(response=[ANSWERS[:2]] * 3),
        columns(hidden=[[states(n + k, 8, seed=n) for k in range(2)] for n in SIZES]),  # two answers each
    ],
)
def test_columns_whose_states_may_be_others_rule_16(tmp_path, found):
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


# Groups of numbers


def test_numbers_below_layers_are_layers(tmp_path):
    layers = {n: {"hidden_states": padded([states(k, 8, seed=k + n) for k in SIZES])} for n in (3, 7, 9, 11)}
    dump(tmp_path / "in/a.pkl", {"layers": layers, "lengths": list(SIZES), "ids": ["a", "b", "c"]})
    assert accept(tmp_path)["b", 0].hidden_states.shape == (4, 4, 8)


@pytest.mark.parametrize("word", ["runs", "questions", "h", "layers_of_runs"])
def test_numbers_below_another_word_rule_20(tmp_path, word):
    groups = {n: {"hidden_states": padded([states(k, 8, seed=k + n) for k in SIZES])} for n in (3, 7, 9, 11)}
    dump(tmp_path / "in/a.pkl", {word: groups, "lengths": list(SIZES), "ids": ["a", "b", "c"]})
    refuse(tmp_path)


# What the words of lists say


def shards(folder, name="shard_{}_hidden.pkl", *, has_tokens=True, ids="q{}"):
    """Write two shards of lists: states, ids and tokens."""
    for n in range(2):
        sizes = (4 + n, 6 + n)
        dump(folder / name.format(n), [states(3, size, 8, seed=size) for size in sizes])
        dump(folder / f"shard_{n}_ids.pkl", [ids.format(2 * n + k) for k in range(2)])
        if has_tokens:
            dump(folder / f"shard_{n}_tokens.pkl", [np.arange(size) + 9 for size in sizes])


def test_shards_of_states_ids_and_tokens(tmp_path):
    shards(tmp_path / "in")
    assert [trace.num_tokens for trace in accept(tmp_path).values()] == [4, 6, 5, 7]


@pytest.mark.parametrize(
    "options",
    [{"has_tokens": False}, {"ids": "q"}, {"name": "shard_{}_acts.pkl"}, {"name": "shard_{}_head_hidden.pkl"}],
)
def test_shards_that_prove_less_rule_18(tmp_path, options):
    shards(tmp_path / "in", **options)
    refuse(tmp_path)


def run_of(items, key="samples"):
    return {"config": {"model": "m"}, key: items}


def test_a_list_named_samples_whose_items_have_ids(tmp_path):
    items = [{**row, "input_ids": np.arange(4 + k)} for k, row in enumerate(listed())]
    dump(tmp_path / "in/a.pkl", run_of(items))
    assert accept(tmp_path)["q1", 0].hidden_states.shape == (3, 5, 8)


@pytest.mark.parametrize(
    "items",
    [
        listed(),
        [{**row, "answers": ANSWERS} for row in listed()],
        [{"id": row["id"], "answer": "a", "samples": {"hidden_states": row["hidden_states"]}} for row in listed()],
        [{**row, "id": "q0", "input_ids": np.arange(4 + k)} for k, row in enumerate(listed())],
    ],
)
def test_a_list_named_samples_that_may_hold_several_answers_rule_18(tmp_path, items):
    dump(tmp_path / "in/a.pkl", run_of(items))
    refuse(tmp_path)


def answers_of(count=2, **more):
    """Return lists of answers with states and tokens by id."""
    return {
        f"q{n}": [
            {"hidden_states": states(3, 4 + n + k, 8, seed=9 * n + k), "tokens": np.arange(4 + n + k), **more}
            for k in range(count)
        ]
        for n in range(3)
    }


def test_lists_of_sampled_answers_by_id(tmp_path):
    dump(tmp_path / "in/sampled.pkl", answers_of(answer="It is one."))
    assert len(accept(tmp_path)) == 6


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("run.pkl", answers_of(answer="It is one.")),  # turns of a conversation
        ("sampled.pkl", answers_of()),
        ("sampled_turns.pkl", answers_of(answer="It is one.")),
        ("sampled.pkl", answers_of(answer=ANSWERS)),
    ],
)
def test_lists_by_id_that_may_be_no_answers_rule_16(tmp_path, name, found):
    dump(tmp_path / f"in/{name}", found)
    refuse(tmp_path)


def vectors(key="activations", name="values", tokens=3, **more):
    """Return records with a list of vectors, each with its layer and position."""
    found = []
    for k in range(3):
        places = [(layer, position) for layer in (3, 7) for position in range(tokens + k)]
        rows = [{"layer": n, "position": p, name: states(8, seed=9 * n + p), **more} for n, p in places]
        found.append({"id": f"q{k}", key: rows})
    return found


def test_values_of_layers_and_positions(tmp_path):
    dump(tmp_path / "in/a.pkl", vectors())
    assert accept(tmp_path)["q1", 0].hidden_states.shape == (2, 4, 8)


@pytest.mark.parametrize(
    "found",
    [
        vectors("cache"),
        vectors("attention"),
        vectors(keys=[1.0, 2.0]),
        vectors("gradients"),
        [{**row, "activations": row["activations"][1:]} for row in vectors()],  # a layer lacks a token
    ],
)
def test_values_that_may_be_no_states_rule_8(tmp_path, found):
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


@pytest.mark.parametrize("ids", [[2, 0, 3, 1], ["q2", "q0", "q3", "q1"], [1, 3, 2, 4], ["0", "1", "10", "11"]])
@pytest.mark.parametrize("where", ["npz", "npy"])
@pytest.mark.parametrize("suffix", ["json", "npy"])
def test_ids_number_rows_in_another_order_rule_13a(tmp_path, ids, where, suffix):
    """Rows that a loader has shuffled, and labels in the order of the data set [labels of other traces]."""
    ids = [*ids, *map(str, range(2, 10))] if ids[-1] == "11" else ids
    count, folder = len(ids), tmp_path / "in"
    arrays = {f"last_token_layer_{k}": states(count, 8, seed=k) for k in (8, 16)}
    folder.mkdir()
    if where == "npz":
        np.savez(folder / "a.npz", **arrays, idx=np.array(ids))
    for name, array in {**arrays, "idx": np.array(ids)}.items() if where == "npy" else ():
        np.save(folder / f"{name}.npy", array)
    if suffix == "json":
        table(folder / "labels.json", [{"is_correct": k % 2, "question": f"Q{k}"} for k in range(count)])
    else:
        np.save(folder / "is_correct.npy", np.arange(count) % 2)

    refuse(tmp_path, "the ids may number rows in another order")


@pytest.mark.long
def test_ids_of_which_a_part_is_looked_at_number_rows_rule_13a(tmp_path):
    count, folder = 2100, tmp_path / "in"
    folder.mkdir()
    arrays = {f"last_token_layer_{k}": states(count, 4, seed=k) for k in (8, 16)}
    np.savez(folder / "a.npz", **arrays, idx=np.random.default_rng(0).permutation(count))
    np.save(folder / "is_correct.npy", np.arange(count) % 2)

    refuse(tmp_path, "the ids may number rows in another order")


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [7, 1, 9, 3], ["c", "a", "d", "b"], ["a1", "b0", "a0", "b1"]])
def test_ids_do_not_number_rows(tmp_path, ids):
    arrays = {f"last_token_layer_{k}": states(4, 8, seed=k) for k in (8, 16)}
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/a.npz", **arrays, idx=np.array(ids))
    np.save(tmp_path / "in/is_correct.npy", np.array([0, 1, 1, 0]))

    assert [trace.score for trace in accept(tmp_path).values()] == [0, 1, 1, 0]


@pytest.mark.parametrize("ids", [[2, 0, 1], [12, 10, 11], ["z2", "z0", "z1"], ["a2", "b0", "a1"], [900, 17, 230]])
@pytest.mark.parametrize("name", ["idx", "id", "index", "question_id"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_table_with_numbers_of_rows_in_another_order_beside_a_stack_rule_13a(tmp_path, ids, name, is_padded):
    mask = np.arange(6) < np.array([6, 4, 5])[:, None] if is_padded else np.ones((3, 6), bool)
    hidden = np.stack([states(4, 6, 12, seed=k) for k in range(3)]) * mask[:, None, :, None]
    found = {"hidden_states": hidden, "input_ids": (np.arange(18).reshape(3, 6) + 5) * mask}
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/a.npz", **found, attention_mask=mask.astype(int))
    table(tmp_path / "in/m.csv", [{name: ids[k], "is_correct": k % 2} for k in range(3)])

    refuse(tmp_path, "is_correct, question_id: joined in order, and the ids may number rows in another order")


@pytest.mark.parametrize("ids", [[0, 1, 2], [10, 11, 12], ["z0", "z1", "z2"], ["a1", "b0", "a2"], ["c", "a", "b"]])
def test_a_table_with_numbers_of_rows_in_order_beside_a_stack(tmp_path, ids):
    found = {"hidden_states": states(3, 4, 6, 12), "input_ids": np.arange(18).reshape(3, 6) + 5}
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/a.npz", **found, attention_mask=np.ones((3, 6), int))
    table(tmp_path / "in/m.csv", [{"idx": ids[k], "is_correct": k % 2} for k in range(3)])

    found = {key: trace.score for (key, _), trace in accept(tmp_path).items()}
    assert found == {str(text): k % 2 for k, text in enumerate(ids)}


@pytest.mark.parametrize("container", ["records", "columns", "dict"])
@pytest.mark.parametrize("sizes", [(7, 7, 7), (7, 5, 9)])
def test_states_of_the_answer_of_as_many_layers_as_ids_rule_16(tmp_path, sizes, container):
    """States (L, S, D) of the answer, and ids of the whole text: 7 in all traces, as there are layers."""
    kept = [
        {"id": f"q{k}", "hidden_states": states(size, 3, 16, seed=k), "input_ids": np.arange(size) + 9}
        for k, size in enumerate(sizes)
    ]
    columns = {name: [item[name] for item in kept] for name in kept[0]}
    by_id = {item["id"]: {name: item[name] for name in ("hidden_states", "input_ids")} for item in kept}
    dump(tmp_path / "in/a.pkl", {"records": kept, "columns": columns, "dict": by_id}[container])
    if len(set(sizes)) == 1:
        refuse(tmp_path)
    else:  # S differs, L does not
        assert [trace.num_tokens for _, trace in sorted(accept(tmp_path).items())] == list(sizes)
