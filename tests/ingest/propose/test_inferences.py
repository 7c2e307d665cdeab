"""Test inferences from names and tables in ordinary folders, each next to a folder in which the same inference would be wrong."""

import json

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

import tracestore
from tests.ingest.execute.folders import convert, dump, save, states, table
from tests.ingest.propose.folders import accept, check_candidates, proposal_of, refuse
from tests.ingest.propose.test_traps import rows
from tracestore.errors import InvalidInputError


@pytest.mark.parametrize("key", ["gold_answers", "possible_answers", "reference_answers"])
def test_reference_answers_are_not_generated(tmp_path, key):
    found = [row | {"answer": f"It is {k}.", key: ["No.", "Yes."]} for k, row in enumerate(rows())]
    dump(tmp_path / "in/a.pkl", found)
    accept(tmp_path)
    assert proposal_of(tmp_path).layout.to_entries()["generated_answer"] == "a.pkl : [id=id]/answer"


@pytest.mark.parametrize("key", ["best_answer", "best_response"])
def test_the_best_answer_is_that_of_the_model(tmp_path, key):
    """Without another answer, the best of several generations is the answer; it is never left out in silence."""
    dump(tmp_path / "in/a.pkl", [row | {key: f"It is {k}."} for k, row in enumerate(rows())])
    proposal = proposal_of(tmp_path)
    for layout in [proposal.layout] if proposal.layout else [one.layout for one in proposal.candidates]:
        assert layout.to_entries()["generated_answer"] == f"a.pkl : [id=id]/{key}"


@pytest.mark.parametrize("key", ["answers", "answer_aliases", "best_generation", "possible_completion"])
def test_an_answer_next_to_other_ones_is_asked(tmp_path, key):
    """Next to its aliases, or to what was generated, `answer` is that of the data set."""
    text = "No." if key in ("best_generation", "possible_completion") else ["No.", "Yes."]
    dump(tmp_path / "in/a.pkl", [row | {"answer": "It is.", key: text} for row in rows()])
    refuse(tmp_path, "another text may be meant")


@pytest.mark.parametrize("key", ["generation", "generated", "model_answer", "prediction", "predicted_answer"])
@pytest.mark.parametrize("other", ["answer", "right_answer", "best_answer"])
def test_a_text_of_the_model_next_to_one_of_the_data_set(tmp_path, key, other):
    """[HaluEval and TruthfulQA with what a model generated]"""
    dump(tmp_path / "in/a.pkl", [row | {other: "No.", key: f"It is {k}."} for k, row in enumerate(rows())])
    assert [trace.answer for trace in accept(tmp_path).values()] == ["It is 0.", "It is 1.", "It is 2."]


@pytest.mark.parametrize("words", [["correct", "hallucinated", "correct"], ["yes", "no", "no"]])
def test_a_prediction_of_a_detector_is_no_answer(tmp_path, words):
    texts = {"answer": ["It is one.", "It is two.", "It is three."], "prediction": words}
    dump(tmp_path / "in/a.pkl", rows(**texts))
    refuse(tmp_path, "another text may be meant")


@pytest.mark.parametrize("key", ["response", "completion"])
@pytest.mark.parametrize("other", ["right_answer", "best_answer", "answer"])
def test_a_response_next_to_an_answer_is_asked(tmp_path, key, other):
    """Dolly names the answer of the data set `response`; next to one that is the right one, it is the model's."""
    dump(tmp_path / "in/a.pkl", [row | {other: "No.", key: f"It is {k}."} for k, row in enumerate(rows())])
    if other == "answer":
        refuse(tmp_path, "another text may be meant")
    else:
        assert accept(tmp_path)["q2", 0].answer == "It is 2."


@pytest.mark.parametrize(
    "keys",
    [
        ("left_answer", "right_answer"),
        ("best_answer", "right_answer"),
        ("answer", "right_answer"),
        ("generation", "response", "right_answer"),
        ("model_answer", "student_answer"),
        ("best_generation", "best_answer"),
        ("model_output", "answer"),
    ],
)
def test_texts_of_which_none_or_several_may_be_the_models_are_asked(tmp_path, keys):
    texts = {key: f"It is {n}." for n, key in enumerate(keys)}
    dump(tmp_path / "in/a.pkl", [row | texts for row in rows()])
    refuse(tmp_path, "another text may be meant")


@pytest.mark.parametrize(
    ("texts", "beside", "field"),
    [
        (["Who?", "When was it? ", "为什么？"], {}, "question"),
        (["Who?", "In 1990.", "Why?"], {}, "generated_answer"),
        (["Who?", "When?", "Why?"], {"prompt": ["Ask.", "Ask me.", "Ask who."]}, "generated_answer"),
        (["", "", ""], {}, "generated_answer"),
    ],
)
@pytest.mark.parametrize("key", ["text", "content"])
def test_texts_that_all_ask_are_questions(tmp_path, key, texts, beside, field):
    dump(tmp_path / "in/a.pkl", rows(**beside, **{key: texts}))
    (candidate,) = refuse(tmp_path, f"{field}: another text may be meant: {key}").candidates
    assert candidate.layout.to_entries()[field] == f"a.pkl : [id=id]/{key}"


