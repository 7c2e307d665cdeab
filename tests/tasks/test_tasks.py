"""Conversions by tasks: the same store for any number of processes, any order and any repetition."""

import copy
import errno
import itertools
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import tracestore
from tests.helpers import (
    ROOT,
    command,
    convert,
    error_of,
    make_trace,
    make_traces,
    read_all,
    tree_bytes,
    write_pickle,
    write_scores,
)
from tests.tasks.conftest import write_data
from tracestore._core.mapping import MappedFile
from tracestore.convert import cutting
from tracestore.convert.options import ConvertOptions
from tracestore.errors import CorruptStoreError, InvalidInputError, UsageError
from tracestore.store.format import paths
from tracestore.store.format.zip_group import ZipGroup, pack_group
from tracestore.store.io import shard_writer
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write.written import TraceBlock
from tracestore.tasks import Receipt, Task, commit_tasks, plan_tasks, receipt, write_task
from tracestore.tasks import task_plan as plan
from tracestore.tasks.task_files import write_tasks


def files_of(store):
    """Return the bytes of the files that readers see."""
    return {path: data for path, data in tree_bytes(store).items() if not path.startswith(paths.RECEIPTS)}


def run_tasks(data, store, **options):
    tasks = plan_tasks(data, store, ConvertOptions(**options))
    for task in reversed(tasks):
        write_task(task)
    return commit_tasks(tasks)


