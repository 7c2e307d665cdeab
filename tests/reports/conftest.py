"""Fixtures: the browser, and the report of a run of 600 traces, 3 models, 5 folds x 3 seeds."""

import datetime
import json
from pathlib import Path

import pytest

import tracestore
from tests.browser import chromium
from tests.reports.synthetic import make_benchmark, make_results, write_traces
from tracestore.experiment.compare_runs import compare_runs, load_runs
from tracestore.reports.benchmark_page import write_benchmark
from tracestore.reports.comparison_page import write_comparison
from tracestore.reports.run_page import RunFacts, write_report

__all__ = ["chromium"]


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        # A relative path, because the page shows it.
        patch.chdir(folder)
        with tracestore.create("store.zarr") as writer:
            write_traces(writer)
        with tracestore.open("store.zarr") as store:
            finished = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC)
            facts = RunFacts("tracestore train --store store.zarr --folds 5 --seeds 3", finished, 300 << 20)
            results = make_results(store)
            write_report(results, Path("report.html"), store, facts)
        for name, rate in (("first", 0.001), ("second", 0.01)):
            (folder / name).mkdir()
            config = {**results["config"], "lr": rate}
            (folder / name / "results.json").write_text(json.dumps({**results, "config": config}))
    return folder / "report.html"


@pytest.fixture(scope="session")
def comparison(report):
    folders = [Path("first"), Path("second")]
    path = report.parent / "comparison.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(report.parent)
        runs = load_runs(folders)
        write_comparison(compare_runs(runs), runs, path, None, [])
    return path


@pytest.fixture(scope="session")
def benchmark(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        write_benchmark(make_benchmark(), Path("report.html"), "tracestore benchmark trivia.zarr b.zarr")
    return path