@pytest.mark.parametrize("name", ["best_checkpoint/a.pkl", "correct.pkl"])
def test_a_name_of_a_file_makes_no_answer_a_reference(tmp_path, name):
    dump(tmp_path / "in" / name, [row | {"answer": f"It is {k}."} for k, row in enumerate(rows())])
    proposal = proposal_of(tmp_path)
    found = [proposal.layout] if proposal.layout else [one.layout for one in proposal.candidates]
    assert all(one.to_entries()["generated_answer"].endswith("/answer") for one in found)


def test_an_attribute_of_a_file_is_no_answer(tmp_path):
    (tmp_path / "in").mkdir()
    arrays = {f"q{k}.layer_{n}": states(4 + k, 8, seed=k + 9 * n) for k in range(3) for n in range(2)}
    save_file(arrays, tmp_path / "in/a.safetensors", metadata={"content": "hidden states"})
    found = [{"id": f"q{k}", "completion": "Yes.", "token_ids": list(range(4 + k)), "correct": True} for k in range(3)]
    table(tmp_path / "in/records.json", found)
    assert accept(tmp_path)["q2", 0].score == 1


def _shards(tmp_path, keys, lengths=(4, 6, 5)):
    """Write layers of traces to two shards; each list of keys is a shard: an id and the layers that it holds of it."""
    (tmp_path / "in").mkdir()
    for number, shard in enumerate(keys, 1):
        arrays = {
            f"{name}.layer.{n}": states(lengths[int(name[-1])], 8, seed=n + 9 * number)
            for name, layers in shard
            for n in layers
        }
        ids = {f"{name}.input_ids": np.arange(lengths[int(name[-1])]) for name, layers in shard if 0 in layers}
        save_file(arrays | ids, tmp_path / f"in/acts-{number:05d}-of-00002.safetensors")


def test_shards_cut_by_size(tmp_path):
    _shards(tmp_path, [[("q0", (0, 1)), ("q1", (0,))], [("q1", (1,)), ("q2", (0, 1))]])
    assert accept(tmp_path)["q1", 0].hidden_states.shape == (2, 6, 8)


def test_shards_that_number_their_own_traces_are_refused(tmp_path):
    _shards(tmp_path, [[("0", (0, 1)), ("1", (0, 1))], [("0", (0, 1)), ("1", (0, 1))]], (4, 4))
    assert not refuse(tmp_path).candidates


def test_numbers_of_parts_of_a_text_are_no_ids(tmp_path):
    (tmp_path / "in").mkdir()
    for k in range(3):
        np.savez(tmp_path / f"in/part-{k + 1}-of-3.npz", hidden_states=states(2, 4 + k, 8), input_ids=np.arange(4 + k))
    refuse(tmp_path, "no ids")


def test_the_number_of_a_question_is_no_shard(tmp_path):
    (tmp_path / "in").mkdir()
    for k in range(3):
        found = {f"layer_{n}": states(4 + k, 8, seed=k + 9 * n) for n in range(2)}
        np.savez(tmp_path / f"in/question_{k + 1}_of_3.npz", **found, input_ids=np.arange(4 + k))
    assert {name for name, _ in accept(tmp_path)} == {"question_1", "question_2", "question_3"}


@pytest.mark.parametrize(
    ("prefix", "expected"), [("webq-test-", ["webq-test-1", "webq-test-2"]), ("test-", ["test-1", "test-2"])]
)
def test_ids_of_a_table_have_what_stands_in_front_of_names(tmp_path, prefix, expected):
    for k in (1, 2):
        for layer in range(2):
            save(tmp_path / f"in/layer_{layer}/webq-test-{k}.npy", states(4 + k, 8, seed=k + 9 * layer))
    found = [{"qid": f"{prefix}{k}", "input_ids": list(range(4 + k)), "correct": k == 1} for k in (1, 2)]
    table(tmp_path / "in/t.json", found)
    (only,) = refuse(tmp_path, "ids of the table begin with this part of the names").candidates
    traces = convert(tmp_path, only.layout.to_entries())
    assert [traces[name, 0].score for name in expected] == [1, 0]


@pytest.mark.parametrize("prefix", ["t-", "st-", "-"])
def test_ids_of_a_table_begin_with_a_word_of_names(tmp_path, prefix):
    for k in (1, 2):
        for layer in range(2):
            save(tmp_path / f"in/layer_{layer}/webq-test-{k}.npy", states(4 + k, 8, seed=k + 9 * layer))
    table(tmp_path / "in/t.json", [{"qid": f"{prefix}{k}", "correct": k == 1} for k in (1, 2)])
    assert not any("[id=qid]" in line for one in refuse(tmp_path).candidates for line in one.lines())


