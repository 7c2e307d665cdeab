"""Test the tree of .npy files and .npz archives."""

import gzip
import io
import pickle
import zipfile

import numpy as np
import pytest

from tests.ingest.readers.trees import check_mutations, check_time, plain, read_tree, refusal, refusal_in_child
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Items

RNG = np.random.default_rng(0)
ARRAYS = {
    "states": RNG.normal(size=(5, 3, 4)).astype("f2"),
    "fortran": np.asfortranarray(RNG.normal(size=(5, 3))),
    "big": np.arange(6, dtype=">i4").reshape(2, 3),
    "empty": np.empty((0, 3), "f4"),
    "flags": np.array([True, False]),
}


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(arrays, is_packed=False):
    out = io.BytesIO()
    (np.savez_compressed if is_packed else np.savez)(out, **arrays)
    return out.getvalue()


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("kind", ["npy", "npy.gz", "npz", "packed npz"])
def test_arrays_are_lazy_and_read_selections(tmp_path, name, kind):
    array = ARRAYS[name]
    path = tmp_path / kind.replace("packed npz", "b.npz").replace("npy", "a.npy")
    data = npy(array) if "npy" in kind else npz({"x": array}, kind == "packed npz")
    path.write_bytes(gzip.compress(data) if kind.endswith(".gz") else data)
    with open_tree(path) as root:
        found = root if "npy" in kind else root["x"]
        assert isinstance(found, Array) and found.shape == array.shape
        assert found.dtype == array.dtype.newbyteorder("=").name
        selections = [(), (slice(0, 1),), (slice(None),)]
        if array.ndim > 1 and array.size:
            selections += [(1,), (0, slice(1, 3)), (slice(None), 2), (slice(1, 2), 1), (-1,)]
        for selection in selections:
            values = found.read(selection)
            assert values.dtype.isnative
            np.testing.assert_array_equal(values, array[selection])


def test_rows_of_a_compressed_array_are_inflated_once(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    path.write_bytes(npz({"x": np.arange(12).reshape(4, 3)}, is_packed=True))
    opened = []
    original = zipfile.ZipFile.open
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *args: opened.append(1) or original(*args))
    with open_tree(path) as root:
        array = root["x"]
        assert [array.read((k,)).tolist() for k in range(4)] == np.arange(12).reshape(4, 3).tolist()
    assert len(opened) == 2  # the header, then the values


@pytest.mark.parametrize("is_packed", [False, True])
def test_names_are_paths(tmp_path, is_packed):
    path = tmp_path / "a.npz"
    arrays = {
        "q0/layer_3": np.ones(2),
        "q0/layer_4": np.zeros(2),
        "q1": np.ones(1),
        "q1/x": np.zeros(1),
        "n": np.array(7),
    }
    path.write_bytes(npz(arrays, is_packed))
    with open_tree(path) as root:
        assert list(root) == ["q0", "q1", "q1/x", "n"] and list(root["q0"]) == ["layer_3", "layer_4"]
        assert (
            root["q0"]["layer_3"].read().tolist() == [1, 1] and root["q1/x"].read().tolist() == [0] and root["n"] == 7
        )


@pytest.mark.parametrize("is_packed", [False, True])
def test_texts_records_and_objects_are_items(tmp_path, is_packed):
    path = tmp_path / "a.npz"
    records = np.array([("q1", 1), ("q2", 0)], [("id", "U2"), ("label", "i8")])
    objects = np.array([{"a": 1}, {"b": np.ones(2)}], dtype=object)
    one = np.array({"a": 1}, dtype=object)
    path.write_bytes(npz({"t": np.array(["x", "yé"]), "r": records, "o": objects, "one": one}, is_packed))
    with open_tree(path) as root:
        assert isinstance(root["t"], Items) and plain(root["t"]) == ["x", "yé"]
        assert plain(root["r"]) == [{"id": "q1", "label": 1}, {"id": "q2", "label": 0}]
        assert root["o"][0]["a"] == 1 and root["o"][1]["b"].read().tolist() == [1, 1] and root["one"]["a"] == 1


