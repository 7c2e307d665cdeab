"""Folds are written once, and a file that was changed or belongs to other labels is refused."""

import json

import numpy as np
import pytest

import tracestore
from tests.detectors.published.conftest import write_published
from tests.helpers import command, write_scores
from tracestore.benchmark.frozen_folds import frozen_folds, make_frozen_folds, read_folds
from tracestore.errors import InvalidInputError, TrainingError, UsageError


@pytest.fixture
def store(tmp_path):
    """Open a store of 60 questions in 12 groups."""
    return tracestore.open(write_published(tmp_path / "s.zarr"))


def test_questions_and_groups_are_in_one_fold(sampled):
    store = tracestore.open(sampled)
    folds = make_frozen_folds(store, store.targets(), 3, 0)
    labeled = np.flatnonzero(~np.isnan(store.targets()))
    for scheme in ("question", "group"):
        found = folds.folds(store, labeled, scheme)
        assert set(found) == {0, 1, 2}
        fold_of = {}
        for k, fold in zip(labeled.tolist(), found.tolist(), strict=True):
            assert fold_of.setdefault(store.question_ids[k], fold) == fold
            if scheme == "group" and store.group(k):
                assert fold_of.setdefault(store.group(k), fold) == fold


def test_folds_are_read_again(store, tmp_path):
    path = tmp_path / "folds.json"
    first = frozen_folds(path, store, store.targets(), 5, 1)
    written = path.read_bytes()
    assert frozen_folds(path, store, store.targets(), 5, 1) == first and path.read_bytes() == written
    assert make_frozen_folds(store, store.targets(), 5, 1).digest == first.digest
    assert make_frozen_folds(store, store.targets(), 5, 2).digest != first.digest
    with pytest.raises(UsageError, match="5 folds with seed 1, not 4 with 1"):
        frozen_folds(path, store, store.targets(), 4, 1)


def test_folds_of_another_run_are_not_replaced(store, tmp_path):
    path = tmp_path / "folds.json"
    first, second = (make_frozen_folds(store, store.targets(), 5, seed) for seed in (1, 2))
    first.write(path)
    second.write(path)
    assert read_folds(path) == first and [p.name for p in tmp_path.glob("*folds*")] == ["folds.json"]


def test_changed_file_is_refused(store, tmp_path):
    path = tmp_path / "folds.json"
    frozen_folds(path, store, store.targets(), 5, 1)
    saved = json.loads(path.read_text())
    saved["fold_of"]["question"]["q0"] = (saved["fold_of"]["question"]["q0"] + 1) % 5
    path.write_text(json.dumps(saved))
    with pytest.raises(InvalidInputError, match="the content was changed"):
        read_folds(path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "folds-s.json").write_text(json.dumps(saved))
    done = command("benchmark", store.path, "--detectors", "length", "--output-dir", out, "--seed", 1, check=3)
    assert "the content was changed" in done.stderr and done.stderr.count("\n") == 1
    for text in (
        "{",
        "[]",
        '{"version": 2}',
        '{"version": 1, "num_folds": 2, "seed": 0, "labels": "", "fold_of": [1]}',
    ):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match="not a file of folds"):
            read_folds(path)


def test_folds_of_other_labels_are_refused(store, tmp_path):
    path = tmp_path / "folds.json"
    targets = store.targets()
    frozen_folds(path, store, targets, 5, 1)
    with pytest.raises(UsageError, match="other questions, groups or labels"):
        frozen_folds(path, store, 1 - targets, 5, 1)
    groups = write_scores(tmp_path / "groups.csv", {"q0": 0.5}, extra=[("group", {"q0": "other"})])
    command("score", store.path, "--scores", groups, check=0)
    with pytest.raises(UsageError, match="other questions, groups or labels"):
        frozen_folds(path, tracestore.open(store.path), targets, 5, 1)


def test_fold_without_a_class_is_refused(store):
    targets = np.zeros(60)
    targets[:3] = 1
    with pytest.raises(TrainingError, match="every fold needs both classes"):
        make_frozen_folds(store, targets, 5, 0)
