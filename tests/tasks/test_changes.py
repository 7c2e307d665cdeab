"""Changes between the plan, the tasks and the commit are refused, or read again, or left for the next plan."""

import json
import os
import shutil
import time

import pytest

import tracestore
from tests.helpers import (
    command,
    convert,
    error_of,
    field_flags,
    make_trace,
    read_all,
    tree_bytes,
    write_pickle,
    write_scores,
)
from tracestore.convert.options import ConvertOptions
from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest import sources
from tracestore.ingest.sources import SourceIdentity
from tracestore.store.format import paths
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write.plan_files import open_plan_files
from tracestore.store.write.writer import StoreWriter
from tracestore.tasks import commit_tasks, plan_tasks, task_plan, write_task
from tracestore.tasks.receipt import listed
from tracestore.tasks.task_files import read_tasks

SCORES = {f"q{10 * k + i}": 0.25 for k in range(6) for i in range(4)}


def write_all(data, store, **options):
    tasks = plan_tasks(data, store, ConvertOptions(**options))
    for task in tasks:
        write_task(task)
    return tasks


def fail_once(data, store, how, **options):
    """Return tasks of which one was written while a source could not be read, which it can now."""
    tasks = plan_tasks(data, store, ConvertOptions(**options))
    path = data / "batch_2.pkl"
    content, hidden = path.read_bytes(), data.parent / "hidden"
    path.rename(hidden)
    if how != "absent":
        path.write_bytes({"empty": b"", "short": content[:-9], "other": content[:-9] + b"123456789"}[how])
    for task in tasks:
        write_task(task)
    hidden.rename(path)
    return tasks


@pytest.mark.long
@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("how", ["absent", "empty", "short", "other"])
def test_a_source_that_could_not_be_read_is_read_again(data, tmp_path, how, skip_bad):
    convert(data, tmp_path / "one.zarr")
    tasks = fail_once(data, tmp_path / "s.zarr", how, skip_bad=skip_bad)
    before = {task.hash: tree_bytes(tmp_path / "s.zarr")[paths.receipt(task.hash)] for task in tasks}
    assert [write_task(task).num_traces for task in tasks] == [4] * 6
    after = tree_bytes(tmp_path / "s.zarr")
    assert [before[task.hash] == after[paths.receipt(task.hash)] for task in tasks] == [k != 2 for k in range(6)]
    report = commit_tasks(tasks)
    assert (report.num_traces, report.num_sources_skipped) == (24, 0)
    with tracestore.open(tmp_path / "s.zarr") as store, tracestore.open(tmp_path / "one.zarr") as one:
        assert repr(read_all(store)) == repr(read_all(one))


def test_a_source_that_cannot_be_read_is_planned_although_the_store_has_forgotten_it(data, tmp_path, monkeypatch):
    """Neither has a fingerprint, and so they say nothing of each other."""
    convert(data, tmp_path / "s.zarr")
    with StoreWriter(tmp_path / "s.zarr") as writer:
        writer.forget_source("batch_2.pkl")
        writer.commit()
        assert writer.has_source("batch_2.pkl", 0, "")
    identity_of = task_plan.identity_of

    def unreadable(source):
        return SourceIdentity(0, "", 0) if source.name == "batch_2.pkl" else identity_of(source)

    monkeypatch.setattr(task_plan, "identity_of", unreadable)
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    assert [source for task in tasks for source in task.sources] == ["batch_2.pkl"]


@pytest.mark.long
def test_a_refused_commit_removes_the_receipts_with_errors(data, tmp_path):
    """Planned again, their tasks are not written, even if the plan is the same one."""
    os.rename(data / "batch_0.pkl", data / "batch_2.tmp")
    os.rename(data / "batch_2.pkl", data / "batch_0.pkl")
    os.rename(data / "batch_2.tmp", data / "batch_2.pkl")
    path = data / "batch_0.pkl"
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    path.rename(tmp_path / "hidden")
    for task in tasks:
        write_task(task)
    (tmp_path / "hidden").rename(path)
    with pytest.raises(InvalidInputError, match=r"batch_0.pkl"):
        commit_tasks(tasks)
    kept = {name for name in tree_bytes(tmp_path / "s.zarr") if name.startswith(paths.RECEIPTS)}
    assert kept == {paths.receipt(task.hash) for task in tasks[1:]}
    assert plan_tasks(data, tmp_path / "s.zarr") == tasks
    with pytest.raises(UsageError, match="1 of 6 tasks are not written"):
        commit_tasks(tasks)
    write_task(tasks[0])
    assert commit_tasks(tasks).num_traces == 24


