"""Conversion on a Dask cluster: the same bytes, one-line errors, no files left."""

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import ROOT, convert, make_graphs, make_trace, make_traces, tree_bytes, write_pickle
from tests.machine import wait_until
from tracestore import cli
from tracestore.tasks import convert_files, write_task

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster") / "data"
    folder.mkdir()
    for k in range(5):
        suffix = ".pkl.gz" if k % 2 else ".pkl"
        write_pickle(folder / f"batch_{k}{suffix}", [make_trace(10 * k + i, tokens=5 + i) for i in range(4)])
    return folder


@contextlib.contextmanager
def cluster(folder):
    """Run a scheduler and two workers in processes of their own; yield the address."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__WORKER__DAEMON": "False"}
    processes = []

    def start(*args):
        log = (folder / f"{args[0]}{len(processes)}.log").open("wb")
        command = [sys.executable, "-m", "dask", *args]
        processes.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log))

    try:
        file = folder / "scheduler.json"
        start("scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file), "--host", "127.0.0.1")
        wait_until(lambda: file.exists() and file.read_text())  # the scheduler creates it before it writes
        address = json.loads(file.read_text())["address"]
        for _ in range(2):
            start("worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1")
        yield address
    finally:
        for process in processes:
            process.kill()  # not terminate(): a worker would wait for a scheduler that ended first
        for process in processes:
            process.wait()


@pytest.fixture(scope="module")
def address():
    """Run a cluster of two processes for several tests; yield its address."""
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as found:
        yield found.scheduler_address


@pytest.mark.long
def test_a_cluster_gives_the_same_bytes_and_errors_as_one_process(data, tmp_path):
    convert(data, tmp_path / "one.zarr", "--workers", 1)
    with cluster(tmp_path) as address:
        convert(data, tmp_path / "cluster.zarr", "--dask", address)
        assert tree_bytes(tmp_path / "cluster.zarr") == tree_bytes(tmp_path / "one.zarr")
        # An invalid file in the middle: the files before it are committed, one line gives the reason.
        bad = tmp_path / "bad"
        bad.mkdir()
        write_pickle(bad / "a.pkl", make_traces(3))
        write_pickle(bad / "b.pkl", [make_trace(5), {k: v for k, v in make_trace(6).items() if k != "hidden_states"}])
        write_pickle(bad / "c.pkl", [make_trace(7)])
        done = convert(bad, tmp_path / "bad.zarr", "--dask", address, check=3)
        assert done.stderr.count("\n") == 1 and "b.pkl, trace 1" in done.stderr
        assert len(tracestore.open(tmp_path / "bad.zarr")) == 3
        convert(bad, tmp_path / "bad.zarr", "--dask", address, "--skip-bad")
        assert len(tracestore.open(tmp_path / "bad.zarr")) == 5


@pytest.mark.long
@pytest.mark.parametrize(("attention", "is_local"), [("mean", True), ("heads", False), ("none", False)])
def test_a_cluster_of_this_machine_gives_the_same_bytes(request, data, tmp_path, attention, is_local):
    words = ("local", "--workers", 2) if is_local else [request.getfixturevalue("address")]
    convert(data, tmp_path / "one.zarr", "--attention", attention)
    convert(data, tmp_path / "cluster.zarr", "--attention", attention, "--dask", *words)
    assert tree_bytes(tmp_path / "cluster.zarr") == tree_bytes(tmp_path / "one.zarr")


@pytest.mark.long
def test_an_unreachable_scheduler_is_wrong_usage(data, tmp_path, monkeypatch):
    dask = pytest.importorskip("dask")
    monkeypatch.setattr("tracestore.tasks.workers._CONNECT_TIMEOUT_S", 1)
    with dask.config.set({"distributed.comm.timeouts.connect": "0.5s"}):
        done = convert(data, tmp_path / "s.zarr", "--dask", "tcp://127.0.0.1:9", check=2)
    assert done.stderr.count("\n") == 1 and "no Dask scheduler" in done.stderr
    assert not (tmp_path / "s.zarr").exists()


class FailingWorkers:
    """Workers in this process, of which one dies with a source."""

    def __init__(self, *_):
        pass

    def submit(self, task):
        future = Future()
        try:
            if any("batch_2" in name for name in task.sources):
                raise RuntimeError("worker died")
            future.set_result(write_task(task))
        except RuntimeError as error:
            future.set_exception(error)
        return future

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.long
def test_sources_before_a_failed_worker_are_committed(data, tmp_path, monkeypatch, capsys):
    """The message names the source, and the same command continues."""
    store = tmp_path / "s.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(convert_files, "DaskWorkers", FailingWorkers)
        assert cli.main(["convert", str(data), str(store), "--dask", "local", "--skip-bad"]) == 1
    errors = capsys.readouterr().err
    assert "batch_2.pkl: a worker failed" in errors and errors.count("\n") == 1
    with tracestore.open(store) as opened:
        assert len(opened) == 8
    convert(data, store, "--skip-bad")
    with tracestore.open(store) as opened:
        assert len(opened) == 20
    convert(data, tmp_path / "one.zarr", "--skip-bad")
    assert tree_bytes(store) == tree_bytes(tmp_path / "one.zarr")


class LateWorkers(FailingWorkers):
    """Workers in this process, whose receipts and segments appear one after the other when the task is written."""

    def submit(self, task):
        future, store = Future(), Path(task.store)
        known = {*store.glob("segments/*"), *store.glob("receipts/*")}
        future.set_result(write_task(task))
        new = {*store.glob("segments/*"), *store.glob("receipts/*")} - known
        hidden = store.parent / f"hidden_{task.number}"
        hidden.mkdir()
        for k, path in enumerate(sorted(new, reverse=task.number % 2)):
            Timer(0.2 + 0.2 * k, path.rename(hidden / path.name).rename, [path]).start()
        return future


@pytest.mark.long
def test_files_of_a_worker_that_are_visible_late_are_waited_for(data, tmp_path, monkeypatch):
    """A receipt before its segment, and a segment before its receipt."""
    convert(data, tmp_path / "one.zarr")
    with monkeypatch.context() as patch:
        patch.setattr(convert_files, "DaskWorkers", LateWorkers)
        convert(data, tmp_path / "s.zarr", "--dask", "local")
    assert tree_bytes(tmp_path / "s.zarr") == tree_bytes(tmp_path / "one.zarr")


@pytest.mark.long
def test_graphs_and_sequences_pass_through_a_cluster(address, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    traces = make_traces(3)
    ids = [t["question_id"] for t in traces]
    torch.save({"graphs": [make_graphs(t) for t in traces], "question_ids": ids}, data / "sharded_data_part_0.pt")
    last = torch.from_numpy(np.stack([np.stack(t["hidden_states"])[:, -1] for t in traces]))
    value = {"sequences": last, "labels": torch.tensor([0.0, 1.0, 1.0]), "question_ids": ids}
    torch.save(value, data / "preprocessed_0.pt")
    convert(data, tmp_path / "one.zarr", "--workers", 1)
    convert(data, tmp_path / "cluster.zarr", "--dask", address)
    assert tree_bytes(tmp_path / "cluster.zarr") == tree_bytes(tmp_path / "one.zarr")


@pytest.mark.long
def test_sources_that_share_a_table_are_one_task(address, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for k in range(3):
        np.save(data / f"q{k}.npy", np.full((2, 3, 4), k + 1, "f2"))
    (data / "labels.csv").write_text("qid,is_correct\nq0,1\nq1,0\nq2,1\n")
    lines = ["hidden_states = {id}.npy -> L S D", "is_correct = labels.csv : [id=qid]/is_correct"]
    flags = [word for line in lines for word in ("--field", line)]
    convert(data, tmp_path / "one.zarr", *flags, "--workers", 1)
    convert(data, tmp_path / "cluster.zarr", *flags, "--dask", address)
    assert tree_bytes(tmp_path / "cluster.zarr") == tree_bytes(tmp_path / "one.zarr")
    assert tracestore.open(tmp_path / "cluster.zarr").scores.tolist() == [1, 0, 1]
