"""The command `tracestore benchmark`: what it compares, and the files that it writes."""

import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

import tracestore
from tests.detectors.plugins import install
from tests.detectors.published.conftest import COUNT, make_labeled, write_published
from tests.helpers import ROOT, command, error_of, make_traces, write_scores, write_store
from tracestore.benchmark.fold_metrics import agreement
from tracestore.benchmark.fold_runs import platt
from tracestore.benchmark.run import BenchmarkOptions, run_benchmark
from tracestore.detectors import registry
from tracestore.evaluation.metrics import auroc
from tracestore.evaluation.significance import adjusted_p_to, holm

METRICS = ("auroc", "auprc", "prr", "risk_coverage_area", "brier", "ece", "within_group_auroc")
CONTROLS = {"length", "group_rate", "probe_prompt", "mean_logprob"}


@pytest.fixture
def path(tmp_path):
    """Write a store of 60 questions in 12 groups."""
    return write_published(tmp_path / "s.zarr")


@pytest.fixture
def with_plugin(tmp_path, monkeypatch):
    """Install the package of a detector."""
    monkeypatch.syspath_prepend(str(install(tmp_path / "site")))
    registry.registry.cache_clear()
    yield
    registry.registry.cache_clear()


def run(path, out, *names, folds=3, **options):
    return run_benchmark([path], out, BenchmarkOptions(names, folds=folds, **options), lambda _: None)


@pytest.mark.long
def test_detector_of_another_package_is_in_the_table_with_all_metrics(path, tmp_path, with_plugin):
    out = tmp_path / "out"
    words = ("--detectors", "norm,probe_mean", "--folds", 3, "--workers", 2, "--output-dir", out)
    done = command("benchmark", path, *words, check=0)
    results = json.loads((out / "benchmark.json").read_text())
    (entry,) = results["stores"].values()
    assert set(entry["detectors"]) == {"norm", "probe_mean", *CONTROLS}
    norm = entry["detectors"]["norm"]
    assert norm["package"] == "norm-detector" and norm["provenance"]["fields"] == ["last_token"]
    for test in norm["schemes"].values():
        assert all(isinstance(test[name], float) for name in METRICS)
        assert all(len(test[f"interval_by_{unit}"]) == 2 for unit in ("question", "group"))
        assert test["interval_methods"] == {"question": "bootstrap", "group": "jackknife"}
    assert norm["fit_s"] > 0 and norm["peak_bytes"] >= 0
    lines = [line for line in done.stdout.splitlines() if "norm" in line and " to " in line]
    assert len(lines) == 2
    assert (out / "table.txt").read_text().strip() in done.stdout


@pytest.mark.long
def test_comparisons_are_adjusted_over_all_pairs(path, tmp_path):
    (entry,) = run(path, tmp_path / "out", "probe_mean")["stores"].values()
    assert {(c["scheme"], c["unit"]) for c in entry["comparisons"]} == {
        (scheme, unit) for scheme in ("question", "group") for unit in ("question", "group")
    }
    for scheme in ("question", "group"):
        pairs = [c for c in entry["comparisons"] if (c["scheme"], c["unit"]) == (scheme, "group")]
        assert len(pairs) == 10 and [c["p_holm"] for c in pairs] == holm([c["p"] for c in pairs])
        found = {name: d["schemes"][scheme]["auroc"] for name, d in entry["detectors"].items()}
        assert all(c["difference"] == pytest.approx(found[c["first"]] - found[c["second"]]) for c in pairs)


def section(text, scheme):
    """Return the part of the page's verdict about a scheme of folds."""
    return text.split(f">s, folds by {scheme}</h3>")[1].split("</h3>")[0].split("</section>")[0]


@pytest.mark.long
def test_report_ranks_the_detectors_of_each_scheme(path, tmp_path):
    (entry,) = run(path, tmp_path / "out", "probe_mean", command="tracestore benchmark <x>")["stores"].values()
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    for scheme in ("question", "group"):
        best = max(entry["detectors"], key=lambda d: entry["detectors"][d]["schemes"][scheme]["auroc"])
        assert f"{best} has the highest AUROC of {len(entry['detectors'])} detectors" in text
        assert f">s, folds by {scheme}</h2>" in text
        for unit, p in adjusted_p_to(best, [c for c in entry["comparisons"] if c["scheme"] == scheme]).items():
            assert set(p) == set(entry["detectors"]) - {best}
            equal = any(value >= 0.05 for value in p.values())
            assert (f"The tests by {unit} show no difference" in section(text, scheme)) == equal
    assert text.count('scope="row">probe_mean<') == 2 and "tracestore benchmark &lt;x&gt;" in text


