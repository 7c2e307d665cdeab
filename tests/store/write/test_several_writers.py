"""Several writers of one store: nothing is lost, twice or damaged."""

import errno
import math
import os
import random
import shutil
import traceback

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, make_trace, make_traces, read_all, tree_bytes, write_pickle, write_store
from tracestore.convert import cutting
from tracestore.errors import LateConflictError, StoreLockedError, UsageError
from tracestore.store.format.labels import ScoreField
from tracestore.store.io import fsio, locks
from tracestore.store.io.folder_target import FolderTarget
from tracestore.store.maintain.clean import clean_store
from tracestore.store.maintain.verify import verify_store
from tracestore.store.read.columns import TraceValues
from tracestore.store.write.record import record_from_dict
from tracestore.store.write.writer import StoreWriter

ROUNDS = int(os.environ.get("TRACESTORE_ROUNDS", "4"))


def add_source(writer, name, traces, **given):
    """Add a source of a file."""
    writer.begin_source(name, len(traces), name)
    for position, trace in enumerate(traces):
        record = record_from_dict(trace, source_name=name, position=position, need_attention=None)
        writer.append_packed(writer.pack(record), **given)
    writer.end_source()


def check(path, traces):
    """Assert that a store has these traces in some order, and is intact."""
    with tracestore.open(path) as store:
        found = {t["question_id"]: t["hidden"] for t in read_all(store)}
        assert len(store) == len(found) == len(traces)
        assert found == {t["question_id"]: np.stack(t["hidden_states"]).tobytes() for t in traces}
        assert [store.index_of(id_) for id_ in store.question_ids] == list(range(len(store)))
    report = verify_store(path, num_threads=1)
    assert report.damaged == {} and report.leftovers == []


def test_writers_take_turns(tmp_path):
    traces, path = make_traces(12), tmp_path / "s.zarr"
    with tracestore.create(path, append=True) as one, tracestore.create(path, append=True) as other:
        for k, trace in enumerate(traces):
            writer = (one, other)[k % 2]
            writer.append(trace, score=k / 12)
            if k % 3 == 0:
                writer.flush()
    check(path, traces)
    with tracestore.open(path) as store:
        assert {t.question_id: t.score for t in store} == {t["question_id"]: k / 12 for k, t in enumerate(traces)}
        sources = [s.path for s in store.internals.index.sources()]
        assert sorted(sources) == [f"append-{k:010d}" for k in range(12)], "the names follow the numbers"


def test_equal_traces_of_two_writers_are_one(tmp_path):
    """The second one finds its traces in the store when it commits, and leaves its segment out."""
    traces, path = make_traces(4), tmp_path / "s.zarr"
    with StoreWriter(path) as one, StoreWriter(path) as other:
        add_source(one, "file", traces)
        add_source(other, "file", traces)
        one.commit()
        before = tree_bytes(path / "segments")
        other.commit()
        assert other.manifest.num_traces == 4 and tree_bytes(path / "segments") == before
        add_source(other, "more", [*traces[:2], make_trace(4)])
        other.commit()
    check(path, make_traces(5))
    with tracestore.open(path) as store:
        sources = {s.path: (s.num_traces, s.num_skipped) for s in store.internals.index.sources()}
        assert sources == {"file": (4, 0), "more": (1, 2)}


def test_a_part_of_the_traces_is_new(tmp_path):
    traces, path = make_traces(6), tmp_path / "s.zarr"
    with StoreWriter(path) as one, StoreWriter(path) as other:
        add_source(one, "a", traces[:4])
        add_source(other, "b", traces[2:])
        one.commit()
        other.commit()
    check(path, traces)
    with tracestore.open(path) as store:
        sources = {s.path: (s.num_traces, s.num_skipped) for s in store.internals.index.sources()}
        assert sources == {"a": (4, 0), "b": (2, 2)}


@pytest.mark.parametrize("on_conflict", ["error", "keep-first", "keep-last"])
def test_conflicts_are_decided_when_the_second_one_commits(tmp_path, on_conflict):
    traces, path = make_traces(3), tmp_path / "s.zarr"
    changed = make_trace(1, tokens=9, seed=5) | {"question_id": traces[1]["question_id"]}
    with StoreWriter(path) as one, StoreWriter(path, on_conflict=on_conflict) as other:
        add_source(one, "a", traces[:2])
        add_source(other, "b", [changed])
        add_source(other, "c", [traces[2]])
        one.commit()
        if on_conflict == "error":
            with pytest.raises(LateConflictError, match="second trace of question id 'q1'"):
                other.commit()
        else:
            other.commit()
    traces[1] = changed if on_conflict == "keep-last" else traces[1]
    check(path, traces)


