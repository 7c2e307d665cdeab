"""The fields of schema.OPTIONAL_FIELDS: validation, round trips, alignment with the tokens, and verify."""

import contextlib
import json
import random

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import (
    command,
    convert,
    make_optional,
    make_trace,
    make_traces,
    segment_of,
    write_pickle,
    write_store,
)
from tests.malicious_inputs.stores import Store, change_array
from tracestore.errors import CorruptStoreError, InvalidInputError
from tracestore.store.format import schema
from tracestore.store.maintain.merge import merge_stores
from tracestore.store.maintain.verify import verify_store
from tracestore.store.read.trace import OptionalFields


def longer(trace):
    """Return the trace with one more token than hidden states."""
    count = len(trace["tokens"]) + 1
    return trace | {"tokens": np.arange(count), "tokens_decoded": [f"t{k}" for k in range(count)]}


def make_all():
    """Return traces of 4 tokens: without fields, with all, with one of T = S + 1, with some."""
    traces = make_traces(4, tokens=4)
    traces[1] |= make_optional(4, 1)
    traces[2] = longer(traces[2]) | make_optional(5, 2)
    traces[3] |= {"token_label": np.array([0, 1, -1, 0], "i1"), "answer_span": (2, -1), "spans": []}
    return traces


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
            assert found[name].tobytes() == value.tobytes(), name
        else:
            assert found[name] == value and type(found[name]) is type(value), name


def assert_stored(path, traces):
    with tracestore.open(path) as store:
        for trace in traces:
            stored = store[store.index_of(trace["question_id"])]
            expected = {name: trace[name] for name in schema.OPTIONAL_FIELDS if name in trace}
            copied = stored.copy()
            assert_equal(stored.optional_fields, expected)
            assert_equal(copied.optional_fields, expected)
            for name in schema.OPTIONAL_FIELDS:
                for source in (stored, copied):
                    value = getattr(source, name)
                    assert_equal(
                        {} if value is None else {name: value}, {k: v for k, v in expected.items() if k == name}
                    )
            assert stored.extras == {} and stored.num_tokens == 4
            np.testing.assert_array_equal(stored.tokens, trace["tokens"])
            assert stored.tokens_decoded == trace["tokens_decoded"]
    assert verify_store(path).damaged == {}


def test_the_attributes_of_a_trace_are_those_of_the_table():
    assert OptionalFields.__annotations__.keys() == schema.OPTIONAL_FIELDS.keys(), (
        "see OptionalFields in store/read/trace.py"
    )
    assert OptionalFields.token_label.__doc__ == schema.OPTIONAL_FIELDS["token_label"].doc


def test_every_field_survives_create_convert_merge_subset_and_export(tmp_path):
    traces = make_all()
    write_store(tmp_path / "a.zarr", traces, commit_after=[1])
    assert_stored(tmp_path / "a.zarr", traces)
    write_pickle(tmp_path / "a.pkl", traces)
    convert(tmp_path / "a.pkl", tmp_path / "b.zarr")
    merge_stores([tmp_path / "a.zarr", tmp_path / "b.zarr"], tmp_path / "m.zarr")
    merge_stores([tmp_path / "m.zarr"], tmp_path / "s.zarr", chosen=[np.arange(1, 3)])
    command("export", tmp_path / "m.zarr", tmp_path / "out", "--format", "pkl", check=0)
    convert(tmp_path / "out", tmp_path / "c.zarr")
    for name in ("b", "m", "c"):
        assert_stored(tmp_path / f"{name}.zarr", traces)
    assert_stored(tmp_path / "s.zarr", traces[1:3])
    for source in (tmp_path / "out", tmp_path / "m.zarr"):
        for loaded, trace in zip(tracestore.TraceBatchLoader(str(source)).iter_traces(), traces, strict=True):
            assert_equal(*({k: v for k, v in t.items() if k in schema.OPTIONAL_FIELDS} for t in (loaded, trace)))


def test_a_token_without_hidden_states_disturbs_no_reader(tmp_path):
    path = write_store(tmp_path / "s.zarr", make_all(), score=lambda k: k / 4)
    assert json.loads(command("view", path, "q2", "--json", check=0).stdout)["tokens"] == [0, 1, 2, 3, 4]
    assert "t0|t1|t2|t3|t4" in command("view", path, "q2", check=0).stdout
    assert "one_token" not in command("lint", path).stdout
    with tracestore.open(path) as store:
        assert store.num_tokens.tolist() == [4, 4, 4, 4] and len(store.to_pandas(texts=True)) == 4
        for view in ("sequence", "graph"):
            assert len(list(tracestore.TraceLoader(store, view=view, batch_size=2))) == 2


def test_a_segment_without_the_fields_has_no_array_for_them(tmp_path):
    traces = [*make_traces(3), make_all()[1] | {"question_id": "new"}]
    path = write_store(tmp_path / "s.zarr", traces, commit_after=[2])
    first, second = (Store(path).group(f"{segment_of(path, k)}/rows.zip", schema.ROW_DTYPES).names for k in (0, 1))
    assert second - first == {name for arrays in schema.OPTIONAL_ARRAYS.values() for name in arrays}