@pytest.mark.parametrize("is_list", [False, True], ids=["a file for each trace", "a list"])
def test_rows_of_a_long_table_in_another_order_are_joined_by_id(tmp_path, is_list):
    """The first look shows some of both, which have no id in common."""
    found = [row | {"uid": f"geo/{k}"} for k, row in enumerate(rows(40))]
    for row in found:
        del row["id"]
    if is_list:
        dump(tmp_path / "in/run.pkl", found)
    for k, row in enumerate(() if is_list else found):
        dump(tmp_path / f"in/ex_{k}.pkl", row)
    order = [*range(12, 34), *range(12), *range(34, 40)]
    table(tmp_path / "in/labels.csv", [{"uid": f"geo/{k}", "is_correct": k % 2} for k in order])
    assert {name: trace.score for (name, _), trace in accept(tmp_path).items()} == {
        f"geo/{k}": k % 2 for k in range(40)
    }


def test_ids_of_a_table_without_what_stands_in_front_of_names(tmp_path):
    for k in (1, 2):
        save(tmp_path / f"in/webq-test-{k}.npy", states(2, 4 + k, 8, seed=k))
    table(tmp_path / "in/t.json", [{"qid": f"webq-train-{k}", "input_ids": list(range(4 + k))} for k in (1, 2)])
    assert not any("[id=qid]" in line for one in refuse(tmp_path).candidates for line in one.lines())


@pytest.mark.parametrize("key", ["wrong", "incorrect", "inaccurate", "unfaithful"])
def test_a_column_wrong_says_that_answers_are_wrong(tmp_path, key):
    dump(tmp_path / "in/a.pkl", [row | {"pred": "Yes.", "gold": "No."} for row in rows(**{key: [0, 1, 1]})])
    assert proposal_of(tmp_path).layout.to_entries()["is_hallucinated"] == f"a.pkl : [id=id]/{key}"


@pytest.mark.parametrize("word", ["hal", "hallu", "halluc", "hallucin", "hallucinate", "hallucinates", "hallucination"])
@pytest.mark.parametrize("form", ["{}", "is_{}", "{}_label", "has_{}"])
@pytest.mark.parametrize("values", [[0, 1, 1], ["no", "yes", "yes"]])
def test_a_word_for_a_hallucination_is_never_correctness(tmp_path, word, form, values):
    dump(tmp_path / "in/a.pkl", rows(**{form.format(word): values}))
    layout = proposal_of(tmp_path).layout
    assert layout is not None and layout.directions() == {"is_hallucinated": "hallucination"}


@pytest.mark.parametrize("key", ["no_halluc", "not_hallu", "hallucination_free", "non_hallucinated", "halluc_check"])
def test_a_word_beside_hallucination_may_turn_its_meaning(tmp_path, key):
    dump(tmp_path / "in/a.pkl", rows(**{key: [0, 1, 1]}))
    found = {name for candidate in refuse(tmp_path).candidates for name in candidate.layout.directions()}
    assert found == {"is_correct", "is_hallucinated"}


@pytest.mark.parametrize("key", ["wrong", "inaccurate", "unfaithful"])
def test_a_count_of_wrong_answers_is_no_label(tmp_path, key):
    dump(tmp_path / "in/a.pkl", rows(**{key: [0, 1, 2]}))
    assert not refuse(tmp_path).candidates


def _stack(tmp_path, row, *, number=0, lengths=(4, 6, 5)):
    """Write a padded stack with its ids of tokens and a mask; return rows of a table, with the number of each row."""
    size = max(lengths)
    mask = np.arange(size) < np.array(lengths)[:, None]
    hidden = states(len(lengths), 2, size, 8, seed=number) * mask[:, None, :, None]
    save(tmp_path / f"in/hidden_states{number or ''}.npy", hidden)
    save(tmp_path / f"in/input_ids{number or ''}.npy", np.arange(5, 5 + size) * mask)
    save(tmp_path / f"in/attention_mask{number or ''}.npy", mask.astype("i8"))
    return [{row: k, "id": f"q{k}", "question": f"Is it {k}?", "is_correct": k % 2} for k in range(len(lengths))]


@pytest.mark.parametrize("row", ["index", "row", "idx"])
def test_a_column_that_counts_the_rows_in_front_of_ids(tmp_path, row):
    table(tmp_path / "in/labels.csv", _stack(tmp_path, row))
    assert [accept(tmp_path)[f"q{k}", 0].score for k in range(3)] == [0, 1, 0]


def test_rows_that_are_sorted_by_another_column_are_joined_by_their_number(tmp_path):
    table(tmp_path / "in/labels.csv", _stack(tmp_path, "row")[::-1])
    (only,) = refuse(tmp_path, "the numbers may be those of another order").candidates
    assert only.outcome.first_id == "q0"
    assert only.layout.to_entries()["is_correct"] == "labels.csv : [N=row]/is_correct"


def test_numbers_of_a_larger_data_set_are_no_rows(tmp_path):
    found = _stack(tmp_path, "index")
    table(tmp_path / "in/labels.csv", [row | {"index": 7 * row["index"] + 2} for row in found])
    assert not any("[N=index]" in line for one in refuse(tmp_path).candidates for line in one.lines())


