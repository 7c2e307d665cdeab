"""Two judgments of one answer agree, wherever they come from (rule 14)."""

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, field_flags, make_traces, write_pickle, write_scores, write_store
from tracestore.convert.options import ConvertOptions
from tracestore.errors import InvalidInputError, UsageError
from tracestore.tasks import commit_tasks, plan_tasks, write_task

TRUTH = [1, 0, 1, 0, 1, 0]
IDS = [f"q{k}" for k in range(len(TRUTH))]
WRONG = [1 - value for value in TRUTH]
# A column of judgments, its values, and whether a high one means a correct answer.
COLUMNS = {
    **dict.fromkeys(("is_correct", "Is Correct", "correct", "correctness", "is_right", "judge_correct"), (TRUTH, True)),
    **dict.fromkeys(("is_hallucinated", "hallucinated", "hallucination", "hallucination_label"), (WRONG, False)),
    "is_factual": (["yes", "no", "1.0", "False", "true", "0"], True),
    "verdict": (["correct", "incorrect"] * 3, True),
}


def write_labels(path, column, values, labels, name="label"):
    extra = [(name, dict(zip(IDS, labels, strict=True)))]
    return write_scores(path, dict(zip(IDS, values, strict=True)), column, extra)


@pytest.mark.parametrize("num_wrong", [1, len(TRUTH)])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_label_that_contradicts_a_judgment_in_one_file_is_refused(tmp_path, column, num_wrong):
    """A label of 1 is a hallucinated answer."""
    folder, store, values = tmp_path / "in", tmp_path / "s.zarr", COLUMNS[column][0]
    write_pickle(folder / "a.pkl", make_traces(len(TRUTH)))
    path = write_labels(folder / "my_scores.csv", column, values, [*TRUTH[:num_wrong], *WRONG[num_wrong:]])
    write_store(tmp_path / "labeled.zarr", make_traces(len(TRUTH)))
    for words in (("convert", folder), ("convert", folder / "a.pkl", "--scores", path)):
        message = error_of(*words, store, code=3)
        assert "my_scores.csv" in message and "--score-column" in message and not store.exists()
    error_of("score", tmp_path / "labeled.zarr", "--scores", path, code=3)
    with pytest.raises(InvalidInputError, match="expected that they agree"):
        for task in plan_tasks([folder], store):
            write_task(task)
    convert(folder, store, "--score-column", column)
    assert tracestore.open(store).targets().tolist() == WRONG
    write_labels(path, column, values, WRONG)
    convert(folder, tmp_path / "agree.zarr")
    agreed = tracestore.open(tmp_path / "agree.zarr")
    assert agreed.labels.tolist() == agreed.targets().tolist() == WRONG


@pytest.mark.parametrize("column", ["exact_match", "em", "rouge_l", "f1"])
def test_a_metric_of_0_and_1_is_no_judgment(tmp_path, column):
    path = write_labels(tmp_path / "t.csv", column, [1, 0, 0, 0, 1, 0], [0, 1, 0, 1, 0, 1])
    convert(write_pickle(tmp_path / "a.pkl", make_traces(len(TRUTH))), tmp_path / "s.zarr", "--scores", path)
    assert tracestore.open(tmp_path / "s.zarr").labels.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("scores", [[0.6, 0, 1, 0, 1, 0], ["", 0, 1, 0, 1, 0]])
def test_a_grade_between_0_and_1_may_differ_from_the_label(tmp_path, scores):
    path = write_labels(tmp_path / "t.csv", "is_correct", scores, [1, *WRONG[1:]])
    convert(write_pickle(tmp_path / "a.pkl", make_traces(len(TRUTH))), tmp_path / "s.zarr", "--scores", path)
    assert tracestore.open(tmp_path / "s.zarr").labels.tolist() == [1, *WRONG[1:]]


@pytest.mark.parametrize("line", ["label", "is_hallucinated"])
@pytest.mark.parametrize("is_task", [False, True])
@pytest.mark.parametrize("is_table", [False, True])
def test_a_scores_file_contradicts_a_judgment_of_the_layout(tmp_path, line, is_task, is_table):
    folder, store = tmp_path / "in", tmp_path / "s.zarr"
    rows = [{"id": i, "ok": float(truth)} for i, truth in zip(IDS, TRUTH, strict=True)]
    write_pickle(folder / "a.pkl", [row | {"hs": np.ones((2, k + 2, 4), "f4")} for k, row in enumerate(rows)])
    write_scores(folder / "t.csv", dict(zip(IDS, TRUTH, strict=True)), "ok")
    lines = ["hidden_states = a.pkl : [id=id]/hs -> L S D"]
    lines += [f"{line} = t.csv : [id=question_id]/ok"] if is_table else [f"{line} = a.pkl : [id=id]/ok"]
    lines += ["ignore = a.pkl : []/ok"] if is_table else ["ignore = t.csv"]
    path = write_scores(tmp_path / "judge.csv", dict(zip(IDS, TRUTH, strict=True)), "is_correct")
    if is_task:
        with pytest.raises(InvalidInputError, match="agree"):
            tasks = plan_tasks([folder], store, ConvertOptions(layout=lines_of(lines), scores=path))
            for task in tasks:
                write_task(task)
            commit_tasks(tasks)
    else:
        error_of("convert", folder, store, *field_flags(*lines), "--scores", path, code=3)
    with pytest.raises(UsageError):
        tracestore.open(store)


def lines_of(lines):
    return dict(text.split(" = ", 1) for text in lines)


@pytest.mark.parametrize("column", ["is_correct", "is_hallucinated"])
def test_a_scores_file_contradicts_a_stored_label(tmp_path, column):
    store = tmp_path / "s.zarr"
    traces = [trace | {"label": label} for trace, label in zip(make_traces(len(TRUTH)), WRONG, strict=True)]
    convert(write_pickle(tmp_path / "a.pkl", traces), store)
    wrong, right = (WRONG, TRUTH) if column == "is_correct" else (TRUTH, WRONG)
    path = write_scores(tmp_path / "t.csv", dict(zip(IDS, wrong, strict=True)), column)
    assert "agree" in error_of("score", store, "--scores", path, code=3)
    assert not tracestore.open(store).score_fields
    command("score", store, "--scores", path, "--name", "judge", check=0)
    path = write_scores(tmp_path / "t.csv", dict(zip(IDS, right, strict=True)), column)
    command("score", store, "--scores", path, "--name", column, check=0)
    # The file replaces the label inside a trace.
    path = write_scores(tmp_path / "t.csv", dict(zip(IDS, wrong, strict=True)), column)
    convert(tmp_path / "a.pkl", tmp_path / "n.zarr", "--scores", path)
    assert tracestore.open(tmp_path / "n.zarr").targets().tolist() == TRUTH
