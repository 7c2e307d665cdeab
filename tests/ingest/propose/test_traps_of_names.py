"""Test folders in whose names a sign, a word or a copy says something else than the usual name does.

Each test has the number of the rule that catches the trap in its name.
"""

import numpy as np
import pytest

from tests.ingest.execute.folders import dump, save, states, table
from tests.ingest.propose.folders import accept, check_candidates, proposal_of, refuse
from tests.ingest.propose.test_traps import attention, rows
from tests.tiers import long

LAYERS = 4


def layers_of(trace, names, key="hidden_states"):
    """Return the layers of a record by names that count from the end: the name of the last one comes first."""
    return {names(-1 - k): layer for k, layer in enumerate(reversed(trace[key]))}


def listed(names, of_attention="layer_{}".format):
    """Return records, and the same ones with dicts of layers: stacked attention may have another order than names."""
    traces = rows(layers=LAYERS, key="hidden_states")
    return traces, [
        trace | {"hidden_states": layers_of(trace, names), "attn": layers_of(trace, of_attention, "attn")}
        for trace in traces
    ]


# Outputs of modules


@pytest.mark.parametrize("key", ["self_attn", "self_attn.output", "self_attn.weights"])
@pytest.mark.parametrize("is_square", [True, False])
def test_an_output_of_the_module_is_no_attention_rule_6a(tmp_path, key, is_square):
    lengths = (8, 8, 8) if is_square else (4, 6, 5)
    found = []
    for n, row in enumerate(rows(lengths=lengths)):
        row.pop("attn")
        outputs = {f"model.layers.{k}.{key}": states(lengths[n], 8, seed=50 + n + 9 * k) for k in range(2)}
        found.append(row | {f"model.layers.{k}": layer for k, layer in enumerate(row.pop("hs"))} | outputs)
    dump(tmp_path / "in/a.pkl", found)
    proposal = proposal_of(tmp_path)
    assert proposal.candidates and f"layers.{{layer}}.{key}" in proposal.message()
    for candidate in proposal.candidates:
        assert "attentions" not in candidate.layout.addresses
    assert is_square == (proposal.layout is None)
    check_candidates(tmp_path, proposal)


def test_square_weights_of_a_module_are_no_attention_rule_8(tmp_path):
    found = [row | {"self_attn.q_proj.weight": attention(8, 8)} for row in rows(lengths=(8, 8, 8))]
    dump(tmp_path / "in/a.pkl", [{k: v for k, v in row.items() if k != "attn"} for row in found])
    assert not any("attentions" in one.layout.addresses for one in proposal_of(tmp_path).candidates)


@pytest.mark.parametrize("name", ["attn_rollout", "attention_entropy", "attn_flow"])
def test_the_name_of_a_file_says_no_attention_where_a_key_says_nothing_rule_8(tmp_path, name):
    found = [(row["id"], row.pop("attn")) for row in rows()]
    dump(tmp_path / "in/a.pkl", [{k: v for k, v in row.items() if k != "attn"} for row in rows()])
    for question_id, weights in found:
        (tmp_path / "in" / name).mkdir(exist_ok=True)
        np.savez(tmp_path / f"in/{name}/{question_id}.npz", a=weights)
    assert not any("attentions" in one.layout.addresses for one in refuse(tmp_path).candidates)


@pytest.mark.parametrize("name", ["gold_answer", "reference_answers", "correct_response"])
def test_the_name_of_a_file_says_a_reference_where_a_key_says_nothing_rule_13b(tmp_path, name):
    dump(tmp_path / "in/a.pkl", rows())
    table(tmp_path / f"in/{name}.json", {f"q{k}": {"data": f"It is {k}."} for k in range(3)})
    assert not any("generated_answer" in one.layout.addresses for one in proposal_of(tmp_path).candidates)


# Layers that count from the end


@pytest.mark.parametrize(
    "form", ["{}", "layer_{}", "layer.{}", "layer {}", "block_{}", "block.{}", "l_{}", "layers[{}]", "h.{}", "h_{}"]
)
def test_the_minus_of_layers_is_their_sign_rule_1(tmp_path, form):
    traces, found = listed(lambda number: form.format(number))
    dump(tmp_path / "in/a.pkl", found)
    stored = accept(tmp_path)
    for trace in traces:
        np.testing.assert_allclose(stored[trace["id"], 0].hidden_states, trace["hidden_states"], rtol=2e-3, atol=1e-3)


