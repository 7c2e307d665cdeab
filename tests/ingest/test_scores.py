"""The meaning of a high score is preserved across files and commands."""

import csv
import json
import pickle

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, make_trace, make_traces, write_pickle, write_store
from tests.train.runs import FAST, write_labeled
from tracestore.errors import UsageError
from tracestore.store.format.labels import ScoreField

SCORES = [0.1, 0.6, 0.9, 0.5]
CORRECT, HALLUCINATION = [1, 0, 0, 0], [0, 1, 1, 1]


def write_csv(path, header, rows=None):
    """Write rows, by default SCORES of q0 to q3."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([header, *(rows or ([f"q{k}", score] for k, score in enumerate(SCORES)))])
    return path


@pytest.fixture
def source(tmp_path):
    return write_pickle(tmp_path / "a.pkl", make_traces(4))


@pytest.mark.parametrize(
    ("column", "labels"),
    [("score", CORRECT), ("bleurt_score", CORRECT), ("correctness", CORRECT), ("is_correct", CORRECT), ("correct", CORRECT),
     ("hallucination_score", HALLUCINATION), ("p_hallucination", HALLUCINATION), ("hallucination", HALLUCINATION),
     ("is_hallucination", HALLUCINATION)],
)  # fmt: skip
def test_the_column_name_determines_the_direction(tmp_path, source, column, labels):
    scores = write_csv(tmp_path / "scores.csv", ["question_id", column])
    counts = "1 of 4 below 0.5" if labels == CORRECT else "3 of 4 at or above 0.5"
    done = convert(source, tmp_path / "s.zarr", "--scores", scores)
    assert f"{counts}: labeled hallucination; train --score-threshold chooses" in done.stdout
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.scores.tolist() == SCORES, "values are stored unchanged"
        assert store.targets().tolist() == labels
        assert [b.y.tolist() for b in tracestore.TraceLoader(store, batch_size=4, shuffle="none")] == [labels]
        info = store.info()
    direction = "correct" if labels == CORRECT else "hallucination"
    expected = {"direction": direction, "source": f"scores.csv, column {column}", "version": None}
    assert info["score"] == column and info["scores"] == {column: expected}
    # Round trips through export, score and merge.
    command("export", tmp_path / "s.zarr", tmp_path / "out", check=0)
    convert(tmp_path / "out", tmp_path / "again.zarr")
    convert(source, tmp_path / "bare.zarr")
    command("score", tmp_path / "bare.zarr", "--scores", tmp_path / "out/scores.csv", check=0)
    command("merge", tmp_path / "s.zarr", tmp_path / "merged.zarr", check=0)
    for name in ("again", "bare", "merged"):
        assert tracestore.open(tmp_path / f"{name}.zarr").targets().tolist() == labels, name


@pytest.mark.parametrize("column", ["is_correct", "correct", "is_hallucinated", "is_wrong", "bleurt"])
@pytest.mark.parametrize("value", [-1, 100, 0.5, "", "no"])
def test_a_judgment_is_no_other_number(tmp_path, source, column, value):
    """[-1 stands for an answer that was not judged]"""
    scores = write_csv(tmp_path / "scores.csv", ["question_id", column], [["q0", 1], ["q1", value]])
    is_refused = column != "bleurt" and type(value) is int

    done = convert(source, tmp_path / "s.zarr", "--scores", scores, check=3 * is_refused)

    assert not is_refused or f"row 1: found {value}, expected 0 to 1, or an empty cell" in done.stderr


@pytest.mark.parametrize("words", [["convert"], ["score"]])
def test_an_ambiguous_column_needs_score_direction(tmp_path, source, words):
    convert(source, tmp_path / "s.zarr")

    def run(path, *flags):
        name = path.read_text().partition("\n")[0].rpartition(",")[2]
        into = [source, tmp_path / "t.zarr"] if words == ["convert"] else [tmp_path / "s.zarr", "--name", name]
        return command(*words, *into, "--scores", path, *flags)

    for file, header, flags in (
        ("x.csv", ["question_id", "label"], []),
        ("x.csv", ["question_id", "mine"], ["--score-column", "mine"]),
        ("hallucination_scores.csv", ["question_id", "score"], []),
        ("llama-risk-scores.csv", ["question_id", "score"], []),
    ):
        path = write_csv(tmp_path / file, header)
        done = run(path, *flags)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--score-direction" in done.stderr
        assert run(path, *flags, "--score-direction", "hallucination").returncode == 0
    path = write_csv(tmp_path / "x.csv", ["question_id", "score", "hallucination_score"], [["q0", 0.1, 0.9]])
    done = run(path)
    assert done.returncode == 2 and "score and hallucination_score" in done.stderr


def test_one_score_has_one_direction(tmp_path, source):
    one = write_csv(tmp_path / "one.csv", ["question_id", "judge"], [["q0", 0.5]])
    every = write_csv(tmp_path / "every.csv", ["question_id", "judge"])
    convert(source, tmp_path / "s.zarr", "--scores", every, "--score-column", "judge", "--score-direction", "correct")
    flags = ["--score-column", "judge", "--score-direction", "hallucination"]
    more = write_pickle(tmp_path / "b.pkl", [t | {"question_id": "b"} for t in make_traces(1)])
    for words in (
        ["score", tmp_path / "s.zarr", "--scores", one],
        ["convert", more, tmp_path / "s.zarr", "--scores", one],
    ):
        done = command(*words, *flags)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "another name" in done.stderr
    convert(source, tmp_path / "t.zarr", "--scores", every, *flags)
    done = command("merge", tmp_path / "s.zarr", tmp_path / "t.zarr", tmp_path / "m.zarr")
    assert done.returncode == 2 and "another name" in done.stderr
    assert tracestore.open(tmp_path / "s.zarr").targets().tolist() == CORRECT
    # A file with a value of every trace replaces values and direction.
    done = command("score", tmp_path / "s.zarr", "--scores", every, *flags, check=0)
    assert "3 of 4 at or above 0.5" in done.stdout
    assert tracestore.open(tmp_path / "s.zarr").targets().tolist() == HALLUCINATION


def test_a_store_holds_several_named_scores(tmp_path, source):
    convert(source, tmp_path / "s.zarr", "--scores", write_csv(tmp_path / "a.csv", ["question_id", "bleurt_score"]))
    judged = write_csv(tmp_path / "j.csv", ["question_id", "p_hallucination"], [["q0", 0.75], ["q2", 0.25]])
    flags = ["--scores", judged, "--name", "judge", "--source", "a judge", "--version", "2"]
    done = command("score", tmp_path / "s.zarr", *flags, check=0)
    assert "2 of 4 with the score judge" in done.stdout and "the default score is bleurt_score" in done.stdout
    command("merge", tmp_path / "s.zarr", tmp_path / "merged.zarr", check=0)
    for path in (tmp_path / "s.zarr", tmp_path / "merged.zarr"):
        with tracestore.open(path) as store:
            assert store.score_name == "bleurt_score" and store.targets().tolist() == CORRECT
            assert store.score_fields["judge"] == ScoreField("hallucination", "a judge", "2")
            np.testing.assert_array_equal(store.named_scores("judge"), [0.75, np.nan, 0.25, np.nan])
            assert store[0].scores == {"bleurt_score": SCORES[0], "judge": 0.75}
            assert store[1].copy().scores == {"bleurt_score": SCORES[1]}
            frame = store.to_pandas()
            np.testing.assert_array_equal(frame["score_judge"], store.named_scores("judge"))
        with tracestore.open(path, score="judge") as store, pickle.loads(pickle.dumps(store)) as copy:
            for opened in (store, store.reopen(), copy):
                assert opened.score_direction == "hallucination"
                np.testing.assert_array_equal(opened.targets(), [1, np.nan, 0, np.nan])
            labels = [batch.y for batch in tracestore.TraceLoader(store, batch_size=4, shuffle="none")]
            np.testing.assert_array_equal(labels[0], [1, np.nan, 0, np.nan])
    command("score", tmp_path / "s.zarr", *flags, "--default", check=0)
    assert tracestore.open(tmp_path / "s.zarr").score_name == "judge"
    with pytest.raises(UsageError, match="found no score 'x'; its scores are: bleurt_score, judge"):
        tracestore.open(tmp_path / "s.zarr", score="x")
    for name in ("a/b", "", "x" * 65):
        assert command("score", tmp_path / "s.zarr", "--scores", judged, "--name", name or "/").returncode == 2


def test_a_program_appends_named_scores(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.define_score("judge", direction="hallucination", source="a model", version="1")
        for trace, value in zip(make_traces(4), SCORES, strict=True):
            writer.append(trace, score=1 - value, scores={"judge": value})
        with pytest.raises(UsageError, match="define_score"):
            writer.append(make_traces(5)[4], scores={"other": 1.0})
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.score_name == "judge" and store.targets().tolist() == HALLUCINATION
        assert store.named_scores("score").tolist() == [1 - value for value in SCORES]


def test_files_that_tracestore_writes_can_be_joined(tmp_path):
    """predictions.csv of a training run, and the output of predict."""
    store = write_labeled(tmp_path / "s.zarr")
    run = ["--store", store, "--output-dir", tmp_path / "r", *FAST, "--epochs", 1, "--no-run-gnn-det", "--no-run-gvae"]
    command("train", *run, check=0)
    predictions = tmp_path / "r/predictions.csv"
    expected = {r["question_id"]: float(r["label"]) for r in csv.DictReader(predictions.open())}
    command(
        "predict",
        "--checkpoint",
        tmp_path / "r/lstm_solo/best.pt",
        "--store",
        store,
        "--output",
        tmp_path / "p.csv",
        check=0,
    )
    scored = {r["question_id"]: float(r["hallucination_score"]) for r in csv.DictReader((tmp_path / "p.csv").open())}
    traces = [t | {"question_id": q} for t, q in zip(make_traces(len(scored)), scored, strict=True)]
    write_store(tmp_path / "bare.zarr", traces)
    command("score", tmp_path / "bare.zarr", "--scores", predictions, "--score-column", "label", check=0)
    with tracestore.open(tmp_path / "bare.zarr") as bare:
        targets = dict(zip(bare.question_ids, bare.targets(), strict=True))
        assert {q: targets[q] for q in expected} == expected
    command("score", tmp_path / "bare.zarr", "--scores", tmp_path / "p.csv", "--name", "p", "--default", check=0)
    with tracestore.open(tmp_path / "bare.zarr") as bare:
        assert bare.targets().tolist() == [float(scored[q] >= 0.5) for q in bare.question_ids]


def test_create_takes_a_score_direction(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(4), score=lambda k: SCORES[k], score_direction="hallucination")
    assert tracestore.open(tmp_path / "s.zarr").targets().tolist() == HALLUCINATION
    with pytest.raises(UsageError, match="expected one of"):
        tracestore.create(tmp_path / "t.zarr", score_direction="up")
    assert np.isnan(tracestore.open(tmp_path / "s.zarr").labels).all()
    info = json.loads(command("info", tmp_path / "s.zarr", "--json", check=0).stdout)
    assert info["scores"]["score"]["direction"] == "hallucination"


LABELED = {
    "partly labeled": ([0, "", "", 1], SCORES, [0, 0, 0, 1], 2),
    "labels alone for some": ([1, 0, "", ""], ["", "", 0.9, 0.1], [1, 0, 0, 1], 0),
    "one differs": ([1, 1, 0, 0], SCORES, [1, 1, 0, 0], 1),
    "words": (["hallucinated", "correct", "", "Incorrect."], SCORES, [1, 0, 0, 1], 1),
    "numbers with a point": (["1.0", "0.0", "0.0", ""], SCORES, [1, 0, 0, 0], 0),
}


@pytest.mark.parametrize("case", LABELED)
def test_labels_next_to_scores_count_first(tmp_path, source, case):
    labels, scores, targets, num_different = LABELED[case]
    rows = [[f"q{k}", labels[k], scores[k]] for k in range(4)]
    path = write_csv(tmp_path / "scores.csv", ["question_id", "label", "score"], rows)
    done = convert(source, tmp_path / "s.zarr", "--scores", path)
    store = tracestore.open(tmp_path / "s.zarr")
    assert store.targets().tolist() == targets
    assert np.isnan(store.labels).tolist() == [label == "" for label in labels]
    assert "--score-column score uses the score alone" in done.stdout
    differ = f"the label of {num_different} trace" in done.stdout
    assert differ == (num_different > 0)
    convert(source, tmp_path / "alone.zarr", "--scores", path, "--score-column", "score")
    assert np.isnan(tracestore.open(tmp_path / "alone.zarr").labels).all()
    command("merge", tmp_path / "alone.zarr", tmp_path / "merged.zarr", check=0)
    done = command("score", tmp_path / "merged.zarr", "--scores", path, check=0)
    assert f"{sum(label != '' for label in labels)} labels of the file not used" in done.stdout


def test_labels_of_answers_without_a_score_arrive_later(tmp_path, source):
    write_csv(tmp_path / "scores.csv", ["question_id", "label", "score"], [["q0", 1, 0.1], ["q1", 0, 0.9]])
    convert(source, tmp_path / "s.zarr", "--scores", tmp_path / "scores.csv")
    rows = [["q0", 1, 0.1], ["q1", 0, 0.9], ["q2", 1, ""], ["q3", "", 0.2]]
    write_csv(tmp_path / "scores.csv", ["question_id", "label", "score"], rows)
    convert(source, tmp_path / "s.zarr", "--scores", tmp_path / "scores.csv")
    assert tracestore.open(tmp_path / "s.zarr").targets().tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("column", ["score", "hallucination_score"])
def test_labels_that_contradict_the_scores_are_refused(tmp_path, column):
    source = write_pickle(tmp_path / "a.pkl", make_traces(10))
    labels = [k % 2 if column == "score" else 1 - k % 2 for k in range(10)]
    rows = [[f"q{k}", labels[k], 0.1 + k % 2 / 2] for k in range(10)]
    path = write_csv(tmp_path / "scores.csv", ["question_id", "label", column], rows)
    done = convert(source, tmp_path / "s.zarr", "--scores", path, check=2)
    assert done.stderr.count("\n") == 1 and f"--score-column {column} or --score-column label" in done.stderr
    convert(source, tmp_path / "s.zarr", "--scores", path, "--score-column", "label", "--score-direction", "correct")
    assert tracestore.open(tmp_path / "s.zarr").targets().tolist() == [1 - label for label in labels]
    # Nine of them may be those of the answers with wrong scores.
    path = write_csv(tmp_path / "scores.csv", ["question_id", "label", column], rows[:9])
    done = convert(source, tmp_path / "few.zarr", "--scores", path)
    assert tracestore.open(tmp_path / "few.zarr").labels.tolist()[:9] == labels[:9]
    assert "the label of 9 traces differs from that of its score" in done.stdout


@pytest.mark.parametrize("value", ["2", "0.5", "maybe", "-1", "inf"])
def test_other_labels_next_to_scores_are_refused(tmp_path, source, value):
    path = write_csv(tmp_path / "scores.csv", ["question_id", "label", "score"], [["q0", value, 0.5]])
    done = convert(source, tmp_path / "s.zarr", "--scores", path, check=3)
    assert "expected 1 (hallucinated) or 0; --score-column score uses the scores alone" in done.stderr


def numbered(count):
    """Return traces with ids that are numbers, and questions."""
    own = ({"question_id": str(k), "question": f"Who is {'abcd'[k]}?"} for k in range(count))
    return [trace | fields for trace, fields in zip(make_traces(count), own, strict=True)]


@pytest.mark.parametrize(
    "names",
    [
        ("id", "example_id"), ("index", "tqa_index"), ("row_id", "prompt_idx"), ("qid", "id"), ("question_id", "qid"),
        ("question_id", "idx"),
    ],
)  # fmt: skip
def test_two_columns_of_ids_that_contradict_each_other(tmp_path, names):
    """[the number of a row of a shuffled table]"""
    source, rows = write_pickle(tmp_path / "a.pkl", numbered(4)), [(0, 2), (1, 0), (2, 3), (3, 1)]
    scores = write_csv(tmp_path / "scores.csv", [*names, "score"], [[*ids, ids[1] / 10] for ids in rows])

    done = convert(source, tmp_path / "s.zarr", "--scores", scores, check=2)
    assert f"choose --id-column {names[0]} or --id-column {names[1]}" in done.stderr
    convert(source, tmp_path / "s.zarr", "--scores", scores, "--id-column", names[1])
    assert [trace.score for trace in tracestore.open(tmp_path / "s.zarr")] == [0, 0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("other", "ids"),
    [("answer_idx", (0, 1, 1, 0)), ("example_id", range(4)), ("item_id", "abcd"), ("rank", (1, 0, 3, 2))],
)
def test_a_column_next_to_the_ids_that_does_not_contradict_them(tmp_path, other, ids):
    source = write_pickle(tmp_path / "a.pkl", numbered(4))
    scores = write_csv(tmp_path / "scores.csv", ["id", other, "score"], [[k, ids[k], k / 10] for k in range(4)])
    convert(source, tmp_path / "s.zarr", "--scores", scores)


@pytest.mark.parametrize("other", ["id", "idx", "row_index"])
def test_a_column_that_numbers_the_answers_of_all_questions(tmp_path, other):
    source = write_pickle(tmp_path / "a.pkl", numbered(2))
    rows = [[k // 2, k, k // 2 / 10] for k in range(4)]
    convert(
        source, tmp_path / "s.zarr", "--scores", write_csv(tmp_path / "x.csv", ["question_id", other, "score"], rows)
    )
    assert [trace.score for trace in tracestore.open(tmp_path / "s.zarr")] == [0, 0.1]


@pytest.mark.parametrize("column", ["prompt", "query", "Instruction"])
def test_the_prompt_of_a_row_is_not_the_question_of_another_one(tmp_path, column):
    source = write_pickle(tmp_path / "a.pkl", numbered(4))

    def write(texts):
        return write_csv(
            tmp_path / "scores.csv", ["id", column, "score"], [[k, t, k / 10] for k, t in enumerate(texts)]
        )

    done = convert(source, tmp_path / "s.zarr", "--scores", write(f"Who is {c}?" for c in "bcda"), check=3)
    assert "the question of 0 is 'Who is b?', and the trace has 'Who is a?'" in done.stderr
    convert(source, tmp_path / "s.zarr", "--scores", write(f"Template {c}" for c in "bcda"))
    convert(source, tmp_path / "t.zarr", "--scores", write(f"Q: Who is {c}? A:" for c in "abcd"))


def test_the_questions_of_a_file_are_counted_once(tmp_path):
    traces = [trace | {"question_id": f"q{k // 2}", "sample": k % 2} for k, trace in enumerate(make_traces(4))]
    rows = [[f"q{k // 2}", k % 2, k / 4] for k in range(4)]
    path = write_csv(tmp_path / "scores.csv", ["question_id", "sample", "score"], rows)
    done = convert(write_pickle(tmp_path / "a.pkl", traces), tmp_path / "s.zarr", "--scores", path)
    assert "column score, 2 questions" in done.stdout
    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0, 0.25, 0.5, 0.75]


def test_groups_alone_leave_the_direction_of_the_store(tmp_path):
    with tracestore.create(tmp_path / "s.zarr", score_direction="hallucination") as writer:
        for k in range(10):
            writer.append(make_trace(k), score=float(k < 3))
    rows = "".join(f"q{k},,g{k}\n" for k in range(10))
    (tmp_path / "groups.csv").write_text("question_id,score,group\n" + rows)
    words = ("score", tmp_path / "s.zarr", "--scores", tmp_path / "groups.csv", "--on-conflict", "keep-first", "--json")
    found = json.loads(command(*words, check=0).stdout)
    assert found["score_direction"] == "hallucination" and found["labels"].startswith("3 of 10")
