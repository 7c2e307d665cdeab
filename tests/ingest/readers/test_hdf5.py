"""Test the tree of HDF5 files, and the process that reads them."""

import gzip
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Pipe

import numpy as np
import pytest

from tests.helpers import ROOT
from tests.ingest.readers.trees import (
    check_mutations,
    check_time,
    plain,
    read_tree,
    refusal,
    refusal_in_child,
    refusal_of_convert,
)
from tests.machine import is_running, wait_until
from tests.tiers import long
from tracestore.errors import InvalidInputError
from tracestore.ingest.readers import hdf5, hdf5_process
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Group, Items

h5py = pytest.importorskip("h5py")
STATES = np.arange(24, dtype="<f2").reshape(2, 3, 4)


def write(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, value in arrays.items():
            file[name] = value
    return path


@pytest.fixture
def path(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["q0/h"] = STATES
        file["q0"].attrs["question"] = "why"
        file["q0/h"].attrs["layers"] = [3, 4]
        file["texts"] = ["a", "bé"]
        file["table"] = np.array([["a", "b"], ["c", "d"]], dtype=object)
        file["text"] = "whole"
        file["fixed"] = np.array([b"x", b"yy"])
        file["number"] = 5
        file["flag"] = True
        file["empty"] = np.empty((0, 3), "f4")
        file["big"] = np.arange(3, dtype=">i4")
        lists = file.create_dataset("lists", (2,), h5py.vlen_dtype("i4"))
        lists[0], lists[1] = [1, 2], [3]
        file["records"] = np.array([(1, b"a", [1, 2])], [("i", "i8"), ("s", "S2"), ("h", "f4", (2,))])
        file.create_dataset("packed", data=np.arange(40_000.0).reshape(200, 200), compression="gzip", chunks=(7, 50))
    return tmp_path / "a.h5"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([b"a", b"bc"], "S2"), ["a", "bc"]),
        (np.array([[b"a"], [b"b"]]), [["a"], ["b"]]),
        (np.bytes_(b"a"), "a"),
        (np.array([b"\xe9"]), ["\ufffd"]),
        (["a", "b"], ["a", "b"]),
        (np.array([True, False]), [True, False]),
        (np.float32(0.5), 0.5),
        (1 + 2j, None),
        (np.array([1j]), None),
    ],
)
def test_attributes_hold_texts_and_real_numbers(tmp_path, value, expected):
    """Keras writes arrays of bytes."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["h"] = STATES
        file["h"].attrs["value"] = value
    with open_tree(tmp_path / "a.h5") as root:
        found = root["h"].attributes
        assert (np.asarray(plain(found["value"])).tolist() if found else None) == expected


def test_a_file_is_a_tree(path):
    with open_tree(path) as root:
        assert isinstance(root, Group) and isinstance(root["q0"]["h"], Array) and isinstance(root["texts"], Items)
        assert root["q0"].attributes == {"question": "why"} and root.attributes == {}
        assert plain(root["q0"]["h"].attributes["layers"]).tolist() == [3, 4]
        found = plain(root)
    assert found.pop("q0")["h"].tolist() == STATES.tolist()
    assert found.pop("packed").tolist() == np.arange(40_000.0).reshape(200, 200).tolist()
    assert found.pop("empty").shape == (0, 3) and found.pop("big").tolist() == [0, 1, 2]
    assert [part.tolist() for part in found.pop("lists")] == [[1, 2], [3]]
    (record,) = found.pop("records")
    assert (record["i"], record["s"], record["h"].tolist()) == (1, "a", [1, 2])
    assert found == {
        "texts": ["a", "bé"], "table": [["a", "b"], ["c", "d"]], "text": "whole", "fixed": ["x", "yy"], "number": 5,
        "flag": True,
    }  # fmt: skip


@pytest.mark.parametrize("selection", [(1,), (slice(3, 9),), (slice(None), 2), (slice(5, 8), slice(45, 60)), (-1, -1)])
def test_selections_are_read(path, selection):
    with open_tree(path) as root:
        np.testing.assert_array_equal(root["packed"].read(selection), np.arange(40_000.0).reshape(200, 200)[selection])


def test_compressed_files_are_refused(path):
    packed = path.with_suffix(".h5.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert "inflate it" in refusal(packed)


@pytest.mark.long
def test_links_and_other_files_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = h5py.SoftLink("/y")
    assert "soft link" in refusal(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = h5py.ExternalLink("a.h5", "/")
    assert "external link" in refusal(tmp_path / "b.h5")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file.create_group("x")["y"] = file
    assert "twice" in refusal(tmp_path / "c.h5")
    layout = h5py.VirtualLayout((3,), "f4")
    layout[:] = h5py.VirtualSource("a.h5", "x", (3,))
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["good"] = [1, 2]
        file.create_virtual_dataset("x", layout)
    with open_tree(tmp_path / "d.h5") as root:
        assert root["good"].read().tolist() == [1, 2]
        with pytest.raises(InvalidInputError, match="other files"):
            root["x"]


def shared_text(path, count, length):
    """Write a file in which `count` texts are one of `length` characters in the file."""
    with h5py.File(path, "w") as file:
        texts = file.create_dataset("answer", (count,), h5py.string_dtype())
        texts[0] = "x" * length
        place = texts.id.get_offset()
    data = bytearray(path.read_bytes())
    data[place : place + 16 * count] = data[place : place + 16] * count
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("where", ["array", "field"])
def test_numbers_that_stand_for_names_are_refused(tmp_path, where):
    """[CORRECT is 0]"""
    dtype = h5py.enum_dtype({"CORRECT": 0, "HALLUCINATED": 1}, basetype="i1")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("ok", (3,), dtype if where == "array" else np.dtype([("id", "i4"), ("ok", dtype)]))
        file["plain"] = [True, False]

    with open_tree(tmp_path / "a.h5") as root:
        assert plain(root["plain"]).tolist() == [True, False]
        with pytest.raises(InvalidInputError, match="numbers that stand for names"):
            plain(root["ok"])


@pytest.mark.long
@pytest.mark.parametrize(("count", "length"), [(500_000, 16_000), (20_000, 1_000_000), (4_000, 60_000)])
def test_texts_that_share_their_bytes_end(tmp_path, count, length):
    assert refusal_in_child(shared_text(tmp_path / "a.h5", count, length))


@pytest.mark.long
def test_texts_that_share_their_bytes_are_not_converted(tmp_path):
    path = shared_text(tmp_path / "a.h5", 500_000, 16_000)
    with h5py.File(path, "r+") as file:
        file["hidden_states"] = STATES
    assert "a.h5" in refusal_of_convert(path)


def test_few_texts_that_share_their_bytes_are_read(tmp_path):
    path = shared_text(tmp_path / "a.h5", 300, 5_000)
    assert read_tree(path)["answer"] == ["x" * 5_000] * 300


@pytest.mark.long
@pytest.mark.parametrize("name", ["fill", "chunk", "many"])
def test_amplified_arrays_end(tmp_path, name):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if name == "fill":
            file.create_dataset("x", (1 << 40,), "f4", chunks=(1 << 20,))
        elif name == "chunk":
            file.create_dataset("x", data=np.zeros((1 << 26,), "f4"), chunks=(1 << 26,), compression="gzip")
        else:
            for k in range(40):
                file.create_dataset(f"x{k}", (1 << 23,), "f4", chunks=(1 << 20,))
    assert refusal_in_child(tmp_path / "a.h5")


def test_texts_read_in_pages(tmp_path):
    texts = [f"{k}" * (k % 50) for k in range(20_000)] + ["y" * 200_000] * 30
    write(tmp_path / "a.h5", texts=texts)
    assert read_tree(tmp_path / "a.h5")["texts"] == texts


@pytest.mark.parametrize("count", [12, *long(60)])
@pytest.mark.long
def test_changed_files_are_read_or_refused(path, count):
    assert check_mutations(path.read_bytes(), path.with_name("b.h5"), count, seed=count) > count // 6


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_files_are_refused(path, share):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert refusal(path)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGSTOP])
def test_a_library_that_crashes_or_hangs_refuses_the_file(path, monkeypatch, number):
    process = hdf5_process.HDF5Process()
    monkeypatch.setattr(hdf5._idle, "take", lambda: process)
    with pytest.raises(InvalidInputError, match="HDF5 library"), open_tree(path) as root:
        assert root["number"] == 5
        monkeypatch.setattr(hdf5_process, "TIMEOUT_S", 0.5)
        os.kill(process._process.pid, number)
        root["q0"]["h"].read()
    assert not process.is_alive


BUSY = """
import signal, sys, time
from tracestore.ingest.readers import hdf5_process
hdf5_process.TIMEOUT_S = float(sys.argv[3])
def answer(request):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if "wait" in request:
        sum(iter(int, 1))  # never returns, and no other thread of Python runs
    return {"pid": __import__("os").getpid()}, iter(())