@pytest.mark.long
def test_a_changed_source_is_read_again_if_its_fingerprint_is_the_same(data, tmp_path, monkeypatch):
    """Fingerprints are samples. The commit has refused another source."""
    monkeypatch.setattr(sources, "_SAMPLE_BYTES", 1)
    names = {"batch_2.pkl": (b"q22", b"q21"), "batch_4.pkl": (b"answer 42", b"answer 40")}
    contents = {name: (data / name).read_bytes() for name in names}
    before = [sources.fingerprint(data / name) for name in names]
    for name, words in names.items():
        assert contents[name].count(words[0]) == 1
        (data / name).write_bytes(contents[name].replace(*words))
    with pytest.raises(InvalidInputError, match="q21"):
        commit_tasks(write_all(data, tmp_path / "s.zarr"))
    for name, content in contents.items():
        (data / name).write_bytes(content)
    assert [sources.fingerprint(data / name) for name in names] == before
    commit_tasks(write_all(data, tmp_path / "s.zarr"))
    convert(data, tmp_path / "one.zarr")
    with tracestore.open(tmp_path / "s.zarr") as store, tracestore.open(tmp_path / "one.zarr") as one:
        assert repr(read_all(store)) == repr(read_all(one))


@pytest.mark.long
def test_a_source_that_was_left_out_is_read_by_the_next_plan(data, tmp_path):
    """Also by a plan that equals an earlier one, whose commit has left it out."""
    path = data / "batch_2.pkl"
    content = path.read_bytes()
    for k in range(2):
        tasks = plan_tasks(data, tmp_path / "s.zarr", ConvertOptions(skip_bad=True))
        path.unlink()
        for task in tasks:
            write_task(task)
        path.write_bytes(content)
        assert (len(tasks), commit_tasks(tasks).num_sources_skipped) == ([6, 1][k], 1)
    tasks = plan_tasks(data, tmp_path / "s.zarr", ConvertOptions(skip_bad=True))
    with pytest.raises(UsageError, match="1 of 1 tasks are not written"):
        commit_tasks(tasks)
    write_task(tasks[0])
    assert commit_tasks(tasks).num_traces == 24


def provenances_of(store):
    with tracestore.open(store) as found:
        return [provenance.model for provenance in found.internals.attributes.provenance]


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("change", ["other", "gone", "invalid", "written"])
def test_a_commit_has_the_provenance_of_the_plan(data, tmp_path, change, is_named):
    path = (tmp_path / "p.json") if is_named else data / "provenance.json"
    path.write_text(json.dumps({"model": "one"}))
    options = {"provenance": str(path)} if is_named else {}
    tasks = plan_tasks(data, tmp_path / "s.zarr", ConvertOptions(**options))
    for task in tasks[:3]:
        write_task(task)
    if change == "gone":
        path.unlink()
    else:
        path.write_text({"other": json.dumps({"model": "two"}), "invalid": "{", "written": "{}"}[change])
    for task in tasks[3:]:
        write_task(task)
    commit_tasks(tasks)
    assert provenances_of(tmp_path / "s.zarr") == ["one"]


def add_scores(data, store, monkeypatch):
    write_scores(data / "scores.csv", SCORES)


def change_scores(data, store, monkeypatch):
    write_scores(data / "scores.csv", {f"q{10 * k + i}": 0.75 for k in range(6) for i in range(4)})


def remove_scores(data, store, monkeypatch):
    (data / "scores.csv").unlink()


def change_version(data, store, monkeypatch):
    monkeypatch.setattr(task_plan, "version", lambda name: "9")


def change_provenance(data, store, monkeypatch):
    (data / "provenance.json").write_text(json.dumps({"model": "two"}))


def remove_provenance(data, store, monkeypatch):
    (data / "provenance.json").unlink()


def change_store(data, store, monkeypatch):
    convert(data / "batch_0.pkl", store, "--codec", "zstd", "--provenance", data / "provenance.json")


