"""Objects of pandas, SciPy and PyTorch in pickles: frames, sparse matrices and tensors, edges, namedtuples."""

import collections
import io
import pickle

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of, write_pickle
from tracestore._core.pickle import BufferReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.pickles.pickle_reader import pickle_reader
from tracestore.ingest.pickles.resolve import resolve
from tracestore.ingest.pickles.sparse import PickledSparse

RNG = np.random.default_rng(0)
HIDDEN = RNG.standard_normal((2, 4, 5)).astype("f4")
ATTENTION = np.tril(RNG.random((2, 4, 4)).astype("f4"))
Answer = collections.namedtuple("Answer", "question_id hidden_states")


def read(data):
    """Return the value that a pickle holds."""
    return resolve(pickle_reader(BufferReader(data)).load(), Limits(lambda: len(data)))


def stored(tmp_path, value):
    """Convert a pickled trace and return it from the store."""
    convert(write_pickle(tmp_path / "in.pkl", value), tmp_path / "s.zarr", check=0)
    return tracestore.open(tmp_path / "s.zarr")[0]


def test_frames_are_rows_with_their_index():
    pd = pytest.importorskip("pandas")
    columns = {
        "question_id": ["a", None, "ü"],
        "states": [HIDDEN, HIDDEN + 1, HIDDEN + 2],
        "score": [0.1, 0.2, 0.3],
        "rank": [3, 2, 1],
        "kind": pd.Categorical(["x", "y", "x"]),
        "time": pd.to_datetime(["2020-01-01", "2020-01-02", None]),
        "count": pd.array([1, None, 3], dtype="Int64"),
        "is_ok": [True, False, True],
    }
    frame = pd.DataFrame(columns)
    rows = read(pickle.dumps(frame, 4))
    assert [row["question_id"] for row in rows] == ["a", None, "ü"]
    assert [row["count"] for row in rows] == [1, None, 3] and [row["kind"] for row in rows] == ["x", "y", "x"]
    assert str(rows[1]["time"]).startswith("2020-01-02") and [bool(row["is_ok"]) for row in rows] == [True, False, True]
    np.testing.assert_array_equal(rows[2]["states"], HIDDEN + 2)
    indexed = frame[["score", "rank"]].set_index(pd.Index(["a", "b", "c"], name="qid"))
    assert [row["qid"] for row in read(pickle.dumps(indexed, 5))] == ["a", "b", "c"]
    levels = frame[["score"]].set_index(pd.MultiIndex.from_product([["q"], [0, 1, 2]], names=["id", "layer"]))
    assert [(row["id"], row["layer"]) for row in read(pickle.dumps(levels, 4))] == [("q", 0), ("q", 1), ("q", 2)]
    assert read(pickle.dumps(frame.iloc[1:].set_index("rank"), 4))[0]["score"] == 0.2
    assert read(pickle.dumps(pd.Series([1.5, 2.5], index=["a", "b"]), 4)) == {"a": 1.5, "b": 2.5}


def test_a_frame_of_another_structure_is_refused():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": pd.Series([1, 2], dtype="Sparse[int]")})
    with pytest.raises(InvalidInputError, match="to_parquet"):
        read(pickle.dumps(frame, 4))


@pytest.mark.parametrize("layout", ["csr_matrix", "csc_array", "coo_matrix"])
def test_sparse_attention_of_scipy(tmp_path, layout):
    sparse = pytest.importorskip("scipy.sparse")
    layers = [getattr(sparse, layout)(layer) for layer in ATTENTION]
    trace = stored(tmp_path, [{"question_id": "q", "hidden_states": HIDDEN, "attentions": layers}])
    np.testing.assert_array_equal(trace.attention, ATTENTION.astype("f2"))


