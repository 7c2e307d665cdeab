"""JSON, JSON Lines and CSV files with arrays."""

import base64
import gzip
import json

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of
from tests.ingest.containers.layouts import base, check
from tracestore.ingest.containers import tables

NONE = ("--attention", "none")
TRACES = [base(k, tokens=2 + k, attention=False) for k in range(3)]


def stored(tmp_path, source, *flags):
    convert(source, tmp_path / "s.zarr", *NONE, *flags)
    return tracestore.open(tmp_path / "s.zarr")


def encoded(array):
    data = base64.b64encode(array.astype("f4").tobytes()).decode()
    return {"dtype": "float32", "shape": array.shape, "data": data}


FORMS = {
    "nested lists": lambda a: {"hidden_states": a.tolist()},
    "flat with a shape": lambda a: {"hidden_states": a.ravel().tolist(), "shape": a.shape},
    "flat with a named shape": lambda a: {"acts": a.ravel().tolist(), "acts_shape": a.shape, "shape": [1]},
    "base64": lambda a: {"hidden_states": encoded(a)},
    "dict of layers": lambda a: {"layers": {str(k): layer.tolist() for k, layer in enumerate(a)}},
    "output of a model": lambda a: {"output": {"hidden_states": a[:, None].tolist()}},
    "a key per layer": lambda a: {f"layer_{k}": layer.tolist() for k, layer in enumerate(a)},
}


def rows_of(form):
    return [
        {"id": f"q{k}", "answer": f"{k}!", "tokens": t["tokens"].tolist()} | FORMS[form](t["hidden_states"])
        for k, t in enumerate(TRACES)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_json_lines_hold_a_trace_per_line(tmp_path, form):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows_of(form)))
    (folder / "config.json").write_text('{"layers": [1, 2], "name": "m"}')

    store = stored(tmp_path, folder)

    check(store, TRACES)
    assert store.question_ids == ["q0", "q1", "q2"] and [t.answer for t in store] == ["0!", "1!", "2!"]


@pytest.mark.parametrize("layout", ["list", "by id", "results", "gzip"])
def test_json_files_hold_all_traces(tmp_path, layout):
    rows = rows_of("nested lists")
    by_id = {row.pop("id"): row for row in map(dict, rows)}
    value = {"list": rows, "gzip": rows, "by id": by_id, "results": {"model": "m", "results": by_id}}[layout]
    data = json.dumps(value).encode()
    path = tmp_path / ("a.json.gz" if layout == "gzip" else "a.json")
    path.write_bytes(gzip.compress(data) if layout == "gzip" else data)

    store = stored(tmp_path, path)

    check(store, TRACES)
    assert store.question_ids == ["q0", "q1", "q2"]


@pytest.mark.parametrize("form", ["list", "columns"])
def test_csv_holds_the_last_token_as_a_list_or_a_column_per_dimension(tmp_path, form):
    last = np.stack([t["hidden_states"][0, -1] for t in TRACES])
    names = [f"dim_{d}" for d in range(last.shape[1])]
    lines = [f"id,{'hidden_state' if form == 'list' else ','.join(names)}"]
    for k, vector in enumerate(last.tolist()):
        lines.append(f'q{k},"{vector}"' if form == "list" else f"q{k},{','.join(map(str, vector))}")
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")

    store = stored(tmp_path, tmp_path / "a.csv")

    np.testing.assert_array_equal([t.last_token[0] for t in store], last)
    assert store.question_ids == ["q0", "q1", "q2"]