def _batches(tmp_path, batches):
    """Write two batches of two rows, and a table with the numbers of batches and rows; batches has those of each id."""
    (tmp_path / "in").mkdir()
    for number in range(2):
        mask = np.arange(6) < np.array([[6], [4 + number]])
        save_file(
            {
                "hidden_states": states(2, 2, 6, 8, seed=number) * mask[:, None, :, None].astype("f4"),
                "input_ids": np.arange(5, 11) * mask,
                "attention_mask": mask.astype("i8"),
            },
            tmp_path / f"in/batch_{number}.safetensors",
        )
    found = [{"qid": f"q{k}", "batch": b, "row": r, "is_correct": k % 2} for k, (b, r) in enumerate(batches)]
    table(tmp_path / "in/t.json", found)


def test_columns_with_the_numbers_of_batches_and_rows(tmp_path):
    _batches(tmp_path, [(1, 1), (0, 0), (1, 0), (0, 1)])
    (only,) = refuse(tmp_path, "chunk=batch, N=row: the numbers may be those of another order").candidates
    traces = convert(tmp_path, only.layout.to_entries())
    assert [traces[f"q{k}", 0].num_tokens for k in range(4)] == [5, 6, 6, 4]
    np.testing.assert_allclose(traces["q2", 0].hidden_states, states(2, 2, 6, 8, seed=1)[0], rtol=2e-3, atol=1e-3)


def test_numbers_of_other_batches(tmp_path):
    _batches(tmp_path, [(0, 0), (1, 0), (2, 0), (3, 0)])
    assert not any("[chunk=batch" in line for one in refuse(tmp_path).candidates for line in one.lines())


def _flat(tmp_path, order, **columns):
    """Write states of traces behind each other with offsets, and a table with rows in an order and further columns."""
    lengths = (4, 6, 5)
    save(tmp_path / "in/hidden.npy", states(sum(lengths), 2, 8))
    save(tmp_path / "in/token_ids.npy", np.arange(sum(lengths)))
    found = [{"qid": f"q{k}", **{name: values[k] for name, values in columns.items()}} for k in order]
    table(tmp_path / "in/meta.json", [row | {"hallucinated": k == 1} for k, row in zip(order, found, strict=True)])


def test_offsets_next_to_numbers_of_tokens(tmp_path):
    _flat(tmp_path, (0, 1, 2), n_tokens=(4, 6, 5))
    save(tmp_path / "in/offsets.npy", np.array([0, 4, 10, 15]))
    traces = accept(tmp_path)
    assert [traces[f"q{k}", 0].num_tokens for k in range(3)] == [4, 6, 5]


def test_offsets_with_rows_in_another_order_than_numbers_of_tokens(tmp_path):
    _flat(tmp_path, (1, 0, 2), n_tokens=(4, 6, 5))
    save(tmp_path / "in/offsets.npy", np.array([0, 4, 10, 15]))
    assert not any(
        "meta.json" in line for one in refuse(tmp_path).candidates for line in one.lines() if "(N S)" in line
    )


@pytest.mark.parametrize("ends", [{}, {"n_tokens": (5, 5, 5)}, {"end": (10, 5, 15)}])
def test_offsets_with_rows_that_begin_elsewhere(tmp_path, ends):
    """Lengths that are equal show no order of rows; where the rows begin does."""
    save(tmp_path / "in/hidden.npy", states(15, 2, 8))
    save(tmp_path / "in/token_ids.npy", np.arange(15))
    save(tmp_path / "in/offsets.npy", np.array([0, 5, 10, 15]))
    columns = {"start": (5, 0, 10)} | ends
    found = [{"qid": name, **{c: v[k] for c, v in columns.items()}} for k, name in enumerate("bac")]
    table(tmp_path / "in/meta.json", [row | {"hallucinated": row["qid"] == "b"} for row in found])
    for one in refuse(tmp_path).candidates:
        for trace in convert(tmp_path, one.layout.to_entries()).values():
            assert (
                trace.question_id not in ("a", "b", "c")
                or trace.tokens[0] == {"a": 0, "b": 5, "c": 10}[trace.question_id]
            )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_first_tokens_with_numbers_of_tokens(tmp_path, order):
    _flat(tmp_path, order, start=(0, 4, 10), n_tokens=(4, 6, 5))
    traces = accept(tmp_path)
    assert [traces[f"q{k}", 0].tokens[0] for k in range(3)] == [0, 4, 10]
    assert [traces[f"q{k}", 0].score for k in range(3)] == [0, 1, 0]


def test_lengths_that_contradict_offsets_are_refused(tmp_path):
    _flat(tmp_path, (0, 1, 2), n_tokens=(4, 5, 6))
    save(tmp_path / "in/offsets.npy", np.array([0, 4, 10, 15]))
    layout = {"hidden_states": "hidden.npy -> (N S) L D", "S.offsets": "offsets.npy"}
    layout |= {
        "S.lengths": "meta.json : []/n_tokens",
        "ignore": ["token_ids.npy"],
        "is_hallucinated": "meta.json : []/hallucinated",
    }
    with pytest.raises(InvalidInputError, match=r"found other rows than S\.offsets"):
        convert(tmp_path, layout | {"question_id": "meta.json : []/qid"})