def start(file, *words):
    command = [sys.executable, "-m", "tracestore", "work", str(file), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def check_equal(one, other):
    """Assert that two stores have the same traces, values and sources."""
    with tracestore.open(one) as first, tracestore.open(other) as second:
        assert repr(read_all(first)) == repr(read_all(second))
        np.testing.assert_array_equal(first.labels, second.labels)
        assert [t.source for t in first] == [t.source for t in second]
        assert [t.extras for t in first] == [t.extras for t in second]
        sources = [list(store.internals.index.sources()) for store in (first, second)]
        assert sources[0] == sources[1]
    report = verify_store(one, num_threads=1)
    assert report.damaged == {}


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_bytes_do_not_depend_on_processes_order_and_repetition(data, tmp_path, workers):
    one, store = tmp_path / "one.zarr", tmp_path / "s.zarr"
    run_tasks(data, one)
    tasks = plan_tasks(data, store)
    assert len(tasks) == 6
    mixed = [*tasks, *tasks]
    random.Random(workers).shuffle(mixed)
    processes = []
    for k in range(workers):  # each task at two places, also at the same time
        file = tmp_path / f"{k}.json"
        write_tasks(file, mixed[k::workers])
        processes.append(start(file))
    assert [process.wait(60) for process in processes] == [0] * workers
    commit_tasks(random.sample(tasks, 6))
    assert files_of(store) == files_of(one)
    check_equal(store, one)


@pytest.mark.long
def test_processes_of_dask_give_the_same_bytes(data, tmp_path):
    distributed = pytest.importorskip("distributed")
    run_tasks(data, tmp_path / "one.zarr")
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        receipts = client.gather(client.map(write_task, [*tasks, *reversed(tasks)], pure=False))
    assert len({r.task for r in receipts}) == 6
    commit_tasks(tasks)
    assert files_of(tmp_path / "s.zarr") == files_of(tmp_path / "one.zarr")


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("attention", ["mean", "heads", "none"])
def test_one_task_gives_the_bytes_of_convert(data, tmp_path, monkeypatch, codec, attention):
    monkeypatch.undo()
    convert(data, tmp_path / "one.zarr", "--codec", codec, "--attention", attention)
    run_tasks(data, tmp_path / "s.zarr", codec=codec, attention=attention)
    assert files_of(tmp_path / "s.zarr") == files_of(tmp_path / "one.zarr")


def of_scores(folder):
    ids = [f"q{10 * k + i}" for k in range(6) for i in range(4)]
    extra = [
        ("label", {q: int(k < 12) for k, q in enumerate(ids)}),
        ("topic", {q: f"t{k % 3}" for k, q in enumerate(ids)}),
    ]
    write_scores(folder / "scores.csv", {q: k / 30 for k, q in enumerate(ids)}, extra=extra)
    return {"group_column": "topic"}


def of_duplicates(folder):
    others = [{k: v for k, v in make_trace(98).items() if k not in names} for names in (["tokens"], ["tokens_decoded"])]
    others[1]["question_id"] = "q97"
    first = make_trace(0, tokens=3) | {"rare": 0, "temperature": 0.5}
    write_pickle(folder / "batch_6.pkl", [first, make_trace(99), *others])
    return {}


def of_conflicts(choice):
    def change(folder):
        other = make_trace(1, tokens=4) | {"generated_answer_clean": "another", "rare": 7}
        write_pickle(folder / "batch_6.pkl", [other | {"hidden_states": [h + 1 for h in other["hidden_states"]]}])
        return {"on_conflict": choice}

    return change


def of_texts(folder):
    write_pickle(folder / "batch_6.pkl", [make_trace(1, tokens=4) | {"rare": 1, "generated_answer_clean": "another"}])
    return {"on_conflict": "keep-first"}


def of_refused(folder):
    traces = make_traces(4, tokens=3)
    traces[0]["question_id"], traces[2]["question_id"] = "new", "newer"
    traces[1] = {k: v for k, v in make_trace(70).items() if k != "hidden_states"}
    traces[3] = make_trace(71, layers=2)
    write_pickle(folder / "batch_6.pkl", traces)
    write_pickle(folder / "batch_7.pkl", [make_trace(72, dim=9)])
    return {"skip_bad": True}


def of_names(folder):
    scores = {"batch_8": 0.25} | {f"q{10 * k + i}": 0.5 for k in range(6) for i in range(4)}
    write_pickle(folder / "batch_8.pkl", [{k: v for k, v in make_trace(80).items() if k != "question_id"}])
    write_scores(folder / "scores.csv", scores)
    return {}


def of_others(folder):
    (folder / "settings.json").write_text('{"a": 1}')
    (folder / "other").mkdir()
    write_pickle(folder / "other" / "batch_0.pkl", [make_trace(90) | {"label": 1}, make_trace(91) | {"label": 0}])
    return {"dtype": "keep"}


CASES = [of_scores, of_duplicates, *map(of_conflicts, ("keep-first", "keep-last")), of_texts, of_refused, of_names]


@pytest.mark.long
@pytest.mark.parametrize("change", [*CASES, of_others], ids=lambda f: f.__name__)
def test_tasks_give_what_convert_gives(data, tmp_path, change):
    """The traces and the counts, whatever the sources have in common."""
    options = change(data)
    one, store = tmp_path / "one.zarr", tmp_path / "s.zarr"
    words = [w for n, v in options.items() for w in ([f"--{n.replace('_', '-')}"] + ([] if v is True else [v]))]
    expected = json.loads(convert(data, one, "--json", *words).stdout)
    report = run_tasks(data, store, **options)
    check_equal(store, one)
    segments = ("num_segments", "generation", "bytes_out", "seconds", "store", "scores_file", "refused_file")
    found = {name: value for name, value in vars(report).items() if name not in segments}
    assert found == {name: value for name, value in expected.items() if name not in segments}
    assert plan_tasks(data, store, ConvertOptions(**options)) == [] or change in (of_refused, of_others)


@pytest.mark.long
def test_a_refused_source_keeps_those_before_it(data, tmp_path):
    write_pickle(data / "batch_3.pkl.gz", [make_trace(30), {"question_id": "bad"}])
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    for task in tasks:
        write_task(task)
    with pytest.raises(InvalidInputError, match=r"batch_3.pkl.gz, trace 1"):
        commit_tasks(tasks)
    assert len(tracestore.open(tmp_path / "s.zarr")) == 12
    write_pickle(data / "batch_3.pkl.gz", [make_trace(30)])
    run_tasks(data, tmp_path / "s.zarr")
    assert len(tracestore.open(tmp_path / "s.zarr")) == 21


@pytest.mark.parametrize("questions", ["AAA A-A", "ABA", "A AB", "AA B", "A - B", "-A AB"])
def test_blocks_hold_the_answers_to_one_question(tmp_path, monkeypatch, questions):
    """Only those to other questions are added trace by trace. - is a blank question, and a blank ends a file."""
    sample = itertools.count()
    for name, file in enumerate(questions.split()):
        traces = [make_trace(0, seed=(k := next(sample))) | {"sample": k, "question": q.strip("-")} for q in file]
        write_pickle(tmp_path / "data" / f"{name}.pkl", traces)
    if "B" in questions:
        with pytest.raises(InvalidInputError, match=r"question: found 'B', expected that of sample . .* 'A' "):
            run_tasks(tmp_path / "data", tmp_path / "s.zarr")
        return
    monkeypatch.delattr(TraceBlock, "trace")
    run_tasks(tmp_path / "data", tmp_path / "s.zarr")
    assert [t.sample for t in tracestore.open(tmp_path / "s.zarr")] == list(range(next(sample)))


@pytest.mark.parametrize("write", [tracestore.convert_files, run_tasks])
def test_a_source_whose_mapped_bytes_are_gone_is_refused(data, tmp_path, monkeypatch, write):
    def fail(*_):
        raise OSError(errno.EFAULT, "Bad address")

    monkeypatch.setattr(shard_writer, "pwritev_all", fail)

    with pytest.raises(InvalidInputError, match=r"batch_0\.pkl: another program truncated the file"):
        write(data, tmp_path / "s.zarr")


@pytest.mark.long
def test_a_plan_is_kept_until_it_is_committed(data, tmp_path):
    store = tmp_path / "s.zarr"
    tasks = plan_tasks(data, store)
    for workers in (1, 4):
        assert plan_tasks([str(data)], store, ConvertOptions(workers=workers)) == tasks
    write_pickle(data / "batch_9.pkl", [make_trace(95)])
    assert plan_tasks(data, store) == tasks, "an added file waits for the next plan"
    other = plan_tasks(data, store, ConvertOptions(on_conflict="keep-last"))
    assert plan_tasks(data, store) == tasks != other, "each plan is kept"
    with pytest.raises(UsageError, match=r"6 of 6 tasks are not written"):
        commit_tasks(tasks)
    write_task(tasks[0])
    with pytest.raises(UsageError, match="expected the 6 tasks of one plan"):
        commit_tasks(tasks[:1])
    for task in tasks:
        write_task(task)
    assert commit_tasks(tasks).num_traces == 24
    run_tasks(data, store)
    assert len(tracestore.open(store)) == 25
    assert commit_tasks(plan_tasks(data, store)) is None


def test_tasks_and_receipts_are_plain_values(data, tmp_path):
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    receipts = [write_task(task) for task in tasks]
    for kind, values in ((Task, tasks), (Receipt, receipts)):
        assert pickle.loads(pickle.dumps(values)) == values
        assert [kind.from_json(value.to_json()) for value in values] == values
        for text in ("", "{}", "[1]", "null", '{"store": 1}', values[0].to_json()[:-9]):
            with pytest.raises(UsageError):
                kind.from_json(text)
    assert all(receipt.num_traces == 4 and receipt.num_bytes > 0 for receipt in receipts)


def test_changed_sources_and_other_versions_are_refused(data, tmp_path, monkeypatch):
    of_scores(data)
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    write_pickle(data / "batch_0.pkl", [make_trace(5)])
    for task in tasks:
        write_task(task)
    with pytest.raises(InvalidInputError, match=r"batch_0.pkl: has changed since the plan"):
        commit_tasks(tasks)
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="other versions"):
        patch.setattr(plan, "version", lambda name: "9")
        write_task(tasks[0])
    (data / "scores.csv").write_text("question_id,score\nq0,1\n")
    for call in (lambda: write_task(tasks[0]), lambda: commit_tasks(tasks)):
        with pytest.raises((InvalidInputError, UsageError), match=r"changed since the plan|not written"):
            call()


