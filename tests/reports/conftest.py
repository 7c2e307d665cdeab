"""Fixtures: the browser, and the report of a run of 600 traces, 3 models, 5 folds x 3 seeds."""

import datetime

import pytest

import tracestore
from tests.browser import chromium
from tests.reports.synthetic import make_results, write_traces
from tracestore.reports.run import RunFacts, write_report

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
            write_report(make_results(store), folder / "report.html", store, facts)
    return folder / "report.html"
