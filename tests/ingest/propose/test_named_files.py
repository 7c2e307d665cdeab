"""Test tables with a column of texts that are the names of the states' files."""

import itertools
import json

import numpy as np
import pytest

import tracestore
from tests.ingest.execute.folders import states, table
from tests.ingest.propose.folders import accept, check_candidates, proposal_of, refuse

COLUMNS = ["file", "path", "npz", "npy", "states_file", "Hidden_Path"]
FORMS = ["acts/{}.npz", "{}.npz", "{}", "/data/run3/acts/{}.npz", "acts\\{}.npz", "./acts/{}.npz"]
STEMS = ["0003_2f5d", "0001_a4c1", "0000_77be", "0002_b0d9"]


def write(folder, suffix=".jsonl", **columns):
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
    write(tmp_path / "in", suffix, **{column: [form.format(stem) for stem in STEMS]}, gold=[["a"], ["b"], ["c"], ["d"]])
    check_traces(accept(tmp_path))


@pytest.mark.parametrize("column", ["states", "record", "acts", "nearest", "dump", "source"])
def test_a_column_without_a_word_of_files_is_a_candidate(tmp_path, column):
    """[the file of another trace, as of a neighbor]"""
    write(tmp_path / "in", **{column: [f"acts/{stem}.npz" for stem in STEMS]})
    proposal = refuse(tmp_path, f"{column}: the files that it names may be those of other rows")
    assert f"[file={column}]/id" in str(proposal.candidates[0].layout.to_entries()["question_id"])


@pytest.mark.parametrize("other", ["nearest", "other_file", "reference_path"])
def test_two_columns_of_files_are_candidates(tmp_path, other):
    write(tmp_path / "in", npz=[f"acts/{s}.npz" for s in STEMS], **{other: [f"acts/{s}.npz" for s in STEMS[::-1]]})
    proposal = refuse(tmp_path)
    ids = {one.layout.to_entries()["question_id"] for one in proposal.candidates}
    assert ids == {f"meta.jsonl : [file={name}]/id" for name in ("npz", other)}


def test_two_columns_of_the_same_files_are_one_candidate(tmp_path):
    write(tmp_path / "in", npz=[f"acts/{s}.npz" for s in STEMS], attn=[f"attn/{s}.npz" for s in STEMS])
    check_traces(accept(tmp_path))


@pytest.mark.parametrize(
    "values",
    [
        [f"acts/{STEMS[0]}.npz"] * 4,
        [*(f"acts/{stem}.npz" for stem in STEMS[:3]), "acts/lost.npz"],
        ["why", "who", "what", "how"],
    ],
)
def test_values_that_are_not_the_files_of_the_rows_join_nothing(tmp_path, values):
    write(tmp_path / "in", record=values)
    proposal = refuse(tmp_path)
    assert not any("[file=" in str(one.layout.to_entries()) for one in proposal.candidates)


def test_several_answers_of_named_files(tmp_path):
    write(
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
    write(
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
