"""Files that must be refused with one line and exit code 3, without a change of the store."""

import gzip
import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import as_torch, command, convert, make_trace, make_traces, read_traces, tree_bytes, write_pickle
from tracestore.errors import InvalidInputError

# Reason of files that are not like the traces of a tool, so that their fields are not known.
NO_LAYOUT = "no built-in layout describes it"


def assert_refused(path, *words):
    """Assert that reading raises InvalidInputError with the words; return its text."""
    with pytest.raises(InvalidInputError) as caught:
        for _ in read_traces(path, path.name):
            pass
    text = str(caught.value)
    assert "\n" not in text and path.name in text
    for word in words:
        assert word in text, text
    return text


def bad_schema():
    """Yield a name, an invalid trace, and a word of the error."""
    good = make_trace(2, tokens=3)
    yield "missing hidden_states", {k: v for k, v in good.items() if k != "hidden_states"}, "hidden_states"
    yield "missing attentions", {k: v for k, v in good.items() if k != "attentions"}, "attentions"
    ragged = list(good["hidden_states"])
    ragged[1] = ragged[1][:2]
    yield "ragged layers", {**good, "hidden_states": ragged}, "hidden_states[1]"
    yield "other S", {**good, "attentions": [a[:, :2, :2] for a in good["attentions"]]}, "attentions[0]"
    yield "fewer layers", {**good, "attentions": good["attentions"][:1]}, "expected 3"
    yield "zero layers", {**good, "hidden_states": []}, "zero layers"
    yield "zero tokens", make_trace(0, tokens=0), "found no items"
    yield "object instead of array", {**good, "hidden_states": ["a", "b", "c"]}, "hidden_states"
    yield "integers", {**good, "hidden_states": [h.astype("i4") for h in good["hidden_states"]]}, "int32"
    yield (
        "mixed dtypes",
        {
            **good,
            "hidden_states": [good["hidden_states"][0], *make_trace(2, tokens=3, dtype="f4")["hidden_states"][1:]],
        },
        "float32",
    )
    yield "tokens too many", {**good, "tokens": np.arange(9)}, "9 ids"
    yield "tokens not integers", {**good, "tokens": [0.5, 1.0, 2.0]}, "integers"
    yield "id not text", {**good, "question_id": [1]}, "question_id"
    yield (
        "beyond float16",
        {**good, "hidden_states": [h.astype("f4") * 1e6 for h in good["hidden_states"]]},
        "--dtype keep",
    )
    yield "not a dict", 17, "expected a mapping"


@pytest.mark.parametrize("name,trace,word", list(bad_schema()), ids=lambda v: v if isinstance(v, str) else "")
def test_a_trace_that_breaks_the_schema_is_refused(tmp_path, name, trace, word):
    path = write_pickle(tmp_path / "bad.pkl", [*make_traces(2), trace])
    if name == "beyond float16":
        done = convert(path, tmp_path / "s.zarr", check=3)
        assert "bad.pkl, trace 2" in done.stderr and word in done.stderr and done.stderr.count("\n") == 1
        return
    assert_refused(path, "trace 2", word)