def test_a_second_trace_with_another_value_is_a_conflict(tmp_path):
    trace = make_trace(1, tokens=4) | make_optional(4)
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append(trace)
        for _ in range(2):  # pending, then committed
            writer.append(trace)
            for name in schema.OPTIONAL_FIELDS:
                other = make_optional(4, 7) | {"answer_span": (1, 2), "temperature": 0.5, "spans": []}
                with pytest.raises(InvalidInputError, match=rf"different content \({name}\)"):
                    writer.append(trace | {name: other[name]})
            writer.flush()
    assert len(tracestore.open(tmp_path / "s.zarr")) == 1


def test_values_of_other_libraries_are_accepted(tmp_path):
    trace = make_trace(3, tokens=2) | {
        "token_logprob": [None, -0.5],
        "token_entropy": torch.tensor([0.5, 1.0], dtype=torch.bfloat16),
        "top_ids": [torch.tensor([3, 4]), torch.tensor([5, -1])],
        "top_logprobs": [[-1, None], [np.float16(-2), -0.5]],
        "generated_mask": np.array([False, True]),
        "answer_span": torch.tensor([1, 2]),
        "temperature": np.float64(1),
        "seed": torch.tensor(5),
        "labels": [{"start": np.int64(0), "end": 3, "label_type": "Baseless", "text": "abc"}],
    }
    with tracestore.open(write_store(tmp_path / "s.zarr", [trace])) as store:
        found = store[0].optional_fields
    expected = {
        "token_logprob": np.array([np.nan, -0.5], "f4"),
        "token_entropy": np.array([0.5, 1], "f4"),
        "top_ids": np.array([[3, 4], [5, -1]], "i4"),
        "top_logprobs": np.array([[-1, np.nan], [-2, -0.5]], "f4"),
        "generated_mask": np.array([0, 1], "u1"),
        "answer_span": (1, 2),
        "temperature": 1.0,
        "seed": 5,
        "spans": [{"start": 0, "end": 3, "type": "Baseless", "text": "abc"}],
    }
    assert_equal(found, expected)


def test_unknown_values_and_other_labels_are_left_out(tmp_path):
    unknown = {
        "temperature": float("nan"),
        "seed": -1,
        "answer_span": (-1, -1),
        "token_label": None,
        "labels": [7, -100],
    }
    with tracestore.open(write_store(tmp_path / "s.zarr", [make_trace(1) | unknown])) as store:
        assert store[0].optional_fields == {} and store[0].extras == {"labels": [7, -100]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.arange(6)}, "tokens: found 6 tokens, expected 4, the rows of hidden_states, or one more"),
        ({"tokens": np.arange(5)}, "tokens_decoded: found 4 strings, expected 5 as in tokens"),
        ({"token_logprob": np.zeros(5)}, "token_logprob: found float64 of shape (5,), expected numbers of shape (4,)"),
        ({"token_logprob": ["a"] * 4}, "token_logprob: found list, expected numbers of shape (4,)"),
        ({"token_logprob": [[0.5], 1, 2, 3]}, "token_logprob: found list, expected numbers of shape (4,)"),
        ({"token_label": np.full(4, 2)}, "token_label: found values from 2 to 2, expected -1 to 1"),
        ({"generated_mask": [0.5] * 4}, "generated_mask: found float64 of shape (4,), expected integers of shape (4,)"),
        ({"special_mask": [None] * 4}, "special_mask: found object of shape (4,), expected integers of shape (4,)"),
        ({"top_ids": np.zeros((4, 0), int)}, "top_ids: found int64 of shape (4, 0), expected integers of shape (4, K)"),
        ({"top_ids": [[2**31]] * 4}, f"top_ids: found values from {2**31} to {2**31}, expected -1 to {2**31 - 1}"),
        (
            {"top_ids": np.zeros((4, 2), int), "top_logprobs": np.zeros((4, 3))},
            "top_logprobs: found shape (4, 3), expected (4, 2) as top_ids",
        ),
        ({"temperature": "hot"}, "temperature: found str, expected one number"),
        ({"seed": 2**63}, f"seed: found values from {2**63} to {2**63}, expected -1 to {2**63 - 1}"),
        ({"answer_span": 3}, "answer_span: found int64 of shape (), expected 2 integers"),
        ({"answer_span": (1, 5)}, "answer_span: found (1, 5), expected positions in order from 0 to 4"),
        ({"answer_span": (5, -1)}, "answer_span: found (5, -1), expected positions in order from 0 to 4"),
        ({"answer_span": (3, 2)}, "answer_span: found (3, 2), expected positions in order from 0 to 4"),
        ({"spans": "x"}, "spans: found str, expected a list of dicts with start, end and type"),
        ({"spans": [{"start": 1, "end": 2}]}, "spans[0]: found dict, expected a dict with start, end and type"),
        ({"spans": [{"start": 1.0, "end": 2, "type": "x"}]}, "spans[0].start: found float, expected an integer"),
        ({"spans": [{"start": 3, "end": 2, "type": "x"}]}, "spans[0]: found start 3, end 2, expected offsets in order"),
        ({"spans": [{"start": 1, "end": 2, "type": 3}]}, "spans[0].type: found int, expected a string"),
    ],
)
def test_invalid_values_are_one_clear_line(tmp_path, changes, message):
    with tracestore.create(tmp_path / "s.zarr") as writer, pytest.raises(InvalidInputError) as caught:
        writer.append(make_trace(1, tokens=4) | changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def damaged(path, name, change):
    """Change an array of the only segment; return the damage that verify finds, by file."""
    store = Store(path)
    (segment,) = store.segments()
    arrays = store.arrays(f"{segment}/rows.zip", schema.ROW_DTYPES)
    arrays[name] = change(arrays[name])
    store.set_rows(segment, arrays)
    store.reseal()
    store.seal()
    return verify_store(path).damaged


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("token_logprob_offsets", lambda a: a - 1, "not offsets of 9 values"),
        ("token_logprob_offsets", lambda a: a[:-1], "expected 5"),
        ("token_logprob_offsets", lambda a: np.array([0, 0, 3, 9, 9]), "found 3 values of 4 tokens in row 1"),
        ("top_ids_offsets", lambda a: np.array([0, 0, 13, 27, 27]), "found 13 values of 4 tokens in row 1"),
        ("top_ids", lambda a: a * 0 - 2, "top_ids: found values from -2 to -2, expected -1"),
        ("generated_mask", lambda a: a + 2, "generated_mask: found values from"),
        ("token_label", lambda a: a * 0 + 5, "token_label: found values from 5 to 5"),
        ("answer_end", lambda a: a + 9, "answer_span: found (-1, 8), expected positions"),
        ("temperature", lambda a: a[1:], "found 3 values, expected 4"),
        ("spans", lambda a: a * 0 + 65, "spans: Expecting value"),
        ("tokens_offsets", lambda a: np.array([0, 2, 8, 13, 17]), "not one per hidden state, or one more"),
        ("tokens_decoded_ptr", lambda a: np.array([0, 4, 8, 8, 17]), "not one text per token"),
    ],
)
def test_verify_detects_inconsistent_fields(tmp_path, name, change, reason):
    path = write_store(tmp_path / "s.zarr", make_all())
    rows = f"{segment_of(path)}/rows.zip"
    found = damaged(path, name, change)
    assert list(found) == [rows] and reason in found[rows], found
    with contextlib.suppress(CorruptStoreError), tracestore.open(path) as store:
        for trace in store:
            _ = trace.optional_fields