def test_samples_of_two_writers_answer_one_question(tmp_path):
    path, traces = tmp_path / "s.zarr", [make_trace(0, seed=k) | {"sample": k, "question": "Who?"} for k in range(4)]
    with StoreWriter(path) as one, StoreWriter(path) as other:
        add_source(one, "a", traces[:1])
        add_source(other, "b", traces[1:2])
        add_source(other, "c", [make_trace(1), traces[2] | {"question_id": "q2"}])
        add_source(one, "d", [traces[3] | {"question_id": "q2", "question": "Where?"}])
        one.commit()
        with pytest.raises(LateConflictError, match=r"c, trace 1, question: found 'Who\?', .*'Where\?'"):
            other.commit()
    assert [(t.question_id, t.sample) for t in tracestore.open(path)] == [("q0", 0), ("q2", 3), ("q0", 1)]


def test_a_source_whose_duplicate_was_refused_is_refused(tmp_path):
    """Its trace was left out for one that is not committed."""
    path, traces = tmp_path / "s.zarr", make_traces(2)
    changed = make_trace(1, tokens=9, seed=5) | {"question_id": traces[1]["question_id"]}
    with StoreWriter(path) as one, StoreWriter(path) as other:
        add_source(one, "a", [traces[1]])
        add_source(other, "b", [traces[0], changed])
        add_source(other, "c", [traces[0]])
        one.commit()
        with pytest.raises(LateConflictError, match=r"b, trace 1, .*second trace of question id 'q1' .*1 more refused"):
            other.commit()
        assert other.manifest.num_traces == 1
        add_source(other, "c", [traces[0]])
        other.commit()
    check(path, traces)


def test_labels_scores_and_groups_of_two_writers(tmp_path):
    path, traces = tmp_path / "s.zarr", make_traces(4)
    write_store(path, traces[:1], score=0.5)
    with StoreWriter(path) as one, StoreWriter(path) as other:
        one.define_score("judge", ScoreField("hallucination"))
        add_source(one, "a", traces[1:2], scores={"judge": 0.25})
        other.define_score("judge", ScoreField("hallucination"))
        add_source(other, "b", [traces[2], traces[1] | {"label": 1}], scores={"judge": 0.75}, group="g")
        other.update_values({0: TraceValues({"judge": 1.0})})
        one.update_values({0: TraceValues({"score": 0.125})})
        one.commit()
        other.commit()
    with tracestore.open(path) as store:
        assert list(store.question_ids) == ["q0", "q1", "q2"]
        assert [t.scores for t in store] == [{"score": 0.125, "judge": 1.0}, {"judge": 0.25}, {"judge": 0.75}]
        labels = store.labels.tolist()
        assert math.isnan(labels[0]) and labels[1] == 1 and math.isnan(labels[2])
        assert [store.group(k) for k in range(3)] == ["", "", "g"]
    assert verify_store(path).damaged == {}


def test_a_trace_of_two_programs_has_the_values_of_both(tmp_path):
    trace = make_trace(0)
    writers = {name: tracestore.create(tmp_path / "s.zarr", append=True) for name in ("one", "two")}
    for name, writer in writers.items():
        writer.define_score(name)
        writer.append(trace, scores={name: 0.25}, group="g" if name == "one" else "")
    for writer in reversed(writers.values()):
        writer.close()
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store[0].scores == {"one": 0.25, "two": 0.25} and store.group(0) == "g" and len(store) == 1


def test_a_score_of_the_other_direction_is_refused(tmp_path):
    path = write_store(tmp_path / "s.zarr", make_traces(1))
    with StoreWriter(path) as one, StoreWriter(path) as other:
        for writer, direction in ((one, "correct"), (other, "hallucination")):
            writer.define_score("judge", ScoreField(direction))
            writer.update_values({0: TraceValues({"judge": 1.0})})
        one.commit()
        with pytest.raises(UsageError, match="a high judge means 'correct'"):
            other.commit()
    with tracestore.open(path) as store:
        assert store.score_fields["judge"].direction == "correct"


def test_two_writers_set_a_lens(tmp_path):
    path, matrix = write_store(tmp_path / "s.zarr", make_traces(2)), np.arange(40, dtype="f4").reshape(5, 8)
    with (
        tracestore.create(path, append=True) as one,
        tracestore.create(path, append=True) as equal,
        tracestore.create(path, append=True) as different,
    ):
        one.set_lens(matrix, norm="none")
        equal.set_lens(matrix, norm="none")
        equal.append(make_trace(2))
        different.set_lens(matrix + 1, norm="none")
        one.flush()
        equal.flush()
        with pytest.raises(UsageError, match="another lens"):
            different.flush()
    check(path, make_traces(3))