def _labels(tmp_path, other):
    """Write traces with a file each, and two tables of the same label."""
    for k in range(3):
        save(tmp_path / f"in/acts/q{k}.npy", states(2, 4 + k, 8, seed=k))
    table(tmp_path / "in/labels.json", [{"id": f"q{k}", "hallucinated": k == 1} for k in range(3)])
    table(tmp_path / "in/annotations.csv", [{"id": f"q{k}", "hallucinated": v} for k, v in enumerate(other)])


def test_two_tables_with_contradicting_labels(tmp_path):
    _labels(tmp_path, (0, 0, 0))
    refuse(tmp_path, "labels.json : []/hallucinated contradicts annotations.csv : []/hallucinated for 1 of 3 ids")


def test_two_tables_with_equal_labels(tmp_path):
    _labels(tmp_path, (0, 1, 0))
    assert "contradicts" not in refuse(tmp_path).message()


@pytest.mark.parametrize(("words", "correct"), [(("hallucinated", "ok"), [0, 1, 1]), (("correct", "bad"), [1, 0, 0])])
def test_the_only_word_next_to_words_of_one_side(tmp_path, words, correct):
    dump(tmp_path / "in/a.pkl", rows(label=[words[0], words[1], words[1]]))
    found = refuse(tmp_path, f"{words[1]}: no known word").candidates
    first = next(one for one in found if "no known word" in str(one.unproved))
    traces = convert(tmp_path, first.layout.to_entries())
    assert [traces[f"q{k}", 0].score for k in range(3)] == correct
    assert any(f"words.{words[1]} = missing" in line for one in found for line in one.lines())


def test_a_word_next_to_words_of_both_sides_is_no_label(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(label=["correct", "incorrect", "partial"]))
    assert "no known word" not in refuse(tmp_path).message()


@pytest.mark.parametrize("container", ["pkl", "csv"])
@pytest.mark.parametrize("name", ["label", "is_correct"])
def test_a_number_below_zero_next_to_0_and_1_may_mean_no_label_rule_22a(tmp_path, container, name):
    labels = {name: [0, -1, 1, 1]}
    dump(tmp_path / "in/a.pkl", rows(4, **(labels if container == "pkl" else {})))
    if container == "csv":
        table(tmp_path / "in/t.csv", [{"id": f"q{k}", name: label} for k, label in enumerate(labels[name])])
    found = refuse(
        tmp_path, f"{'t.csv : []' if container == 'csv' else 'a.pkl : []'}/{name}: may be what a detector says"
    ).candidates
    assert [one.layout.settings["words.-1"] for one in found] == ["missing"] * (2 if name == "label" else 1)
    traces = convert(tmp_path, found[0].layout.to_entries())
    np.testing.assert_equal([traces[f"q{k}", 0].score for k in range(4)], [0, np.nan, 1, 1])


@pytest.mark.parametrize("labels", [[-1, 1, 1], [0, -1, 0], [0, 1, 2], [-1, -2, 0]])
def test_other_numbers_of_labels_are_not_left_out_rule_22a(tmp_path, labels):
    """[-1 as the opposite of 1]"""
    dump(tmp_path / "in/a.pkl", rows(is_correct=labels))
    assert not refuse(tmp_path).candidates


@pytest.mark.parametrize(("name", "words"), [("grade", ("pass", "fail")), ("hallucination_label", ("bad", "good"))])
def test_two_words_without_a_meaning_are_asked_rule_22(tmp_path, name, words):
    dump(tmp_path / "in/a.pkl", rows(**{name: [words[0], words[1], words[1]]}))
    found = refuse(tmp_path, f"{' and '.join(sorted(words))}: no known word").candidates
    scores = []
    for one in found:
        tracestore.convert_files(tmp_path / "in", tmp_path / f"{len(scores)}.zarr", layout=one.layout.to_entries())
        with tracestore.open(tmp_path / f"{len(scores)}.zarr") as store:
            scores.append([int(label) for label in store.targets()])
    assert sorted(scores) == [[0, 1, 1], [1, 0, 0]]


def test_three_words_without_a_meaning_have_no_candidate_rule_22(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(grade=["high", "low", "none of both"]))
    assert not refuse(tmp_path).candidates


def test_scales_of_quantized_states_are_no_states(tmp_path):
    for k in range(3):
        path = tmp_path / f"in/q{k}.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, h=np.ones((3, 4, 8), "u1"), h_scale=np.arange(3, dtype="f4"))
    assert not refuse(tmp_path, "No array of floating-point numbers is named").candidates


def _classes(tmp_path, names, **more):
    """Write a file per trace to a folder per class: the first and the last trace are of the first class."""
    for k, row in enumerate(rows(**more)):
        dump(tmp_path / f"in/{names[k % 2]}/q{k}.pkl", {name: value for name, value in row.items() if name != "id"})


