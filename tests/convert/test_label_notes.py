"""Test that what loses labels, or gives labels by a threshold that does not fit, is reported with its flag."""

import csv
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tracestore
from tests.helpers import command, convert, make_trace, make_traces, write_pickle, write_store
from tracestore.errors import UsageError
from tracestore.store.format.labels import describe, threshold_or_default, unlabeled_note

SCALE = "4 scores from 20 to 80, outside [0, 1], where the default threshold 0.5 applies; train --score-threshold chooses another"
HUNDREDS = [20, 80, 20, 80]


def traces(first=0, count=4, **values):
    """Return traces, each with the values of its position."""
    made = [make_trace(k, tokens=2) for k in range(first, first + count)]
    return [trace | {key: given[k] for key, given in values.items()} for k, trace in enumerate(made)]


def source(folder, name, first=0, count=4, **values):
    """Write traces into a folder of their own."""
    write_pickle(folder / name / f"{name}.pkl", traces(first, count, **values))
    return folder / name


def stored(folder, name, first=0, **values):
    """Return a store of such traces."""
    convert(source(folder, f"{name}_src", first, **values), folder / f"{name}.zarr")
    return folder / f"{name}.zarr"


def table(path, column, values, first=0):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["question_id", column], *([f"q{first + k}", value] for k, value in enumerate(values))])
    return path


def merged(folder, first, second):
    command("merge", first, folder / "both.zarr", check=0)
    return command("merge", second, folder / "both.zarr", check=0).stdout


def merge_of_two_names(folder):
    one, two = stored(folder, "one", score=[0, 1, 0, 1]), stored(folder, "two", 4, hallucination_score=[1, 0, 1, 0])
    return command("merge", one, two, folder / "both.zarr", check=0).stdout


def merge_into_another_name(folder):
    return merged(
        folder, stored(folder, "one", hallucination_score=[0, 1, 0, 1]), stored(folder, "two", 4, bleurt=[1, 0, 1, 0])
    )


def merge_of_different_defaults(folder):
    one = stored(folder, "one", bleurt=[1, 0, 1, 0])
    both = stored(folder, "two", 4, score=[1, 0, 1, 0])
    judged = table(folder / "judged.csv", "bleurt", [0, 0, 1, 1], first=4)
    command("score", both, "--scores", judged, "--name", "bleurt", check=0)
    return command("merge", one, both, folder / "both.zarr", check=0).stdout


def merge_of_a_labeled_and_a_scored_store(folder):
    one, two = stored(folder, "one", label=[0, 1, 0, 1]), stored(folder, "two", 4, score=[0, 1, 0, 1])
    return command("merge", one, two, folder / "both.zarr", check=0).stdout


def merge_of_duplicates_with_both_scores(folder):
    found, stores = source(folder, "src"), [folder / "one.zarr", folder / "two.zarr"]
    for store, column, values in zip(
        stores, ("score", "hallucination_score"), ([0, 1, 0, 1], [1, 0, 1, 0]), strict=True
    ):
        convert(found, store, "--scores", table(folder / f"{column}.csv", column, values))
    return command("merge", *stores, folder / "both.zarr", check=0).stdout


def convert_with_a_scores_file(folder):
    found = source(folder, "one")
    return convert(found, folder / "s.zarr", "--scores", table(folder / "s.csv", "score", HUNDREDS)).stdout


def convert_of_scores_inside(folder):
    return convert(source(folder, "one", score=HUNDREDS), folder / "s.zarr").stdout


def convert_of_another_score(folder):
    store = stored(folder, "one", score=[0, 1, 0, 1])
    return convert(source(folder, "two", 4, hallucination_score=[0, 1, 0, 1]), store).stdout


def convert_with_a_file_of_another_name(folder):
    store = stored(folder, "one", score=[0, 1, 0, 1])
    return convert(
        source(folder, "two", 4), store, "--scores", table(folder / "s.csv", "bleurt", [0, 1, 0, 1], 4)
    ).stdout


def convert_with_a_file_instead_of_labels(folder):
    found = source(folder, "one", label=[0, 1, 0, 1])
    return convert(found, folder / "s.zarr", "--scores", table(folder / "s.csv", "score", [0.2])).stdout


