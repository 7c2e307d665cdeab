"""Arrow and Parquet files: data sets of Hugging Face, activations of SAELens, feather files; refusals."""

import io
import pickle

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of, read_traces, tree_bytes
from tests.ingest.containers.layouts import base, by_layer, check

pa = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")
pq = pytest.importorskip("pyarrow.parquet")

HEADS = ("--attention", "heads")
NONE = ("--attention", "none")


def stored(tmp_path, source, *flags):
    convert(source, tmp_path / "s.zarr", *(flags or HEADS))
    return tracestore.open(tmp_path / "s.zarr")


def write_stream(table, path):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_file(table, path):
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "parquet": lambda table, path: pq.write_table(table, path),
    "parquet, small row groups": lambda table, path: pq.write_table(table, path, row_group_size=2, compression="zstd"),
    "arrow stream": write_stream,
    "arrow file": write_file,
    "feather, lz4": lambda table, path: feather.write_feather(table, path),
    "feather, zstd": lambda table, path: feather.write_feather(table, path, compression="zstd", chunksize=2),
}
PRESENT = {"stacked": lambda a: a, "layer_0": lambda a: by_layer(a, "layer_{}", "attention_{}")}


@pytest.mark.parametrize("layout", PRESENT)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_row_per_trace(tmp_path, writer, layout):
    traces = [base(k, tokens=2 + k % 3) for k in range(8)]
    rows = [
        {name: value.tolist() for name, value in PRESENT[layout](t).items()}
        | {
            "id": f"q{k}",
            "question": "Why?",
            "prompt_length": k % 3,
            "words": ["a", "é"],
            "none": None,
            "sample": k % 2,
        }
        for k, t in enumerate(traces)
    ]
    table = pa.Table.from_pylist(rows)
    for name in table.schema.names:  # 16-bit floats, as data sets of activations have them
        if name.startswith(("hidden", "layer", "att")):
            depth = str(table.schema.field(name).type).count("list")
            kind = pa.float16()
            for _ in range(depth):
                kind = pa.list_(kind)
            k = table.schema.get_field_index(name)
            values = [np.asarray(r[name], "f2") for r in rows]
            table = table.set_column(k, name, pa.array([nested(v) for v in values], kind))
    path = tmp_path / ("a.parquet" if "parquet" in writer else "a.arrow")
    WRITERS[writer](table, path)
    store = stored(tmp_path, path)
    check(store, traces)
    assert store.question_ids == [f"q{k}" for k in range(8)]
    assert store[5].question == "Why?" and store[5].prompt_length == 2 and store[5].sample == 1
    assert store[5].extras == {"words": ["a", "é"]}


def nested(array):
    """Return nested lists of NumPy's 16-bit floats, which pyarrow requires."""
    return list(array) if array.ndim == 1 else [nested(row) for row in array]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_activations_of_saelens(tmp_path, dtype, num_shards):
    """CacheActivationsRunner saves one array (context size, D) per hook, and token_ids."""
    datasets = pytest.importorskip("datasets")
    hidden = np.random.default_rng(0).standard_normal((9, 5, 8)).astype(dtype)
    tokens = np.arange(45, dtype="i4").reshape(9, 5)
    name = "blocks.3.hook_resid_post"
    features = datasets.Features(
        {
            name: datasets.Array2D((5, 8), dtype),
            "token_ids": datasets.Sequence(datasets.Value("int32"), length=5),
        }
    )
    saved = datasets.Dataset.from_dict({name: hidden, "token_ids": tokens}, features=features)
    saved.save_to_disk(tmp_path / "acts", num_shards=num_shards)
    store = stored(tmp_path, tmp_path / "acts", *NONE, "--dtype", "keep")
    assert len(store) == 9 and store.num_layers == 1 and store[8].source == ("acts", 8)
    for k, trace in enumerate(store):
        np.testing.assert_array_equal(trace.hidden_states, hidden[k][None])
        np.testing.assert_array_equal(trace.tokens, tokens[k])
    assert "(1 file already in the store" in convert(tmp_path / "acts", tmp_path / "s.zarr", *NONE).stdout