class Evil:
    """Pickles to a call of os.system that creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_executed(tmp_path, protocol):
    marker = tmp_path / "executed"
    trace = {**make_trace(0), "note": Evil(marker)}
    path = write_pickle(tmp_path / "evil.pkl", [trace], protocol)
    assert_refused(path, "system")
    assert_refused(write_pickle(tmp_path / "evil2.pkl", Evil(marker), protocol))
    torch.save({"graphs": Evil(marker)}, tmp_path / "evil.pt")
    assert_refused(tmp_path / "evil.pt")
    assert not marker.exists()


def handmade():
    """Yield the bytes of an invalid pickle and a word of the error."""
    yield b"", "empty"
    yield b"hello, this is no pickle", ""
    yield b"\x80\x06N.", "protocol 6"
    yield b"cos\nsystem\n(S'true'\ntR.", "os.system"
    yield b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"
    yield b"\x80\x04\x8c\x05numpy\x8c\x04load\x93.", "numpy.load"
    yield b"(i__main__\nX\n.", "0x69"
    yield b"\x80\x02\x82\x01.", "0x82"
    yield b"\x80\x05\x97.", "0x97"
    yield b"Pabc\n.", "0x50"
    yield b"(I1\nI2\nt.trailing", "trailing"
    yield pickle.dumps([]) + pickle.dumps([]), NO_LAYOUT
    yield pickle.dumps([]), NO_LAYOUT
    yield pickle.dumps(make_traces(2))[:-40], "truncated"
    yield b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x", "truncated"
    yield b"\x80\x04]r\xff\xff\xff\x7f.", NO_LAYOUT
    yield b"\x80\x02h\x07.", "does not exist"
    yield b"\x80\x02e.", "well-formed"
    yield b"\x80\x02a.", "well-formed"
    yield b"\x80\x02\x86.", "tuple"
    yield b"(" * 5000 + b".", "nests"
    yield b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\1" * (1 << 20) + b".", "512 bits"
    yield b"I" + b"9" * 500 + b"\n.", "512 bits"
    yield b"\x80\x02K\x01}b.", "state"
    yield b"\x80\x02}Q.", "persistent"
    # The 199-byte pickle that crashes an interpreter through dtype.__setstate__.
    yield b"cnumpy\ndtype\n(S'i4'\nI0\nI1\ntR(I3\nS'|'\nNS'x'\nNI-1\nI-1\nI63\ntb.", "structured"
    yield b"cnumpy\ndtype\n(S'V8'\nI0\nI1\ntR.", "dtype"
    yield b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntS'b'\ntR.", "numpy.ndarray"


@pytest.mark.parametrize("data,word", list(handmade()), ids=range(len(list(handmade()))))
def test_a_handmade_pickle_is_refused(tmp_path, data, word):
    path = tmp_path / "bad.pkl"
    path.write_bytes(data)
    assert_refused(path, word)
    if data:
        packed = tmp_path / "bad.pkl.gz"
        packed.write_bytes(gzip.compress(data))
        assert_refused(packed, "in a compressed file" if word == "truncated" and len(data) < 20 else word)


def test_arrays_that_do_not_match_their_bytes_are_refused(tmp_path):
    array = np.arange(12, dtype="f4").reshape(3, 4)
    data = pickle.dumps([{"x": array}], 4)
    assert data.count(b"K\x03K\x04\x86") == 1
    path = tmp_path / "bad.pkl"
    for wrong_shape in (b"K\x03K\x05\x86", b"K\xffK\xff\x86"):
        path.write_bytes(data.replace(b"K\x03K\x04\x86", wrong_shape))
        assert_refused(path, "bytes")
    objects = np.array([[[{"a": 1}]]], dtype=object)
    assert_refused(write_pickle(tmp_path / "objects.pkl", [{"x": objects}]), "object array")


def test_damaged_gzip_files_are_refused(tmp_path):
    good = gzip.compress(pickle.dumps(make_traces(4)))
    for name, data, word in (
        ("cut", good[:-20], "truncated"),
        ("crc", good[:-8] + bytes([good[-8] ^ 1]) + good[-7:], "gzip"),
        ("garbage", good + b"garbage", "gzip"),
    ):
        path = tmp_path / f"{name}.pkl.gz"
        path.write_bytes(data)
        assert_refused(path, word)


def test_damaged_torch_files_are_refused(tmp_path):
    buffer = io.BytesIO()
    value = {"sequences": torch.randn(3, 2, 4), "labels": torch.zeros(3), "question_ids": ["a", "b", "c"]}
    torch.save(value, buffer)
    entries = {i.filename: zipfile.ZipFile(buffer).read(i) for i in zipfile.ZipFile(buffer).infolist()}

    def rewrite(name, change, compression=zipfile.ZIP_STORED):
        out = tmp_path / name
        with zipfile.ZipFile(out, "w", compression) as archive:
            for key, data in entries.items():
                archive.writestr(key, change(key, data))
        return out

    list(read_traces(rewrite("same.pt", lambda k, d: d), "same.pt"))
    assert_refused(rewrite("deflated.pt", lambda k, d: d, zipfile.ZIP_DEFLATED), "compressed")
    assert_refused(rewrite("short.pt", lambda k, d: d[:-4] if k.endswith("data/0") else d), "storage")
    assert_refused(rewrite("big.pt", lambda k, d: b"big" if k.endswith("byteorder") else d), "byte order")
    (tmp_path / "cut.pt").write_bytes(buffer.getvalue()[:-30])
    assert_refused(tmp_path / "cut.pt", "truncated")
    with pytest.warns(UserWarning), zipfile.ZipFile(tmp_path / "twice.pt", "w") as archive:
        for _ in range(2):
            for key, data in entries.items():
                archive.writestr(key, data)
    assert_refused(tmp_path / "twice.pt", "twice")
    torch.save(value, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "legacy.pt").read_bytes()
    (tmp_path / "legacy.pt").write_bytes(data[:-5])
    assert_refused(tmp_path / "legacy.pt", "truncated")
    (tmp_path / "legacy.pt").write_bytes(data + b"x")
    assert_refused(tmp_path / "legacy.pt", "trailing")
    wrong = {k: v for k, v in value.items() if k != "labels"}
    torch.save(wrong, tmp_path / "nolabels.pt")
    assert_refused(tmp_path / "nolabels.pt", "labels")


def test_files_that_are_not_regular_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.pkl")
    (tmp_path / "dangling.pkl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.pkl").symlink_to(tmp_path / "loop.pkl")
    for name in ("pipe.pkl", "dangling.pkl", "loop.pkl"):
        assert_refused(tmp_path / name)
    assert "FIFO" in convert(tmp_path / "pipe.pkl", tmp_path / "s.zarr", check=3).stderr


def test_valid_files_before_an_invalid_one_are_committed(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_pickle(data / "batch_0.pkl", make_traces(3))
    broken = make_traces(6)[3:]
    del broken[2]["hidden_states"]
    write_pickle(data / "batch_1.pkl", broken)
    done = convert(data, tmp_path / "s.zarr", check=3)
    assert done.stderr.startswith("tracestore convert: batch_1.pkl, trace 2, hidden_states: missing key")
    command("verify", tmp_path / "s.zarr", check=0)
    assert tracestore.open(tmp_path / "s.zarr").question_ids == ["q0", "q1", "q2"]
    before = tree_bytes(tmp_path / "s.zarr")
    convert(data, tmp_path / "s.zarr", check=3)
    assert tree_bytes(tmp_path / "s.zarr") == before
    done = convert(data, tmp_path / "s.zarr", "--skip-bad")
    assert "skipped batch_1.pkl, trace 2" in done.stdout
    write_pickle(data / "batch_1.pkl", make_traces(6)[3:])
    convert(data, tmp_path / "s.zarr")
    assert len(tracestore.open(tmp_path / "s.zarr")) == 6


@pytest.mark.parametrize("workers", ["1", "3"])
def test_traces_may_share_arrays(tmp_path, workers):
    traces = [as_torch(t) for t in make_traces(3, tokens=4)]
    for trace in traces[1:]:
        trace["attentions"] = traces[0]["attentions"]
    write_pickle(tmp_path / "shared.pkl", traces)
    convert(tmp_path / "shared.pkl", tmp_path / "s.zarr", "--attention", "heads", "--workers", workers)
    store = tracestore.open(tmp_path / "s.zarr")
    for trace in store:
        np.testing.assert_array_equal(trace.attention, torch.stack(traces[0]["attentions"]).numpy())


def regressions():
    """Yield inputs that once caused a crash, a hang or another exception, and a word of the error."""
    yield b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.", "nests"
    yield b"\x80\x04})" + b"\x85" * 1_000 + b"Ns.", "dict key"
    steps = b"".join(b"h%ch%c\x86q%c" % (k, k, k + 1) for k in range(60))
    yield b"\x80\x02)q\x00" + steps + b".", ""
    yield (
        pickle.dumps([{"hidden_states": np.empty((10**12, 0, 1), "f2"), "attentions": [], "tokens": []}]),
        "empty array",
    )
    yield pickle.dumps([{**make_trace(0), "sample": 2**40}]), "sample"
    a = np.zeros((8, 4096), "f4")
    many = {**make_trace(0), "attentions": [a] * 20_000}
    yield pickle.dumps([many]), NO_LAYOUT
    # The end of the file shows that the list of traces is not the whole object.
    one = pickle.dumps([make_trace(0)], 4)
    yield one[:-1] + b"K\x01\x86.", NO_LAYOUT
    yield one[:-1] + b"0" + one[2:], ""


@pytest.mark.parametrize("data,word", list(regressions()), ids=range(len(list(regressions()))))
def test_a_regression_is_refused(tmp_path, data, word):
    path = tmp_path / "bad.pkl"
    path.write_bytes(data)
    assert assert_refused(path, word)


@pytest.mark.long
def test_flipped_bits_inside_gzip_are_refused(tmp_path):
    data = bytearray(gzip.compress(pickle.dumps(make_traces(6, tokens=20, dim=64))))
    rng = np.random.default_rng(0)
    for k in range(30):
        broken = bytearray(data)
        broken[int(rng.integers(20, len(data) - 10))] ^= 1 << int(rng.integers(8))
        (tmp_path / f"{k}.pkl.gz").write_bytes(broken)
        assert assert_refused(tmp_path / f"{k}.pkl.gz")


def test_cycles_of_links_are_walked_once(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_pickle(data / "a.pkl", make_traces(2))
    (data / "self").symlink_to(data)
    (data / "up").symlink_to(tmp_path)
    convert(data, tmp_path / "s.zarr")
    assert tracestore.open(tmp_path / "s.zarr").info()["num_sources"] == 1


def test_big_endian_sequences_are_converted(tmp_path):
    sequences = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(">f2")
    value = {"sequences": sequences, "labels": [0.0, 1.0], "question_ids": ["a", "b"]}
    write_pickle(tmp_path / "preprocessed_0.pt", value)
    convert(tmp_path / "preprocessed_0.pt", tmp_path / "s.zarr")
    np.testing.assert_array_equal(tracestore.open(tmp_path / "s.zarr")[1].last_token, sequences[1].astype("f2"))


def test_a_label_from_a_second_source_is_kept(tmp_path):
    traces = make_traces(3)
    write_pickle(tmp_path / "t.pkl", traces)
    convert(tmp_path / "t.pkl", tmp_path / "s.zarr")
    sequences = torch.stack([torch.from_numpy(np.stack(t["hidden_states"])[:, -1]) for t in traces])
    value = {"sequences": sequences, "labels": torch.tensor([1.0, 0.0, 1.0]), "question_ids": ["q0", "q1", "q2"]}
    torch.save(value, tmp_path / "preprocessed_0.pt")
    convert(tmp_path / "preprocessed_0.pt", tmp_path / "s.zarr")
    store = tracestore.open(tmp_path / "s.zarr")
    assert len(store) == 3 and store.labels.tolist() == [1, 0, 1]
    torch.save(value | {"labels": torch.tensor([0.0, 0.0, 1.0])}, tmp_path / "preprocessed_1.pt")
    assert "label" in convert(tmp_path / "preprocessed_1.pt", tmp_path / "s.zarr", check=3).stderr


REFUSE_ALL = """
import gc, pathlib, sys
from tracestore.errors import InvalidInputError
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Group

