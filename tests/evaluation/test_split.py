"""Splits and folds: pure functions of the data that keep questions and groups together."""

import numpy as np
import pytest

import tracestore
from tests.helpers import make_trace, make_traces, write_store
from tracestore.errors import TrainingError
from tracestore.evaluation import store_split as splits
from tracestore.split import SPLITS, question_keys, split_keys


def test_split_is_a_pure_function():
    keys, labels = [f"k{i}" for i in range(200)], [i % 3 == 0 for i in range(200)]
    first = split_keys(keys, labels, 1)
    shuffled = np.random.default_rng(0).permutation(200)
    assert split_keys([keys[i] for i in shuffled], [labels[i] for i in shuffled], 1) == first
    assert split_keys(keys, labels, 2) != first
    for positive in (True, False):
        names = [first[k] for k, y in zip(keys, labels, strict=True) if y == positive]
        assert abs(names.count("train") / len(names) - 0.7) < 0.02


def test_split_keeps_questions_and_groups_together(tmp_path):
    traces = [make_trace(k, tokens=2, seed=sample) | {"sample": sample} for k in range(60) for sample in range(2)]
    write_store(tmp_path / "s.zarr", traces, score=lambda n: n // 6 % 2, group=lambda n: f"g{n // 6}")
    store = tracestore.open(tmp_path / "s.zarr")
    split = splits.make_split(store, store.targets(), 0)
    split_of = {int(i): name for name, indices in split.indices.items() for i in indices}
    assert len(split_of) == 120
    for group in range(20):
        assert len({split_of[6 * group + k] for k in range(6)}) == 1


# Groups of the samples of 40 questions, and of one that the earlier run does not use.
GROUPS = {
    "none": lambda k, sample: "",
    "each": lambda k, sample: f"k{k}",
    "four": lambda k, sample: f"g{k // 4}" if k < 40 else "",
    "others": lambda k, sample: f"h{k % 5}",
    "joined by samples": lambda k, sample: f"j{(k + sample) % 20}",
    "joined by a new question": lambda k, sample: f"g{k // 4 if k < 40 else sample}",
}


@pytest.mark.parametrize("is_folded", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("none", "none", None),
        ("none", "each", None),
        ("four", "none", None),
        ("four", "four", None),
        ("four", "joined by a new question", None),
        ("none", "four", "groups of .* have changed .* group 'g0' and"),
        ("four", "others", "groups of .* have changed .* group 'h0'"),
        ("none", "joined by samples", "groups of .* have changed .* group 'j0'"),
        ("four", "unlabeled", "1 question of the earlier run, such as 'q0': without a label or score in"),
        ("four", "removed", "1 question of the earlier run, such as 'nowhere': not in"),
    ],
)
def test_the_split_of_an_earlier_run_keeps_the_groups_of_now_together(tmp_path, is_folded, before, after, message):
    traces = [make_trace(k, tokens=2, seed=sample) | {"sample": sample} for k in range(41) for sample in range(2)]

    def store_with(name, groups, unlabeled):
        score = [None if k == unlabeled else float(k % 2) for k in range(41)]
        path = write_store(
            tmp_path / name, traces, score=lambda n: score[n // 2], group=lambda n: groups(*divmod(n, 2))
        )
        return tracestore.open(path)

    first = store_with("a", GROUPS[before], 40)
    targets = first.targets()
    made = splits.make_folds(first, targets, 3, 0)[2] if is_folded else splits.make_split(first, targets, 0)
    ids = made.question_ids
    ids["train"] += ["nowhere"] * (after == "removed")
    now = store_with("b", GROUPS.get(after, GROUPS[before]), 0 if after == "unlabeled" else None)
    if message is None:
        again = splits.split_from_ids(now, now.targets(), ids)
        assert all(np.array_equal(again.indices[part], made.indices[part]) for part in SPLITS)
    else:
        with pytest.raises(TrainingError, match=message):
            splits.split_from_ids(now, now.targets(), ids)


def test_folds_are_a_pure_function():
    keys, labels = [f"k{i}" for i in range(203)], [i % 3 == 0 for i in range(203)]
    first = splits.fold_keys(keys, labels, 5, 1)
    shuffled = np.random.default_rng(0).permutation(203)
    assert splits.fold_keys([keys[i] for i in shuffled], [labels[i] for i in shuffled], 5, 1) == first
    assert splits.fold_keys(keys, labels, 5, 2) != first
    for key in keys:
        assert [fold[key] for fold in first].count("test") == 1
    for positive in (True, False):
        mine = [k for k, y in zip(keys, labels, strict=True) if y == positive]
        for fold in first:
            names = [fold[k] for k in mine]
            assert abs(names.count("test") - len(mine) / 5) <= 1
            assert abs(names.count("val") - len(mine) * 0.8 / 6) <= 2


def test_groups_of_any_size_are_assigned_evenly():
    rng = np.random.default_rng(0)
    keys = np.repeat([f"g{k}" for k in range(60)], rng.integers(1, 40, 60))
    labels = rng.random(len(keys)) < 0.3
    for fold in splits.fold_keys(keys.tolist(), labels.tolist(), 4, 0):
        tested = np.array([fold[k] == "test" for k in keys])
        assert tested.mean() == pytest.approx(0.25, abs=0.02)
        assert labels[tested].mean() == pytest.approx(labels.mean(), abs=0.03)


def test_questions_that_share_groups_get_the_same_key():
    questions = ["q1", "q1", "q2", "q3", "q3", "q4", "q5"]
    groups = ["b", "", "a", "a", "b", "", "c"]
    assert question_keys(questions, groups) == ["a", "a", "a", "a", "a", "q4", "c"]
    assert question_keys(["q"] * 3, ["", "", ""]) == ["q"] * 3


def test_no_question_and_no_group_is_in_two_splits(sampled):
    store = tracestore.open(sampled)
    targets = store.targets()
    for seed in range(25):
        folds = splits.make_folds(store, targets, 3, seed)
        tested = np.concatenate([fold.indices["test"] for fold in folds])
        assert sorted(tested) == list(range(80)), "every labeled trace is tested once, the unlabeled one never"
        for split in (splits.make_split(store, targets, seed), *folds):
            split_of = {int(i): name for name, indices in split.indices.items() for i in indices}
            assert len(split_of) == 80
            for key_of in (lambda i: store.question_ids[i], store.group):
                names = {}
                for i, name in split_of.items():
                    names.setdefault(key_of(i), set()).add(name)
                names.pop("", None)
                assert all(len(found) == 1 for found in names.values())
            again = splits.split_from_ids(store, targets, split.question_ids)
            assert all(np.array_equal(again.indices[p], split.indices[p]) for p in SPLITS)


def test_too_few_questions_are_refused_by_fold(tmp_path):
    store = tracestore.open(write_store(tmp_path / "s.zarr", make_traces(12), score=lambda k: float(k > 2)))
    with pytest.raises(TrainingError, match=r"fold \d: every split needs traces of both classes"):
        splits.make_folds(store, store.targets(), 5, 0)
