"""Test `tracestore compare`: runs with different flags on the same traces."""

import json

import pytest

from tests.helpers import command
from tests.train.runs import FAST, ONLY, write_labeled


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train into output folders: two that differ in a flag, one with another split, three with folds."""
    folder = tmp_path_factory.mktemp("compare")
    store = write_labeled(folder / "store.zarr")
    flags = ["--store", store, *FAST, *ONLY["lstm_solo"], "--no-probe", "--epochs", 2]
    for name, more in (
        ("plain", []),
        ("layers", ["--layers", "0,2"]),
        ("other", ["--seed", 7]),
        ("folds", ["--folds", 2, "--seeds", 2]),
        ("folds2", ["--folds", 2, "--lr", 0.01]),
        ("folds3", ["--folds", 2, "--seed", 43]),
    ):
        command("train", *flags, *more, "--output-dir", folder / name, check=0)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("first", "second", "count"), [("plain", "layers", 1), ("folds", "folds2", 2)])
def test_compares_runs_with_a_paired_test(runs, tmp_path, first, second, count):
    done = command("compare", runs / first, runs / second, "--json", check=0)
    found = json.loads(done.stdout)["lstm_solo"]
    (pair,) = found["comparisons"]
    a, b = (found["models"][str(runs / name)]["test"]["auroc"] for name in (first, second))
    assert pair["difference"] == pytest.approx(a - b)
    # The test split of a single run has only four questions of a class, too few for a test.
    assert (pair["p"] is None and pair["interval"] is None) if count == 1 else 0 < pair["p"] <= 1
    saved = json.loads((runs / second / "results.json").read_text())
    assert b == pytest.approx(saved["models"]["lstm_solo"]["test"]["auroc"])
    page = tmp_path / "comparison.html"
    done = command("compare", runs / first, runs / second, "--output", page, check=0)
    text = page.read_text(encoding="utf-8")
    assert "has the highest AUROC" in text and f"{runs / first} - {runs / second}" in text and str(page) in done.stdout
    option = "layers" if count == 1 else "lr"
    assert f'<th scope="row">{option}</th>' in text and '<th scope="row">epochs</th>' not in text
    assert ("fewer than 5 of a class" in done.stdout) == (count == 1)
    assert f"lstm_solo, {count} run" in done.stdout and f"{runs / first} - {runs / second}" in done.stdout


@pytest.mark.long
def test_incomparable_runs_are_a_usage_error(runs, tmp_path):
    (tmp_path / "results.json").write_text("[1, 2")
    for folders, words in (
        ([runs / "plain"], "at least two"),
        ([runs / "plain", runs / "plain"], "at least two"),
        ([runs / "plain", runs / "nothing"], "No such file"),
        ([runs / "plain", tmp_path], "not the results"),
        ([runs / "plain", runs / "other"], "same --seed"),
        ([runs / "plain", runs / "folds"], "no fold and seed in common"),
        ([runs / "folds", runs / "folds3"], "different traces, labels or folds"),
    ):
        done = command("compare", *folders, check=2)
        assert done.stderr.count("\n") == 1 and words in done.stderr
