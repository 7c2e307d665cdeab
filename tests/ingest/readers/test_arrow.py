"""Test the tree of Arrow files and streams and of Parquet files."""

import gzip
import json
import struct

import numpy as np
import pytest

from tests.ingest.readers.trees import (
    check_mutations,
    check_time,
    plain,
    read_tree,
    refusal,
    refusal_in_child,
    refusal_of_convert,
)
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Group, Items, StreamItems

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def ipc(table, new=None, **options):
    out = pa.BufferOutputStream()
    with (new or pa.ipc.new_file)(out, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return out.getvalue().to_pybytes()


def parquet(table, **options):
    out = pa.BufferOutputStream()
    pq.write_table(table, out, **options)
    return out.getvalue().to_pybytes()


TABLE = pa.table(
    {
        "id": ["q1", "q2", "q3"],
        "h": pa.array([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]], None], pa.list_(pa.list_(pa.float32()))),
        "ragged": [[[1], [2, 3]], [[]], [None]],
        "n": [1, None, 3],
        "texts": [["a", None], [], None],
        "struct": [{"x": 1, "y": [1.5]}, None, {"x": None, "y": []}],
        "bytes": [b"ab", None, b""],
        "dictionary": pa.array(["u", "v", "u"]).dictionary_encode(),
        "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)),
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        "flags": [[True, False], [], [True]],
        "flag": [True, False, None],
        "time": pa.array([1, 2, 3], pa.timestamp("s")),
        "half": pa.array(np.ones(3, "f2")),
        "objects": [[{"a": 1}, {"a": 2}], [], None],
    }
).replace_schema_metadata({"model": "m"})
FIRST = {
    "id": "q1", "h": [[1, 2], [3, 4]], "ragged": [[1], [2, 3]], "n": 1, "texts": ["a", None],
    "struct": {"x": 1, "y": [1.5]}, "bytes": [97, 98], "dictionary": "u", "fixed": [1, 2], "map": {"k": 1},
    "flags": [True, False], "flag": True, "time": "1970-01-01T00:00:01", "half": 1.0, "objects": [{"a": 1}, {"a": 2}],
}  # fmt: skip
FILES = {
    "a.arrow": lambda table: ipc(table),
    "stream.arrow": lambda table: ipc(table, pa.ipc.new_stream),
    "packed.arrow": lambda table: ipc(table, compression="zstd"),
    "a.parquet": lambda table: parquet(table),
    "plain.parquet": lambda table: parquet(table, use_dictionary=False, data_page_version="2.0"),
    "groups.parquet": lambda table: parquet(table, row_group_size=1, compression="gzip"),
    "a.parquet.gz": lambda table: gzip.compress(parquet(table)),
}


def lists(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: lists(item) for key, item in value.items()}
    return [lists(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", FILES)
def test_rows_are_groups(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name](TABLE))
    with open_tree(tmp_path / name) as root:
        assert isinstance(root, StreamItems) and root.attributes["model"] == "m"
        first, second, third = [row for row in root if isinstance(row, Group)]
        assert isinstance(first["h"], Array) and first["h"].dtype == "float32" and first["h"].shape == (2, 2)
        assert first["h"].read((1, slice(0, 1))).tolist() == [3] and isinstance(first["ragged"], Items)
        assert lists(plain(first)) == FIRST
        assert second["n"] is None and second["struct"] is None and second["h"].shape == (1, 2)
        assert third["h"] is None and lists(plain(third["struct"])) == {"x": None, "y": []}


@pytest.mark.parametrize("name", FILES)
def test_slices_and_files_without_rows(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name](TABLE.slice(1, 1)))
    (row,) = read_tree(tmp_path / name)
    assert row["id"] == "q2" and row["fixed"].tolist() == [3, 4] and row["dictionary"] == "v"
    (tmp_path / name).write_bytes(FILES[name](TABLE.slice(0, 0)))
    assert read_tree(tmp_path / name) == []


def test_runs_and_views(tmp_path):
    runs = pa.RunEndEncodedArray.from_arrays([2, 5], pa.array(["x", "y"])).slice(1, 3)
    views = pa.ListViewArray.from_arrays([2, 0, 0], [1, 2, 3], pa.array([1, 2, 3]))
    (tmp_path / "a.arrow").write_bytes(ipc(pa.table({"runs": runs, "views": views})))
    rows = lists(read_tree(tmp_path / "a.arrow"))
    assert rows == [{"runs": "x", "views": [3]}, {"runs": "y", "views": [1, 2]}, {"runs": "y", "views": [1, 2, 3]}]


