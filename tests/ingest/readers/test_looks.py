"""Looks at the first items of files: what is opened once, and what is read afterwards."""

import gzip
import os
import pickle

import pytest

from tests.helpers import make_traces
from tracestore.errors import InvalidInputError
from tracestore.ingest.readers import looks as looks_module
from tracestore.ingest.readers.looks import FirstLooks
from tracestore.store.io.scratch import Scratch


def dumped(traces, suffix):
    data = pickle.dumps(traces)
    return gzip.compress(data, 1) if suffix == ".gz" else data


@pytest.fixture
def opened(monkeypatch):
    """The files that were opened, in their order."""
    paths, real = [], looks_module.open_tree
    monkeypatch.setattr(
        looks_module, "open_tree", lambda path, **options: paths.append(path.name) or real(path, **options)
    )
    return paths


def ids_of(items):
    return [item["question_id"] for item in items]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_looks_begin_with_the_first_item_and_the_reading_takes_all(tmp_path, opened, suffix):
    path = tmp_path / f"a.pkl{suffix}"
    path.write_bytes(dumped(traces := make_traces(5), suffix))
    looks = FirstLooks()

    for _ in range(3):
        with looks.look(path) as root:
            assert next(iter(root))["question_id"] == traces[0]["question_id"]
    with looks.take(path, Scratch()) as root:
        assert ids_of(root) == [trace["question_id"] for trace in traces]

    assert len(opened) == 1


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_file_that_has_changed_since_the_look_is_opened_again(tmp_path, suffix, is_replaced):
    path = tmp_path / f"a.pkl{suffix}"
    path.write_bytes(dumped(make_traces(5), suffix))
    looks = FirstLooks()
    with looks.look(path) as root:
        next(iter(root))

    other = [{**t, "question_id": f"new{k}"} for k, t in enumerate(make_traces(7))]
    if is_replaced:
        (tmp_path / "b").write_bytes(dumped(other, suffix))
        os.replace(tmp_path / "b", path)
    else:
        path.write_bytes(dumped(other, suffix))
        os.utime(path, ns=(1, 1))

    with looks.take(path, Scratch()) as root:
        assert ids_of(root) == [f"new{k}" for k in range(7)]


def test_a_look_at_several_items_and_a_failed_one_leave_nothing_open(tmp_path, opened):
    path = tmp_path / "a.pkl"
    path.write_bytes(dumped(make_traces(5), ""))
    looks = FirstLooks()
    with looks.look(path) as root:
        assert len(ids_of(root)) == 5
    with pytest.raises(InvalidInputError, match="no"), looks.look(path):
        raise InvalidInputError("no")
    with looks.take(path, Scratch()) as root:
        assert len(ids_of(root)) == 5

    assert len(opened) == 3


def test_two_files_stay_open(tmp_path, opened):
    paths = [tmp_path / f"{k}.pkl" for k in range(4)]
    looks = FirstLooks()
    for path in paths:
        path.write_bytes(dumped(make_traces(2), ""))
        with looks.look(path) as root:
            next(iter(root))
    looks.drop(paths[0])
    for path in paths:
        with looks.take(path, Scratch()) as root:
            assert len(ids_of(root)) == 2

    assert opened == [*(path.name for path in paths), "0.pkl", "2.pkl", "3.pkl"]
    with looks.look(paths[0]):
        pass
    looks.close()
    assert not looks._open
