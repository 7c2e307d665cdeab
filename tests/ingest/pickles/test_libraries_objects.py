"""Objects of pandas, SciPy and PyTorch in pickles: frames, sparse matrices and tensors."""

import io

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, write_pickle
from tests.ingest.readers.trees import read_tree
from tracestore.errors import InvalidInputError
from tracestore.ingest.pickles.sparse import PickledSparse

RNG = np.random.default_rng(0)
HIDDEN = RNG.standard_normal((2, 4, 5)).astype("f4")
ATTENTION = np.tril(RNG.random((2, 4, 4)).astype("f4"))


def stored(path):
    """Convert a file of one trace without tokens and return it from the store."""
    lines = (f"hidden_states = {path.name} : []/hidden_states -> L S D", f"question_id = {path.name} : []/question_id")
    lines += (f"attentions = {path.name} : []/attentions -> L S S",)
    store = path.with_suffix(".zarr")
    convert(path, store, *(word for line in lines for word in ("--field", line)))
    return tracestore.open(store)[0]


def test_frames_are_rows_with_their_index(tmp_path):
    def read(value, protocol=4):
        return read_tree(write_pickle(tmp_path / "in.pkl", value, protocol))

    pd = pytest.importorskip("pandas")
    columns = {
        "question_id": ["a", None, "ü"],
        "states": [HIDDEN, HIDDEN + 1, HIDDEN + 2],
        "score": [0.1, 0.2, 0.3],
        "rank": [3, 2, 1],
        "is_ok": [True, False, True],
    }
    frame = pd.DataFrame(columns)
    rows = read(frame)
    assert [row["question_id"] for row in rows] == ["a", None, "ü"]
    assert [bool(row["is_ok"]) for row in rows] == [True, False, True]
    np.testing.assert_array_equal(rows[2]["states"], HIDDEN + 2)
    indexed = frame[["score", "rank"]].set_index(pd.Index(["a", "b", "c"], name="qid"))
    assert [row["qid"] for row in read(indexed, 5)] == ["a", "b", "c"]
    assert read(frame.iloc[1:].set_index("rank"))[0]["score"] == 0.2


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    "kind", ["Sparse[int]", "category", "Int64", "Float32", "boolean", "interval", "levels", "series"]
)
def test_a_frame_of_another_structure_is_refused(tmp_path, kind, protocol):
    """The codes of categories, and the values behind a mask, are no values of the column."""
    pd = pytest.importorskip("pandas")
    if kind == "levels":
        frame = pd.DataFrame({"a": [1, 0]}, index=pd.MultiIndex.from_product([["q"], [0, 1]], names=["id", "layer"]))
    elif kind == "series":
        frame = pd.Series([1.5, 2.5], index=["a", "b"])
    elif kind == "interval":
        frame = pd.DataFrame({"a": pd.arrays.IntervalArray.from_breaks([0, 1, 2])})
    else:
        frame = pd.DataFrame({"a": pd.Series([1, 0], dtype=kind)})
    with pytest.raises(InvalidInputError, match="to_parquet"):
        read_tree(write_pickle(tmp_path / "in.pkl", frame, protocol))


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", ["M8[ns]", "M8[D]", "m8[s]"])
def test_dates_of_numpy_are_refused(tmp_path, dtype, protocol):
    for value in (np.zeros(2, dtype), np.zeros((), dtype)[()], [{"time": np.zeros(2, dtype)}]):
        with pytest.raises(InvalidInputError, match="expected numbers or strings"):
            read_tree(write_pickle(tmp_path / "in.pkl", value, protocol))


@pytest.mark.parametrize("layout", ["csr_matrix", "csc_array", "coo_matrix"])
def test_sparse_attention_of_scipy(tmp_path, layout):
    sparse = pytest.importorskip("scipy.sparse")
    layers = [getattr(sparse, layout)(layer) for layer in ATTENTION]
    path = write_pickle(tmp_path / "in.pkl", [{"question_id": "q", "hidden_states": HIDDEN, "attentions": layers}])
    np.testing.assert_array_equal(stored(path).attention, ATTENTION.astype("f2"))


@pytest.mark.parametrize("name", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_tensors(tmp_path, name):
    torch = pytest.importorskip("torch")
    layers = [getattr(torch.from_numpy(layer), name)() for layer in ATTENTION]
    file = io.BytesIO()
    torch.save([{"question_id": "q", "hidden_states": torch.from_numpy(HIDDEN), "attentions": layers}], file)
    (tmp_path / "in.pt").write_bytes(file.getvalue())
    np.testing.assert_array_equal(stored(tmp_path / "in.pt").attention, ATTENTION.astype("f2"))


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
