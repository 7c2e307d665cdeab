"""`convert --workers N`: the bytes of one process, also after kills, interruptions and repetitions."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

import tracestore
from tests.helpers import (
    ROOT,
    convert,
    error_of,
    make_graphs,
    make_trace,
    make_traces,
    read_all,
    tree_bytes,
    write_pickle,
    write_scores,
)
from tests.tasks.test_tasks import check_equal, of_scores
from tests.tiers import long
from tracestore.convert import cutting
from tracestore.convert.options import ConvertOptions
from tracestore.store.format import paths
from tracestore.tasks import plan_tasks, write_task


@pytest.mark.parametrize("codec", ["none", pytest.param("zstd", marks=pytest.mark.long)])
def test_bytes_do_not_depend_on_the_number_of_processes(data, tmp_path, codec):
    options = of_scores(data)
    words = ["--group-column", options["group_column"], "--codec", codec]
    convert(data, tmp_path / "1.zarr", *words)
    for workers in (2, 4):
        convert(data, tmp_path / f"{workers}.zarr", *words, "--workers", workers)
        assert tree_bytes(tmp_path / f"{workers}.zarr") == tree_bytes(tmp_path / "1.zarr")
    with tracestore.open(tmp_path / "1.zarr") as store:
        assert store.internals.manifest.num_segments == store.internals.manifest.generation == 6


@pytest.mark.long
def test_files_that_are_added_are_runs_of_their_own(data, tmp_path):
    convert(data, tmp_path / "1.zarr")
    convert(data, tmp_path / "2.zarr", "--workers", 2)
    for k in range(2):
        write_pickle(data / f"batch_1{k}.pkl", [make_trace(100 + k)])
    for workers in (1, 2):
        done = convert(data, tmp_path / f"{workers}.zarr", "--workers", workers)
        assert "2 traces added from 2 files" in done.stdout and "6 files already in the store" in done.stdout
    assert tree_bytes(tmp_path / "2.zarr") == tree_bytes(tmp_path / "1.zarr")
    assert "0 traces added" in convert(data, tmp_path / "2.zarr", "--workers", 2).stdout


def test_one_task_is_written_in_this_process(data, tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "MIN_BYTES", 128 << 20)
    monkeypatch.setattr(subprocess, "Popen", None)
    convert(data, tmp_path / "s.zarr", "--workers", 2)
    assert len(tracestore.open(tmp_path / "s.zarr")) == 24 and not (tmp_path / "s.zarr" / paths.RECEIPTS).exists()


@pytest.mark.long
def test_reports_and_errors_are_those_of_one_process(data, tmp_path):
    """An unreadable source in the middle, with and without --skip-bad."""
    write_pickle(data / "batch_3.pkl.gz", [make_trace(30), {"question_id": "bad"}])
    (data / "batch_4.pkl").unlink()
    (data / "batch_4.pkl").symlink_to("nowhere")
    errors = []
    for workers in (1, 2):
        words = (data, tmp_path / f"{workers}.zarr", "--workers", workers)
        errors.append(error_of("convert", *words, code=3))
        assert len(tracestore.open(tmp_path / f"{workers}.zarr")) == 12
        report = json.loads(convert(*words, "--skip-bad", "--json").stdout)
        counts = [report[f"num_{n}"] for n in ("traces", "traces_refused", "sources_skipped", "traces_new")]
        assert counts == [17, 2, 1, 5]
    assert errors[0] == errors[1]
    assert tree_bytes(tmp_path / "2.zarr") == tree_bytes(tmp_path / "1.zarr")


def write_sources(folder, rng):
    """Write files of a few traces with duplicates, conflicts and invalid traces."""
    folder.mkdir()
    for k in range(rng.randint(2, 7)):
        keys = [rng.randrange(12) for _ in range(rng.randint(1, 6))]
        traces = [make_trace(key, tokens=1 + key % 7, seed=rng.random() < 0.2) for key in dict.fromkeys(keys)]
        if rng.random() < 0.15:
            traces.append({"hidden_states": 1})
        write_pickle(folder / f"{k:02d}.pkl{rng.choice(['', '.gz'])}", traces)
    if rng.random() < 0.3:
        write_scores(folder / "scores.csv", {f"q{k}": k / 12 for k in range(12)})


@pytest.mark.parametrize("seed", [*range(4), *long(*range(4, 30))])
def test_random_sources_give_the_same_traces(tmp_path, monkeypatch, seed):
    """Rows of duplicates stay in the segments of tasks; everything that readers see is equal."""
    rng = random.Random(seed)
    write_sources(tmp_path / "data", rng)
    monkeypatch.setattr(cutting, "MIN_BYTES", rng.choice([1, 2_000, 10_000]))
    words = [
        "--skip-bad",
        "--on-conflict",
        rng.choice(["keep-first", "keep-last"]),
        "--attention",
        rng.choice(["mean", "heads"]),
    ]
    one = convert(tmp_path / "data", tmp_path / "1.zarr", *words)
    options = ConvertOptions(
        **{w.removeprefix("--").replace("-", "_"): v for w, v in zip(words[1::2], words[2::2], strict=True)},
        skip_bad=True,
    )
    tasks = plan_tasks(tmp_path / "data", tmp_path / "2.zarr", options)
    for task in rng.sample(tasks, len(tasks)):
        write_task(task)
    convert(tmp_path / "data", tmp_path / "2.zarr", *words, "--workers", 2)
    check_equal(tmp_path / "2.zarr", tmp_path / "1.zarr")
    assert one.returncode == 0


@pytest.mark.long
def test_a_plan_that_was_not_committed_is_continued(data, tmp_path, monkeypatch):
    """By one worker, too, and without reading again what a task has written."""
    store = tmp_path / "s.zarr"
    convert(data, tmp_path / "1.zarr")
    tasks = plan_tasks(data, store)
    for task in tasks[:4]:
        write_task(task)
    for k in range(4):
        path = next(data.glob(f"batch_{k}.*"))
        path.write_bytes(bytes(path.stat().st_size))
    convert(data, store)
    with tracestore.open(store) as found, tracestore.open(tmp_path / "1.zarr") as expected:
        assert repr(read_all(found)) == repr(read_all(expected))
    assert tree_bytes(store) == tree_bytes(tmp_path / "1.zarr")


@pytest.mark.long
@pytest.mark.parametrize("skip_bad", [[], ["--skip-bad"]])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_source_that_changes_during_an_interruption_is_planned_again(data, tmp_path, is_gone, skip_bad):
    store, path = tmp_path / "s.zarr", data / "batch_2.pkl"
    for task in plan_tasks(data, store, ConvertOptions(skip_bad=bool(skip_bad)))[:2]:
        write_task(task)
    path.unlink()
    if not is_gone:
        write_pickle(path, [make_trace(70 + k) for k in range(3)])
    convert(data, store, "--workers", 2, *skip_bad)
    convert(data, tmp_path / "1.zarr", *skip_bad)
    assert tree_bytes(store) == tree_bytes(tmp_path / "1.zarr")


@pytest.mark.long
def test_a_script_needs_no_main_guard(data, tmp_path):
    convert(data, tmp_path / "1.zarr", "--dtype", "keep")
    script = (
        "import tracestore; from tracestore.convert import cutting; cutting.MIN_BYTES = 1\n"
        f"report = tracestore.convert_files({str(data)!r}, {str(tmp_path / '2.zarr')!r}, workers=2, dtype='keep')\n"
        "print(report.num_traces_new)"
    )
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / "script.py"], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("24\n", "")
    assert tree_bytes(tmp_path / "2.zarr") == tree_bytes(tmp_path / "1.zarr")


def test_watch_reads_with_threads(data, tmp_path, monkeypatch):
    convert(data, tmp_path / "1.zarr")
    convert(data / "batch_0.pkl", tmp_path / "2.zarr")
    monkeypatch.setattr(subprocess, "Popen", None)
    convert(data, tmp_path / "2.zarr", "--watch", "--watch-timeout", 0, "--workers", 3)
    with tracestore.open(tmp_path / "1.zarr") as one, tracestore.open(tmp_path / "2.zarr") as other:
        assert repr(read_all(one)) == repr(read_all(other))


@pytest.mark.long
def test_a_process_writes_one_task_after_the_other(data, tmp_path, failing):
    with failing(-1, "pass") as started:
        convert(data, tmp_path / "s.zarr", "--workers", 2)
    assert len(started) == 2 and all(process.returncode is not None for process in started)
    assert len(tracestore.open(tmp_path / "s.zarr")) == 24


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_same_command_writes_only_what_was_not_written(data, tmp_path, failing, is_killed):
    """A source is refused, or its worker is killed; the receipts of the tasks behind it stay."""
    convert(data, tmp_path / "1.zarr")
    store, path = tmp_path / "s.zarr", data / "batch_2.pkl"
    content = path.read_bytes()
    if not is_killed:
        write_pickle(path, [make_trace(20), {"question_id": "bad"}])
    for task in plan_tasks(data, store):
        if task.number != 2:
            write_task(task)
    with failing(2, "os.kill(os.getpid(), signal.SIGKILL)" if is_killed else "pass"):
        assert "batch_2.pkl" in error_of("convert", data, store, "--workers", 2, code=3)
    assert len(tracestore.open(store)) == 8
    path.write_bytes(content)
    with failing(1, "raise errors.InvalidInputError('is read again')"):
        convert(data, store, "--workers", 2)
    assert tree_bytes(store) == tree_bytes(tmp_path / "1.zarr")


@pytest.mark.long
def test_a_full_disk_of_a_worker_is_exit_4(data, tmp_path, failing):
    with failing(1, "raise errors.DiskFullError('no space left')"):
        assert "no space left" in error_of("convert", data, tmp_path / "s.zarr", "--workers", 2, code=4)
    assert len(tracestore.open(tmp_path / "s.zarr")) == 4
    convert(data, tmp_path / "1.zarr")
    convert(data, tmp_path / "s.zarr", "--workers", 2)
    assert tree_bytes(tmp_path / "s.zarr") == tree_bytes(tmp_path / "1.zarr")


@pytest.mark.long
def test_graphs_and_sequences(tmp_path):
    torch = pytest.importorskip("torch")
    folder, traces = tmp_path / "data", make_traces(3)
    folder.mkdir()
    ids = [t["question_id"] for t in traces]
    torch.save({"graphs": [make_graphs(t) for t in traces], "question_ids": ids}, folder / "sharded_data_part_0.pt")
    last = torch.from_numpy(np.stack([np.stack(t["hidden_states"])[:, -1] for t in traces]))
    value = {"sequences": last, "labels": torch.tensor([0.0, 1.0, 1.0]), "question_ids": ids}
    torch.save(value, folder / "preprocessed_0.pt")
    for workers in (1, 2):
        convert(folder, tmp_path / f"{workers}.zarr", "--workers", workers)
    assert tree_bytes(tmp_path / "2.zarr") == tree_bytes(tmp_path / "1.zarr")


def test_cuts_are_runs_of_whole_sources(monkeypatch):
    monkeypatch.setattr(cutting, "MIN_BYTES", 128 << 20)
    rng = random.Random(0)
    for _ in range(300):
        sizes = [rng.choice([0, 1, 60 << 20, 200 << 20, 9 << 30]) for _ in range(rng.randint(0, 40))]
        shared = [rng.choice([None, None, "a", "b"]) for _ in sizes]
        total = sum(sizes) * rng.choice([1, 3])
        runs = cutting.cut(sizes, shared, total)
        assert [k for run in runs for k in run] == list(range(len(sizes))) and all(runs)
        for value in ("a", "b"):
            assert len({n for n, run in enumerate(runs) for k in run if shared[k] == value}) <= 1
        if set(shared) <= {None} and runs:
            least = min(max(-(-total // 64), cutting.MIN_BYTES), 4 << 30)
            assert all(sum(sizes[k] for k in run) >= least or sizes[run[-1] + 1] >= least for run in runs[:-1])
            for at in range(len(runs)):  # what is left behind a run is cut as before
                first = runs[at][0]
                rest = cutting.cut(sizes[first:], shared[first:], total)
                assert [[k + first for k in run] for run in rest] == [list(run) for run in runs[at:]]
