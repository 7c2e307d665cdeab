"""The formats that hold every field: safetensors and Parquet files, read by the libraries they are made for."""

import json
import resource
import subprocess
import sys

import numpy as np
import pytest

import tracestore
from tests.helpers import (
    ROOT,
    as_torch,
    command,
    convert,
    error_of,
    make_graphs,
    make_optional,
    make_trace,
    make_traces,
    write_store,
)
from tracestore.errors import UsageError
from tracestore.store.format import schema


def export(store, out, format, *options, check=0):
    return command("export", store, out, "--format", format, *options, check=check)


def full_traces():
    """Return traces of which some have optional fields, extras, or are further answers."""
    traces = make_traces(6, tokens=lambda k: 2 + k)
    traces[1] |= make_optional(3) | {"question": "why?", "prompt_length": 1, "rank": 2**70, "logits": np.arange(3.0)}
    traces[3] |= {"question_id": "q2", "sample": 1, "token_entropy": np.arange(5, dtype="f4")}
    return traces


@pytest.fixture
def store(tmp_path):
    """Write a store with every kind of value: optional fields, samples, labels, groups, two scores."""
    path = tmp_path / "s.zarr"
    write_store(
        path, full_traces(), score=lambda k: None if k == 4 else k / 10, label=lambda k: 1.0 if k == 2 else None,
        group=lambda k: "g" if k == 5 else "", provenance={"model": "m", "layer_ids": [1, 2, 3]}, attention="heads",
    )  # fmt: skip
    (tmp_path / "judge.csv").write_text("question_id,hallucination_score\nq0,0.25\nq5,0.75\n")
    command("score", path, "--scores", tmp_path / "judge.csv", "--name", "judge", check=0)
    return path


def load_safetensors(out):
    """Return the arrays of each file as the library reads them, and the rows of the table."""
    numpy = pytest.importorskip("safetensors.numpy")
    rows = [json.loads(line) for line in (out / "traces.jsonl").read_text().splitlines()]
    return [numpy.load_file(out / row["file"]) for row in rows], rows