def convert_of_labels_beside_scores(folder):
    return convert(source(folder, "one", 0, 2, label=[0, 1], score=[0.9, 0.2]), folder / "s.zarr").stdout


def convert_of_one_class(folder):
    return convert(source(folder, "one", score=[0.6, 0.7, 0.8, 0.9]), folder / "s.zarr").stdout


def score_in_hundreds(folder):
    store = stored(folder, "one")
    return command("score", store, "--scores", table(folder / "s.csv", "score", HUNDREDS), check=0).stdout


def score_of_a_part_as_default(folder):
    store, judged = stored(folder, "one", score=[0, 1, 0, 1]), table(folder / "s.csv", "judge_score", [0, 1])
    arguments = ["--score-column", "judge_score", "--score-direction", "correct", "--name", "judge", "--default"]
    return command("score", store, "--scores", judged, *arguments, check=0).stdout


def subset_without_the_default_score(folder):
    both = stored(folder, "one", score=[0, 1, 0, 1])
    convert(source(folder, "two", 4, bleurt=[0, 1, 0, 1]), both)
    (folder / "ids").write_text("q5\nq6\n")
    return command("subset", both, folder / "part.zarr", "--ids", folder / "ids", check=0).stdout


CASES = [
    (merge_of_two_names, ["two.zarr: 4 traces without a label in", "the default score of", "4 traces without a label or the score score: --score hallucination_score gives 4 of them one"]),
    (merge_into_another_name, ["4 traces without a label in", "--score bleurt gives 4 of them one"]),
    (merge_of_different_defaults, ["two.zarr: 2 traces with another label in", "is bleurt"]),
    (merge_of_a_labeled_and_a_scored_store, []),
    (merge_of_duplicates_with_both_scores, []),
    (convert_with_a_scores_file, [SCALE, "0 without a label or score"]),
    (convert_of_scores_inside, [SCALE]),
    (convert_of_another_score, ["4 without a label or score", "--score hallucination_score gives 4 of them one"]),
    (convert_with_a_file_of_another_name, ["4 without a label or score", "--score bleurt gives 4 of them one"]),
    (convert_with_a_file_instead_of_labels, ["3 without a label or score", "label: found inside 3 traces without a score in s.csv, not used"]),
    (convert_of_labels_beside_scores, ["0 without a label or score", "1 of 2 stored labels: hallucination"]),
    (convert_of_one_class, ["0 of 4 below 0.5", "all of one class, which --score-threshold and --score-direction decide"]),
    (score_in_hundreds, [SCALE]),
    (score_of_a_part_as_default, ["2 traces without a label or the score judge: --score score gives 2 of them one"]),
    (subset_without_the_default_score, ["2 traces without a label or the score score: --score bleurt gives 2 of them one"]),
]  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), CASES, ids=[case.__name__ for case, _ in CASES])
def test_what_happens_to_labels_is_reported(tmp_path, case, expected):
    found = case(tmp_path)
    for text in expected:
        assert text in found, found
    if not expected:
        assert "without a label" not in found and "another label" not in found, found


@pytest.fixture
def hundreds(tmp_path):
    """Forty traces with scores of 20 and 80."""
    made = make_traces(40, tokens=3)
    for trace in made:
        trace["attentions"] = [np.tril(np.ones_like(a)) / np.arange(1, 4)[:, None] for a in trace["attentions"]]
    return write_store(tmp_path / "hundreds.zarr", made, score=lambda k: 20 + 60 * (k % 2), group=lambda k: f"g{k}")


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--store", "{store}", "--output-dir", "{out}"),
        ("benchmark", "{store}", "--output-dir", "{out}"),
        ("subset", "{store}", "{out}", "--split", "train"),
        ("report", "{store}", "--output", "{out}.html"),
        ("serve", "{store}"),
    ],
)
def test_a_command_refuses_to_guess_a_threshold(hundreds, tmp_path, words):
    done = command(*(word.format(store=hundreds, out=tmp_path / "out") for word in words), check=2)
    assert "40 scores from 20 to 80" in done.stderr and "--score-threshold" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


