"""Files with tasks: what they replace, and what is read of them."""

import io
import json
import os
import random
import threading
import time

import pytest

from tests.helpers import command, convert, error_of, make_trace, tree_bytes, write_pickle, write_scores
from tests.tasks.test_tasks import files_of
from tracestore.errors import UsageError
from tracestore.store.format import paths
from tracestore.tasks import commit_tasks, plan_tasks, task_files
from tracestore.tasks.task_files import read_tasks, write_tasks


def of_source(folder, store):
    return folder / "batch_0.pkl"


def of_scores(folder, store):
    return write_scores(folder / "scores.csv", {"q0": 0.5})


def of_link(folder, store):
    os.symlink(folder / "batch_0.pkl", folder.parent / "plan.json")
    return folder.parent / "plan.json"


def of_second_name(folder, store):
    os.link(folder / "batch_0.pkl", folder.parent / "plan.json")
    return folder.parent / "plan.json"


def of_notes(folder, store):
    path = folder.parent / "notes.json"
    path.write_text(json.dumps({"store": str(store)}))
    return path


def of_provenance(folder, store):
    path = folder / "provenance.json"
    path.write_text(json.dumps({"model": "m"}))
    return path


def of_export(folder, store):
    path = folder / "store.json"
    path.write_text("{}")
    return path


def of_manifest(folder, store):
    convert(folder, store)
    return store / "manifest" / "0000000001"


def of_root(folder, store):
    convert(folder, store)
    return store / "zarr.json"


def of_new_name_in_store(folder, store):
    convert(folder, store)
    write_pickle(folder / "batch_9.pkl", [make_trace(95)])
    return store / "plan.json"


def of_new_name_in_sources(folder, store):
    return folder / "plan.json"


def of_empty_destination(folder, store):
    store.mkdir()
    return store / "plan.json"


def of_other_suffix(folder, store):
    return folder.parent / "report.html"


PLACES = [of_source, of_scores, of_link, of_second_name, of_notes, of_provenance, of_export, of_manifest, of_root,
          of_new_name_in_store, of_new_name_in_sources, of_empty_destination, of_other_suffix]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
def test_the_file_of_a_plan_replaces_nothing_else(data, tmp_path, place):
    path = place(data, tmp_path / "s.zarr")
    before = tree_bytes(tmp_path)
    error = error_of("convert", data, tmp_path / "s.zarr", "--plan", path, code=2)
    assert str(path) in error and tree_bytes(tmp_path) == before


def test_the_file_of_a_plan_replaces_an_earlier_or_empty_one(data, tmp_path):
    file = tmp_path / "plan.json"
    file.touch()
    for _ in range(2):
        convert(data, tmp_path / "s.zarr", "--plan", file)
    assert read_tasks(file) == plan_tasks(data, tmp_path / "s.zarr")


def test_a_file_with_missing_lines_is_refused(data, tmp_path):
    """Each command refuses what a full disk or an editor has left of a file."""
    file = tmp_path / "plan.json"
    write_tasks(file, plan_tasks(data, tmp_path / "s.zarr"))
    lines = file.read_text().splitlines(keepends=True)
    for kept in ([], lines[:1], lines[:-1], lines[1:], [*lines, lines[-1]], [*lines[:-1], lines[-1][:40]]):
        file.write_text("".join(kept))
        with pytest.raises(UsageError, match="not a plan"):
            read_tasks(file)
    file.write_text("")
    for name in ("work", "status", "commit"):
        assert "not a plan" in error_of(name, file, code=2)
    write_tasks(file, [])
    assert read_tasks(file) == []


@pytest.mark.long
def test_lines_of_tasks_come_from_standard_input(data, tmp_path, monkeypatch):
    tasks = plan_tasks(data, tmp_path / "s.zarr")
    for lines in ([], [task.to_json() for task in tasks]):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        assert command("work", "-", check=0).stdout.split() == [task.hash for task in tasks if lines]
    assert commit_tasks(tasks).num_traces == 24
    for line in (tasks[0].to_json(), tasks[0].to_json().replace(tasks[0].hash, "00"), "{}", "0", "\n", "\x00"):
        monkeypatch.setattr("sys.stdin", io.StringIO(line))
        error_of("work", "-", code=2)


def reveal(names):
    """Give files their names in the store one after the other, as another machine sees them."""
    for hidden, path in names:
        time.sleep(0.01)
        hidden.rename(path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_commit_waits_for_what_a_file_system_shows_late(data, tmp_path, monkeypatch, seed):
    """Receipts before or after their segments, in any order; until all are visible, nothing is committed."""
    monkeypatch.setattr(task_files, "_POLL_S", 0.01)
    monkeypatch.setattr(task_files, "_MAX_POLL_S", 0.01)
    store, file, hidden = tmp_path / "s.zarr", tmp_path / "plan.json", tmp_path / "hidden"
    convert(data, tmp_path / "one.zarr")
    convert(data, store, "--plan", file)
    command("work", file, check=0)
    written = [*(store / paths.RECEIPTS).glob("*.zip"), *(store / "segments").iterdir()]
    hidden.mkdir()
    names = [(path.rename(hidden / str(k)), path) for k, path in enumerate(written)]
    random.Random(seed).shuffle(names)
    reveal(names[:6])
    assert json.loads(command("status", file, "--json", check=0).stdout)["num_written"] < 6
    before = tree_bytes(store)
    assert "are not written" in error_of("commit", file, "--wait", 0.1, code=2)
    assert tree_bytes(store) == before
    shown = threading.Thread(target=reveal, args=(names[6:],))
    shown.start()
    command("commit", file, "--wait", 60, check=0)
    shown.join()
    assert files_of(store) == tree_bytes(tmp_path / "one.zarr")
