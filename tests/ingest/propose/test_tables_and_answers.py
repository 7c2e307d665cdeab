"""Test several answers to a question, tables that name files, and files of batches without a word for them."""

import itertools
import json

import h5py
import numpy as np
import pytest

import tracestore
from tests.ingest.execute.folders import dump, save, states, table
from tests.ingest.propose.folders import accept, check_candidates, proposal_of, refuse
from tracestore.ingest.propose.proposal import propose

# Numbers of answers in names


WORDS = ("gen_", "sample_", "response_", "answer_", "generation_", "gen", "sample", "response-", "answer.")


def answers(num_questions=3, **more):
    """Return, by question and number, the arrays of an answer."""
    found = {}
    for k, n in itertools.product(range(num_questions), range(3)):
        size = 5 + k + 2 * n
        own = {"hidden_states": states(3, size, 8, seed=10 * k + n), "token_ids": np.arange(size) + 4 * n}
        found[f"tc_{k + 3}", n] = own | {name: values[n] for name, values in more.items()}
    return found


def write_answers(folder, container, word, found):
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
    write_answers(tmp_path / "in", container, word, found)
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
    write_answers(tmp_path / "in", container, word, found)
    if has_text and size > 1:
        assert accept(tmp_path).keys() == found.keys()
    else:
        proposal = refuse(tmp_path, "sample: the numbers may be those of steps or parts of a text")
        assert len(check_candidates(tmp_path, proposal)) == 1


@pytest.mark.parametrize("container", ["pkl", "npz"])
@pytest.mark.parametrize("word", ["regen_", "genre_", "gene_", "gen_x"])
def test_other_words_are_no_answers(tmp_path, word, container):
    write_answers(
        tmp_path / "in", container, word, answers(generated_answer=["It is one.", "It is two.", "It is three."])
    )
    refuse(tmp_path)
    assert not any("{sample}" in str(one.layout.to_entries()) for one in proposal_of(tmp_path).candidates)


@pytest.mark.parametrize("is_list", [False, True])
def test_a_number_of_files_is_that_of_an_answer_only_if_an_id_has_several(tmp_path, is_list):
    """[sample 0 to 7 of eight questions]"""
    several, one_each = {}, {}
    for k, ((name, n), own) in enumerate(
        answers(generated_answer=["It is one.", "It is two.", "It is three."]).items()
    ):
        several.setdefault(n if is_list else k, []).append(own | {"qid": name})
        one_each.setdefault(n if is_list else k, []).append(own | {"qid": f"tc_{9 - k}"})
    expected = set()
    for folder, files in (("several", several), ("one_each", one_each)):
        for number, rows in files.items():
            dump(tmp_path / folder / f"in/generation_{number}.pkl", rows if is_list else rows[0])
            expected |= {(folder, row["qid"], number * (folder == "several")) for row in rows}

    assert {(folder, *key) for folder in ("several", "one_each") for key in accept(tmp_path / folder)} == expected


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


# Columns of texts that are the names of the states' files


COLUMNS = ["file", "path", "npz", "npy", "states_file", "Hidden_Path"]
FORMS = ["acts/{}.npz", "{}.npz", "{}", "/data/run3/acts/{}.npz", "acts\\{}.npz", "./acts/{}.npz"]
STEMS = ["0003_2f5d", "0001_a4c1", "0000_77be", "0002_b0d9"]


def write_named(folder, suffix=".jsonl", **columns):
    """Write a file per trace, and a table of their ids in another order, with further columns."""
    (folder / "acts").mkdir(parents=True)
    for k, stem in enumerate(STEMS):
        layers = {f"layer_{n}": states(4 + k, 8, seed=9 * k + n) for n in (4, 8)}
        np.savez(folder / "acts" / f"{stem}.npz", input_ids=np.arange(4 + k), **layers)
    found = [
        {"id": f"hotpot-{k}", **{name: values[k] for name, values in columns.items()}, "is_correct": k % 2}
        for k in range(len(STEMS))
    ]
    if suffix == ".jsonl":
        (folder / "meta.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    else:
        table(folder / f"meta{suffix}", found)


def check_traces(traces):
    """Assert that each id has the states of the file in its row."""
    assert [traces[f"hotpot-{k}", 0].score for k in range(len(STEMS))] == [0, 1, 0, 1]
    for k in range(len(STEMS)):
        expected = np.stack([states(4 + k, 8, seed=9 * k + n) for n in (4, 8)])
        np.testing.assert_allclose(traces[f"hotpot-{k}", 0].hidden_states, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".json"])