USES = {
    "y": lambda store, threshold: store.targets(threshold) if threshold else store.y,
    "subset": lambda store, threshold: store[[3, 4, 5]].targets(threshold),
    "one class": lambda store, threshold: store[store.scores > 50].targets(threshold),
    "filter": lambda store, threshold: store.filter(y=1) if threshold is None else store.targets(threshold),
    "split": lambda store, threshold: store.split(score_threshold=threshold).train.scores,
    "train_test_split": lambda store, threshold: store.train_test_split(0.2, score_threshold=threshold).train.scores,
    "loader": lambda store, threshold: tracestore.TraceLoader(store, score_threshold=threshold).targets,
    "dataset": lambda store, threshold: tracestore.TraceDataset(store, score_threshold=threshold)[1].y,
    "iterable": lambda store, threshold: next(iter(tracestore.TraceIterableDataset(store, score_threshold=threshold))).y,
    "tokens": lambda store, threshold: tracestore.TraceLoader(store, "tokens", score_threshold=threshold).targets,
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_python_refuses_to_guess_a_threshold(hundreds, use):
    with tracestore.open(hundreds) as store:
        with pytest.raises(UsageError, match=r"scores from 20 to 80.*score_threshold"):
            USES[use](store, None)
        USES[use](store, 50.0)
        assert store.targets(50.0).tolist() == [1.0, 0.0] * 20 and "unknown" not in store._repr_html_()
        assert tracestore.TraceLoader(store, targets=np.arange(40.0)).targets.tolist() == list(range(40))


def test_lint_reports_the_range(hundreds):
    found = json.loads(command("lint", hundreds, "--json", check=1).stdout)
    assert found["counts"] == {"score_range": 1}
    command("lint", hundreds, "--score-threshold", 50, check=0)


_VALUES = st.one_of(st.none(), st.floats(-3, 3, width=32), st.sampled_from([0.0, 0.5, 1.0]))


@pytest.mark.long
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(_VALUES, st.sampled_from([None, 0.0, 1.0]), _VALUES), min_size=1, max_size=12),
    st.sampled_from(["correct", "hallucination"]),
)
def test_the_texts_fit_any_scores_and_labels(rows, direction):
    scores, labels, others = (
        np.array([np.nan if v is None else v for v in column]) for column in zip(*rows, strict=True)
    )
    used = [s for s, label, _ in rows if s is not None and label is None]
    fits = all(0 <= score <= 1 for score in used)
    if fits:
        assert threshold_or_default(None, scores, labels, "s.zarr") == 0.5
    else:
        with pytest.raises(UsageError, match=r"s\.zarr.*--score-threshold"):
            threshold_or_default(None, scores, labels, "s.zarr")
    assert threshold_or_default(0.5, scores, labels, "s.zarr") == 0.5
    text = describe(scores, labels, None, direction)
    assert ("outside [0, 1]" in text) == (not fits) and text
    missing = [k for k, (score, label, _) in enumerate(rows) if score is None and label is None]
    gains = sum(rows[k][2] is not None for k in missing)
    note = unlabeled_note({"score": scores, "other": others}, labels, "score")
    assert (note is None) == (gains == 0)
    if note is not None:
        assert note.startswith(f"{len(missing)} trace") and f"--score other gives {gains} of them one" in note


@pytest.mark.parametrize("direction", ["correct", "hallucination"])
def test_a_scores_file_keeps_its_name_next_to_the_default_of_another_command(tmp_path, direction):
    found, store = source(tmp_path, "one"), tmp_path / "s.zarr"
    table(found / "scores.csv", "score", [0, 1, 0, 1])
    convert(found, store)
    judged = table(tmp_path / "judged.csv", "judge", [0.1, 0.2, 0.3, 0.4])
    arguments = ["--score-column", "judge", "--score-direction", direction, "--name", "m", "--default"]
    command("score", store, "--scores", judged, *arguments, check=0)
    write_pickle(found / "two.pkl", traces(4))
    table(found / "scores.csv", "score", [1, 1, 0, 1, 0, 1, 0, 1])

    text = convert(found, store).stdout

    with tracestore.open(store) as opened:
        assert opened.score_name == "m"
        np.testing.assert_allclose(opened.named_scores("m"), [0.1, 0.2, 0.3, 0.4, *[np.nan] * 4], rtol=1e-6)
        np.testing.assert_array_equal(opened.named_scores("score"), [1, 1, 0, 1, 0, 1, 0, 1])
    assert "4 traces without a label or the score m: --score score gives 4 of them one" in text, text