@pytest.mark.parametrize(
    ("names", "field", "values"),
    [
        (("yes_hallucination", "no_hallucination"), "is_hallucinated", [1, 0, 1]),
        (("Hallucination-No", "Hallucination-Yes"), "is_hallucinated", [0, 1, 0]),
        (("is_hal_true", "is_hal_false"), "is_hallucinated", [1, 0, 1]),
        (("hal_pos", "hal_neg"), "is_hallucinated", [1, 0, 1]),
        (("yes_correct", "no_correct"), "is_correct", [1, 0, 1]),
        (("grounded", "hallucinated"), "is_correct", [1, 0, 1]),
        (("ungrounded", "grounded"), "is_correct", [0, 1, 0]),
        (("faithful", "unfaithful"), "is_correct", [1, 0, 1]),
        (("hallucinated", "non-hallucinated"), "is_correct", [0, 1, 0]),
        (("no_hallucination", "hallucination"), "is_correct", [1, 0, 1]),
        (("hal", "nohal"), "is_correct", [0, 1, 0]),
    ],
)
def test_folders_of_classes_whose_words_say_it(tmp_path, names, field, values):
    _classes(tmp_path, names)
    proposal = proposal_of(tmp_path)
    assert proposal.layout is not None and list(proposal.layout.directions()) == [field]
    assert [accept(tmp_path)[f"q{k}", 0].score for k in range(3)] == values


@pytest.mark.parametrize(
    "names",
    [
        ("true", "false"),
        ("no", "yes"),
        ("pos", "neg"),
        ("positive", "negative"),
        ("label_0", "label_1"),
    ],
)
def test_folders_of_classes_whose_words_do_not_say_it_are_asked(tmp_path, names):
    _classes(tmp_path, names)
    proposal = refuse(tmp_path, "in the names: no word gives their meaning")
    stores = check_candidates(tmp_path, proposal)
    assert {name for candidate, _ in stores for name in candidate.layout.directions()} == {
        *("is_correct", "is_hallucinated")
    }
    assert all(candidate.outcome.num_traces == 3 for candidate, _ in stores)


@pytest.mark.parametrize("names", [("label_0", "label_1", "label_2"), ("yes_hallucination", "maybe_hallucination")])
def test_folders_of_other_classes_are_left_out_or_asked_rule_22(tmp_path, names):
    for k, row in enumerate(rows()):
        dump(tmp_path / f"in/{names[k % len(names)]}/q{k}.pkl", row)
    for candidate in refuse(tmp_path).candidates:
        assert candidate.outcome.num_traces == 3 or any("left out" in line for line in candidate.describe())
        assert "={verdict}" not in str(candidate.layout.to_entries())


@pytest.mark.parametrize("labels", [[1, 0, 1], [0, 1, 0]])
def test_folders_of_classes_agree_with_a_column_rule_14(tmp_path, labels):
    _classes(tmp_path, ("correct", "hallucinated"), is_correct=labels)
    if labels == [0, 1, 0]:
        assert not refuse(tmp_path).candidates
    else:
        assert set(proposal_of(tmp_path).layout.directions()) == {"is_correct", "is_hallucinated"}


@pytest.mark.parametrize("key", ["context_length", "context_len", "contextLength"])
@pytest.mark.parametrize("decision", [[True, False, True], [0, 1, 1]])
def test_the_length_of_a_context_may_be_that_of_the_prompt(tmp_path, key, decision):
    dump(tmp_path / "in/a.pkl", rows(**{key: [3, 5, 2]}))
    table(tmp_path / "in/t.json", [{"id": f"q{k}", "decision": value} for k, value in enumerate(decision)])
    proposal = refuse(tmp_path, "prompt_length: the length of a context may be that of a window or of a document")
    stores = check_candidates(tmp_path, proposal)
    assert [list(one.layout.directions()) for one, _ in stores] == [["is_correct"], ["is_hallucinated"]]
    for candidate, path in stores:
        assert candidate.layout.to_entries()["prompt_length"] == f"a.pkl : [id=id]/{key}"
        assert "S.lengths" not in candidate.layout.addresses
        with tracestore.open(path) as store:
            assert [(trace.num_tokens, trace.prompt_length) for trace in store] == [(4, 3), (6, 5), (5, 2)]


@pytest.mark.parametrize("values", [[2048, 2048, 2048], [3, 3, 3], [4, 6, 5], [0, 2, 3], [3, 7, 2]])
@pytest.mark.parametrize("key", ["context_length", "context_len"])
def test_the_length_of_a_window_is_none_of_a_prompt_rule_16(tmp_path, key, values):
    dump(tmp_path / "in/a.pkl", rows(**{key: values}))
    assert proposal_of(tmp_path).candidates
    for candidate in proposal_of(tmp_path).candidates:
        assert candidate.layout.addresses.keys().isdisjoint(("prompt_length", "S.lengths"))


def test_a_prompt_length_counts_before_the_length_of_a_context(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(prompt_len=[2, 2, 1], context_length=[3, 5, 2]))
    entries = [one.layout.to_entries() for one in proposal_of(tmp_path).candidates]
    assert entries and all(one["prompt_length"].endswith("/prompt_len") for one in entries)