@pytest.mark.long
def test_scores_are_out_of_fold_and_reproduce_the_metrics(path, tmp_path):
    out = tmp_path / "out"
    (entry,) = run(path, out, "probe_mean")["stores"].values()
    with open(out / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == COUNT and [r["question_id"] for r in rows] == [f"q{k}" for k in range(COUNT)]
    folds = json.loads((out / "folds-s.json").read_text())
    assert entry["folds"]["sha256"] == folds["sha256"]
    store = tracestore.open(path)
    for scheme in ("question", "group"):
        fold = np.array([int(r[f"fold:{scheme}"]) for r in rows])
        assert fold.tolist() == [folds["fold_of"][scheme][r["question_id"]] for r in rows]
        score, y = np.array([float(r[f"probe_mean:{scheme}"]) for r in rows]), np.array([int(r["label"]) for r in rows])
        by_fold = [auroc(y[fold == k], score[fold == k]) for k in range(3)]
        test = entry["detectors"]["probe_mean"]["schemes"][scheme]
        assert test["auroc_by_fold"] == pytest.approx(by_fold) and test["auroc"] == pytest.approx(np.mean(by_fold))
        detector = registry.make_detector("probe_mean")
        detector.seed, detector.keep_together = 42, scheme
        detector.fit(store, np.flatnonzero(fold != 0), y[fold != 0])
        np.testing.assert_allclose(detector.score(store, np.flatnonzero(fold == 0)), score[fold == 0], rtol=1e-6)
        assert test["chosen"][0] == detector.chosen


@pytest.mark.long
def test_processes_side_by_side_give_the_same_scores(path, tmp_path):
    for workers in (1, 2):
        run(path, tmp_path / f"out{workers}", "probe_mean", "saplma", workers=workers)
    assert (tmp_path / "out1/scores.csv").read_bytes() == (tmp_path / "out2/scores.csv").read_bytes()


@pytest.mark.long
def test_external_scores_join_the_table(path, tmp_path):
    scores = {f"q{k}": 0.9 - 0.7 * (k % 2) + 0.01 * (k % 7) for k in range(COUNT)}
    judge = write_scores(tmp_path / "judge.csv", scores)
    words = ("benchmark", path, "--detectors", "length", "--output-dir", tmp_path / "out")
    done = command(*words, "--scores", f"judge={judge}", "--json", check=0)
    (entry,) = json.loads(done.stdout)["stores"].values()
    test = entry["detectors"]["judge"]["schemes"]["question"]
    # A high score marks a correct answer; calibration learns the rest from the training labels.
    assert test["auroc"] == 1 and test["brier"] < 0.05 and entry["detectors"]["judge"]["kind"] == "external"
    del scores["q7"]
    write_scores(judge, scores)
    message = error_of(*words, "--overwrite", "--scores", f"judge={judge}", code=2)
    assert "no score for 1 of 60 labeled traces, first 'q7'" in message
    assert "the name of a detector" in error_of(*words, "--overwrite", "--scores", f"length={judge}", code=2)
    assert "a name is given twice" in error_of(*words, "--scores", f"a={judge}", "--scores", f"a={judge}", code=2)


@pytest.mark.long
def test_sources_of_labels_are_side_by_side(path, tmp_path):
    y = np.arange(COUNT) % 2
    values = {"strict": 1 - y.astype(float), "vague": 1.0 - (np.arange(COUNT) % 3 == 0)}
    for name, scores in values.items():
        scores = {f"q{k}": v for k, v in enumerate(scores.tolist()) if name == "strict" or k >= 10}
        command("score", path, "--scores", write_scores(tmp_path / "scores.csv", scores), "--name", name, check=0)
    out = tmp_path / "out"
    (entry,) = run(path, out, "probe_mean")["stores"].values()
    found = entry["label_sources"]
    assert found["fitted_to"] == "stored labels" and list(found["sources"]) == ["stored labels", *values]
    assert found["sources"]["vague"] == {"num_traces": 50, "num_hallucinated": 16}
    pairs = {(p["first"], p["second"]): p for p in found["agreement"]}
    assert pairs["stored labels", "strict"] == {
        **{"first": "stored labels", "second": "strict", "num_traces": 60, "agreement": 1.0, "kappa": 1.0}
    }
    vague, labels = (np.arange(10, COUNT) % 3 == 0).astype(int), y[10:]
    pair = pairs["strict", "vague"]
    assert pair["agreement"] == pytest.approx((vague == labels).mean())
    assert pair["kappa"] == pytest.approx(cohen_kappa_score(labels, vague))
    with open(out / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))[10:]
    for scheme in ("question", "group"):
        fold, score = (np.array([float(r[f"{c}:{scheme}"]) for r in rows]) for c in ("fold", "probe_mean"))
        by_fold = [auroc(vague[fold == k], score[fold == k]) for k in range(3)]
        under = found["schemes"][scheme]["probe_mean"]
        assert under["vague"]["auroc"] == pytest.approx(np.mean(by_fold))
        low, high = under["vague"]["interval_by_question"]
        assert low <= under["vague"]["auroc"] <= high
        assert under["strict"]["auroc"] == entry["detectors"]["probe_mean"]["schemes"][scheme]["auroc"]
    text = (out / "table.txt").read_text()
    row = ["strict", "vague", "50", f"{pair['agreement']:.3f}", f"{pair['kappa']:.3f}"]
    assert row in [line.split() for line in text.splitlines()]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert ">s, sources of labels</h2>" in page and "fitted to stored labels." in page


