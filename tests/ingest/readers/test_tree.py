"""Test the types of the tree that readers yield."""

import numpy as np
import pytest

from tracestore.errors import InvalidInputError
from tracestore.ingest.readers.tree import (
    Array,
    Group,
    Items,
    ListItems,
    MappingGroup,
    NumpyArray,
    StreamItems,
    array_value,
    as_array,
)
from tracestore.store.format import schema


def value_of(value):
    """Return lists, dicts and arrays as a value of the tree."""
    if isinstance(value, dict):
        return MappingGroup(value, value_of)
    if isinstance(value, list | tuple):
        return ListItems(value, value_of)
    return array_value(value) if isinstance(value, np.ndarray | np.generic) else value


@pytest.mark.parametrize("dtype", ["<f2", ">f4", "<f8", "u1", "?", ">i8", "<c8", schema.BFLOAT16, "V2"])
def test_an_array_reads_selections(dtype):
    data = np.arange(1, 25, dtype="<u2" if dtype in ("V2", schema.BFLOAT16) else "<i4")
    data = data.view(dtype) if dtype in ("V2", schema.BFLOAT16) else data.astype(dtype)
    data = data.reshape(2, 3, 4)
    array = array_value(data)
    assert isinstance(array, Array) and array.shape == (2, 3, 4) and array.ndim == 3
    for selection in ((), (1,), (slice(0, 1), 2), (1, slice(1, 3), slice(0, 2))):
        found = array.read(selection)
        assert found.dtype.isnative or found.dtype.fields
        np.testing.assert_array_equal(found, data[selection])


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("<f2", "float16"),
        (">f4", "float32"),
        ("<f8", "float64"),
        ("u1", "uint8"),
        (">i8", "int64"),
        ("?", "bool"),
        ("V2", "void16"),
        (schema.BFLOAT16, "bfloat16"),
        ("<c8", "complex64"),
    ],
)
def test_dtypes_have_names_without_byte_order(dtype, name):
    assert array_value(np.zeros(1, dtype)).dtype == name


def test_numbers_without_axes_are_scalars():
    assert array_value(np.array(3, ">i4")) == 3 and type(array_value(np.float16(0.5))) is float
    assert array_value(np.bool_(True)) is True
    assert array_value(np.array(0x3FC0, "<u2").view(schema.BFLOAT16)) == 1.5
    assert array_value(np.array("q1")) == "q1" and array_value(np.array(b"q\xc3\xa9")) == "qé"


def test_texts_are_items():
    items = array_value(np.array([["a", "b"], ["c", "d"]]))
    assert isinstance(items, Items) and not items.is_stream and items.length == 2
    assert [list(row) for row in items] == [["a", "b"], ["c", "d"]] and items[1][0] == "c"
    with pytest.raises(InvalidInputError, match="not UTF-8"):
        list(array_value(np.array([b"\xff\xfe"])))


def test_records_are_items_of_groups():
    records = np.array([("q1", 1, [1, 2]), ("q2", 0, [3, 4])], [("id", "U2"), ("label", "i8"), ("h", "<f4", (2,))])
    items = array_value(records)
    assert items.length == 2 and isinstance(items[0], Group)
    assert [(row["id"], row["label"], row["h"].read().tolist()) for row in items] == [
        ("q1", 1, [1, 2]),
        ("q2", 0, [3, 4]),
    ]
    assert array_value(records[0])["id"] == "q1" and list(array_value(records[0])) == ["id", "label", "h"]


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        ([1, 2, 3], "int64", (3,)),
        ([[1, 2], [3, 4]], "int64", (2, 2)),
        ([1, 2.5], "float64", (2,)),
        ([[True], [False]], "bool", (2, 1)),
        ([np.zeros((2, 3), "<f2")] * 4, "float16", (4, 2, 3)),
        ([[np.zeros(3, "<f4"), np.zeros(3, "<f8")]], "float64", (1, 2, 3)),
        ([np.zeros(2, schema.BFLOAT16)] * 2, "bfloat16", (2, 2)),
        (np.zeros((1, 2), "<f4"), "float32", (1, 2)),
    ],
)
def test_nested_items_are_an_array(value, dtype, shape):
    array = as_array(value_of(value))
    assert (array.dtype, array.shape, array.read().shape) == (dtype, shape, shape)
    np.testing.assert_array_equal(array.read(), np.array(value))


@pytest.mark.parametrize(
    "value",
    [
        [],
        [[]],
        [[1], [2, 3]],
        ["a"],
        [1, None],
        [1, True],
        [[1], 2],
        [{"a": 1}],
        [1 << 70],
        [np.zeros(2), np.zeros(3)],
        [np.zeros(2), np.zeros(2, schema.BFLOAT16)],
        "text",
        5,
        None,
    ],
)
def test_other_values_are_no_array(value):
    assert as_array(value_of(value)) is None


def test_numbers_keep_all_their_digits():
    assert as_array(value_of([16_777_217, 2])).read().tolist() == [16_777_217, 2]
    assert as_array(value_of([1e300, 0.5])).read().tolist() == [1e300, 0.5]


def test_a_stream_is_iterated_once():
    items = StreamItems(iter([1, 2]))
    assert items.is_stream and list(items) == [1, 2] and list(items) == []
    assert as_array(items) is None
    with pytest.raises(TypeError):
        items[0]


def test_groups_open_values_when_they_are_used():
    opened = []
    group = MappingGroup({"a": 1, ("q", 3): 2}, lambda value: opened.append(value) or value, {"model": "m"})
    assert len(group) == 2 and list(group) == ["a", ("q", 3)] and ("q", 3) in group and not opened
    assert group["a"] == 1 and opened == [1] and group.attributes == {"model": "m"}
    assert isinstance(as_array(array_value(np.zeros(2))), NumpyArray)