CHANGES = [add_scores, change_scores, remove_scores, change_version, change_provenance, remove_provenance, change_store]


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_plan_again_replaces_a_plan_that_cannot_be_committed(data, tmp_path, monkeypatch, change):
    store = tmp_path / "s.zarr"
    if change is not add_scores:
        write_scores(data / "scores.csv", SCORES)
    (data / "provenance.json").write_text(json.dumps({"model": "one"}))
    old = plan_tasks(data, store)
    assert plan_tasks(data, store) == old
    write_task(old[0])
    change(data, store, monkeypatch)
    tasks = write_all(data, store)
    assert {task.plan for task in tasks}.isdisjoint(task.plan for task in old)
    kept = {name for name in tree_bytes(store) if name.startswith(paths.RECEIPTS)}
    assert kept == {paths.plan(tasks[0].plan), *(paths.receipt(task.hash) for task in tasks)}
    with pytest.raises(UsageError, match="plan again"):
        write_task(old[1])
    commit_tasks(tasks)
    one = tmp_path / "one.zarr"
    if change is change_store:
        change(data, one, monkeypatch)
    convert(data, one)
    with tracestore.open(store) as found, tracestore.open(one) as expected:
        assert repr(read_all(found)) == repr(read_all(expected)) and found.score_fields == expected.score_fields
        assert found.score_fields == {} or found.scores.tolist() == expected.scores.tolist()
    assert provenances_of(store) == provenances_of(one)


@pytest.mark.parametrize("lines", [[], ["ignore = old.csv"]])
def test_files_that_are_added_after_the_plan_are_converted_after_it(data, tmp_path, lines):
    file, words = tmp_path / "plan.json", field_flags(*lines)
    if lines:
        (data / "old.csv").write_text("qid,y\n")
    (data / "README.md").write_text("text")
    convert(data, tmp_path / "s.zarr", "--plan", file, "--overwrite", *words)
    command("work", file, check=0)
    write_pickle(data / "sub/more.pkl", [make_trace(99)])
    (data / "LICENSE.md").write_text("text")
    done = convert(data, tmp_path / "s.zarr", "--overwrite", *words, "--json")
    assert "\n1 file added since the plan\n" in done.stderr
    report = json.loads(done.stdout)
    assert report["num_traces"] == report["num_traces_new"] == 25 and report["num_sources"] == 7
    convert(data, tmp_path / "s.zarr", "--plan", file, *words)
    write_scores(data / "scores.csv", {"q0": 0.75})
    assert "added since" not in convert(data, tmp_path / "s.zarr", *words).stdout
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert len(store) == 25 and store["q0"].score == 0.75


@pytest.mark.parametrize("is_named", [False, True])
def test_a_scores_file_that_is_gone_is_refused(data, tmp_path, is_named):
    file, folder = tmp_path / "plan.json", tmp_path if is_named else data
    path = write_scores(folder / "scores.csv", SCORES)
    words = ["--scores", path] if is_named else []
    convert(data, tmp_path / "s.zarr", "--plan", file, *words)
    command("work", file, "--shard", "0/2", check=0)
    path.unlink()
    for name in ("work", "commit", "status"):
        assert "scores.csv: is gone since the plan" in error_of(name, file, code=3)


def test_a_plan_without_tasks_tells_how_changed_scores_are_stored(data, tmp_path):
    ids = [f"q{10 * k + i}" for k in range(6) for i in range(4)]
    write_scores(data / "scores.csv", dict.fromkeys(ids, 0.25))
    convert(data, tmp_path / "s.zarr")
    write_scores(data / "scores.csv", dict.fromkeys(ids, 0.75))
    assert "scores.csv: changed scores" in convert(data, tmp_path / "s.zarr", "--plan", tmp_path / "p.json").stdout
    assert "changed scores are" not in convert(data, tmp_path / "s.zarr", "--workers", 2).stdout
    assert set(tracestore.open(tmp_path / "s.zarr").scores.tolist()) == {0.75}


def replaced(data, number):
    write_pickle(data / f"batch_{number}.pkl", [make_trace(10 * number, tokens=3) | {"rare": 99, "temperature": 0.25}])