@pytest.mark.parametrize("name", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_tensors(tmp_path, name):
    torch = pytest.importorskip("torch")
    layers = [getattr(torch.from_numpy(layer), name)() for layer in ATTENTION]
    file = io.BytesIO()
    torch.save([{"question_id": "q", "hidden_states": torch.from_numpy(HIDDEN), "attentions": layers}], file)
    (tmp_path / "in.pt").write_bytes(file.getvalue())
    convert(tmp_path / "in.pt", tmp_path / "s.zarr", check=0)
    np.testing.assert_array_equal(tracestore.open(tmp_path / "s.zarr")[0].attention, ATTENTION.astype("f2"))


def test_sparse_matrices_are_checked():
    index, values = np.array([0, 1]), np.array([1.0, 2.0])
    wrong = {
        "outside": ("coo", (2, 2), (index, index + 1), values),
        "other indices": ("coo", (2, 2), (index[:1], index), values),
        "than values": ("csr", (2, 2), (np.array([0, 1, 3]), index), values),
        "of shape": ("coo", (1 << 20, 1 << 20), (index, index), values),
    }
    for text, (layout, shape, indices, data) in wrong.items():
        with pytest.raises(InvalidInputError, match=text):
            sparse = PickledSparse(layout)
            sparse.set(shape, indices, data)
            sparse.resolve()


def edges_of(layer, order):
    target, source = np.nonzero(layer)
    return {"edge_index": np.stack([source, target][::order]), "edge_weight": layer[target, source]}


@pytest.mark.parametrize("order", [1, -1])
def test_edges_of_causal_attention_in_either_order(tmp_path, order):
    layers = [edges_of(layer, order) for layer in ATTENTION]
    trace = stored(tmp_path, [{"question_id": "q", "hidden_states": HIDDEN, "attentions": layers}])
    np.testing.assert_array_equal(trace.attention, ATTENTION.astype("f2"))


def test_edges_in_both_directions_are_refused(tmp_path):
    layers = [edges_of(np.ones((4, 4), "f4"), 1)] * 2
    path = write_pickle(tmp_path / "in.pkl", [{"question_id": "q", "hidden_states": HIDDEN, "attentions": layers}])
    assert "both directions" in error_of("convert", path, tmp_path / "s.zarr", code=3)


def test_values_of_a_namedtuple_show_what_they_are(tmp_path):
    path = write_pickle(tmp_path / "in.pkl", [Answer("q0", HIDDEN), Answer("q1", HIDDEN + 1)])
    convert(path, tmp_path / "s.zarr", "--attention", "none", check=0)
    assert tracestore.open(tmp_path / "s.zarr").question_ids == ["q0", "q1"]


def test_traces_behind_each_other_in_one_array_of_a_pickle(tmp_path):
    lengths, total = [2, 3, 4], RNG.standard_normal((2, 9, 5)).astype("f2")
    forms = {
        "layers first": (total, {"lengths": lengths}),
        "tokens first": (total.transpose(1, 0, 2), {"cu_seqlens": np.cumsum([0, *lengths])}),
        "a list of layers": (list(total), {"offsets": np.cumsum([0, *lengths])}),
    }
    for name, (hidden, bounds) in forms.items():
        value = {"hidden_states": hidden, "question_ids": ["a", "b", "c"], "label": [0, 1, 0]} | bounds
        path = write_pickle(tmp_path / f"{name}.pkl", value)
        convert(path, tmp_path / f"{name}.zarr", "--attention", "none", check=0)
        store = tracestore.open(tmp_path / f"{name}.zarr")
        assert store.question_ids == ["a", "b", "c"]
        np.testing.assert_array_equal(store["c"].hidden_states, total[:, 5:])


def test_predictions_of_a_trainer_are_a_batch_without_padding(tmp_path):
    output = pytest.importorskip("transformers").trainer_utils.PredictionOutput
    states = [np.random.default_rng(n).random((2, n, 8), np.float32).astype("f2") for n in (3, 5)]
    padded = [np.full((2, 5, 8), -100, "f2") for _ in range(2)]
    for k, value in enumerate(states):
        for layer in range(2):
            padded[layer][k, : value.shape[1]] = value[layer]
    value = output((np.zeros((2, 5, 9), "f4"), tuple(padded)), np.full((2, 5), -100), {"test_loss": 4.0})
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(value))
    convert(tmp_path / "a.pkl", tmp_path / "s.zarr", "--attention", "none")
    for trace, expected in zip(tracestore.open(tmp_path / "s.zarr"), states, strict=True):
        np.testing.assert_array_equal(trace.hidden_states, expected)