def test_what_tasks_cannot_do_is_refused(data, tmp_path):
    store = tmp_path / "s.zarr"
    for words in (["--dry-run"], ["--watch"], ["--dask", "local"]):
        error_of("convert", data, store, "--plan", tmp_path / "plan.json", *words, code=2)
    error_of("convert", data, "https://localhost/s.zarr", "--plan", tmp_path / "plan.json", code=2)
    error_of("convert", data, store, "--dask", "local", "--watch", code=2)
    assert not store.exists() and not (tmp_path / "plan.json").exists()


def mutations(data, rng):
    """Yield damaged copies of a file."""
    for _ in range(150):
        changed = bytearray(data)
        kind = rng.randrange(4)
        at = rng.randrange(len(data))
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at : at + 8] = rng.randbytes(8)
        else:
            changed[at:at] = rng.randbytes(rng.randrange(1, 64))
        yield bytes(changed)


@pytest.mark.long
def test_damaged_receipts_are_refused_or_right(data, tmp_path):
    of_scores(data)
    store = tmp_path / "s.zarr"
    run_tasks(data, tmp_path / "one.zarr", group_column="topic")
    tasks = plan_tasks(data, store, ConvertOptions(group_column="topic"))
    for task in tasks:
        write_task(task)
    path, found = store / paths.receipt(tasks[2].hash), plan.TaskPlan.read(tasks[2])
    sources = found.described().sources
    whole = path.read_bytes()
    expected = receipt.read_receipt(found, tasks[2], sources)
    path.chmod(0o644)
    num_refused = 0
    for changed in mutations(whole, random.Random(1)):
        path.write_bytes(changed)
        try:
            again = receipt.read_receipt(found, tasks[2], sources)
        except CorruptStoreError as error:
            assert paths.receipt(tasks[2].hash) in str(error)
            num_refused += 1
        else:
            for one, other in zip(expected.sources, again.sources, strict=True):
                texts = [str([replace(t, segment=None) for t in s]) for s in (one, other)]
                assert texts[0] == texts[1]
    assert num_refused > 100
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptStoreError):
        commit_tasks(tasks)
    write_task(tasks[2])
    commit_tasks(tasks)
    assert files_of(store) == files_of(tmp_path / "one.zarr")