def test_tensors_have_their_shape(tmp_path):
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype="f4").reshape(2, 2, 3))
    (tmp_path / "a.arrow").write_bytes(ipc(pa.table({"h": tensors})))
    rows = read_tree(tmp_path / "a.arrow")
    assert rows[1]["h"].tolist() == [[6, 7, 8], [9, 10, 11]]


TEXT = "x" * 1_000_000
NUMBERS = pa.array([list(range(130_000))], pa.list_(pa.int64()))


def views():
    places = np.zeros(50_000, "i4")
    return ipc(pa.table({"h": pa.ListViewArray.from_arrays(places, places + 50_000, pa.array(np.zeros(50_000, "f4")))}))


def nested():
    inner = pa.DictionaryArray.from_arrays(np.zeros(1_000_000, "i1"), [TEXT])
    return ipc(pa.table({"t": pa.ListArray.from_arrays(pa.array([0, 1_000_000], "i4"), inner)}))


def states():
    return parquet(pa.table({"h": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(20_000_000, "f4")), 1_000)}))


def one_row():
    return parquet(
        pa.table({"h": pa.ListArray.from_arrays(pa.array([0, 30_000_000], "i4"), pa.array(np.zeros(30_000_000, "i4")))})
    )


def prefixes():
    table = pa.table({"t": [TEXT[:100_000] + str(k) for k in range(2_000)]})
    return parquet(table, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY")


# Files in which few bytes stand for many values.
AMPLIFIED = {
    "dictionary.arrow": lambda: ipc(pa.table({"t": pa.DictionaryArray.from_arrays(np.zeros(100_000, "i1"), [TEXT])})),
    "lists.arrow": lambda: ipc(pa.table({"h": pa.DictionaryArray.from_arrays(np.zeros(3_300, "i1"), NUMBERS)})),
    "runs.arrow": lambda: ipc(
        pa.table({"h": pa.RunEndEncodedArray.from_arrays(pa.array([100_000], pa.int32()), NUMBERS)})
    ),
    "views.arrow": views,
    "nested.arrow": nested,
    "nulls.arrow": lambda: ipc(pa.table({"t": pa.nulls(20_000_000)})),
    "zeros.arrow": lambda: ipc(pa.table({"h": pa.array([np.zeros(1 << 24, "f4")])}), compression="zstd"),
    "text.parquet": lambda: parquet(pa.table({"t": [TEXT[:4_000]] * 60_000})),
    "texts.parquet": lambda: parquet(pa.table({"t": [[TEXT[:4_000]] * 1_000] * 60})),
    "struct.parquet": lambda: parquet(pa.table({"s": [{"t": TEXT[:4_000].encode()}] * 60_000})),
    "rows.parquet": lambda: parquet(pa.table({name: np.ones(1_000_000, "i1") for name in "abcdefghij"})),
    "states.parquet": states,
    "row.parquet": one_row,
    "prefixes.parquet": prefixes,
    "packed.parquet": lambda: parquet(pa.table({"t": [TEXT * 100]}), use_dictionary=False, compression="zstd"),
}


@pytest.mark.parametrize("name", AMPLIFIED)
@pytest.mark.long
def test_amplified_files_end(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(AMPLIFIED[name]())
    reason = refusal_in_child(path)
    assert reason or name in ("zeros.arrow", "packed.parquet"), path.stat().st_size


@pytest.mark.long
@pytest.mark.parametrize("name", ["dictionary.arrow", "lists.arrow", "runs.arrow", "text.parquet", "states.parquet"])
def test_amplified_files_are_not_converted(tmp_path, name):
    (tmp_path / name).write_bytes(AMPLIFIED[name]())
    assert name in refusal_of_convert(tmp_path / name)


@pytest.mark.long
def test_repeated_labels_and_texts_are_read(tmp_path):
    count = 100_000
    table = pa.table({"label": [1] * count, "model": ["a model"] * count, "context": ["c" * 500] * count})
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(FILES[name](table))
        with open_tree(tmp_path / name) as root:
            assert sum(row["label"] + len(row["context"]) for row in root) == 501 * count


@pytest.mark.parametrize("name", FILES)
def test_changed_files_are_read_or_refused(tmp_path, name):
    assert check_mutations(FILES[name](TABLE), tmp_path / name, 60) > 5


@pytest.mark.parametrize(
    "data", [b"PAR1", b"PAR1" + bytes(20) + b"PAR1", b"ARROW1\0\0", struct.pack("<iI", -1, 1 << 30)]
)
def test_damaged_files_are_refused(tmp_path, data):
    (tmp_path / "a").write_bytes(data)
    assert refusal(tmp_path / "a")


@pytest.mark.parametrize("name", ["two columns", "union", "map"])
def test_ambiguous_columns_are_refused(tmp_path, name):
    column = pa.array([1])
    table = pa.Table.from_arrays([column, column], ["a", "a"])
    if name == "union":
        table = pa.table({"u": pa.UnionArray.from_dense(pa.array([0], "i1"), pa.array([0], "i4"), [column])})
    elif name == "map":
        table = pa.table({"m": pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()))})
    (tmp_path / "a.arrow").write_bytes(ipc(table))
    assert refusal(tmp_path / "a.arrow")