def load_datasets(out, monkeypatch, tmp_path):
    """Return the rows as the library reads them."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))["train"]


def assert_arrays(found, trace):
    """Assert that the arrays of a row or file are those of a trace of float16."""
    np.testing.assert_array_equal(found["hidden_states"], trace.hidden_states)
    np.testing.assert_array_equal(found["attentions"], trace.attention)
    for name in ("tokens", *schema.TOKEN_FIELDS):
        expected = trace.tokens if name == "tokens" else trace.optional(name)
        value = found.get(name)
        assert (value is None) == (expected is None), name
        if expected is not None:
            np.testing.assert_array_equal(np.asarray(value, expected.dtype), expected)


def assert_row(row, trace, scores):
    """Assert that a row, without its missing values, has every text, number and score of a trace."""
    names = ("question_id", "sample", "num_tokens", "prompt_length", "question", "tokens_decoded", "temperature")
    names += ("seed",)
    for name in names:
        assert row.get(name) == getattr(trace, name), name
    assert row.get("generated_answer_clean") == trace.answer and row.get("group", "") == trace.group
    assert row.get("answer_span") == (list(trace.answer_span) if trace.answer_span else None)
    assert (row["source"], row["source_position"]) == trace.source and row["provenance"] == 0
    assert row.get("label") == (None if np.isnan(trace.label) else trace.label)
    assert scores == trace.scores


def test_safetensors_hold_every_field(store, tmp_path):
    done = export(store, tmp_path / "out", "safetensors")
    assert "left out" not in done.stdout and "6 traces in 6 files" in done.stdout
    arrays, rows = load_safetensors(tmp_path / "out")
    opened = tracestore.open(store)
    assert len(rows) == len(opened)
    for found, row, trace in zip(arrays, rows, opened, strict=True):
        assert found["hidden_states"].dtype == found["attentions"].dtype == np.float16 and "last_token" not in found
        assert_arrays(found, trace)
        assert_row(row, trace, {k: row[n] for k, n in (("score", "score"), ("judge", "score_judge")) if n in row})
    assert rows[1]["extras"]["rank"] == {"$int": str(2**70)}
    assert rows[1]["extras"]["logits"]["$array"][:2] == ["<f8", [3]]
    assert rows[1]["spans"][0]["type"] == "Evident Conflict"
    facts = json.loads((tmp_path / "out" / "store.json").read_text())
    assert facts["scores"]["judge"]["direction"] == "hallucination" and facts["provenance"][0]["model"] == "m"
    assert (tmp_path / "out" / "scores.csv").exists() and (tmp_path / "out" / "provenance.json").exists()


def test_datasets_hold_every_field(store, tmp_path, monkeypatch):
    done = export(store, tmp_path / "out", "datasets", "--traces-per-file", 4)
    assert "left out" not in done.stdout and "6 traces in 2 files" in done.stdout
    rows = load_datasets(tmp_path / "out", monkeypatch, tmp_path)
    opened = tracestore.open(store)
    assert len(rows) == len(opened)
    for row, trace in zip(rows, opened, strict=True):
        row = {name: value for name, value in row.items() if value is not None}
        assert_arrays(row, trace)
        assert_row(row, trace, {k: row[n] for k, n in (("score", "score"), ("judge", "score_judge")) if n in row})
    assert rows.features["hidden_states"].feature.feature.feature.dtype == "float16"
    assert json.loads(rows[1]["extras"])["rank"] == {"$int": str(2**70)}


def test_a_data_set_becomes_the_same_store(store, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    from tracestore.bridges.huggingface import from_datasets

    export(store, tmp_path / "out", "datasets")
    rows = load_datasets(tmp_path / "out", monkeypatch, tmp_path)
    with pytest.raises(UsageError, match="found scores judge: pass the meaning"):
        from_datasets(rows, tmp_path / "back.zarr", attention="heads")
    from_datasets(rows, tmp_path / "back.zarr", attention="heads", score_directions={"judge": "hallucination"})
    with tracestore.open(store) as old, tracestore.open(tmp_path / "back.zarr") as new:
        np.testing.assert_array_equal(old.scores, new.scores)
        np.testing.assert_array_equal(old.labels, new.labels)
        for a, b in zip(old, new, strict=True):
            assert a.scores == b.scores
            assert (a.question_id, a.sample, a.answer, a.group) == (b.question_id, b.sample, b.answer, b.group)
            assert a.hidden_states.tobytes() == b.hidden_states.tobytes()
            assert a.attention_packed.tobytes() == b.attention_packed.tobytes()
            assert str(a.optional_fields) == str(b.optional_fields)
        assert new[1].extras["rank"] == 2**70 and new[1].extras["logits"].tolist() == [0, 1, 2]


def test_bfloat16_keeps_its_values(tmp_path, monkeypatch):
    import torch

    load = pytest.importorskip("safetensors.torch").load_file
    trace = as_torch(make_trace(3, dtype="f4"), torch.bfloat16)
    write_store(tmp_path / "s.zarr", [trace], dtype="keep", attention="heads")
    for format in ("safetensors", "datasets"):
        export(tmp_path / "s.zarr", tmp_path / format, format)
    found = load(tmp_path / "safetensors" / "000000.safetensors")
    rows = load_datasets(tmp_path / "datasets", monkeypatch, tmp_path)
    for name in ("hidden_states", "attentions"):
        expected = torch.stack(trace[name])
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected)
        np.testing.assert_array_equal(np.array(rows[0][name], "f4"), expected.float().numpy())


@pytest.mark.parametrize("format", ["safetensors", "datasets"])
def test_edges_and_last_tokens(tmp_path, monkeypatch, format):
    import torch

    data = tmp_path / "data"
    for name in ("gnn", "lstm_solo"):
        (data / name).mkdir(parents=True)
    traces = make_traces(3)
    graphs = [make_graphs(t, threshold=0.3) for t in traces[:2]]
    torch.save(
        {"graphs": graphs, "labels": torch.zeros(2), "question_ids": ["q0", "q1"]}, data / "gnn/preprocessed_0.pt"
    )
    last = torch.stack([torch.from_numpy(np.stack(t["hidden_states"])[:, -1]) for t in traces[1:]]) + 1
    values = {"sequences": last, "labels": torch.zeros(2), "question_ids": ["q1", "q2"]}
    torch.save(values, data / "lstm_solo/preprocessed_0.pt")
    convert(data, tmp_path / "s.zarr")
    export(tmp_path / "s.zarr", tmp_path / "out", format)
    if format == "safetensors":
        found, _ = load_safetensors(tmp_path / "out")
    else:
        found = [
            {name: value for name, value in row.items() if value is not None}
            for row in load_datasets(tmp_path / "out", monkeypatch, tmp_path)
        ]
    for arrays, trace in zip(found, tracestore.open(tmp_path / "s.zarr"), strict=True):
        assert ("hidden_states" in arrays) == ("edge_ptr" in arrays) == (trace.question_id != "q2")
        assert ("last_token" in arrays) == (trace.question_id != "q0"), "only where hidden states do not give it"
        if "last_token" in arrays:
            np.testing.assert_array_equal(arrays["last_token"], trace.last_token)
        if "edge_ptr" in arrays:
            for name, expected in zip(("edge_ptr", "edge_index", "edge_weight"), trace.attention_packed, strict=True):
                np.testing.assert_array_equal(np.reshape(arrays[name], expected.shape), expected)


@pytest.mark.parametrize("format", ["safetensors", "datasets"])
def test_ids_that_utf8_lacks(tmp_path, monkeypatch, format):
    write_store(tmp_path / "s.zarr", [make_trace(0) | {"question_id": "a\ud800"}], score=1.0)
    export(tmp_path / "s.zarr", tmp_path / "out", format)
    if format == "safetensors":
        _, rows = load_safetensors(tmp_path / "out")
        assert rows[0]["question_id"] == "a\ud800"
    else:
        assert load_datasets(tmp_path / "out", monkeypatch, tmp_path)[0]["question_id"] == "a\\ud800"


def test_what_a_format_lacks_is_reported(store, tmp_path):
    with tracestore.create(store, append=True, attention="heads") as writer:
        writer.set_lens(np.ones((4, 8)), np.ones(8), norm="rms", eps=1e-6)
    for format in ("safetensors", "pkl"):
        report = json.loads(export(store, tmp_path / format, format, "--json").stdout)
        assert any("lens" in line for line in report["left_out"])
        assert not any("judge" in line for line in report["left_out"])


def test_arrays_that_arrow_cannot_hold_are_refused(tmp_path, monkeypatch):
    parquet_file = pytest.importorskip("tracestore.export.parquet_file")
    write_store(tmp_path / "s.zarr", [make_trace(4)])
    monkeypatch.setattr(parquet_file, "_MAX_LIST_ITEMS", 100)
    error = error_of("export", tmp_path / "s.zarr", tmp_path / "out", "--format", "datasets", code=2)
    assert "trace 0 (q4), hidden_states: found 120 values" in error and "--format safetensors" in error


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Write a store of 420 MB."""
    traces = make_traces(105, tokens=250, layers=8, dim=512, heads=2)
    return write_store(tmp_path_factory.mktemp("large") / "s.zarr", traces, attention="heads")


@pytest.mark.long
@pytest.mark.parametrize(("format", "limit_mib"), [("pkl", 64), ("safetensors", 192), ("datasets", 192)])
def test_memory_does_not_depend_on_the_size_of_the_store(large, tmp_path, format, limit_mib):
    """Traces are written one by one."""
    pytest.importorskip("pyarrow")
    if not hasattr(resource, "RLIMIT_DATA"):
        pytest.skip("no RLIMIT_DATA here")
    code = f"""
import pyarrow.parquet, resource, tracestore
from tracestore.export.exporter import export_store
import tracestore.export.parquet_file as parquet_file
parquet_file._ROW_GROUP_BYTES = 16 << 20
store = tracestore.open({str(large)!r})
list(store[0].hidden_states[0])
data = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + ({limit_mib} << 20), resource.RLIM_INFINITY))
print(export_store(store, {str(tmp_path / "out")!r}, format={format!r}).bytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300 << 20