def forged():
    """Yield changes that a receipt with a right digest may have."""
    yield lambda d, a: d["segments"].clear()
    yield lambda d, a: d["segments"].append(d["segments"][0])
    yield lambda d, a: d["segments"][0].__setitem__(0, "../../x")
    yield lambda d, a: d["segments"][0].__setitem__(0, "0" * 32)
    yield lambda d, a: d["segments"][0].__setitem__(1, 3)
    yield lambda d, a: d["segments"][0].__setitem__(1, True)
    yield lambda d, a: d["segments"][0].__setitem__(2, 1)
    yield lambda d, a: d["segments"][0].__setitem__(3, 1)
    yield lambda d, a: d["segments"][0].__setitem__(4, {})
    yield lambda d, a: d["segments"][0][4].update(hidden_states=[1, 1])
    yield lambda d, a: d["segments"][0][4].update(attention=[10**9, 10**9])
    yield lambda d, a: d["segments"][0][4].update(last_token="ab")
    yield lambda d, a: d["sources"][0].update(num_traces=5)
    yield lambda d, a: d["sources"][0].update(num_traces=-1)
    yield lambda d, a: d["sources"][0].update(name="other")
    yield lambda d, a: d["sources"][0].update(position=1)
    yield lambda d, a: d["sources"][0].update(error={"reason": "no"})
    yield lambda d, a: d["sources"][0].update(refused=[1])
    yield lambda d, a: d["facts"][0].__setitem__(0, 2)
    yield lambda d, a: d["facts"][0].__setitem__(1, 9)
    yield lambda d, a: d["facts"][0].__setitem__(1, 10**12)
    yield lambda d, a: d["facts"][0].__setitem__(2, "float32")
    yield lambda d, a: d["facts"][0].__setitem__(2, "int8")
    yield lambda d, a: d["facts"][0].__setitem__(6, ["x"])
    yield lambda d, a: d["facts"].clear()
    yield lambda d, a: d.update(scores=["a", "b"])
    yield lambda d, a: d.update(accounts=[])
    yield lambda d, a: d["accounts"][0].update(found=[])
    yield lambda d, a: d["accounts"][0].update(shown={"first": [1], "equal": []})
    yield lambda d, a: d["accounts"][0].update(num_read="x")
    yield lambda d, a: d["accounts"][0].update(first_numbers=[[1]])
    yield lambda d, a: d["accounts"][0].update(tables=[{"field": "label"}])
    yield lambda d, a: d["accounts"][0].pop("left_out")
    yield lambda d, a: d["accounts"].__setitem__(-1, {})
    yield lambda d, a: d.update(task="0" * 32)
    yield lambda d, a: a["facts"].__setitem__(0, -1)
    yield lambda d, a: a["facts"].__setitem__(0, 7)
    yield lambda d, a: a["source_bytes"].__setitem__(0, -1)
    yield lambda d, a: a["group_offsets"].__setitem__(1, 99)
    yield lambda d, a: a.update(values=a["values"][:-1])
    yield lambda d, a: a.update(group_offsets=a["group_offsets"][:-1])