@pytest.mark.parametrize("is_regular", [True, False])
def test_one_object_holds_lists_of_all_traces(tmp_path, is_regular):
    hidden = [t["hidden_states"][:, : 2 if is_regular else None] for t in TRACES]
    value = {"ids": [7, 8, 9], "hidden_states": [h.tolist() for h in hidden], "labels": [0, 1, 1], "model": "m"}
    value["tokens"] = [t["tokens"].tolist()[: h.shape[1]] for t, h in zip(TRACES, hidden, strict=True)]
    (tmp_path / "a.json").write_text(json.dumps(value))

    store = stored(tmp_path, tmp_path / "a.json")

    assert store.question_ids == ["7", "8", "9"] and [t.label for t in store] == [0, 1, 1]
    for trace, expected in zip(store, hidden, strict=True):
        np.testing.assert_array_equal(trace.hidden_states, expected)
    assert store[0].extras == {"model": "m"}


def test_text_next_to_other_sources_is_a_table(tmp_path):
    np.savez(tmp_path / "a.npz", **TRACES[0])
    (tmp_path / "a.json").write_text(json.dumps({"question": "Who?", "weights": [0.5] * 9}))

    store = stored(tmp_path, tmp_path / "a.npz")

    assert len(store) == 1 and store[0].question == "Who?"


def test_a_line_or_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(tables, "MAX_BYTES", 100)
    for name, advice in {"a.jsonl": "save such traces as .npz", "a.json": "write JSON Lines"}.items():
        (tmp_path / name).write_text(json.dumps(rows_of("nested lists")[0]))
        message = error_of("convert", tmp_path / name, tmp_path / "s.zarr", *NONE, code=3)
        assert name in message and advice in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": [1, 2, 3]}, "fit no shape"),
        ({"hidden_states": {"dtype": "object", "shape": [1], "data": "AAAA"}}, "found dtype 'object'"),
        ({"hidden_states": {"dtype": "float32", "shape": [2], "data": "AAAA"}}, "expected 8 bytes"),
        ({"hidden_states": {"dtype": "float32", "shape": [1], "data": "?"}}, "not base64"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_skipped(tmp_path, changes, reason):
    rows = rows_of("flat with a shape")
    rows[1] |= changes
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    message = error_of("convert", tmp_path / "a.jsonl", tmp_path / "s.zarr", *NONE, code=3)
    store = stored(tmp_path, tmp_path / "a.jsonl", "--skip-bad")

    assert "a.jsonl, trace 1, hidden_states: " in message and reason in message
    assert store.question_ids == ["q0", "q2"]


def test_columns_of_a_frame_without_names_are_dimensions(tmp_path):
    """pandas names them 0, 1, ..., which are no vector."""
    states = np.arange(36, dtype="f4").reshape(3, 12) + 0.5
    lines = [",".join(map(str, row)) for row in [range(12), *states.tolist()]]
    (tmp_path / "q1_layer_8.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "q1_layer_9.csv").write_text("\n".join(lines) + "\n")
    store = stored(tmp_path, tmp_path)
    np.testing.assert_array_equal(store["q1"].hidden_states, [states, states])


def test_arrays_of_json_tricks(tmp_path):
    def encoded_array(array):
        return {"__ndarray__": array.tolist(), "dtype": str(array.dtype), "shape": array.shape, "Corder": True}

    results = {
        f"q{k}": {"hidden_states": encoded_array(t["hidden_states"]), "tokens": encoded_array(t["tokens"])}
        for k, t in enumerate(TRACES)
    }
    (tmp_path / "a.json").write_text(json.dumps({"config": {"layers": 3}, "results": results}))
    check(stored(tmp_path, tmp_path / "a.json"), TRACES)


def test_a_line_per_batch(tmp_path):
    states = np.random.default_rng(0).random((5, 3, 8), np.float32)
    batches = [range(3), range(3, 5)]
    lines = [
        {"batch_idx": k, "question_ids": [f"q{i}" for i in b], "last_token_states": states[list(b)].tolist()}
        | {"hallucinated": [i % 2 for i in b]}
        for k, b in enumerate(batches)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    store = stored(tmp_path, tmp_path / "a.jsonl")
    np.testing.assert_allclose([t.last_token for t in store], states, atol=1e-3)
    assert [(t.question_id, t.score) for t in store] == [(f"q{i}", i % 2) for i in range(5)]