@pytest.mark.parametrize(("column", "form"), list(itertools.product(COLUMNS, FORMS)))
def test_a_column_of_file_names_joins_the_rows(tmp_path, column, form, suffix):
    write_named(
        tmp_path / "in", suffix, **{column: [form.format(stem) for stem in STEMS]}, gold=[["a"], ["b"], ["c"], ["d"]]
    )
    check_traces(accept(tmp_path))


@pytest.mark.parametrize("column", ["states", "record", "acts", "nearest", "dump", "source"])
def test_a_column_without_a_word_of_files_is_a_candidate(tmp_path, column):
    """[the file of another trace, as of a neighbor]"""
    write_named(tmp_path / "in", **{column: [f"acts/{stem}.npz" for stem in STEMS]})
    proposal = refuse(tmp_path, f"{column}: the files that it names may be those of other rows")
    assert f"[file={column}]/id" in str(proposal.candidates[0].layout.to_entries()["question_id"])


@pytest.mark.parametrize("other", ["nearest", "other_file", "reference_path"])
def test_two_columns_of_files_are_candidates(tmp_path, other):
    write_named(
        tmp_path / "in", npz=[f"acts/{s}.npz" for s in STEMS], **{other: [f"acts/{s}.npz" for s in STEMS[::-1]]}
    )
    proposal = refuse(tmp_path)
    ids = {one.layout.to_entries()["question_id"] for one in proposal.candidates}
    assert ids == {f"meta.jsonl : [file={name}]/id" for name in ("npz", other)}


def test_two_columns_of_the_same_files_are_one_candidate(tmp_path):
    write_named(tmp_path / "in", npz=[f"acts/{s}.npz" for s in STEMS], attn=[f"attn/{s}.npz" for s in STEMS])
    check_traces(accept(tmp_path))


def write_numbered(folder, files=(0, 1, 2, 3), numbers=(0, 1, 2, 3)):
    """Write a file per number, and a table with the names of the files and numbers of its rows."""
    for k in range(4):
        (folder / "npz").mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"npz/{k:05d}.npz", hidden_states=states(2, 4 + k, 8, seed=k), input_ids=np.arange(4 + k))
    found = [
        {"file": f"{file:05d}.npz", "idx": number, "question": f"What is {file}?", "is_correct": file % 2}
        for file, number in zip(files, numbers, strict=True)
    ]
    table(folder / "t.csv", found)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_a_column_of_files_and_their_numbers_are_one_candidate(tmp_path, order):
    write_numbered(tmp_path / "in", order, order)
    traces = accept(tmp_path)
    assert [traces[str(k), 0].question for k in range(4)] == [f"What is {k}?" for k in range(4)]
    assert [traces[str(k), 0].num_tokens for k in range(4)] == [4, 5, 6, 7]


def test_a_column_of_files_and_numbers_of_others_are_two_candidates(tmp_path):
    write_numbered(tmp_path / "in", (2, 0, 3, 1), (0, 1, 2, 3))
    assert len(refuse(tmp_path).candidates) == 2


def test_ways_to_join_more_traces_than_were_read_are_two_candidates(tmp_path, monkeypatch):
    monkeypatch.setattr("tracestore.ingest.propose.trials._MAX_TRACES", 3)
    write_numbered(tmp_path / "in")
    assert len(refuse(tmp_path).candidates) == 2


@pytest.mark.parametrize(
    "values",
    [
        [f"acts/{STEMS[0]}.npz"] * 4,
        [*(f"acts/{stem}.npz" for stem in STEMS[:3]), "acts/lost.npz"],
        ["why", "who", "what", "how"],
    ],
)
def test_values_that_are_not_the_files_of_the_rows_join_nothing(tmp_path, values):
    write_named(tmp_path / "in", record=values)
    proposal = refuse(tmp_path)
    assert not any("[file=" in str(one.layout.to_entries()) for one in proposal.candidates)


def test_several_answers_of_named_files(tmp_path):
    write_named(
        tmp_path / "in",
        npz=[f"acts/{s}.npz" for s in STEMS],
        question_id=["q1", "q1", "q2", "q2"],
        answer_idx=[0, 1] * 2,
    )
    proposal = proposal_of(tmp_path)
    check_candidates(tmp_path, proposal)
    assert any("answer_idx" in str(one.layout.to_entries().get("sample")) for one in proposal.candidates), (
        proposal.message()
    )