hdf5_process.serve(answer)
"""


@pytest.mark.long
@pytest.mark.parametrize("is_busy", [False, True])
def test_the_process_ends_with_its_parent(tmp_path, is_busy):
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    parent = f"""
import os, subprocess, sys, json, time
from multiprocessing.connection import Pipe
read_end, write_end = os.pipe()
connection, other = Pipe()
child = subprocess.Popen([sys.executable, {str(script)!r}, str(read_end), str(other.fileno()), "60"],
    pass_fds=(read_end, other.fileno()), stdout=subprocess.DEVNULL)
connection.send_bytes(b'{{"ask": 1}}')
print(json.loads(connection.recv_bytes())["pid"], flush=True)
if {is_busy}:
    connection.send_bytes(b'{{"wait": 1}}')
    time.sleep(0.5)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, cwd=ROOT, check=False)
    pid = int(done.stdout)
    wait_until(lambda: not is_running(pid))


@pytest.mark.long
def test_an_answer_has_a_limit_of_time(tmp_path):
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    read_end, write_end = os.pipe()
    connection, other = Pipe()
    child = subprocess.Popen(
        [sys.executable, script, str(read_end), str(other.fileno()), "0.5"],
        pass_fds=(read_end, other.fileno()),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    connection.send_bytes(b'{"wait": 1}')
    assert child.wait(timeout=60) == -signal.SIGALRM
    os.close(read_end)
    os.close(write_end)


@pytest.mark.long
def test_four_times_the_input_takes_four_times_as_long(tmp_path):
    paths = []
    for count in (500, 2_000):
        write(tmp_path / f"{count}.h5", **{f"q{k}/h": STATES for k in range(count)})
        paths.append(tmp_path / f"{count}.h5")
    check_time(*paths, time.perf_counter)