@pytest.mark.long
def test_source_without_both_classes_in_a_fold_has_no_auroc(path, tmp_path):
    scores = write_scores(tmp_path / "scores.csv", {f"q{k}": 1.0 for k in range(COUNT)})
    command("score", path, "--scores", scores, "--name", "always", check=0)
    found = next(iter(run(path, tmp_path / "out", "length")["stores"].values()))["label_sources"]
    assert found["schemes"]["question"]["length"]["always"] == {"auroc": None, "interval_by_question": None}
    assert agreement("a", "b", np.zeros(3), np.zeros(3))["kappa"] is None
    assert agreement("a", "b", np.array([np.nan]), np.ones(1))["agreement"] is None


@pytest.mark.long
def test_a_score_on_another_scale_is_no_source_of_labels(path, tmp_path):
    """The threshold of the labels is not that of a score from 0 to 100, which would give one class."""
    scores = write_scores(tmp_path / "scores.csv", {f"q{k}": 100.0 * (k % 3 == 0) for k in range(COUNT)})
    command("score", path, "--scores", scores, "--name", "percent", check=0)
    command("score", path, "--scores", scores, "--name", "whole", check=0)
    lines = []
    run_benchmark(
        [path], tmp_path / "out", BenchmarkOptions(("length",), score="whole", score_threshold=50.0), lines.append
    )
    found = json.loads((tmp_path / "out/benchmark.json").read_text())["stores"]["s"]["label_sources"]
    assert list(found["sources"]) == ["stored labels", "whole"] and found["sources"]["whole"]["num_hallucinated"] == 40
    assert any(line.startswith("score percent: values outside [0, 1], no source of labels") for line in lines)


@pytest.mark.long
def test_the_default_score_on_another_scale_is_no_source_without_a_threshold(path, tmp_path):
    scores = write_scores(tmp_path / "scores.csv", {f"q{k}": 100.0 * (k % 3 == 0) for k in range(COUNT)})
    command("score", path, "--scores", scores, "--name", "whole", "--default", check=0)
    for threshold, sources in ((None, None), (50.0, ["stored labels", "whole"])):
        out = tmp_path / str(threshold)
        run_benchmark([path], out, BenchmarkOptions(("length",), score_threshold=threshold), lambda _: None)
        found = json.loads((out / "benchmark.json").read_text())
        label_sources = found["stores"]["s"]["label_sources"]
        assert (label_sources and list(label_sources["sources"])) == sources
        assert ("--score-threshold 50.0" in (out / "report.html").read_text()) == (threshold is not None)


@pytest.mark.long
def test_the_threshold_of_a_score_is_not_that_of_others(path, tmp_path):
    """A threshold from 0 to 1 is one of the chosen score, whose values need not lie there."""
    for name, low, high in (("signed", -1.0, 1.0), ("judge", 0.2, 0.8)):
        scores = write_scores(tmp_path / f"{name}.csv", {f"q{k}": high if k % 3 else low for k in range(COUNT)})
        command("score", path, "--scores", scores, "--name", name, "--score-direction", "correct", check=0)
    run(path, tmp_path / "out", "length", score="signed", score_threshold=0.0)
    found = json.loads((tmp_path / "out/benchmark.json").read_text())["stores"]["s"]["label_sources"]
    assert {name: found["sources"][name]["num_hallucinated"] for name in ("signed", "judge")} == dict.fromkeys(
        ("signed", "judge"), COUNT // 3
    )