def test_lengths_of_contexts_of_a_stack_are_its_lengths(tmp_path):
    hidden, tokens = states(3, 2, 6, 8), np.arange(1, 19).reshape(3, 6)
    for k, length in enumerate((6, 4, 5)):
        hidden[k, :, length:] = tokens[k, length:] = 0
    found = {"hidden_states": hidden, "input_ids": tokens, "ids": ["a", "b", "c"]}
    dump(tmp_path / "in/a.pkl", found | {"context_length": np.array([6, 4, 5])})
    proposal = proposal_of(tmp_path)
    assert proposal.candidates
    assert all("S.lengths" in one.layout.addresses for one in proposal.candidates), proposal.message()


@pytest.mark.parametrize("name", ["condition", "kind", "grade"])
@pytest.mark.parametrize("words", [("truthful", "deceptive"), ("unsupported", "fine"), ("correct", "bad")])
def test_one_of_two_texts_that_says_a_class_is_asked(tmp_path, name, words):
    """[a column of classes that is left out] Whatever its name, and however rare the known word."""
    (tmp_path / "in").mkdir()
    for k in range(5):
        np.savez(tmp_path / f"in/q{k}.npz", hs=states(3, 4 + k, 8, seed=k), input_ids=np.arange(5, 9 + k))
    rows = {f"q{k}": {name: words[k > 0]} for k in range(5)}
    (tmp_path / "in/manifest.json").write_text(json.dumps(rows))

    candidates = refuse(tmp_path).candidates
    meant = [c.layout for c in candidates if c.layout.settings.get(f"words.{words[1]}") == (words[0] == "unsupported")]
    assert meant and all("is_correct" in layout.addresses for layout in meant)


@pytest.mark.parametrize("name", ["answer_start", "ans_start"])
def test_the_start_of_the_answer_is_asked(tmp_path, name):
    """[a place in a text, as in SQuAD]"""
    dump(tmp_path / "in/a.pkl", [row | {name: 2} for row in rows()])
    refuse(tmp_path, "prompt_length: it may be a place in the text")


@pytest.mark.parametrize("name", ["generation", "answer_no", "sample_no"])
def test_columns_that_number_answers(tmp_path, name):
    found = [row | {"id": f"q{k // 2}", name: k % 2, "text": "It is."} for k, row in enumerate([*rows(), *rows()][:4])]
    for k, row in enumerate(found):
        row["hs"] = states(*row["hs"].shape, seed=40 + k)
    dump(tmp_path / "in/a.pkl", found)
    proposal = proposal_of(tmp_path)
    entries = (proposal.layout or proposal.candidates[0].layout).to_entries()
    assert entries["hidden_states"].startswith(f"a.pkl : [id=id, sample={name}]/")


@pytest.mark.parametrize("names", [("context_yes", "context_no"), ("rag_true", "rag_false"), ("pos", "neg")])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_folders_of_another_class_next_to_labels(tmp_path, names, num_rows):
    """[the class of the prompt that is taken for the label, proved by rows that happen to agree]"""
    for k in range(6):
        save(tmp_path / f"in/{names[k % 2]}/q{k}.npy", states(3, 4 + k, 8, seed=k))
    rows = "".join(f"q{k},{int(k in (0, 3))}\n" for k in range(num_rows))
    (tmp_path / "in/labels.csv").write_text("id,is_correct\n" + rows)

    proposal = proposal_of(tmp_path)
    for layout in [proposal.layout] if proposal.layout else [one.layout for one in proposal.candidates]:
        assert "is_hallucinated" not in layout.templates and "is_correct" not in layout.templates
        assert "is_correct" in layout.addresses


@pytest.mark.parametrize("name", ["response_text", "output_text", "response_content"])
def test_an_answer_that_asks_is_no_question(tmp_path, name):
    found = [row | {name: f"Do you mean {k}?"} for k, row in enumerate(rows())]
    dump(tmp_path / "in/a.pkl", found)
    proposal = proposal_of(tmp_path)
    for layout in [proposal.layout] if proposal.layout else [one.layout for one in proposal.candidates]:
        assert "question" not in layout.addresses


def test_folders_of_numbers_may_be_parts(tmp_path):
    _classes(tmp_path, ("halluc_0", "halluc_1"))
    refuse(tmp_path, "in the names: no word gives their meaning")


@pytest.mark.parametrize(
    ("name", "text", "scores"),
    [
        ("info.json", "1 = correct, 0 = hallucinated", [0, 1, 1]),
        ("meta.json", "0: truthful; 1: hallucinated", [1, 0, 0]),
        ("meta.json", "1 = not correct, 0 = correct", None),
        ("meta.json", "0 = wrong, 1 = correct, 1 = hallucinated", None),
        ("meta.json", "see README", None),
    ],
)
def test_a_text_states_what_labels_mean_rule_22(tmp_path, name, text, scores):
    settings_with_maps(tmp_path, {"labels": text}, name)
    if scores is None:
        assert len(refuse(tmp_path).candidates) == 2
        return
    accept(tmp_path)
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert [1 - label for label in store.targets()] == scores