@pytest.mark.parametrize("name", ["f1", "em", "rouge1"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_words_and_scores_are_columns_of_their_own(tmp_path, suffix, name):
    write_named(
        tmp_path / "in",
        suffix,
        file=[f"{stem}.npz" for stem in STEMS],
        question=["Why?", "Who?", "What?", "How?"],
        **{name: [0.25, 0.5, 0.75, 1.0]},
    )
    proposal = proposal_of(tmp_path)
    (_, path), *_ = check_candidates(tmp_path, proposal)
    with tracestore.open(path) as store:
        for trace in store:
            k = int(trace.question_id[-1])
            assert trace.question == ["Why?", "Who?", "What?", "How?"][k]
            assert trace.scores[name] == (k + 1) / 4


# Files whose names end in the number of a batch, or of its first row


ROWS = 11
# Rows of each batch, and the numbers in the names of the files.
CUTS = {
    "first rows": ([4, 4, 3], [0, 4, 8]),
    "first rows of unequal batches": ([2, 5, 4], [0, 2, 7]),
    "counted": ([4, 4, 3], [0, 1, 2]),
    "counted full": ([4, 4, 4], [0, 1, 2]),
    "many first rows": ([2] * 20 + [1], range(0, 41, 2)),
    "many counted": ([2] * 20 + [1], range(21)),
}


def write_batches(folder, sizes, numbers, container="csv", *, rows=None, names="layer_{}_{}", shape=(8,)):
    """Write states of each batch and layer, and a table with a row per trace."""
    firsts = np.cumsum([0, *sizes])
    for layer in range(3):
        array = states(sum(sizes), *shape, seed=layer)
        for first, size, number in zip(firsts, sizes, numbers, strict=False):
            save(folder / f"acts/{names.format(layer, number)}.npy", array[first : first + size])
    found = [{"statement": f"It is {k}.", "is_correct": k % 2} for k in range(rows or sum(sizes))]
    if container == "npy":
        save(folder / "is_correct.npy", np.array([row["is_correct"] for row in found]))
    elif container == "jsonl":
        (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    else:
        table(folder / "t.csv", found)


@pytest.mark.parametrize("container", ["csv", "jsonl", "npy"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("names", ["layer_{}_{}", "l{}_{:04d}", "block.{}.{}"])
def test_numbers_of_batches_are_candidates(tmp_path, names, cut, container):
    sizes, numbers = CUTS[cut]
    write_batches(tmp_path / "in", sizes, numbers, container, names=names)
    proposal = refuse(tmp_path, "the files may be traces and their rows tokens")
    assert "{chunk}" in proposal.candidates[0].layout.to_entries()["last_token"]
    (_, path), *_ = check_candidates(tmp_path, proposal)
    with tracestore.open(path) as store:
        expected = np.stack([states(sum(sizes), 8, seed=layer) for layer in range(3)])
        for k, trace in enumerate(store):
            np.testing.assert_allclose(trace.last_token, expected[:, k], rtol=2e-3, atol=1e-3)
            assert trace.score == k % 2 and trace.question in (None, f"It is {k}.")


@pytest.mark.parametrize("cut", ["first rows", "counted"])
@pytest.mark.parametrize("rows", [3, 10, 12])
def test_a_table_with_another_number_of_rows_is_that_of_no_batches(tmp_path, cut, rows):
    """[a file per question, whose rows are tokens]"""
    write_batches(tmp_path / "in", *CUTS[cut], rows=rows)
    proposal = refuse(tmp_path)
    assert not any(
        "{chunk}" in str(one.layout.to_entries()) and " : []" in str(one.layout.to_entries())
        for one in proposal.candidates
    )


@pytest.mark.parametrize("numbers", [[0, 3, 8], [1, 5, 9], [0, 4, 9], [3, 1, 2]])
@pytest.mark.parametrize("has_table", [True, False])
def test_numbers_that_are_neither_rows_nor_counts_are_those_of_traces(tmp_path, numbers, has_table):
    write_batches(tmp_path / "in", [4, 4, 3], numbers)
    if not has_table:
        (tmp_path / "in/t.csv").unlink()
    check_candidates(tmp_path, proposal_of(tmp_path))
    assert not any("{chunk}" in str(one.layout.to_entries()) for one in proposal_of(tmp_path).candidates)


@pytest.mark.parametrize("column", ["question_id", "id"])
def test_a_table_with_the_numbers_of_files_as_ids(tmp_path, column):
    """Next to a layout that ids prove, no batches are proposed."""
    for k in range(3):
        for layer in range(2):
            save(tmp_path / f"in/layer_{layer}_{k}.npy", states(4 + k, 8, seed=9 * k + layer))
    table(tmp_path / "in/t.csv", [{column: k, "is_correct": k % 2} for k in range(3)])
    layout = proposal_of(tmp_path).layout
    assert layout is not None and layout.to_entries()["is_correct"] == f"t.csv : [id={column}]/is_correct"


@pytest.mark.parametrize("names", ["acts_{1}_{0}", "acts_{1}"])
@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_first_rows_in_other_names(tmp_path, names, shape):
    write_batches(tmp_path / "in", *CUTS["first rows"], names=names, shape=shape)
    check_candidates(tmp_path, refuse(tmp_path))


def test_a_number_per_file_has_no_rows(tmp_path):
    """A file per layer and value: d0.npy, d4.npy."""
    for k in (0, 4):
        for layer in range(2):
            for dim in range(4):
                save(tmp_path / f"in/layer_{layer}_d{dim}_{k}.npy", states(4, seed=9 * k + layer))
    check_candidates(tmp_path, proposal_of(tmp_path))


def test_columns_without_a_letter_number_nothing(tmp_path):
    """A table whose header counts its columns, as pandas writes it, is neither rows nor numbers of batches."""
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/hidden_states.npy", np.stack([states(3, 5, 16, seed=k) for k in range(6)]))
    (tmp_path / "in/1.csv").write_text("0,1\n" + "".join(f"{k},{k + 7}\n" for k in range(6)))
    assert "none is proved" in proposal_of(tmp_path).refusal()


# Integers of the tokens, columns of labels


def write_items(folder, **columns):
    """Write states and integers `ids` of four traces, and a table with the columns."""
    for k in range(4):
        folder.mkdir(exist_ok=True)
        np.savez(folder / f"q{k}.npz", hidden_states=states(3, 4 + k, 8, seed=k), ids=np.arange(4 + k) + 100 * k)
    rows = [{"id": f"q{k}", **{name: values[k] for name, values in columns.items()}} for k in range(4)]
    table(folder / "t.csv", rows)


def test_ids_inside_a_trace_may_be_those_of_its_tokens(tmp_path):
    """They are as many as states [other ids, such as those of rows of a batch]."""
    write_items(tmp_path / "in", prompt_len=[2, 3, 2, 4], is_correct=[0, 1, 1, 0])

    refuse(tmp_path)

    ((candidate, path),) = check_candidates(tmp_path, proposal_of(tmp_path))
    assert "tokens: ids may be other ones than those of tokens" in candidate.unproved
    assert [trace.tokens.tolist() for trace in tracestore.open(path)] == [
        [*range(100 * k, 100 * k + 4 + k)] for k in range(4)
    ]
    assert [trace.prompt_length for trace in tracestore.open(path)] == [2, 3, 2, 4]


@pytest.mark.parametrize("names", [("label_info", "label_truth"), ("label_truth", "label_hallu_info")])
def test_each_of_two_labels_may_be_the_one_that_is_meant(tmp_path, names):
    """One column is about informative answers, one about true ones [the first one is taken]."""
    values = dict(zip(names, ([1, 1, 0, 1], [0, 1, 0, 0]), strict=True))
    write_items(tmp_path / "in", **values)

    stores = check_candidates(tmp_path, proposal_of(tmp_path))

    found = {tuple(tracestore.open(path).targets().tolist()): candidate for candidate, path in stores}
    expected = [[abs(is_correct - v) for v in column] for column in values.values() for is_correct in (0, 1)]
    assert set(found) == set(map(tuple, expected))
    for candidate in found.values():
        (left_out,) = candidate.left_out
        assert left_out.startswith("t.csv : [id=id]/label_")


def test_flags_in_words_are_no_question(tmp_path):
    write_items(tmp_path / "in", is_prompt=["True", "False", "True", "True"], is_correct=[0, 1, 1, 0])
    for _, path in check_candidates(tmp_path, proposal_of(tmp_path)):
        assert not any(trace.question for trace in tracestore.open(path))


def test_flags_that_do_not_mark_a_prompt_are_left_out(tmp_path):
    rows = [{"id": f"q{k}", "hidden_states": states(3, 5, 8, seed=k), "input_ids": np.arange(5)} for k in range(3)]
    dump(tmp_path / "in/a.pkl", [row | {"prompt_mask": np.array([0, 0, 1, 1, 1])} for row in rows])
    ((candidate, path),) = check_candidates(tmp_path, proposal_of(tmp_path))
    assert candidate.left_out == ["a.pkl : [id=id]/prompt_mask"]
    assert all(trace.prompt_length is None for trace in tracestore.open(path))


@pytest.mark.parametrize("mark", [lambda k, n: k < n, lambda k, n: int(k < n)])
def test_flags_of_the_prompt(tmp_path, mark):
    rows = [
        {"id": f"q{k}", "hidden_states": states(3, 5 + k, 8, seed=k), "input_ids": np.arange(5 + k)} for k in range(3)
    ]
    dump(
        tmp_path / "in/a.pkl",
        [row | {"is_prompt": np.array([mark(n, 2 + k) for n in range(5 + k)])} for k, row in enumerate(rows)],
    )

    assert [trace.prompt_length for trace in accept(tmp_path).values()] == [2, 3, 4]


@pytest.mark.parametrize("names", [range(4), (1, 2, 3, 4), (0, 1, 2, 5)])
@pytest.mark.parametrize("num_rows", [4, 5])
def test_numbers_in_names_may_be_those_of_the_rows_of_a_table(tmp_path, names, num_rows):
    """A table without ids has a row for each number [rows of a shuffled table, numbers of other rows]."""
    for k in names:
        save(tmp_path / f"in/hs_{k}.npy", states(3, 4 + k, 8, seed=k))
    table(tmp_path / "in/t.csv", [{"question": f"What is {k}?", "is_correct": k % 2} for k in range(num_rows)])

    stores = check_candidates(tmp_path, proposal_of(tmp_path))

    refuse(tmp_path)
    found = [[trace.question for trace in tracestore.open(path)] for _, path in stores]
    is_found = [*names] == [*range(num_rows)]
    assert [texts for texts in found if any(texts)] == [[f"What is {k}?" for k in names]] * is_found


@pytest.mark.parametrize("counted", ["tokens", "columns"])
def test_prompts_of_padded_rows_that_may_count_the_padding(tmp_path, counted):
    mask = np.array([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    hidden = states(3, 2, 6, 8) * mask[:, None, :, None]
    lengths = np.array([2, 3, 4]) - (0 if counted == "columns" else np.array([0, 1, 0]))
    prompts = np.full(3, 4) if counted == "columns" else lengths
    arrays = {"hidden_states": hidden, "attention_mask": mask, "input_ids": np.arange(3, 21).reshape(3, 6) * mask}
    np.savez(_folder(tmp_path) / "a.npz", **arrays, prompt_len=prompts, question_id=np.array(["a", "b", "c"]))

    stores = check_candidates(tmp_path, proposal_of(tmp_path))

    refuse(tmp_path)
    found = {path: [trace.prompt_length for trace in tracestore.open(path)] for _, path in stores}
    expected = [2, 3, 4] if counted == "columns" else prompts.tolist()
    assert expected in found.values()
    known = {"L.what": "block output"}
    candidates = propose({"a.npz": tmp_path / "in/a.npz"}, known).candidates
    assert candidates and all(candidate.layout.settings.items() >= known.items() for candidate in candidates)


def _folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def test_flags_of_the_prompt_in_rows_of_tokens(tmp_path):
    rows = [
        {
            "qid": f"w{k}",
            "layer": layer,
            "pos": n,
            "token_id": 7 * n + k,
            "is_prompt": n < 2 + k,
            "vector": vector.tolist(),
        }
        for k in range(3)
        for layer, hidden in enumerate(states(2, 5 + k, 8, seed=k))
        for n, vector in enumerate(hidden)
    ]
    dump(tmp_path / "in/a.pkl", rows)

    assert [trace.prompt_length for trace in accept(tmp_path).values()] == [2, 3, 4]


@pytest.mark.parametrize("lengths", [(2, 3, 2, 4), (20, 31, 25, 44)])
def test_lengths_of_prompts_without_tokens(tmp_path, lengths):
    """They are a line of a candidate, left out where they count something else [characters]."""
    folder = tmp_path / "in"
    folder.mkdir()
    for k in range(4):
        np.savez(folder / f"q{k}.npz", acts=states(3, 5 + k % 3, 8, seed=k))
    table(folder / "t.csv", [{"id": f"q{k}", "prompt_len": lengths[k], "is_correct": k % 2} for k in range(4)])

    refuse(tmp_path)

    found = [
        [trace.prompt_length for trace in tracestore.open(path)]
        for _, path in check_candidates(tmp_path, proposal_of(tmp_path))
    ]
    assert ([*lengths] if lengths[0] == 2 else [None] * 4) in found