@pytest.mark.parametrize("on_conflict", ["error", "keep-first", "keep-last"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_content_older_than_that_of_the_store_is_not_committed(data, tmp_path, on_conflict, is_gone):
    store = tmp_path / "s.zarr"
    tasks = write_all(data, store, on_conflict=on_conflict)
    replaced(data, 2)
    convert(data / "batch_2.pkl", store)
    before = tracestore.open(store)
    if is_gone:
        (data / "batch_2.pkl").unlink()
    with pytest.raises(InvalidInputError, match=r"batch_2.pkl: (has changed since the plan|found nothing)"):
        commit_tasks(tasks)
    with before, tracestore.open(store) as found:
        assert len(found) == 9 and repr(found[0]) == repr(before[0])


def test_content_that_changes_after_its_task_is_for_the_next_plan(data, tmp_path):
    """The store has nothing newer of the source: what the task has read is committed."""
    tasks = write_all(data, tmp_path / "s.zarr")
    write_pickle(data / "batch_2.pkl", [make_trace(77)])
    assert commit_tasks(tasks).num_traces == 24
    tasks = write_all(data, tmp_path / "s.zarr")
    assert [task.sources for task in tasks] == [("batch_2.pkl",)]
    assert commit_tasks(tasks).num_traces == 25


@pytest.fixture
def committed(data, tmp_path):
    """Return the folder, the file of a plan whose segments an abandoned plan has written, and its tasks."""
    file = tmp_path / "plan.json"
    convert(data, tmp_path / "s.zarr", "--plan", file)
    command("work", file, check=0)
    return tmp_path / "s.zarr", file, read_tasks(file)


def make_old(store, days):
    """Set all times of a store."""
    for path in sorted(store.rglob("*"), reverse=True):
        os.utime(path, (time.time() - days * 24 * 3600,) * 2)


def test_clean_keeps_what_a_plan_needs(committed):
    store, file, _ = committed
    make_old(store, 30)
    assert "removed 0 unnamed items" in command("clean", store, check=0).stdout
    assert "6 of 6 tasks" in command("status", file, check=0).stdout
    for words in (["--dry-run"], []):
        done = command("clean", store, "--force", *words, check=0).stdout
        assert f"{'would remove' if words else 'removed'} 13 unnamed items" in done
    for name in ("status", "work", "commit"):
        assert "has no such plan" in error_of(name, file, code=2)
    assert [path for path in tree_bytes(store) if "/" in path] == []


@pytest.mark.long
def test_clean_keeps_segments_that_a_task_uses_again(committed, data):
    """Also while no receipt lists them yet."""
    store, _, tasks = committed
    (store / paths.plan(tasks[0].plan)).unlink()
    for task in tasks:
        (store / paths.receipt(task.hash)).unlink()
    make_old(store, 30)
    tasks = plan_tasks(data, store)
    write_task(tasks[0])
    (store / paths.receipt(tasks[0].hash)).unlink()
    assert "removed 5 unnamed items" in command("clean", store, check=0).stdout
    num_bytes = len(tree_bytes(store))
    for task in tasks:
        write_task(task)
    assert len(tree_bytes(store)) > num_bytes
    assert commit_tasks(tasks).num_traces == 24


@pytest.mark.long
@pytest.mark.parametrize("what", ["segment", "array", "rows", "receipt", "damaged"])
def test_a_task_whose_segment_or_receipt_is_lost_is_written_again(committed, what):
    store, file, tasks = committed
    receipt = store / paths.receipt(tasks[3].hash)
    segment = store / listed(open_plan_files(store), tasks[3])[0][0]
    if what == "segment":
        shutil.rmtree(segment)
    elif what in ("receipt", "damaged"):
        content = receipt.read_bytes()
        receipt.unlink()
        if what == "damaged":
            receipt.write_bytes(content[:-1])
    else:
        (segment / {"array": "hidden_states/c/0/0", "rows": "rows.zip"}[what]).unlink()
    if what in ("segment", "receipt", "damaged"):
        assert "5 of 6 tasks written" in command("status", file, check=0).stdout
    error = error_of("commit", file, code=2 if what == "receipt" else 3)
    assert "not written" in error or "write its task again" in error or "missing" in error
    command("work", file, check=0)
    assert "6 of 6 tasks" in command("status", file, check=0).stdout
    command("commit", file, check=0)
    assert len(tracestore.open(store)) == 24 and verify_store(store).damaged == {}


@pytest.mark.long
def test_a_commit_that_reads_all_files_again_refuses_attention(tmp_path):
    """The plan has found none in the first traces; a store without attention drops it only if an option chooses that."""
    data, file = tmp_path / "data", tmp_path / "plan.json"
    data.mkdir()

    def save(name, keys, *, seed=0, last=()):
        traces = [make_trace(k, tokens=4, seed=seed) for k in keys]
        for trace in traces:
            del trace["attentions"]
        write_pickle(data / name, [*traces, *last])

    def run(*words, check):
        return command(*words, check=check).stderr

    save("a.pkl", [1, 2])
    save("c.pkl", [3, 2], seed=1)
    words = ("convert", data, tmp_path / "s.zarr", "--on-conflict", "keep-last")
    run(*words, check=0)
    save("a.pkl", [1, 2], seed=2)
    save("d.pkl", range(10, 14), last=[make_trace(20, tokens=4)])
    shutil.copytree(tmp_path / "s.zarr", tmp_path / "t.zarr")
    assert "attention" in run("convert", data, tmp_path / "t.zarr", "--on-conflict", "keep-last", check=3)
    run(*words, "--plan", file, check=0)
    run("work", file, check=0)
    assert "attention" in run("commit", file, check=3)