@pytest.mark.long
def test_traces_with_nan_are_dropped_and_listed(tmp_path):
    traces = [make_labeled(k) for k in range(COUNT)]
    traces[7]["hidden_states"][1][0, 0] = np.nan
    path, lines = write_published(tmp_path / "s.zarr", traces), []
    for drops, count, text in (
        (True, 59, "1 trace with NaN or infinite values left out: q7"),
        (False, 60, "1 trace; --drop"),
    ):
        out = tmp_path / f"out{drops}"
        run_benchmark([path], out, BenchmarkOptions(("length",), folds=2, drop_nonfinite=drops), lines.append)
        results = json.loads((out / "benchmark.json").read_text())
        entry = results["stores"]["s"]
        assert entry["num_traces"] == count and results["config"]["drop_nonfinite"] is drops
        assert entry["dropped_nonfinite"] == ([{"question_id": "q7", "sample": 0}] if drops else [])
        assert any(text in line for line in lines), lines
        assert ("\nq7," in (out / "scores.csv").read_text()) != drops


@pytest.mark.long
def test_several_stores_give_a_transfer_matrix(path, tmp_path):
    traces = [make_labeled(k, shift=4.0) for k in range(COUNT - 10, 2 * COUNT - 10)]
    other = write_published(tmp_path / "other.zarr", traces)
    out = tmp_path / "out"
    done = command("benchmark", path, other, "--detectors", "probe_mean", "--output-dir", out, "--workers", 1, check=0)
    assert "s and other share 10 questions: transfer is trained on them" in done.stdout
    results = json.loads((out / "benchmark.json").read_text())
    cells = {(c["detector"], c["trained_on"], c["tested_on"]): c for c in results["transfer"]}
    assert {key[1:] for key in cells} == {("s", "other"), ("other", "s")} and len(cells) == 10
    trained, tested = tracestore.open(path), tracestore.open(other)
    y = np.arange(COUNT) % 2
    detector = registry.make_detector("probe_mean")
    detector.seed, detector.keep_together = 42, "group"
    expected = auroc(y, detector.fit(trained, np.arange(COUNT), y).score(tested, np.arange(COUNT)))
    cell = cells["probe_mean", "s", "other"]
    assert cell["auroc"] == pytest.approx(expected)
    assert cell["interval_by_question"][0] <= expected <= cell["interval_by_question"][1]
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- leaderboard: written by bench/leaderboard.py -->\nearlier\n<!-- end of leaderboard -->\nafter"
    )
    script = [sys.executable, ROOT / "bench/leaderboard.py", page, out / "benchmark.json"]
    subprocess.run(script, check=True)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter") and "earlier" not in text
    assert f"| probe_mean | {expected:.3f} |" in text and "### other" in text
    found = [line.split(" | ") for line in text.partition("### other")[0].splitlines() if " to " in line]
    assert len(found) == 5 and [cells[1] for cells in found] == sorted((cells[1] for cells in found), reverse=True)
    page.write_text("no markers")
    assert subprocess.run(script, capture_output=True).returncode == 1 and page.read_text() == "no markers"
    assert "s -> other" in done.stdout and (out / "scores-other.csv").exists() and (out / "folds-other.json").exists()
    small = write_store(tmp_path / "small.zarr", make_traces(60, tokens=6, dim=4), label=lambda k: k % 2)
    assert "layers or hidden size differ" in error_of("benchmark", path, small, "--output-dir", tmp_path / "b", code=2)


@pytest.mark.long
def test_detectors_without_their_fields_are_skipped_with_the_reason(tmp_path):
    traces = make_traces(40, tokens=5)
    bare = write_store(tmp_path / "bare.zarr", traces, label=lambda k: k % 2, attention="none")
    (entry,) = run(bare, tmp_path / "out", "probe_last", "lookback_lens")["stores"].values()
    assert list(entry["detectors"]) == ["probe_last"] and "no graphs" in entry["skipped"]["lookback_lens"]
    assert entry["folds"]["schemes"] == ["question"]
    for names, code in (("probe_last", 0), ("features", 0), ("probe_last,lookback_lens", 1)):
        command("benchmark", bare, "--detectors", names, "--output-dir", tmp_path / names, check=code)
    message = error_of("benchmark", bare, "--detectors", "lookback_lens", "--output-dir", tmp_path / "b", code=2)
    assert "no detector can run" in message


