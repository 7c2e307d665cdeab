"""Test the files and stores of an extraction whose answers the test gives."""

import csv
import re
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

import tracestore
from tests.helpers import command, make_trace, tree_bytes
from tracestore.errors import UsageError
from tracestore.extract import extraction
from tracestore.extract.extraction import extract_to_folder, extract_to_store, plan_batches
from tracestore.extract.questions import Question, with_samples

QUESTIONS = [Question(f"q{k}", f"What is {k}?", ("answer",)) for k in range(10)]


def answers_of(text):
    return lambda asked: [
        make_trace(int(q.question_id[1:])) | {"generated_answer_clean": text, "question": q.text} for q in asked
    ]


ANSWER = answers_of("answer")


def run(folder, questions=QUESTIONS, answer=ANSWER, per_file=4, shard=(0, 1), **options):
    """Extract into a folder; return the result of each question."""
    return list(extract_to_folder(folder, plan_batches(questions, per_file, shard), answer, **options))


def test_interrupted_file_is_written_again(tmp_path):
    calls = []

    def answer(asked):
        calls.extend(q.question_id for q in asked)
        if len(calls) == 4:
            raise RuntimeError("power cut")
        return answers_of("a")(asked)

    with pytest.raises(RuntimeError):
        run(tmp_path, QUESTIONS[:4], answer, 2)
    assert sorted(p.name for p in tmp_path.glob("*")) == [".scores", "traces_batch_0000.pkl"]
    run(tmp_path, QUESTIONS[:4], answer, 2)
    assert calls == ["q0", "q1", "q2", "q3", "q2", "q3"]


def test_scores_of_a_killed_run_never_stand_beside_the_traces_of_another(tmp_path, monkeypatch):
    """The second run answers differently and ends between the file and its scores; the third one writes both."""
    run(tmp_path, QUESTIONS[:2], ANSWER, judges=("containment",))
    with monkeypatch.context() as patch:
        write = extraction._write_rows
        patch.setattr(extraction, "_write_rows", lambda path, rows: write(path, rows) if not rows else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, QUESTIONS[:2], answers_of("b"), judges=("exact_match",))
    assert run(tmp_path, QUESTIONS[:2], answers_of("c"), judges=("exact_match",)) == [False, False]
    assert run(tmp_path, QUESTIONS[:2], answers_of("d"), judges=("exact_match",)) == [None, None]


@pytest.mark.parametrize("name", ["scores.csv", "traces_batch_0001.pkl"])
def test_foreign_files_are_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=name):
        run(tmp_path, answer=lambda asked: [])
    assert tree_bytes(tmp_path) == {name: b"mine"}


def test_an_answer_that_another_process_has_committed_first_stays(tmp_path):
    def first(asked):
        list(extract_to_store(tmp_path / "run.zarr", QUESTIONS[1:3], answers_of("a 2"), attention="mean"))
        return answers_of("a 1")(asked)

    done = list(extract_to_store(tmp_path / "run.zarr", QUESTIONS[:3], first, attention="mean", batch_size=3))
    assert len(done) == 3
    with tracestore.open(tmp_path / "run.zarr") as store:
        assert {t.question_id: t.answer for t in store} == {"q0": "a 1", "q1": "a 2", "q2": "a 2"}


def test_changed_questions_are_not_those_of_before(tmp_path):
    """[extract] a question or its accepted answers changed under its id"""
    changed = [Question("q0", "What is zero?", ("answer",)), Question("q1", "What is 1?", ("one",)), *QUESTIONS[2:]]
    list(extract_to_store(tmp_path / "s.zarr", QUESTIONS, ANSWER, attention="mean"))
    with pytest.raises(UsageError, match=r"question 'q0' is .*, not 'What is zero\?'"):
        list(extract_to_store(tmp_path / "s.zarr", changed, ANSWER, attention="mean"))
    batches = [plan_batches(questions, 1) for questions in (QUESTIONS, changed)]
    assert None not in list(extract_to_folder(tmp_path / "f", batches[0], ANSWER))
    assert list(extract_to_folder(tmp_path / "f", batches[1], ANSWER)) == [True, False, *[None] * 8]


def store_run(path, questions=QUESTIONS, answer=ANSWER, **options):
    """Extract into a store; return the result of each question."""
    return list(extract_to_store(path, questions, answer, attention="mean", **options))


def edit_scores(path, text, *words):
    """Replace scores of a store by those of a file."""
    (path.parent / "edited.csv").write_text(text)
    command("score", path, "--scores", path.parent / "edited.csv", *words, check=0)


def test_existing_traces_of_a_store_are_judged_again(tmp_path):
    """Their stored answers get the scores of changed accepted answers and of more judges; other scores stay."""
    path, changed = tmp_path / "s.zarr", [Question("q0", "What is 0?", ("one",)), *QUESTIONS[1:]]
    store_run(path, QUESTIONS[:3])
    edit_scores(path, "question_id,score\nq0,0.25\n", "--name", "mine")
    assert store_run(path, changed, judges=("containment_f1", "rouge_l")) == ["rejudged"] * 3 + [True] * 7
    with tracestore.open(path) as store:
        earlier = dict.fromkeys(("containment", "containment_f1", "token_f1"), 0.0)
        assert store[0].scores == {**earlier, "rouge_l": 0.0, "mine": 0.25}
        assert store[1].scores == {**dict.fromkeys(earlier, 1.0), "rouge_l": 1.0}
        assert store[9].scores == {"containment_f1": 1.0, "rouge_l": 1.0} and store.score_name == "containment_f1"
    before = tree_bytes(path)
    assert store_run(path, changed, judges=("containment_f1", "rouge_l")) == [None] * 10
    assert tree_bytes(path) == before