@pytest.mark.long
@pytest.mark.parametrize("name", ["a.arrow", "packed.arrow", "a.parquet"])
def test_four_times_the_input_takes_four_times_as_long(tmp_path, name):
    paths = []
    for count in (20_000, 80_000):
        table = pa.table(
            {"id": [f"q{k}" for k in range(count)], "h": [[k / 7] * 8 for k in range(count)], "label": [1] * count}
        )
        path = tmp_path / f"{count}{name}"
        path.write_bytes(FILES[name](table))
        paths.append(path)
    check_time(*paths)


@pytest.mark.parametrize("new", [ipc, parquet])
@pytest.mark.parametrize(
    "names", [["correct", "hallucinated"], ["hallucinated", "correct"], ["no", "yes"], ["0", "1"], ["a", "b", "c"]]
)
def test_numbers_of_classes_are_their_names(tmp_path, new, names):
    numbers = [1, 0, -1, None, len(names) - 1]
    features = {"y": {"names": names, "_type": "ClassLabel"}, "n": {"dtype": "int64", "_type": "Value"}}
    features["messages"] = [{"role": {"dtype": "string", "_type": "Value"}}]  # as older versions write lists
    header = {"huggingface": json.dumps({"info": {"features": features}})}
    data = new(pa.table({"y": numbers, "n": numbers}).replace_schema_metadata(header))
    (tmp_path / "a.arrow").write_bytes(data)
    found = [names[1], names[0], None, None, names[-1]]
    assert [(row["y"], row["n"]) for row in read_tree(tmp_path / "a.arrow")] == list(zip(found, numbers, strict=True))


OTHER_HEADERS = ["", "{", "[]", "null", '{"info": 1}', '{"info": {"features": {"y": 1}}}', "[" * 100_000]
OTHER_HEADERS += ['{"info": {"features": {"y": {"_type": "ClassLabel", "names": 3}}}}']
OTHER_HEADERS += ['{"info": {"features": {"z": {"_type": "ClassLabel", "names": ["a", "b"]}}}}']


@pytest.mark.parametrize("header", OTHER_HEADERS)
def test_a_header_that_describes_no_classes(tmp_path, header):
    (tmp_path / "a.arrow").write_bytes(ipc(pa.table({"y": [1, 0]}).replace_schema_metadata({"huggingface": header})))
    assert [row["y"] for row in read_tree(tmp_path / "a.arrow")] == [1, 0]


@pytest.mark.parametrize("numbers", [[2], [1 << 40], [0.5], ["a"], [[0]]])
def test_a_number_of_no_class_is_refused(tmp_path, numbers):
    features = {"y": {"names": ["a", "b"], "_type": "ClassLabel"}}
    header = {"huggingface": json.dumps({"info": {"features": features}})}
    (tmp_path / "a.arrow").write_bytes(ipc(pa.table({"y": numbers}).replace_schema_metadata(header)))
    assert refusal(tmp_path / "a.arrow")