def read(value):
    if isinstance(value, Array):
        value.read()
    elif value is not None and not isinstance(value, str | int | float):
        for inner in value.values() if isinstance(value, Group) else value:
            read(inner)

for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        with open_tree(path) as root:
            read(root)
    except InvalidInputError as error:
        error.itself = error  # a cycle with all frames of the reader
gc.collect()
"""


@pytest.mark.long
def test_broken_files_in_cycles_of_errors_leave_nothing_on_standard_error(tmp_path):
    # Collecting a cycle once cleared buffers that a reader had not released.
    whole = {"a.pkl": pickle.dumps(make_traces(3)), "b.pt": io.BytesIO(), "c.pt": io.BytesIO()}
    traces = [as_torch(trace) for trace in make_traces(3)]
    torch.save(traces, whole["b.pt"])
    torch.save(traces, whole["c.pt"], _use_new_zipfile_serialization=False)
    rng = np.random.default_rng(0)
    for k in range(200):
        name = list(whole)[k % 3]
        data = bytearray(whole[name] if name == "a.pkl" else whole[name].getvalue())
        data[int(rng.integers(len(data)))] ^= 0xFF
        (tmp_path / f"{k}_{name}").write_bytes(data[: int(rng.integers(40, len(data)))] if k % 4 else data)
    done = subprocess.run([sys.executable, "-c", REFUSE_ALL, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
