"""Test converting again: layouts that the store keeps, and labels, scores and groups that have changed."""

import csv

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of, make_traces, write_pickle
from tests.ingest.execute.folders import dump, states, table

LINES = ["hidden_states = *.pkl : [id=id]/hs -> L S D", "is_correct = labels.csv : [id=id]/ok"]
FLAGS = [word for line in LINES for word in ("--field", line)]


def rows(*numbers):
    return [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k)} for k in numbers]


def write_labels(folder, values):
    table(folder / "labels.csv", [{"id": f"q{k}", "ok": value} for k, value in enumerate(values)])


def labels(store):
    """Return the stored scores of is_correct by id."""
    opened = tracestore.open(store)
    return dict(zip(opened.question_ids, opened.scores.tolist(), strict=True))


@pytest.fixture
def folder(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(0, 1))
    write_labels(tmp_path / "in", [1, 0])
    return tmp_path / "in"


def test_new_files_are_read_by_the_layout_of_the_store(tmp_path, folder):
    convert(folder, tmp_path / "s.zarr", *FLAGS)
    dump(folder / "b.pkl", rows(2, 3))
    write_labels(folder, [1, 0, 0, 1])

    convert(folder, tmp_path / "s.zarr")

    assert labels(tmp_path / "s.zarr") == {"q0": 1, "q1": 0, "q2": 0, "q3": 1}
    store = tracestore.open(tmp_path / "s.zarr")
    np.testing.assert_allclose(store[store.index_of("q3")].hidden_states, rows(3)[0]["hs"], rtol=1e-3)
    (text,) = store.internals.attributes.layouts
    assert '[id=id]/hs -> L S D"' in text


def test_a_file_that_no_kept_line_names_is_refused(tmp_path, folder):
    convert(folder, tmp_path / "s.zarr", *FLAGS)
    np.save(folder / "more.npy", states(3, 4))

    assert "more.npy" in error_of("convert", folder, tmp_path / "s.zarr", code=3)


def test_changed_labels_of_a_table_replace_those_of_the_store(tmp_path, folder):
    convert(folder, tmp_path / "s.zarr", *FLAGS)
    write_labels(folder, [0, 0])

    done = convert(folder, tmp_path / "s.zarr")

    assert labels(tmp_path / "s.zarr") == {"q0": 0, "q1": 0}
    assert "1 stored label replaced by changed ones" in done.stdout


def test_another_layout_is_added(tmp_path, folder):
    convert(folder, tmp_path / "s.zarr", *FLAGS)
    dump(tmp_path / "more/b.joblib", [{"name": "x", "acts": states(2, 4, 8, seed=9)}])
    convert(tmp_path / "more", tmp_path / "s.zarr", "--field", "hidden_states = *.joblib : [id=name]/acts -> L S D")

    assert len(tracestore.open(tmp_path / "s.zarr").internals.attributes.layouts) == 2
    convert(folder, tmp_path / "s.zarr")
    assert sorted(tracestore.open(tmp_path / "s.zarr").question_ids) == ["q0", "q1", "x"]


def test_a_store_of_families_keeps_no_layout(tmp_path):
    write_pickle(tmp_path / "a.pkl", make_traces(3))
    convert(tmp_path / "a.pkl", tmp_path / "s.zarr")

    assert tracestore.open(tmp_path / "s.zarr").internals.attributes.layouts == ()


def write_scores(path, scores, groups=None):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["question_id", "score", *(["group"] if groups else [])])
        for k, score in enumerate(scores):
            writer.writerow([f"q{k}", score, *([groups[k]] if groups else [])])


@pytest.mark.parametrize(
    "flags", [[], ["--on-conflict", "keep-last"], ["--scores"]], ids=["found", "keep-last", "named"]
)
def test_changed_scores_replace_those_of_the_store(tmp_path, flags):
    (tmp_path / "in").mkdir()
    write_pickle(tmp_path / "in/a.pkl", make_traces(4))
    path = tmp_path / "in/scores.csv"
    flags = [*flags, path] if flags == ["--scores"] else flags
    write_scores(path, [0.1, 0.2, 0.3], ["a", "a", "b"])
    convert(tmp_path / "in", tmp_path / "s.zarr", *flags)
    write_scores(path, [0.1, 0.9, 0.3, 0.4], ["a", "a", "c", "d"])

    done = convert(tmp_path / "in", tmp_path / "s.zarr", *flags)

    store = tracestore.open(tmp_path / "s.zarr")
    assert store.scores.tolist() == [0.1, 0.9, 0.3, 0.4]
    assert "scores, labels or groups of 2 stored traces have changed and were replaced" in done.stdout
    again = convert(tmp_path / "in", tmp_path / "s.zarr", *flags)
    assert "have changed" not in again.stdout


def test_the_first_score_of_the_layout_is_the_default(tmp_path):
    names = [f"s{k}" for k in (3, 1, 7, 0, 5, 2, 6, 4)]
    dump(tmp_path / "in/a.pkl", rows(0, 1))
    table(tmp_path / "in/scores.csv", [{"id": f"q{k}"} | dict.fromkeys(names, k / 2) for k in range(2)])
    lines = {f"correctness.{name}": f"scores.csv : [id=id]/{name}" for name in names}

    layout = {"hidden_states": "*.pkl : [id=id]/hs -> L S D", **lines}
    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", layout=layout)

    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.internals.attributes.default_score == names[0]
