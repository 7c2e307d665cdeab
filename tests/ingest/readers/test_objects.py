"""Test the tree of pickles and files of torch.save."""

import bz2
import gzip
import lzma
import pickle
import types
import zipfile

import numpy as np
import pytest

import tracestore
from tests.ingest.readers.trees import check_mutations, check_time, plain, read_tree, refusal, refusal_in_child
from tests.malicious_inputs.files.bombs import valid_files
from tests.malicious_inputs.files.corpus import malicious_files
from tracestore.errors import InvalidInputError
from tracestore.ingest.files import byte_source
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Group, Items, StreamItems, as_array

PACK = {".pkl": bytes, ".pkl.gz": gzip.compress, ".pkl.bz2": bz2.compress, ".pkl.xz": lzma.compress}
RNG = np.random.default_rng(0)


def traces(count, tokens=3):
    return [
        {
            "question_id": f"q{k}",
            "hidden_states": RNG.normal(size=(2, tokens, 4)).astype("f2"),
            "tokens": list(range(tokens)),
            "label": k % 2,
            "score": 0.5,
            "extra": None,
            3: ("a", True),
        }
        for k in range(count)
    ]


def equal(found, expected):
    if isinstance(expected, np.ndarray):
        return isinstance(found, np.ndarray) and found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(equal(found[k], expected[k]) for k in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return found == expected and type(found) is type(expected)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("suffix", PACK)
def test_items_of_a_list_come_one_by_one(tmp_path, protocol, suffix):
    data = traces(3)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(PACK[suffix](pickle.dumps(data, protocol)))
    with open_tree(path) as root:
        assert isinstance(root, StreamItems) if protocol > 1 else isinstance(root, Items)
        assert equal([plain(item) for item in root], data)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": [1, 2, {"c": "d"}]}},
        ([np.ones((2, 3), "f4"), np.zeros((1, 3), "f4")], ["q1", "q2"]),
        [np.ones((2, 3), "f4")] * 3,
        [[1.5, 2], [3]],
        [],
        (),
        "text",
        7,
        None,
        {"a": 1, ("q", 3): 2, 5: 3},
    ],
)
def test_values_are_those_of_the_pickle(tmp_path, value, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(PACK[suffix](pickle.dumps(value, 4)))
    assert equal(read_tree(path), list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("suffix", PACK)
def test_pickles_behind_each_other_are_items(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    for parts in ([{"a": 1}, {"b": 2}], [{"a": 1}, [{"b": 2}, {"c": 3}]], [[{"a": 1}], {"b": 2}, []]):
        path.write_bytes(PACK[suffix](b"".join(pickle.dumps(part, 4) for part in parts)))
        flat = [item for part in parts for item in (part if isinstance(part, list) else [part])]
        assert read_tree(path) == flat
    path.write_bytes(PACK[suffix](pickle.dumps({"a": 1}, 4) + b"junk"))
    assert "trailing bytes" in refusal(path)


def test_one_item_is_in_memory_at_a_time(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(traces(50), 4))
    with open_tree(path) as root:
        items = iter(root)
        first = next(items)
        assert isinstance(first, Group) and isinstance(first["hidden_states"], Array)
        assert root.length is None and len(list(items)) == 49


def test_objects_are_groups_of_their_attributes(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(types.SimpleNamespace(x=np.arange(3), name="n"), 4))
    with open_tree(path) as root:
        assert plain(root["x"]).tolist() == [0, 1, 2] and root.attributes == {"class": "types.SimpleNamespace"}


@pytest.mark.parametrize("kind", ["bytes", "array", "list"])
def test_lines_state_the_shape_of_flat_values_in_a_mapping(tmp_path, kind):
    states = np.arange(24, dtype="f2").reshape(2, 3, 4) + 1
    data = {"bytes": states.tobytes(), "array": states.ravel(), "list": states.ravel().tolist()}[kind]
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps([{"id": "q", "h": {"dtype": "float16", "shape": states.shape, "data": data}}], 4))
    layout = {"hidden_states": "a.pkl : [id=id]/h/data -> L S D", "shape.hidden_states": "a.pkl : [id=id]/h/shape"}
    layout |= {"dtype.hidden_states": "float16"} if kind == "bytes" else {}

    tracestore.convert_files(path, tmp_path / "s.zarr", layout=layout)

    assert tracestore.open(tmp_path / "s.zarr")[0].hidden_states.tolist() == states.tolist()


def test_bytes_are_arrays(tmp_path):
    path = tmp_path / "a.pkl"
    import io

    out = io.BytesIO()
    np.save(out, np.arange(3, dtype="f4"))
    path.write_bytes(pickle.dumps({"npy": out.getvalue(), "raw": b"\1\2", "none": b"", b"k": np.float32(2)}, 4))
    found = read_tree(path)
    assert equal(
        found, {"npy": np.arange(3, dtype="f4"), "raw": np.array([1, 2], "u1"), "none": np.empty(0, "u1"), "k": 2.0}
    )


def test_frames_are_rows(tmp_path):
    pd = pytest.importorskip("pandas")
    path = tmp_path / "a.pkl"
    frame = pd.DataFrame({"id": ["q1", "q2"], "n": [1, 2], "h": [np.ones(2, "f4"), np.zeros(2, "f4")]})
    path.write_bytes(pickle.dumps(frame, 4))
    assert equal(
        read_tree(path), [{"id": "q1", "n": 1, "h": np.ones(2, "f4")}, {"id": "q2", "n": 2, "h": np.zeros(2, "f4")}]
    )


def test_files_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    value = {"x": torch.arange(6).reshape(2, 3).T, "b": [torch.ones(2, dtype=torch.bfloat16), torch.tensor(3)]}
    for name, options in (("zip.pt", {}), ("old.pt", {"_use_new_zipfile_serialization": False})):
        torch.save(value, tmp_path / name, **options)
        for suffix, pack in (("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)):
            path = tmp_path / (name + suffix)
            path.write_bytes(pack((tmp_path / name).read_bytes()))
            with open_tree(path) as root:
                assert root["x"].read().tolist() == [[0, 3], [1, 4], [2, 5]]
                assert root["x"].read((slice(1, 3), 0)).tolist() == [1, 2]
                assert root["b"][0].dtype == "bfloat16" and root["b"][1] == 3
    torch.save(torch.eye(3).to_sparse(), tmp_path / "sparse.pt")
    assert read_tree(tmp_path / "sparse.pt").tolist() == np.eye(3).tolist()
    torch.save((1.5 * torch.eye(3)).to(torch.bfloat16).to_sparse(), tmp_path / "short.pt")
    assert read_tree(tmp_path / "short.pt").tolist() == (1.5 * np.eye(3)).tolist()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_items_of_a_list_of_torch_come_one_by_one(tmp_path, protocol):
    """A list of many tensors is no object of too many values; an object that holds a list is read as a whole."""
    torch = pytest.importorskip("torch")
    data = [{"id": f"q{k}", "h": torch.full((2,), float(k))} for k in range(300)]
    torch.save(data, tmp_path / "a.pt", pickle_protocol=protocol)
    with open_tree(tmp_path / "a.pt") as root:
        assert isinstance(root, StreamItems) and not root.is_lent
        first, *others = root
        assert first["h"].read().tolist() == [0, 0] and [plain(o)["h"].tolist()[0] for o in others] == [*range(1, 300)]
    for value in ((data[:2], [1]), {"a": data[:2]}, (*(t["h"] for t in data[:25]),), [[1, 2], [3]], []):
        torch.save(value, tmp_path / "b.pt", pickle_protocol=protocol)
        assert len(read_tree(tmp_path / "b.pt")) == len(value)


@pytest.mark.parametrize("ending", [b"x", pickle.dumps([1], 2)])
def test_nothing_follows_the_pickle_of_torch(tmp_path, ending):
    torch = pytest.importorskip("torch")
    torch.save([{"h": torch.ones(2)}], tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive, zipfile.ZipFile(tmp_path / "b.pt", "w") as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name) + ending * name.endswith("data.pkl"))
    assert "trailing bytes after the pickle" in refusal(tmp_path / "b.pt")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_of_torch_files_are_stored_as_they_are(tmp_path, dtype):
    """Layers of a storage each, of a shared one, and of other strides; those of two dtypes are refused."""
    torch = pytest.importorskip("torch")
    states = (torch.arange(3 * 5 * 4).reshape(3, 5, 4) % 50 + 1).to(getattr(torch, dtype))
    forms = {
        "apart": [layer.clone() for layer in states],
        "shared": list(states),
        "strided": [layer.T.contiguous().T for layer in states],
        "mixed": [states[0].float(), *states[1:].half()],
    }
    attention = [torch.eye(5).half().repeat(2, 1, 1)] * 3
    for name, layers in forms.items():
        (tmp_path / name).mkdir()
        rows = [{"question_id": f"q{k}", "hidden_states": layers, "attentions": attention} for k in range(2)]
        torch.save(rows, tmp_path / name / "a.pt")
        if name == "mixed":
            with pytest.raises(InvalidInputError, match="expected float"):
                tracestore.convert_files(tmp_path / name, tmp_path / f"{name}.zarr")
            continue
        tracestore.convert_files(tmp_path / name, tmp_path / f"{name}.zarr")
        store = tracestore.open(tmp_path / f"{name}.zarr")
        assert len(store) == 2 and np.array_equal(store[1].hidden_states, states.half().numpy())


@pytest.mark.parametrize(
    "value",
    [
        [[[[[[0] * 30] * 30] * 30] * 30] * 30] * 30,
        {str(k): ["x" * 1000] * 1000 for k in range(200)},
        [{"h": "y" * 100_000} for _ in range(10)] * 10_000,
        [np.zeros((1000, 1000), "f4")] * 1_000,
    ],
    ids=["lists", "texts", "dicts", "arrays"],
)
def test_values_count_each_time_they_are_named(tmp_path, value):
    if isinstance(value, dict):
        shared = ["x" * 1000] * 1000
        value = dict.fromkeys(value, shared)
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(value, 4))
    assert path.stat().st_size < 5 << 20
    assert "exceed the file many times" in refusal_in_child(path)


def test_one_array_may_stand_for_several_layers(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps([np.zeros((10, 10), "f4")] * 30, 4))
    with open_tree(path) as root:
        items = list(root)
    assert len(items) == 30
    path.write_bytes(pickle.dumps(([np.zeros((1000, 1000), "f4")] * 150,), 4))
    with open_tree(path) as root:
        array = as_array(root[0])
        assert array.shape == (150, 1000, 1000) and array.read((3, slice(0, 1))).shape == (1, 1000)


def test_objects_that_hold_themselves_end(tmp_path):
    path = tmp_path / "a.pkl"
    value = {"a": []}
    value["a"].append(value)
    path.write_bytes(pickle.dumps(value, 4))
    assert refusal(path)


@pytest.mark.long
def test_malicious_files_are_read_as_data_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for case in malicious_files():
        path = tmp_path / f"a{case.suffix}"
        path.write_bytes(case.data)
        refusal(path)
        assert not (tmp_path / "malicious-marker").exists()


@pytest.mark.parametrize("name", ["a.pkl", "a.pkl.gz", "a.pt"])
def test_changed_files_are_read_or_refused(tmp_path, name):
    data = pickle.dumps(traces(3), 4)
    if name == "a.pkl.gz":
        data = gzip.compress(data)
    elif name == "a.pt":
        torch = pytest.importorskip("torch")
        torch.save({"x": torch.arange(6), "y": [torch.ones(2, 2)]}, tmp_path / "valid.pt")
        data = (tmp_path / "valid.pt").read_bytes()
    assert check_mutations(data, tmp_path / name, 150) > 75


def test_valid_files_are_read(tmp_path):
    for suffix, data in valid_files().values():
        path = tmp_path / f"a{suffix}"
        path.write_bytes(data)
        assert refusal(path) == ""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["list", "list in gzip", "dict", "torch"])
def test_four_times_the_input_takes_four_times_as_long(tmp_path, kind, monkeypatch):
    # A thread that inflates ahead runs for the large file alone, as four files are open on the other side.
    monkeypatch.setattr(byte_source, "_is_processor_idle", lambda: False)

    def path_of(count):
        path = tmp_path / f"a{count}.pkl"
        if kind == "torch":  # the parser limits the number of values of one object
            torch = pytest.importorskip("torch")
            torch.save([{"id": f"q{k}", "h": torch.zeros(2, 4)} for k in range(count // 6)], path)
            return path
        data = [{"id": f"q{k}", "h": np.zeros((8, 32), "f4"), "t": list(range(10))} for k in range(count)]
        packed = pickle.dumps(data if kind.startswith("list") else {row["id"]: row for row in data}, 4)
        path.write_bytes(gzip.compress(packed, 1) if "gzip" in kind else packed)
        return path

    check_time(path_of(12_000), path_of(48_000))


def test_a_list_inside_an_object_is_refused_at_the_end(tmp_path):
    path = tmp_path / "a.pkl.gz"
    path.write_bytes(gzip.compress(pickle.dumps(([{"a": 1}], [1]), 4)))
    with pytest.raises(InvalidInputError, match="inside another object") as raised:
        read_tree(path)
    assert raised.value.is_whole_source