def make_dataset(traces):
    datasets = pytest.importorskip("datasets")
    columns = {
        name: [t[name].astype("f4" if t[name].dtype == "f2" else "i8").tolist() for t in traces] for name in traces[0]
    }
    return datasets.Dataset.from_dict(columns | {"question_id": [f"q{k}" for k in range(len(traces))]})


@pytest.mark.parametrize("form", ["save_to_disk", "to_parquet", "splits"])
def test_data_sets_of_hugging_face(tmp_path, form):
    datasets = pytest.importorskip("datasets")
    traces = [base(k, tokens=2 + k) for k in range(6)]
    dataset = make_dataset(traces)
    (tmp_path / "in").mkdir()
    if form == "save_to_disk":
        dataset.save_to_disk(tmp_path / "in/d")
    elif form == "splits":
        datasets.DatasetDict(train=dataset.select(range(4)), test=dataset.select([4, 5])).save_to_disk(
            tmp_path / "in/d"
        )
    else:
        for shard in range(2):
            part = dataset.shard(2, shard, contiguous=True)
            part.to_parquet(tmp_path / f"in/train-{shard:05d}-of-00002.parquet")
    store = stored(tmp_path, tmp_path / "in")
    order = [4, 5, 0, 1, 2, 3] if form == "splits" else range(6)
    check(store, [traces[k] for k in order])
    assert store.question_ids == [f"q{k}" for k in order]


def test_an_extension_type_that_is_registered_is_read_like_others(tmp_path):
    values = np.arange(2 * 3 * 4 * 8, dtype="f4").reshape(2, 3, 4, 8)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    pq.write_table(pa.table({"hidden_states": tensors, "tokens": [[1, 2, 3, 4]] * 2}), tmp_path / "a.parquet")
    store = stored(tmp_path, tmp_path / "a.parquet", *NONE, "--dtype", "keep")
    np.testing.assert_array_equal([t.hidden_states for t in store], values)


def test_the_data_set_of_speculators_is_not_a_source(tmp_path):
    from tests.ingest.containers.test_safetensors_file import connector_file

    datasets = pytest.importorskip("datasets")
    pytest.importorskip("torch")
    prepared = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]})
    prepared.save_to_disk(tmp_path / "in")
    (tmp_path / "in/hidden_states").mkdir()
    for k in range(11):
        connector_file(tmp_path / f"in/hidden_states/hs_{k}.safetensors", seed=k)
    store = stored(tmp_path, tmp_path / "in", *NONE)
    assert store.question_ids == [f"hidden_states/hs_{k}" for k in range(11)]


def test_last_tokens_of_rows(tmp_path):
    values = np.random.default_rng(0).standard_normal((5, 3, 8)).astype("f4")
    pq.write_table(pa.table({"last_token": values.tolist(), "qid": list(range(5))}), tmp_path / "a.parquet")
    store = stored(tmp_path, tmp_path / "a.parquet", *NONE)
    assert store.question_ids == ["0", "1", "2", "3", "4"]
    np.testing.assert_array_equal([t.last_token for t in store], values.astype("f2"))


def test_workers_do_not_change_the_bytes(tmp_path):
    (tmp_path / "in").mkdir()
    for k in range(5):
        traces = [base(n, tokens=3) for n in range(3 * k, 3 * k + 3)]
        rows = [{name: value.astype("f4").tolist() for name, value in t.items() if name != "tokens"} for t in traces]
        table = pa.Table.from_pylist([r | {"id": 3 * k + n} for n, r in enumerate(rows)])
        pq.write_table(table, tmp_path / f"in/{k}.parquet")
    convert(tmp_path / "in", tmp_path / "s.zarr", "--workers", 1)
    convert(tmp_path / "in", tmp_path / "t.zarr", "--workers", 3)
    assert tree_bytes(tmp_path / "s.zarr") == tree_bytes(tmp_path / "t.zarr")