def test_traces_without_a_stored_answer_keep_their_scores(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        trace = {name: value for name, value in make_trace(0).items() if "answer" not in name}
        writer.append(trace, score=0.5)
    assert store_run(tmp_path / "s.zarr", QUESTIONS[:2]) == [None, True]
    assert tracestore.open(tmp_path / "s.zarr")[0].scores == {"score": 0.5}


def test_a_store_keeps_the_judge_of_its_default_score(tmp_path):
    """New traces would have no label; scores that are not of a judge are not mixed with its own."""
    path = tmp_path / "s.zarr"
    store_run(path, QUESTIONS[:3])
    before = tree_bytes(path)
    with pytest.raises(UsageError, match="not rouge_l; pass --judge containment_f1 --judge rouge_l, or") as error:
        store_run(path, answer=lambda _: 1 / 0, judges=("rouge_l",))
    assert f"{path}: its default score is of the judge containment_f1" in str(error.value)
    assert tree_bytes(path) == before
    words = ("--score-column", "score", "--name", "containment_f1")
    edit_scores(path, "question_id,score\nq0,0.5\nq1,1\nq2,0\n", *words)
    with pytest.raises(UsageError, match=r"containment_f1 is of 'edited.csv.*', not of this judge; pass another"):
        store_run(path, answer=lambda _: 1 / 0)
    store_run(path, judges=("containment",))
    with tracestore.open(path) as store:
        np.testing.assert_array_equal(store.scores, [0.5, 1, 0] + [np.nan] * 7)
        assert (store.named_scores("containment") == 1).all()


def test_the_first_commits_come_early(tmp_path, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(extraction, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    questions, committed = [Question(f"q{k}", f"What is {k}?", ("answer",)) for k in range(205)], set()
    for _ in extract_to_store(tmp_path / "s.zarr", questions, ANSWER, attention="mean"):
        with suppress(UsageError), tracestore.open(tmp_path / "s.zarr") as store:
            committed.add(len(store))
    assert sorted(committed) == [10, 20, 40, 80, 140, 200]


@pytest.mark.parametrize("limit", range(1, 11))
def test_a_lower_limit_keeps_the_traces(tmp_path, limit):
    """No question is answered again, and no file of the longer run is replaced by a shorter one."""
    assert len(run(tmp_path)) == 10
    before = tree_bytes(tmp_path)
    assert run(tmp_path, QUESTIONS[:limit]) == [None] * limit
    assert tree_bytes(tmp_path) == before


ROUGE = {"judges": ("rouge_l",)}


@pytest.mark.parametrize(
    ("questions", "options", "message"),
    [
        (with_samples(QUESTIONS, 2), {}, "traces_batch_0000.pkl: has an answer to 'q2', sample 0"),
        (QUESTIONS, {"per_file": 3}, "traces_batch_0001.pkl: has an answer to 'q6', sample 0"),
        (QUESTIONS, {"per_file": 1}, "traces_batch_0001.pkl: has an answer to 'q4', sample 0"),
        (QUESTIONS[1:], {}, "traces_batch_0000.pkl: has an answer to 'q0', sample 0"),
        (QUESTIONS[9:], {}, "traces_batch_0000.pkl: has an answer to 'q0', sample 0"),
        (QUESTIONS[::-1], {}, "traces_batch_0000.pkl: has an answer to 'q0', sample 0"),
        (QUESTIONS[:2], ROUGE, "traces_batch_0000.pkl: has an answer to 'q2', sample 0"),
        (QUESTIONS[:4], ROUGE, "traces_batch_0001.pkl: has scores of the judge containment_f1, not rouge_l"),
        (QUESTIONS, ROUGE | {"shard": (0, 2)}, "traces_batch_0001.pkl: has scores of the judge containment_f1"),
        (QUESTIONS[:8], {"judges": ("token_f1", "containment_f1")}, "traces_batch_0002.pkl: has scores of the judge"),
    ],
)
def test_another_run_in_the_folder_loses_no_answer(tmp_path, questions, options, message):
    """It mixes no scores of two judges in one column either; the folder is unchanged, and no question is answered."""
    assert len(run(tmp_path)) == 10
    before = tree_bytes(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)):
        run(tmp_path, questions, lambda _: 1 / 0, **options)
    assert tree_bytes(tmp_path) == before


def test_more_questions_and_other_judges_in_the_folder(tmp_path):
    for limit, judges, made in ((6, ("rouge_l",), 6), (10, ("rouge_l",), 6), (10, ("token_f1", "rouge_l"), 10)):
        done = run(tmp_path, QUESTIONS[:limit], judges=judges)
        assert sum(is_correct is not None for is_correct in done) == made
    with (tmp_path / "scores.csv").open() as file:
        assert [[*row][2:4] for row in csv.DictReader(file)] == [["score", "rouge_l"]] * 10