@pytest.fixture(scope="module")
def uncommitted(tmp_path_factory):
    """Return tasks that are written, their store, and the document and the arrays of the first receipt."""
    folder = tmp_path_factory.mktemp("uncommitted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "MIN_BYTES", 1)
        tasks = plan_tasks(write_data(folder / "data"), folder / "s.zarr")
    for task in tasks:
        write_task(task)
    group = ZipGroup(MappedFile(folder / "s.zarr" / paths.receipt(tasks[0].hash)), receipt._ARRAYS)
    arrays = {name: group.read(name).copy() for name in receipt._ARRAYS}
    return tasks, folder / "s.zarr", group.attributes()["tracestore"], arrays


@pytest.mark.parametrize("number", range(len(list(forged()))))
def test_forged_receipts_are_refused(uncommitted, number):
    tasks, store, *content = uncommitted
    document, arrays = copy.deepcopy(content)
    del document["digest"]
    list(forged())[number](document, arrays)
    facts = {"tracestore": document | {"digest": receipt._digest(document, arrays)}}
    path = store / paths.receipt(tasks[0].hash)
    path.unlink()
    path.write_bytes(pack_group(arrays, facts))
    with pytest.raises(CorruptStoreError):
        commit_tasks(tasks)
    with pytest.raises(UsageError, match="nothing has been committed"):
        tracestore.open(store)


def test_a_segment_that_is_gone_is_refused(data, tmp_path):
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    for task in tasks:
        write_task(task)
    path = next((tmp_path / "s.zarr" / "segments").glob("*/hidden_states/c/0/0"))
    path.unlink()
    with pytest.raises(CorruptStoreError):
        commit_tasks(tasks)


@pytest.mark.long
def test_a_coordinator_that_stops_continues_from_the_receipts(data, tmp_path, monkeypatch):
    """A commit fails behind each generation; the same call continues, to the same bytes."""
    from tracestore.store.io.folder_target import FolderTarget

    run_tasks(data, tmp_path / "one.zarr")
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    for task in tasks:
        write_task(task)
    settle = FolderTarget.settle

    def fail(self, manifest, root):
        settle(self, manifest, root)
        raise KeyboardInterrupt

    monkeypatch.setattr(FolderTarget, "settle", fail)
    monkeypatch.setattr(FolderTarget, "begin", lambda self, manifest, root: settle(self, manifest, root))
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            commit_tasks(tasks)
    assert commit_tasks(tasks).num_sources_skipped_existing == 6
    assert files_of(tmp_path / "s.zarr") == files_of(tmp_path / "one.zarr")


@pytest.mark.long
def test_two_coordinators_add_each_source_once(data, tmp_path):
    one, other = (plan_tasks(sources, tmp_path / "s.zarr") for sources in (data, data))
    for task in one:
        write_task(task)
    assert one == other
    command = [sys.executable, "-m", "tracestore", "commit", tmp_path / "plan.json"]
    write_tasks(tmp_path / "plan.json", one)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1].decode() for process in processes]
    assert 0 in [process.returncode for process in processes], errors
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert len(store) == 24 and len(list(store.internals.index.sources())) == 6
    assert verify_store(tmp_path / "s.zarr").damaged == {}