def test_integers_below_zero_are_layers_from_the_end_rule_1(tmp_path):
    traces, found = listed(int)
    dump(tmp_path / "in/a.pkl", found)
    np.testing.assert_allclose(
        accept(tmp_path)["q1", 0].hidden_states, traces[1]["hidden_states"], rtol=2e-3, atol=1e-3
    )


def test_files_of_layers_from_the_end_rule_1(tmp_path):
    traces = rows(layers=LAYERS, key="hidden_states")
    (tmp_path / "in").mkdir()
    for k in range(LAYERS):
        found = {trace["id"]: trace["hidden_states"][k - LAYERS] for trace in traces}
        np.savez(tmp_path / f"in/layer_{k - LAYERS}.npz", **found)
    np.testing.assert_allclose(
        accept(tmp_path)["q2", 0].hidden_states, traces[2]["hidden_states"], rtol=2e-3, atol=1e-3
    )


def test_a_hyphen_behind_the_word_may_be_a_sign_rule_1(tmp_path):
    dump(
        tmp_path / "in/a.pkl",
        [
            trace | {"hidden_states": layers_of(trace, "layer{}".format)}
            for trace in rows(layers=LAYERS, key="hidden_states")
        ],
    )
    assert any("may be a sign" in one for one in refuse(tmp_path).candidates[0].unproved)


def test_a_hyphen_in_front_of_0_is_no_sign_rule_1(tmp_path):
    traces = rows(layers=LAYERS, key="hidden_states")
    found = [{**t, "hidden_states": {f"layer-{k}": one for k, one in enumerate(t["hidden_states"])}} for t in traces]
    dump(tmp_path / "in/a.pkl", found)
    np.testing.assert_allclose(
        accept(tmp_path)["q1", 0].hidden_states, traces[1]["hidden_states"], rtol=2e-3, atol=1e-3
    )


# Ids of what was generated


def answers(name):
    """Return records whose ids are under a name."""
    return [{**{k: v for k, v in row.items() if k != "input_ids"}, name: row["input_ids"]} for row in rows()]


GENERATED = ["generated_ids", "generated_tokens", "generated_token_ids", "new_tokens", "new_token_ids"]
GENERATED += ["answer_ids", "answer_tokens", "response_ids", "response_token_ids", "generation_token_ids"]
GENERATED += [
    "output_ids",
    "output_token_ids",
    "output_tokens",
    "sequences",
    "sequence",
    "next_tokens",
    "target_token_ids",
]


@pytest.mark.parametrize("name", GENERATED)
def test_an_id_may_be_the_one_that_the_state_generated_rule_3(tmp_path, name):
    dump(tmp_path / "in/a.pkl", answers(name))
    proposal = refuse(tmp_path)
    assert any("the token before the one that it generated" in one for one in proposal.candidates[0].unproved)


@pytest.mark.parametrize("folder", ["generated_ids", "outputs", "response_token_ids"])
def test_the_folder_of_ids_may_say_that_they_are_generated_rule_3(tmp_path, folder):
    for k in range(3):
        save(tmp_path / f"in/hidden_states/q{k}.npy", states(2, 4 + k, 8, seed=k))
        save(tmp_path / f"in/{folder}/token_ids/q{k}.npy", np.arange(4 + k) + 5)
    proposal = refuse(tmp_path)
    assert any("the token before the one that it generated" in one for one in proposal.candidates[0].unproved)


@pytest.mark.parametrize("name", ["input_ids", "tokens", "token_ids"])
@pytest.mark.parametrize("shape", [(1, 1), (1,)])
def test_ids_of_passes_of_one_token_may_be_those_that_they_generated_rule_3(tmp_path, name, shape):
    """States as generate() returns them: of each step, of each layer, an array of one token."""
    found = [
        {"id": f"q{k}", "hidden_states": [[states(*shape, 8, seed=9 * n + m) for m in range(3)] for n in range(4 + k)],
         name: list(range(5, 9 + k))}
        for k in range(3)
    ]  # fmt: skip
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path, "the token before the one that it generated")


@pytest.mark.parametrize("name", ["input_ids", "token_ids"])
def test_ids_of_steps_may_be_those_that_they_generated_rule_3(tmp_path, name):
    found = [
        {"id": f"q{k}", name: list(range(5, 9 + k)), "layers": [4, 8, 12],
         "hidden_states": {f"step_{n}": states(3, 1, 8, seed=9 * k + n) for n in range(4 + k)}}
        for k in range(3)
    ]  # fmt: skip
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path, "the token before the one that it generated")


@pytest.mark.parametrize("name", ["input_ids", "token_ids", "tokens", "input_output_ids"])
def test_ids_of_the_whole_text_belong_to_the_states(tmp_path, name):
    dump(tmp_path / "in/a.pkl", answers(name))
    assert accept(tmp_path)["q1", 0].tokens.tolist() == rows()[1]["input_ids"].tolist()


