"""Test folders with several answers to a question: numbers in names, and columns of tables that are joined in order."""

import itertools
import json

import h5py
import numpy as np
import pytest

import tracestore
from tests.ingest.execute.folders import dump, save, states, table
from tests.ingest.propose.folders import accept, check_candidates, proposal_of, refuse

WORDS = ("gen_", "sample_", "response_", "answer_", "generation_", "gen", "sample", "response-", "answer.")


def answers(num_questions=3, **more):
    """Return, by question and number, the arrays of an answer."""
    found = {}
    for k, n in itertools.product(range(num_questions), range(3)):
        size = 5 + k + 2 * n
        own = {"hidden_states": states(3, size, 8, seed=10 * k + n), "token_ids": np.arange(size) + 4 * n}
        found[f"tc_{k + 3}", n] = own | {name: values[n] for name, values in more.items()}
    return found


def write(folder, container, word, found):
    """Write answers below a key or folder that has the id of their question."""
    groups = {}
    for (name, n), own in found.items():
        groups.setdefault(name, {})[f"{word}{n}"] = own
    if container == "npz":
        for name, group in groups.items():
            (folder / name).mkdir(parents=True)
            for key, own in group.items():
                np.savez(folder / name / f"{key}.npz", **own)
    elif container == "pkl":
        dump(folder / "a.pkl", groups)
    else:
        folder.mkdir()
        with h5py.File(folder / "a.h5", "w") as file:
            for name, n in found:
                for key, value in found[name, n].items():
                    file[f"{name}/{word}{n}/{key}"] = value


@pytest.mark.parametrize("container", ["h5", "pkl", "npz"])
@pytest.mark.parametrize("word", WORDS)
def test_the_number_below_an_id_is_that_of_an_answer(tmp_path, word, container):
    found = answers(generated_answer=["It is one.", "It is two.", "It is three."])
    write(tmp_path / "in", container, word, found)
    stored = accept(tmp_path)
    assert stored.keys() == found.keys()
    for key, own in found.items():
        np.testing.assert_allclose(stored[key].hidden_states, own["hidden_states"], rtol=2e-3, atol=1e-3)
        assert stored[key].tokens.tolist() == own["token_ids"].tolist()


@pytest.mark.parametrize("container", ["h5", "pkl", "npz"])
@pytest.mark.parametrize("word", ["gen_", "generation_"])
@pytest.mark.parametrize("has_text", [True, False])
@pytest.mark.parametrize("size", [1, 4])
def test_a_number_of_a_generation_may_be_that_of_a_step_or_a_part(tmp_path, word, container, has_text, size):
    texts = {"generated_answer": ["It is one.", " two", " three"]} if has_text else {}
    found = answers(**texts)
    for (_, n), own in found.items():
        if n:
            own |= {"hidden_states": own["hidden_states"][:, :size], "token_ids": own["token_ids"][:size]}
    write(tmp_path / "in", container, word, found)
    if has_text and size > 1:
        assert accept(tmp_path).keys() == found.keys()
    else:
        proposal = refuse(tmp_path, "sample: the numbers may be those of steps or parts of a text")
        assert len(check_candidates(tmp_path, proposal)) == 1


@pytest.mark.parametrize("container", ["pkl", "npz"])
@pytest.mark.parametrize("word", ["regen_", "genre_", "gene_", "gen_x"])
def test_other_words_are_no_answers(tmp_path, word, container):
    write(tmp_path / "in", container, word, answers(generated_answer=["It is one.", "It is two.", "It is three."]))
    refuse(tmp_path)
    assert not any("{sample}" in str(one.layout.to_entries()) for one in proposal_of(tmp_path).candidates)


# Numbers of answers in tables and columns in the order of the states


NAMES = [
    ("question_idx", "answer_idx"), ("question_idx", "sample_idx"), ("question_id", "response_idx"),
    ("qid", "generation_idx"), ("qid", "sample"), ("question_id", "sample_id"), ("prompt_idx", "sample_idx"),
]  # fmt: skip
TABLES = ["csv", "jsonl", "json", "npz", "npy", "rows of the states"]


def write_in_order(folder, container, columns):
    """Write last tokens of two layers, and columns with a value per trace in their order."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if container == "rows of the states":
        found = [{"hidden_states": states(2, 4 + k, 8, seed=k), "tokens": list(range(4 + k))} for k in range(len(rows))]
        dump(folder / "a.pkl", [own | row for own, row in zip(found, rows, strict=True)])
        return
    arrays = {f"last_token_layer_{k}": states(len(rows), 8, seed=k) for k in range(2)}
    folder.mkdir()
    if container == "npz":
        np.savez(folder / "a.npz", **arrays, **{name: np.array(values) for name, values in columns.items()})
        return
    for name, array in arrays.items():
        save(folder / f"{name}.npy", array)
    if container == "npy":
        for name, values in columns.items():
            save(folder / f"{name}.npy", np.array(values))
    elif container == "jsonl":
        (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table(folder / f"t.{container}", rows)


@pytest.mark.parametrize("container", TABLES)
@pytest.mark.parametrize(("name", "number"), NAMES)
def test_columns_of_the_number_of_an_answer(tmp_path, name, number, container):
    columns = {name: [2, 2, 2, 4, 4, 7], number: [0, 1, 2, 0, 1, 0], "is_correct": [0, 1, 1, 0, 1, 0]}
    write_in_order(tmp_path / "in", container, columns)
    # The order of two axes of last tokens next to a table is not proved.
    (_, path), *others = check_candidates(tmp_path, proposal_of(tmp_path))
    stored = {(trace.question_id, trace.sample): trace for trace in tracestore.open(path)}
    assert not others and (container in ("csv", "jsonl", "json")) == (proposal_of(tmp_path).layout is None)
    for k, key in enumerate(zip(map(str, columns[name]), columns[number], strict=True)):
        assert stored[key].score == columns["is_correct"][k]
        if container != "rows of the states":
            np.testing.assert_allclose(stored[key].last_token[1], states(6, 8, seed=1)[k], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("container", TABLES)
@pytest.mark.parametrize("number", ["answer_idx", "sample_idx"])
def test_ids_that_do_not_repeat_have_no_number_of_an_answer(tmp_path, number, container):
    """[the choice that is correct]"""
    write_in_order(tmp_path / "in", container, {"question_idx": [4, 7, 2, 9], number: [0, 1, 1, 3]})
    layout = proposal_of(tmp_path).layout
    assert layout is None or "sample" not in str(layout.to_entries())
    check_candidates(tmp_path, proposal_of(tmp_path))


@pytest.mark.parametrize("container", TABLES)
@pytest.mark.parametrize("number", ["sample_idx", "sample_id"])
def test_a_number_of_every_row_may_be_the_id(tmp_path, number, container):
    write_in_order(tmp_path / "in", container, {"question_idx": [4, 4, 7, 7], number: [0, 1, 2, 3]})
    refuse(tmp_path, "question_idx" if number == "sample_id" else "may be the id")


@pytest.mark.parametrize("container", TABLES)
@pytest.mark.parametrize("number", ["answer_idx", "sample_idx"])
def test_numbers_of_answers_that_repeat_are_refused(tmp_path, number, container):
    write_in_order(tmp_path / "in", container, {"question_idx": [4, 4, 7, 7], number: [0, 0, 1, 1]})
    candidates = refuse(tmp_path).candidates
    assert not any("question_idx" in str(one.layout.to_entries().get("question_id")) for one in candidates)
