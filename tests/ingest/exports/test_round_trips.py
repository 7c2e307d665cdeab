"""Conversion restores exported traces unchanged: every format, field, label, score, group and provenance."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracestore
from tests.helpers import command, convert, error_of, make_optional, make_trace, make_traces, write_store
from tests.tiers import long
from tracestore.store.format import schema
from tracestore.store.format.labels import ScoreField
from tracestore.store.format.provenance import Provenance
from tracestore.store.read.columns import TraceValues
from tracestore.store.write.writer import StoreWriter

FORMATS = ("pkl", "pt-lstm", "pt-gnn", "safetensors", "datasets")
# Formats with a place for several answers to one question.
WITH_SAMPLES = ("pkl", "safetensors", "datasets")
# Fields with a value per token or per answer, texts and further values of one trace of 4 tokens, one at a time.
FIELDS = {name: {name: value} for name, value in make_optional(4).items()}
FIELDS |= {
    "all of them": make_optional(4),
    "question": {"question": 'why\n"so",?\x00 \ud800'},
    "generated_answer": {"generated_answer": "given", "generated_answer_clean": ""},
    "generated_text": {"generated_text": "⟂" * 50},
    "prompt_length": {"prompt_length": 2},
    "an array": {"logits": np.arange(6.0).reshape(2, 3), "mask": np.array([True, False]), "empty": np.zeros((0, 3))},
    "numbers": {"rank": 2**70, "low": -math.inf, "none": None, "flag": False, "global_example_id": 7},
    "bytes": {"raw": b"\x00\xff"},
    "names of encodings": {"$array": {"$int": "x"}, "a": {"$float": "1"}, "b": {"$dict": [[1, 2]], "c": ["$int"]}},
    "names of fields": {"response": "r", "label_type": "x", "file": "f", "row": 3, "meta": {"question": "inner"}},
    "nested": {"a": [[1, {"b": [None, 2.5, {3: "c"}]}], "d"], "extras": {"spans": [{"start": 1}]}},
    "long texts": {"document": "é" * 200_000},
}


def same(a, b):
    """Return whether two values are equal; NaN equals NaN, and arrays agree in dtype, shape and bytes."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        is_array = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        return is_array and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def assert_same_stores(before, after, format):
    """Assert that a store that went through files of a format has everything that is not an array of states."""
    with tracestore.open(before) as old, tracestore.open(after) as new:
        assert len(new) == len(old) and list(new.question_ids) == list(old.question_ids)
        assert new.score_fields == old.score_fields and new.score_name == old.score_name
        assert new.score_direction == old.score_direction
        np.testing.assert_array_equal(new.targets(0.5), old.targets(0.5))
        np.testing.assert_array_equal(new.labels, old.labels)
        for a, b in zip(old, new, strict=True):
            where = f"{format}, trace {a.index}"
            for name in ("sample", "group", "scores", "prompt_length", "tokens", "tokens_decoded", "provenance"):
                assert same(getattr(a, name), getattr(b, name)), f"{where}: {name}"
            for name in schema.TEXT_FIELDS:
                assert a.text(name) == b.text(name), f"{where}: {name}"
            assert same(a.optional_fields, b.optional_fields), f"{where}: {a.optional_fields} {b.optional_fields}"
            assert same(a.extras, b.extras), f"{where}: {a.extras} {b.extras}"
            assert a.last_token.tobytes() == b.last_token.tobytes(), where
            if format != "pt-lstm":
                assert a.hidden_states.tobytes() == b.hidden_states.tobytes(), where
            if format in WITH_SAMPLES and a.attention_layout is not None:
                assert np.array_equal(a.attention, b.attention), where


def round_trip(store, work, format):
    """Export a store twice, with a conversion of the files in between and after; assert that nothing changes."""
    for k in range(2):
        out, back = work / f"{format}-{k}", work / f"{format}-{k}.zarr"
        command("export", store, out, "--format", format, "--traces-per-file", 3, check=0)
        convert(out, back, "--dtype", "keep")
        assert command("verify", back).returncode == 0
        assert_same_stores(store, back, format)
        with tracestore.open(back) as opened:
            has_edges = opened.attention_layout == "edges"
        store = back
        if has_edges and format != "pt-gnn":
            return


@pytest.mark.long
@pytest.mark.parametrize("format", FORMATS)
def test_every_field_survives(tmp_path, format):
    traces = [make_trace(k, tokens=4) | fields for k, fields in enumerate(FIELDS.values())]
    write_store(tmp_path / "s.zarr", traces, attention="mean")
    round_trip(tmp_path / "s.zarr", tmp_path, format)


VALUES = {
    "absent": ([None] * 4, [None] * 4),
    "labels": ([0.0, 1.0, 0.0, 1.0], [None] * 4),
    "some labels": ([0.0, None, None, 1.0], [None] * 4),
    "scores": ([None] * 4, [0.1, 0.5, 0.9, 0.49]),
    "some scores": ([None] * 4, [None, 0.5, None, 0.49]),
    "both": ([1.0, 0.0, 0.0, 1.0], [0.1, 0.5, 0.9, 0.49]),
    "both in part": ([1.0, None, 0.0, None], [0.1, 0.5, None, None]),
    "disagreeing": ([0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]),
    "disagreeing in part": ([None, 1.0, 0.0, None], [0.0, 1.0, 0.0, None]),
}