def test_a_writer_that_takes_the_lock_in_vain_starts_again(tmp_path, monkeypatch):
    """The manifest decides where locks exclude no process. The segments have their names already."""
    path, has_changed, calls = tmp_path / "s.zarr", FolderTarget.has_changed, []

    def late(target, known):
        calls.append(known)
        return len(calls) > 1 and has_changed(target, known)

    with StoreWriter(path) as one, StoreWriter(path) as other:
        add_source(one, "a", make_traces(2))
        one.commit()
        add_source(other, "b", make_traces(3)[2:])
        monkeypatch.setattr(FolderTarget, "has_changed", late)
        other.commit()
    assert clean_store(path, older_than_s=0).removed, "its first index and columns"
    check(path, make_traces(3))


def test_a_writer_of_a_replaced_store_commits_nothing(tmp_path):
    """The sources that it has left out are not in the new store."""
    path, new = (
        write_store(tmp_path / name, traces) for name, traces in (("s", make_traces(2)), ("n", make_traces(4)))
    )
    with StoreWriter(path) as writer:
        add_source(writer, "b", [make_trace(5)])
        for name in os.listdir(new):
            if name != "lock":
                shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
                shutil.move(new / name, path / name)
        with pytest.raises(StoreLockedError, match="another writer has replaced the store"):
            writer.commit()
    check(path, make_traces(4))


def test_a_trace_that_comes_back_has_the_segment_of_before(tmp_path):
    path, trace = tmp_path / "s.zarr", make_trace(1)
    changed = make_trace(1, tokens=9, seed=5) | {"question_id": trace["question_id"]}
    for split_bytes in (1, 1 << 30):
        with StoreWriter(path, overwrite=True, on_conflict="keep-last", split_bytes=split_bytes) as writer:
            for number, given in enumerate((trace, changed, trace)):
                add_source(writer, f"{number}", [given])
                writer.commit() if split_bytes > 1 else None
            writer.commit()
            assert len(os.listdir(writer.target.path / "segments")) == 2
            writer.replace_existing()
        check(path, [trace])


def test_a_new_store_without_attention_that_another_writer_made_with_it(tmp_path):
    path = tmp_path / "s.zarr"
    with tracestore.create(path, append=True) as one, StoreWriter(path) as other:
        add_source(other, "a", make_traces(2))
        other.commit()
        one.append({"question_id": "x", "hidden_states": make_trace(3)["hidden_states"]})
        with pytest.raises(UsageError, match="created the store with --attention mean, not none"):
            one.flush()
    check(path, make_traces(2))


def test_provenances_of_two_writers_get_their_places(tmp_path):
    path, traces = tmp_path / "s.zarr", make_traces(3)
    with (
        tracestore.create(path, append=True, provenance=tracestore.Provenance(model="m", tool="a")) as one,
        tracestore.create(path, append=True, provenance=tracestore.Provenance(model="m", tool="b")) as other,
        tracestore.create(path, append=True, provenance=tracestore.Provenance(model="n")) as conflicting,
    ):
        one.append(traces[0])
        other.append(traces[1])
        conflicting.append(traces[2])
        one.flush()
        other.flush()
        with pytest.raises(UsageError, match="provenance"):
            conflicting.flush()
    with tracestore.open(path) as store:
        assert [t.provenance.tool for t in store] == ["a", "b"]


@pytest.mark.parametrize("options", [{"codec": "zstd"}, {"dtype": "keep"}, {"attention": "none"}])
def test_options_of_two_new_stores_must_agree(tmp_path, options):
    path, traces = tmp_path / "s.zarr", make_traces(2)
    with StoreWriter(path) as one, StoreWriter(path, **options) as other:
        add_source(one, "a", traces[:1])
        add_source(other, "b", traces[1:])
        one.commit()
        with pytest.raises(UsageError, match="another writer has created the store with"):
            other.commit()
    check(path, traces[:1])


def test_overwrite_and_a_writer_exclude_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_WAIT_S", 0.05)
    path = write_store(tmp_path / "s.zarr", make_traces(2))
    with StoreWriter(path), pytest.raises(StoreLockedError, match="another writer has the store open"):
        StoreWriter(path, overwrite=True)
    with StoreWriter(path, overwrite=True):
        with pytest.raises(StoreLockedError, match="another writer"):
            StoreWriter(path)
        with pytest.raises(StoreLockedError, match="another writer"):
            StoreWriter(path, overwrite=True)
    with tracestore.create(path, append=True) as writer:
        writer.append(make_trace(2))
    check(path, make_traces(3))