@pytest.mark.long
def test_random_changes_of_the_arrays_never_end_in_another_error(tmp_path):
    rng = random.Random(0)
    names = [name for arrays in schema.OPTIONAL_ARRAYS.values() for name in arrays]
    num_read = num_refused = 0
    for k in range(40):
        path = write_store(tmp_path / f"{k}.zarr", make_all())

        def change(array):
            change_array(rng, array)
            return array

        damaged(path, rng.choice(names), change)
        with tracestore.open(path) as store:
            for index in range(4):
                try:
                    store[index].copy()
                    num_read += 1
                except CorruptStoreError:
                    num_refused += 1
    assert num_read and num_refused and num_read + num_refused == 40 * 4


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        ("f4", (), {"float32": 1}),
        ("f8", (), {"float64": 1}),
        ("f4", ("--dtype", "keep"), {}),
        ("f2", ("--attention", "heads"), {}),
    ],
)
def test_rounding_to_float16_is_reported(tmp_path, dtype, options, expected):
    write_pickle(tmp_path / "a.pkl", make_traces(2, dtype=dtype))
    done = convert(tmp_path / "a.pkl", tmp_path / "s.zarr", "--json", *options)
    assert json.loads(done.stdout)["num_sources_rounded"] == expected
    lines = [line for line in done.stderr.splitlines() if " rounded" in line]
    advice = {"f4": "; --dtype keep keeps them"}.get(dtype, "")
    bound = "; the relative error of values from 6.1e-05 on is at most 0.049 %"
    assert lines == [f"{name} values of 1 file were rounded to float16{advice}{bound}" for name in expected]


def test_the_error_of_rounding_is_bounded():
    values = np.random.default_rng(0).uniform(np.log(6.104e-05), np.log(65504), 100_000)
    values = np.exp(values)
    assert (np.abs(values - values.astype("f2").astype("f8")) / values).max() <= 0.00049


def test_a_version_without_a_field_refuses_its_segments_with_the_names_of_the_arrays(tmp_path, monkeypatch):
    trace = make_trace(0, tokens=5) | {"token_entropy": np.ones(5, "f4")}
    path = write_store(tmp_path / "s.zarr", [trace])
    known = {name: dtype for name, dtype in schema.ROW_DTYPES.items() if not name.startswith("token_entropy")}
    monkeypatch.setattr(schema, "ROW_DTYPES", known)
    refused = pytest.raises(CorruptStoreError, match=r"format: \['token_entropy', 'token_entropy_offsets'\]$")
    with tracestore.open(path) as store, refused:
        store[0].copy()