@pytest.mark.long
def test_processes_of_one_command(data, tmp_path):
    run_tasks(data, tmp_path / "one.zarr")
    convert(data, tmp_path / "s.zarr", "--plan", tmp_path / "plan.json")
    assert command("work", tmp_path / "plan.json", "--workers", 2, check=0).stdout.count("is written") == 6
    command("commit", tmp_path / "plan.json", check=0)
    assert files_of(tmp_path / "s.zarr") == files_of(tmp_path / "one.zarr")
    # Without the plan the processes fail, with the message and the exit code of one of them.
    assert "it is committed" in error_of("work", tmp_path / "plan.json", "--workers", 2, code=2)


@pytest.mark.long
@pytest.mark.parametrize("num_kills", [2, 3])
def test_a_killed_process_is_repeated_three_times_at_most(data, tmp_path, failing, num_kills):
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    write_tasks(tmp_path / "plan.json", tasks)
    kill = f"file = open({str(tmp_path / 'kills')!r}, 'a'); file.write('x'); file.flush()\n"
    kill += f"        if file.tell() <= {num_kills}: os.kill(os.getpid(), signal.SIGKILL)"
    with failing(3, kill):
        if num_kills == 2:
            command("work", tmp_path / "plan.json", "--workers", 2, check=0)
            assert commit_tasks(tasks).num_traces == 24
        else:
            error = error_of("work", tmp_path / "plan.json", "--workers", 2, code=3)
            assert "batch_3.pkl.gz" in error and "killed 3 times (signal 9)" in error


@pytest.mark.long
def test_commands(data, tmp_path):
    file, store = tmp_path / "plan.json", tmp_path / "s.zarr"
    convert(data, store, "--plan", file)
    assert "0 of 6 tasks" in command("status", file, check=0).stdout
    assert command("work", file, "--shard", "1/2", check=0).stdout.count("task ") == 3
    assert "shard 6/7 has no task: the plan has 6 tasks" in command("work", file, "--shard", "6/7", check=0).stdout
    status = json.loads(command("status", file, "--json", check=0).stdout)
    assert (status["num_written"], status["missing"]) == (3, [0, 2, 4])
    assert "3 of 6 tasks are not written" in error_of("commit", file, code=2)
    worker = start(file, "--shard", "0/2")
    command("commit", file, "--wait", 60, check=0)
    assert worker.wait(60) == 0
    assert len(tracestore.open(store)) == 24
    for name in ("status", "commit"):
        assert "it is committed, and the store has all sources of its tasks" in error_of(name, file, code=2)
    (tmp_path / "copy").mkdir()
    shutil.move(store / "receipts", tmp_path / "copy")
    assert "it is committed, or was removed" in error_of("commit", file, code=2)
    shutil.move(tmp_path / "copy/receipts", store)
    convert(data, store, "--plan", file)
    for name in ("work", "status", "commit"):
        command(name, file, check=0)
    for words in (["work", tmp_path / "none"], ["work", data / "batch_0.pkl"], ["status", data], ["commit", data]):
        error_of(*words, code=2)
    for shard in ("2/2", "x", "1"):
        command("work", file, "--shard", shard, check=2)
