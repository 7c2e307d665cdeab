"""Objects of pandas, SciPy and PyTorch in pickles: frames, sparse matrices and tensors."""

import io

import numpy as np
import pytest

from tests.helpers import error_of, write_pickle
from tests.ingest.readers.trees import read_tree
from tracestore.errors import InvalidInputError

RNG = np.random.default_rng(0)
HIDDEN = RNG.standard_normal((2, 4, 5)).astype("f4")
ATTENTION = np.tril(RNG.random((2, 4, 4)).astype("f4"))


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


@pytest.mark.parametrize("layout", ["csr_matrix", "coo_array"])
def test_sparse_attention_of_scipy_is_refused(tmp_path, layout):
    sparse = pytest.importorskip("scipy.sparse")
    layers = [getattr(sparse, layout)(layer) for layer in ATTENTION]
    path = write_pickle(tmp_path / "in.pkl", [{"question_id": "q", "hidden_states": HIDDEN, "attentions": layers}])
    message = error_of("convert", path, tmp_path / "s.zarr", "--field", f"records = {path.name} : []", code=3)
    assert "attentions: found a mapping of" in message and "expected the axes" in message


def test_sparse_tensors_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save([{"hidden_states": torch.from_numpy(HIDDEN[0]).to_sparse()}], file)
    (tmp_path / "in.pt").write_bytes(file.getvalue())
    with pytest.raises(InvalidInputError, match="_rebuild_sparse_tensor"):
        read_tree(tmp_path / "in.pt")