def test_a_lock_that_is_held_too_long_ends_the_commit(tmp_path, monkeypatch):
    path = write_store(tmp_path / "s.zarr", make_traces(1))
    monkeypatch.setattr(locks, "LOCK_WAIT_S", 0.05)
    writer = StoreWriter(path)
    add_source(writer, "a", make_traces(2)[1:])
    lock = locks.WriterLock(path)
    with pytest.raises(StoreLockedError):
        writer.commit()
    lock.release()
    writer.close()
    check(path, make_traces(1))


def test_an_empty_store_stays_while_another_writer_has_it_open(tmp_path):
    path = tmp_path / "s.zarr"
    with StoreWriter(path) as one:
        StoreWriter(path).close()
        first = StoreWriter(path)
        add_source(one, "a", make_traces(1))
        first.close()
        one.commit()
    check(path, make_traces(1))
    with StoreWriter(tmp_path / "t.zarr"), StoreWriter(tmp_path / "t.zarr"):
        pass
    assert not (tmp_path / "t.zarr").exists() or not any((tmp_path / "t.zarr/manifest").glob("*"))


@pytest.mark.parametrize("calls", ["rename", "none"])
def test_a_file_system_without_links(tmp_path, monkeypatch, calls):
    """Names are given by renameat2 or, where that is missing too, under the lock of the store."""

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    if calls == "none":
        monkeypatch.setattr(fsio, "rename_exclusive", lambda *_: False)
    path = tmp_path / "s.zarr"
    with tracestore.create(path, append=True) as one, tracestore.create(path, append=True) as other:
        for k, trace in enumerate(make_traces(6)):
            writer = (one, other)[k % 2]
            writer.append(trace)
            writer.flush()
    check(path, make_traces(6))


def test_what_an_interrupted_commit_left_is_used_again(tmp_path, monkeypatch):
    """Also a segment that was removed in part."""
    path, kept = write_store(tmp_path / "s.zarr", make_traces(1)), tmp_path / "kept.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(FolderTarget, "create_manifest", lambda *_: os._exit(9))
        child = os.fork()
        if child == 0:
            with StoreWriter(path) as writer:
                add_source(writer, "a", make_traces(3)[1:])
                writer.commit()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    shutil.copytree(path, kept)
    for number, store in enumerate((path, kept)):
        left = verify_store(store).leftovers
        assert {name.split("/")[0] for name in left} >= {"segments", "index", "columns"}
        for name in left[number::3]:
            (store / name).chmod(0o644)
            (store / name).write_bytes(b"cut") if number else None
        with StoreWriter(store) as writer:
            add_source(writer, "a", make_traces(3)[1:])
            writer.commit()
        check(store, make_traces(3))
    assert tree_bytes(path) == tree_bytes(kept)


def in_a_process(work, *args):
    """Fork a process that calls work(*args). Return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def numbers_of(first):
    return [*range(first, first + 6), *range(100, 103)]


def append(path, first, seed):
    """Append traces and commit at random positions."""
    rng = random.Random(f"{seed} {first}")
    with tracestore.create(path, append=True) as writer:
        for k in numbers_of(first):
            writer.append(make_trace(k, tokens=2 + k % 5), score=k / 1000)
            if rng.random() < 0.5:
                writer.flush()


def convert_files(path, first, seed):
    """Convert a file for each trace, with a commit after each."""
    folder = path.with_name(f"{path.name}-{first}-{seed}")
    folder.mkdir()
    for k in numbers_of(first):
        write_pickle(folder / f"{k}.pkl", [make_trace(k, tokens=2 + k % 5)])
    cutting.MIN_BYTES = 1
    convert(folder, path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("works", [(append, append), (append, convert_files), (convert_files, convert_files)])
def test_two_processes_write_at_once(tmp_path, works):
    """Both have traces of their own and the same others. TRACESTORE_ROUNDS=200 is the long form."""
    for number in range(ROUNDS):
        path = tmp_path / f"{number}.zarr"
        children = [in_a_process(work, path, first, number) for work, first in zip(works, (0, 50), strict=True)]
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0], number
        check(path, [make_trace(k, tokens=2 + k % 5) for k in (*range(6), *range(50, 56), *range(100, 103))])