# Numbers that may be prompt_length


QUESTIONS = ["Why?", "Who is", "What"]


@pytest.mark.parametrize("name", ["question_len", "prompt_length", *long("question_length", "prompt_len", "input_len")])
@pytest.mark.parametrize("key", ["question", "prompt", "query"])
@pytest.mark.parametrize("container", ["pkl", "npz", "table", "texts in a table"])
def test_a_length_in_characters_is_no_prompt_length_rule_16(tmp_path, name, key, container):
    write_questions(tmp_path / "in", container, {key: QUESTIONS, name: list(map(len, QUESTIONS))})
    refuse(tmp_path, "prompt_length: it may count characters or words")


@pytest.mark.parametrize(("name", "lengths"), [("prompt_len", [1, 2, 1]), ("question_len", [3, 3, 3])])
def test_a_length_in_words_or_of_the_question_is_no_prompt_length_rule_16(tmp_path, name, lengths):
    write_questions(tmp_path / "in", "pkl", {"question": QUESTIONS, name: lengths})
    refuse(tmp_path, "prompt_length: it may count characters or words")


@pytest.mark.parametrize("name", ["n_prompt", "num_prompt", "prompt_n"])
@pytest.mark.parametrize("values", [[1, 1, 1], [1, 2, 3], [3, 3, 3]])
def test_a_number_of_prompts_is_no_prompt_length_rule_16(tmp_path, name, values):
    write_questions(tmp_path / "in", "pkl", {"question": QUESTIONS, name: values})
    refuse(tmp_path, "prompt_length: it may be the number of the prompt")


@pytest.mark.parametrize("name", ["prompt_len", "input_len", "n_prompt_tokens"])
@pytest.mark.parametrize("container", ["pkl", "npz", "table"])
def test_a_length_in_tokens_is_the_prompt_length(tmp_path, name, container):
    write_questions(tmp_path / "in", container, {"question": QUESTIONS, name: [2, 3, 2]})
    assert [trace.prompt_length for trace in accept(tmp_path).values()] == [2, 3, 2]


def test_a_length_in_characters_of_questions_of_many_files_is_no_prompt_length_rule_16(tmp_path):
    questions = [f"Who {'x' * k}" for k in range(9)]
    lengths = list(map(len, questions))
    write_questions(tmp_path / "in", "texts in a table", {"question": questions, "prompt_len": lengths})
    refuse(tmp_path, "prompt_length: it may count characters or words")


def write_questions(folder, container, columns):
    """Write states with ids, and columns with a value per trace next to them, or in a table."""
    lines = [
        {"id": f"q{k}"} | dict(zip(columns, values, strict=True))
        for k, values in enumerate(zip(*columns.values(), strict=True))
    ]
    sizes = range(9, 9 + len(lines))
    found = [{"hidden_states": states(4, n, 12, seed=n), "input_ids": np.arange(n)} for n in sizes]
    own = {"table": [], "texts in a table": list(columns)[1:]}.get(container, list(columns))
    found = [row | {name: line[name] for name in own} for row, line in zip(found, lines, strict=True)]
    folder.mkdir()
    if container == "pkl":
        dump(folder / "a.pkl", [{"id": f"q{k}", **row} for k, row in enumerate(found)])
        return
    for k, row in enumerate(found):
        np.savez(folder / f"q{k}.npz", **row)
    if container != "npz":
        table(folder / "questions.csv", [{name: line[name] for name in line if name not in own} for line in lines])


# What is computed from attention


COMPUTED = [
    "attention_rollout",
    "attn_rollout",
    "rollout_attention",
    "attention_flow",
    "attention_max",
    "max_attention",
]
COMPUTED += ["attention_entropy", "attn_grad", "attention_gradients", "attention_std", "attention_lookback_ratio"]


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_from_attention_is_none_rule_8(tmp_path, name):
    found = [{**{k: v for k, v in row.items() if k != "attn"}, name: row["attn"].mean(1)} for row in rows()]
    dump(tmp_path / "in/a.pkl", found)
    proposal = refuse(tmp_path)
    assert not any("attentions" in candidate.layout.addresses for candidate in proposal.candidates)


def averaged(name):
    """Return records with attention of three layers averaged over heads, or of three heads of one layer."""
    found = []
    for row in rows(layers=3):
        weights = row.pop("attn")
        found.append({**row, name: weights[0]})
    return found