@pytest.mark.long
def test_a_store_that_a_fitted_detector_cannot_read_has_no_transfer(path, tmp_path):
    """The detector lost its cross-validation too."""
    traces = [make_labeled(k) for k in range(COUNT, 2 * COUNT)]
    mean = write_store(
        tmp_path / "mean.zarr", traces, label=lambda k: k % 2, group=lambda k: f"g{k // 5}", attention="mean"
    )
    lines, options = [], BenchmarkOptions(("llm_check_attention", "length"), folds=3)
    results = run_benchmark([path, mean], tmp_path / "out", options, lines.append)
    for entry in results["stores"].values():
        assert {"llm_check_attention", "length"} <= set(entry["detectors"]) and not entry["skipped"]
    assert "llm_check_attention" not in {c["detector"] for c in results["transfer"]} and results["transfer"]
    (found,) = (line for line in lines if line.startswith("llm_check_attention") and "found 1" in line)
    assert f"no transfer: {mean}: fitted to attention of 2 heads" in found
    row = next(r for r in (tmp_path / "out/table.txt").read_text().split("->")[-1].splitlines() if "llm_check" in r)
    assert len(re.findall(r"0\.\d{3}|1\.000", row)) == 2


@pytest.mark.long
def test_traces_without_a_score_are_counted(tmp_path):
    traces = [make_labeled(k) for k in range(COUNT)]
    del traces[7]["prompt_length"]
    (entry,) = run(write_published(tmp_path / "s.zarr", traces), tmp_path / "out", "probe_mean")["stores"].values()
    test = entry["detectors"]["probe_mean"]["schemes"]["question"]
    assert test["num_without_score"] == 1 and test["auroc"] > 0.5
    by_question = (tmp_path / "out/table.txt").read_text().split("\n\n")[0].splitlines()
    header, *rows = [re.split("  +", line) for line in by_question[1:]]
    assert {row[0]: row[header.index("without score")] for row in rows}["probe_mean"] == "1"


@pytest.mark.long
def test_earlier_results_are_kept_unless_overwritten(path, tmp_path):
    fast = ("benchmark", path, "--detectors", "length", "--folds", 2, "--workers", 1)
    words = (*fast, "--output-dir", tmp_path / "out")
    command(*words, check=0)
    folds = (tmp_path / "out/folds-s.json").read_bytes()
    assert "holds earlier results" in error_of(*words, code=2)
    command(*words, "--overwrite", check=0)
    assert (tmp_path / "out/folds-s.json").read_bytes() == folds
    for text in ('{"name": "of another program"}', "[1]", "no JSON"):
        (tmp_path / "out/benchmark.json").write_text(text)
        assert "not the results of tracestore benchmark" in error_of(*words, "--overwrite", code=2)
        assert (tmp_path / "out/benchmark.json").read_text() == text
    (tmp_path / "mine/checkpoints").mkdir(parents=True)
    (tmp_path / "mine/checkpoints/length.pt").write_text("mine")
    of_mine = (*fast, "--output-dir", tmp_path / "mine", "--save-detectors")
    assert "holds earlier results" in error_of(*of_mine, code=2)
    assert (tmp_path / "mine/checkpoints/length.pt").read_text() == "mine"
    shared = ("--folds-dir", tmp_path / "out", "--output-dir", tmp_path / "other")
    command(*fast, *shared, check=0)
    assert not (tmp_path / "other/folds-s.json").exists()


def test_calibration_is_fitted_to_the_training_scores():
    rng = np.random.default_rng(0)
    score = rng.standard_normal(4000)
    y = (rng.random(4000) < 1 / (1 + np.exp(-(2 * score + 1)))).astype(int)
    p = platt(score[:3000], y[:3000], np.array([0.0, 1.0, np.nan]))
    np.testing.assert_allclose(p[:2], [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-3))], atol=0.03)
    assert np.isnan(p[2])
    np.testing.assert_allclose(platt(np.zeros(4), np.array([0, 1, 1, 1]), np.zeros(2)), 0.75)