def test_two_bytes_without_a_type_stay_void(tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(npy(np.arange(3, dtype="<u2").view("V2")))
    with open_tree(path) as root:
        assert root.dtype == "void16"
        assert root.read().view("<u2").tolist() == [0, 1, 2]


@pytest.mark.parametrize("is_packed", [False, True])
def test_void_of_archives_and_of_bytes_is_no_bfloat16(tmp_path, is_packed):
    values = np.arange(6, dtype="<u2").view("V2").reshape(2, 3)
    (tmp_path / "a.npz").write_bytes(npz({"x": values}, is_packed))
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"x": npy(values)}))
    for name in ("a.npz", "a.pkl"):
        with open_tree(tmp_path / name) as root:
            assert root["x"].dtype == "void16"
            assert root["x"].read((1,)).view("<u2").tolist() == [3, 4, 5]


@pytest.mark.long
@pytest.mark.parametrize("name", ["zeros", "overlapping entries", "objects", "texts"])
def test_amplified_files_end(tmp_path, name):
    path = tmp_path / "a.npz"
    if name == "zeros":
        path.write_bytes(npz({f"x{k}": np.zeros((1 << 20,), "f4") for k in range(100)}, is_packed=True))
    elif name == "objects":
        path.write_bytes(npz({"o": np.array([["x" * 1000] * 1000] * 1000, dtype=object).reshape(-1)[:400_000]}, True))
    elif name == "texts":
        path.write_bytes(npz({"t": np.array(["x" * 50_000, *["y"] * 1_000])}, is_packed=True))
    else:
        data = bytearray(npz({f"x{k}": np.zeros(1 << 18, "u1") for k in range(2)}))
        first = data.index(b"PK\1\2")
        second = data.index(b"PK\1\2", first + 1)
        end = data.index(b"PK\5\6")
        entry = bytes(data[first:second])
        directory = b"".join(entry.replace(b"x0.npy", f"{k:02x}.npy".encode()) for k in range(200))
        tail = bytearray(data[end:])
        tail[8:12] = (200).to_bytes(2, "little") * 2
        tail[12:16] = len(directory).to_bytes(4, "little")
        path.write_bytes(bytes(data[:first]) + directory + bytes(tail))
    refusal_in_child(path)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 4, 40])
def test_an_archive_in_a_compressed_file_is_limited_by_the_file(tmp_path, count):
    arrays = {f"x{k}": np.zeros((72 << 20) // count, "u1") for k in range(count)}
    (tmp_path / "a.npz.gz").write_bytes(gzip.compress(npz(arrays, is_packed=True)))
    assert "inflates to" in refusal(tmp_path / "a.npz.gz")


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "packed.npz", "objects.npz"])
def test_changed_files_are_read_or_refused(tmp_path, name):
    arrays = {"x": ARRAYS["states"], "t": np.array(["a", "b"]), "f": ARRAYS["fortran"]}
    data = {
        "a.npy": npy(ARRAYS["states"]),
        "a.npz": npz(arrays),
        "packed.npz": npz(arrays, is_packed=True),
        "objects.npz": npz({"o": np.array([{"a": np.ones(3)}], dtype=object)}, is_packed=True),
    }[name]
    assert check_mutations(data, tmp_path / name, 150) > 20


@pytest.mark.parametrize(
    "data", [b"\x93NUMPY", npy(np.ones(3))[:-1], npy(np.ones(3)) + b"x", npz({"x": np.ones(3)})[:-9]]
)
def test_damaged_files_are_refused(tmp_path, data):
    path = tmp_path / "a.npz"
    path.write_bytes(data)
    assert refusal(path)


@pytest.mark.long
@pytest.mark.parametrize("is_packed", [False, True])
def test_four_times_the_input_takes_four_times_as_long(tmp_path, is_packed):
    paths = []
    for count in (4_000, 16_000):
        path = tmp_path / f"{count}.npz"
        path.write_bytes(npz({f"q{k}/h": RNG.normal(size=(4, 64)).astype("f4") for k in range(count)}, is_packed))
        paths.append(path)
    check_time(*paths)


def test_the_tree_of_an_archive_is_read_whole(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(npz(ARRAYS))
    found = read_tree(path)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