@pytest.mark.parametrize("name", ["attention_mean", "attn_mean", "mean_attention", "avg_attn", "attentions"])
def test_a_word_says_that_heads_are_averaged(tmp_path, name):
    dump(tmp_path / "in/a.pkl", averaged(name))
    np.testing.assert_allclose(accept(tmp_path)["q1", 0].attention[0], attention(6, 6), atol=2e-3)


@pytest.mark.parametrize(
    "name", ["attention", "attn", "attn_weights", "attention_weights", "attention_maps", "att", "attns"]
)
def test_as_many_heads_of_one_layer_as_layers_rule_18(tmp_path, name):
    dump(tmp_path / "in/a.pkl", averaged(name))
    assert any("heads of one layer" in one for one in refuse(tmp_path).candidates[0].unproved)


# Copies


@pytest.mark.parametrize("names", [("a", "b"), ("q1", "q1_again"), ("run0", "run1"), ("first", "second")])
def test_equal_states_in_two_places_rule_10b(tmp_path, names):
    found = rows(2, layers=LAYERS)
    for name in names:
        dump(tmp_path / f"in/{name}.pkl", [{**row, "id": f"{name}-{row['id']}"} for row in found])
    assert any("equal states" in one for one in refuse(tmp_path).candidates[0].unproved)


# Tables that name files


@pytest.mark.parametrize("column", ["file", "path", "filename", "states_file"])
def test_a_layout_that_leaves_out_the_table_of_files_is_none(tmp_path, column):
    found = []
    for k in range(3):
        name = f"{(7 * k) % 5:04d}.npz"
        (tmp_path / "in").mkdir(exist_ok=True)
        np.savez(tmp_path / "in" / name, hidden_states=states(2, 4 + k, 8, seed=k), input_ids=np.arange(4 + k))
        found.append({"qid": f"q{k}", column: name, "is_correct": k % 2})
    table(tmp_path / "in/index.csv", found)
    proposal = proposal_of(tmp_path)
    assert [candidate.outcome.first_id for candidate in proposal.candidates] == ["q0"]
    check_candidates(tmp_path, proposal)


def folder_of_files(tmp_path, join, order):
    """Write a file of states per question, and a table of ids that names each by its id or by its file."""
    (tmp_path / "in/hidden_states").mkdir(parents=True)
    found = []
    for k in range(5):
        name = f"q{k}" if join == "id" else f"{(3 * k) % 5:04d}"
        np.save(tmp_path / f"in/hidden_states/{name}.npy", states(3, 4 + k, 8, seed=k))
        row = {"file": f"hidden_states/{name}.npy"} if join == "file" else {}
        found.append({"id": f"q{k}", **row, "input_ids": list(range(order[k] + 4)), "is_correct": k % 2})
    table(tmp_path / "in/meta.json", found)


@pytest.mark.parametrize("join", ["id", "file"])
def test_ids_of_a_table_are_those_of_its_trace(tmp_path, join):
    folder_of_files(tmp_path, join, range(5))
    traces = accept(tmp_path)
    assert [len(traces[f"q{k}", 0].tokens) for k in range(5)] == [4, 5, 6, 7, 8]
    assert [traces[f"q{k}", 0].score for k in range(5)] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("join", ["id", "file"])
@pytest.mark.parametrize("order", [(1, 0, 2, 3, 4), (4, 3, 2, 1, 0), (0, 1, 2, 4, 3)])
def test_ids_of_another_row_are_no_tokens_rule_2(tmp_path, join, order):
    folder_of_files(tmp_path, join, order)
    assert not any("tokens" in candidate.layout.addresses for candidate in refuse(tmp_path).candidates)


# Labels below a record


@pytest.mark.parametrize("key", ["label", "is_correct", "verdict", "hallucinated", "score"])
def test_labels_of_several_judges_are_asked_rule_8a(tmp_path, key):
    found = [{**row, "judges": [{"name": "a", key: 1}, {"name": "b", key: k % 2}]} for k, row in enumerate(rows())]
    dump(tmp_path / "in/a.pkl", found)
    assert all(any(key in text for text in one.left_out) for one in refuse(tmp_path).candidates)


@pytest.mark.parametrize("word", ["NOT_ATTEMPTED", "refused", "partially correct", "?", "unclear"])
def test_a_word_among_words_of_judges_may_mean_no_label_rule_22(tmp_path, word):
    dump(tmp_path / "in/a.pkl", rows(verdict=["correct", word, "incorrect"]))
    (one,) = refuse(tmp_path).candidates
    assert one.layout.settings[f"words.{word}"] == "missing"
    assert one.outcome.counts == {"is_correct": (1, 1, 2)}