class Live:
    """An object whose unpickling would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_in_columns_and_types_are_not_read(tmp_path):
    data = pickle.dumps(Live(tmp_path / "marker"))
    pq.write_table(pa.table({"hidden_states": [data], "tokens": [[1]]}), tmp_path / "a.parquet")
    message = error_of("convert", tmp_path / "a.parquet", tmp_path / "s.zarr", *NONE, code=3)
    assert "a.parquet, trace 0, hidden_states: found bytes" in message
    # The type of a column that pyarrow before 14.0.1 unpickled.
    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": data}
    field = pa.field("hidden_states", pa.list_(pa.list_(pa.list_(pa.float32()))), metadata=metadata)
    table = pa.table([[[[[1.0]]]], [[1]]], schema=pa.schema([field, pa.field("tokens", pa.list_(pa.int64()))]))
    for path, write in ((tmp_path / "b.parquet", pq.write_table), (tmp_path / "b.arrow", write_stream)):
        write(table, path)
        assert len(stored(tmp_path, path, *NONE, "--overwrite")) == 1
    assert not (tmp_path / "marker").exists()


def small(writer):
    """Return the bytes of a small file."""
    rows = [{n: v.astype("f4").tolist() for n, v in base(k).items() if n != "tokens"} for k in range(2)]
    out = io.BytesIO()
    WRITERS[writer](pa.Table.from_pylist([r | {"question": "why"} for r in rows]), out)
    return out.getvalue()


@pytest.mark.parametrize("writer", [name for name in WRITERS if "parquet" not in name])
def test_damaged_files_are_refused_or_read(tmp_path, writer):
    """No change of a file ends the process or gives a traceback."""
    from tracestore.errors import InvalidInputError

    data, rng, refused = small(writer), np.random.default_rng(0), 0
    path = tmp_path / "a"
    for k in range(400):
        changed = bytearray(data)
        if k % 4 == 0:
            del changed[rng.integers(8, len(data)) :]
        for _ in range(rng.integers(0 if k % 4 == 0 else 1, 4)):
            changed[rng.integers(8, len(changed))] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            for record in read_traces(path, "a"):
                del record
        except InvalidInputError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_truncated_parquet_files_are_refused(tmp_path, share):
    data = small("parquet")
    (tmp_path / "a.parquet").write_bytes(data[: int(len(data) * share)])
    assert "a.parquet" in error_of("convert", tmp_path / "a.parquet", tmp_path / "s.zarr", code=3)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_bombs_are_refused(tmp_path, compression):
    table = pa.table({"hidden_states": pa.array(np.zeros(1 << 27, "f4"))})
    feather.write_feather(table, tmp_path / "a.feather", compression=compression, chunksize=1 << 27)
    assert "inflates to" in error_of("convert", tmp_path / "a.feather", tmp_path / "s.zarr", code=3)


def test_a_missing_file_of_a_data_set_is_refused(tmp_path):
    dataset = make_dataset([base(0), base(1)])
    dataset.save_to_disk(tmp_path / "d", num_shards=2)
    (tmp_path / "d/data-00001-of-00002.arrow").unlink()
    assert "found nothing" in error_of("convert", tmp_path / "d", tmp_path / "s.zarr", code=3)
    (tmp_path / "d/state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}')
    assert "state.json" in error_of("convert", tmp_path / "d", tmp_path / "s.zarr", code=2)


@pytest.mark.parametrize("form", ["output", "layers", "bytes", "flat"])
def test_structs_and_bytes_hold_arrays(tmp_path, form):
    traces = [base(k, tokens=3, attention=False) for k in range(3)]
    rows = []
    for k, trace in enumerate(traces):
        hidden = trace["hidden_states"]
        states = {
            "output": {"output": {"hidden_states": hidden.tolist(), "model": "m"}},
            "layers": {"layers": {str(n): layer.tolist() for n, layer in enumerate(hidden)}},
            "flat": {"hidden_states": {"data": hidden.ravel().tolist(), "shape": list(hidden.shape)}},
            "bytes": {"hidden_states": hidden.astype("f2").tobytes(), "dtype": "float16", "shape": list(hidden.shape)},
        }[form]
        rows.append({"id": f"q{k}", "tokens": trace["tokens"].tolist()} | states)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")

    convert(tmp_path / "a.parquet", tmp_path / "s.zarr", *NONE)

    with tracestore.open(tmp_path / "s.zarr") as store:
        check(store, traces)
        assert store.question_ids == ["q0", "q1", "q2"]