def settings_with_maps(tmp_path, maps, name="config.json", labels=(0, 1, 1)):
    """Write a file of each trace with a label, and a file of settings with maps."""
    for k, row in enumerate(rows()):
        dump(tmp_path / f"in/traces/trace_{k}.pkl", {**row, "label": labels[k]})
    table(tmp_path / "in" / name, {"model": "gpt2", "n": 3, **maps})


@pytest.mark.parametrize("key", ["label_map", "label_names", "labelMapping"])
@pytest.mark.parametrize(
    ("words", "scores"), [(("hallucinated", "correct"), [0, 1, 1]), (("right", "wrong"), [1, 0, 0])]
)
def test_settings_state_what_labels_mean_rule_22(tmp_path, key, words, scores):
    settings_with_maps(tmp_path, {key: {"0": words[0], "1": words[1]}})
    accept(tmp_path)
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert [1 - label for label in store.targets()] == scores


@pytest.mark.parametrize(
    "maps",
    [
        {"label_map": {"0": "LABEL_0", "1": "LABEL_1"}},
        {"label_map": {"0": "wrong", "1": "hallucinated"}},
        {"label_map": {"0": "no", "1": "yes"}},
        {"label_map": {"0": "wrong", "1": "correct"}, "label_names": {"0": "correct", "1": "wrong"}},
    ],
    ids=str,
)
def test_maps_of_settings_that_do_not_state_what_labels_mean_rule_22(tmp_path, maps):
    settings_with_maps(tmp_path, maps)
    names = [name for one in refuse(tmp_path).candidates for name in one.layout.directions()]
    assert sorted(names) == ["is_correct", "is_hallucinated"]


@pytest.mark.parametrize(
    ("words", "scores"), [(("hallucinated", "correct"), [0, 1, 1]), (("right", "wrong"), [1, 0, 0])]
)
@pytest.mark.parametrize("is_attribute", [True, False])
def test_two_names_of_labels_state_what_they_mean_rule_22(tmp_path, words, scores, is_attribute):
    (tmp_path / "in").mkdir()
    with h5py.File(tmp_path / "in/a.h5", "w") as file:
        for k, row in enumerate(rows()):
            group = file.create_group(row["id"])
            group.update({"hidden_states": np.stack(row["hs"]), "input_ids": row["input_ids"]})
            group.attrs["label"] = min(k, 1)
        if is_attribute:
            file.attrs["label_names"] = list(words)
        else:
            file["label_names"] = list(words)
    if not is_attribute:  # it may be of two traces
        refuse(tmp_path)
        return
    accept(tmp_path)
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert [1 - label for label in store.targets()] == scores


def test_words_of_two_traces_are_no_names_of_labels(tmp_path):
    """[groups 0 and 1, each with the word of its own label]"""
    (tmp_path / "in").mkdir()
    with h5py.File(tmp_path / "in/a.h5", "w") as file:
        for k, row in enumerate(rows(2)):
            group = file.create_group(f"q/{k}")
            group.update({"hidden_states": np.stack(row["hs"]), "input_ids": row["input_ids"]})
            group.attrs.update({"label": 1 - k, "label_name": ("correct", "wrong")[k]})
    found = refuse(tmp_path)  # which of both it is, is asked
    assert "the meaning of labels" not in found.message() and len(found.candidates) == 2


@pytest.mark.parametrize(("name", "key"), [("labels.json", "label_map"), ("config.json", "label")])
def test_a_table_of_labels_by_the_numbers_of_traces_is_no_map(tmp_path, name, key):
    settings_with_maps(tmp_path, {key: {"0": "wrong", "1": "correct"}}, name)
    for candidate in refuse(tmp_path).candidates:
        assert candidate.left_out


def records_next_to(tmp_path, *others):
    """Write states by id, their questions and labels in one file of records, and other JSON files."""
    for row in rows():
        dump(tmp_path / f"in/features/{row['id']}.pkl", {"hidden_states": row["hs"], "input_ids": row["input_ids"]})
    found = {f"q{k}": {"question": f"What is {k}?", "is_correct": k != 1} for k in range(3)}
    table(tmp_path / "in/annotations.json", found)
    for other in others:
        table(tmp_path / f"in/{other}.json", {"model": "gpt2", "num_layers": 1})


@pytest.mark.parametrize("others", [["config"], ["config", "metadata"], ["Args", "info", "params"]])
def test_settings_next_to_records_are_no_trace(tmp_path, others):
    records_next_to(tmp_path, *others)
    traces = accept(tmp_path)
    assert [traces[f"q{k}", 0].score for k in range(3)] == [1, 0, 1]
    assert traces["q2", 0].question == "What is 2?"


def test_traces_whose_ids_are_words_of_settings(tmp_path):
    for k, name in enumerate(("config", "manifest", "apple")):
        dump(tmp_path / f"in/{name}.pkl", {"hidden_states": states(2, 4 + k, 8), "input_ids": np.arange(4 + k)})
        table(tmp_path / f"in/{name}.json", {"question": f"What is {name}?", "is_correct": k % 2})
    assert {name: trace.score for (name, _), trace in accept(tmp_path).items()} == {
        "config": 0,
        "manifest": 1,
        "apple": 0,
    }