@pytest.mark.parametrize(
    ("values", "direction"),
    [
        *((name, "correct") for name in VALUES),
        *(
            pytest.param(name, "hallucination", marks=pytest.mark.long)
            for name in ("labels", "some scores", "both in part", "disagreeing in part")
        ),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_labels_and_scores_survive(tmp_path, format, values, direction):
    labels, scores = VALUES[values]
    path = tmp_path / "s.zarr"
    write_store(
        path, make_traces(4), label=labels.__getitem__, score=scores.__getitem__, score_direction=direction,
        group=lambda k: ["", "g", " g ", "a,\n\"b\""][k],
    )  # fmt: skip
    round_trip(path, tmp_path, format)


def add_scores(path, fields, values):
    """Define named scores in a store, and set those of some traces."""
    with StoreWriter(path) as writer:
        for name, field in fields.items():
            writer.define_score(name, field)
        writer.update_values({k: TraceValues(scores) for k, scores in values.items()})
        writer.commit()


@pytest.mark.parametrize("format", FORMATS)
def test_named_scores_and_their_default_survive(tmp_path, format):
    path = tmp_path / "s.zarr"
    write_store(path, make_traces(5), score=lambda k: 0.1 * k if k < 4 else 0.75, label=lambda k: float(k % 2))
    fields = {
        "judge": ScoreField("hallucination", "a judge, column x", "v1"),
        "label": ScoreField("correct"),
        "group": ScoreField("hallucination", "unused"),
        "a.b-c": ScoreField("correct", "x" * 1000),
    }
    add_scores(path, fields, {0: {"judge": 0.3, "label": 1.0}, 2: {"a.b-c": 2.0, "judge": -1e300}})
    round_trip(path, tmp_path, format)


@pytest.mark.parametrize("format", FORMATS)
def test_provenance_of_each_trace_survives(tmp_path, format):
    a, b = Provenance(model="a", layer_ids=(1, 2, 3)), Provenance(model="b", layer_ids=(1, 2, 3))
    for k, provenance in enumerate((a, b, None)):
        traces = [make_trace(3 * k + j) for j in range(3)]
        options = {} if provenance is None else {"provenance": provenance.to_json()}
        write_store(tmp_path / f"{k}.zarr", traces, **options)
    path = tmp_path / "s.zarr"
    command("merge", *(tmp_path / f"{k}.zarr" for k in range(3)), path, "--allow-mixed-provenance", check=0)
    command("export", path, tmp_path / "out", "--format", format, check=0)
    convert(tmp_path / "out", tmp_path / "back.zarr", "--allow-mixed-provenance")
    assert_same_stores(path, tmp_path / "back.zarr", format)


@pytest.mark.parametrize("format", WITH_SAMPLES)
def test_samples_and_any_id_survive(tmp_path, format):
    ids = ["q", "q", "a\rb", "c\nd", 'e,"f', "\ud800", "ü", " ", "=1+1"]
    traces = [make_trace(k) | {"question_id": ids[k], "sample": int(k == 1)} for k in range(len(ids))]
    write_store(tmp_path / "s.zarr", traces, label=lambda k: float(k % 2), score=lambda k: k / 10)
    round_trip(tmp_path / "s.zarr", tmp_path, format)


def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    write_store(tmp_path / "s.zarr", [make_trace(0), make_trace(1) | {"question_id": "q0", "sample": 1}])
    for format in ("pt-lstm", "pt-gnn"):
        error = error_of("export", tmp_path / "s.zarr", tmp_path / format, "--format", format, code=2)
        assert "is a further answer" in error and list((tmp_path / format).iterdir()) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
extra_names = st.sampled_from(["rank", "$array", "note", "row", "provenance", "num_tokens", "source", "file", "x y"])
optional_names = st.sets(st.sampled_from(sorted(schema.OPTIONAL_FIELDS)))


@st.composite
def stores(draw):
    """Return traces and their values."""
    traces, values = [], []
    for k in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(1, 4))
        trace = make_trace(k, tokens=tokens, dtype=draw(st.sampled_from(["f2", "f4"])) if k == 0 else "f2")
        optional = make_optional(tokens, seed=draw(st.integers(0, 9)))
        trace |= {name: optional[name] for name in draw(optional_names)}
        trace |= draw(st.dictionaries(extra_names, json_values, max_size=3))
        score = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False))
        values.append(
            {"score": score, "label": draw(st.sampled_from([None, 0.0, 1.0])), "group": draw(st.text(max_size=4))}
        )
        traces.append({name: trace[name] for name in trace})
    return traces, values


@pytest.mark.long
@pytest.mark.parametrize("examples", [5, *long(25)])
@pytest.mark.parametrize("format", FORMATS)
def test_any_store_survives(tmp_path_factory, format, examples):
    @settings(max_examples=examples)
    @given(stores())
    def check(given_store):
        traces, values = given_store
        dtype = traces[0]["hidden_states"][0].dtype
        for trace in traces:
            trace["hidden_states"] = [layer.astype(dtype) for layer in trace["hidden_states"]]
            trace["attentions"] = [layer.astype(dtype) for layer in trace["attentions"]]
        work = tmp_path_factory.mktemp("any")
        with tracestore.create(work / "s.zarr", dtype="keep") as writer:
            for trace, value in zip(traces, values, strict=True):
                writer.append(trace, **value)
        round_trip(work / "s.zarr", work, format)

    check()


def test_a_label_that_differs_from_its_score_counts_and_is_reported(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(4), label=lambda k: float(k % 2), score=lambda k: float(k < 3))
    command("export", tmp_path / "s.zarr", tmp_path / "out", check=0)
    done = convert(tmp_path / "out", tmp_path / "back.zarr")
    assert "the label of 1 trace differs from that of its score" in done.stdout
    assert tracestore.open(tmp_path / "back.zarr").targets(0.5).tolist() == [0, 1, 0, 1]
    listed = command("lint", tmp_path / "back.zarr").stdout
    assert "label 1, score 1" in listed and listed.count("label_differs") >= 1
