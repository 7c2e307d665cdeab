"""Stores survive export and conversion bit for bit."""

import csv
import json
import math
import pickle

import numpy as np
import pytest

import tracestore
from tests.helpers import (
    ROOT,
    as_torch,
    command,
    convert,
    make_graphs,
    make_trace,
    make_traces,
    write_pickle,
    write_store,
)
from tracestore.errors import UsageError
from tracestore.export.exporter import export_store

OPTIONAL = {
    "question": "what?",
    "generated_text": "a text",
    "prompt_length": 1,
    "global_example_id": 7,
    "cutoff_method": None,
    "temperature": 1.5,
    "logprobs": np.arange(4, dtype="f4"),
    "big": 2**70,
    "raw": b"\x00\xff",
    "nested": {"a": [1, 2.5, {"b": "c"}]},
    # What encodings of extras look like.
    "odd": {"a": {"$int": "x"}, "b": {"$float": "1"}, "c": {"$array": ["f4,,", [1], ""]}, "d": {"$dict": 1, "e": 2}},
}


def export(*args, check=0):
    return command("export", *args, check=check)


def files(folder):
    """Return the files of an export that other programs read, by name."""
    own = ("store.json", "traces.jsonl", "tracestore_export.json")
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name not in own}


def round_trip(tmp_path, store, format, *options):
    """Export a store, convert the files and export again. Return both sets of files."""
    export(store, tmp_path / "one", "--format", format, "--traces-per-file", 4)
    convert(tmp_path / "one", tmp_path / "again.zarr", *options)
    export(tmp_path / "again.zarr", tmp_path / "two", "--format", format, "--traces-per-file", 4)
    return files(tmp_path / "one"), files(tmp_path / "two")


def assert_same(a, b, where=""):
    """Assert deep equality; arrays and tensors bit for bit."""
    import torch
    from torch_geometric.data import Data

    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, where
        assert a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist(), where
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), where
    elif isinstance(a, Data):
        assert_same(a.to_dict(), b.to_dict(), where)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{k}]")
    else:
        assert a == b or (a != a and b != b), where


@pytest.mark.parametrize("mode", ["mean", "heads", "none"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "bfloat16"])
def test_pickles_round_trip(tmp_path, mode, dtype):
    import torch

    traces = make_traces(10, dtype="f4" if dtype == "bfloat16" else dtype, causal=dtype != "f4")
    traces[3] |= OPTIONAL
    traces[4]["question_id"], traces[4]["sample"] = "q3", 1
    if dtype == "bfloat16":
        traces = [as_torch(t, torch.bfloat16) for t in traces]
    if mode == "none":
        for trace in traces:
            del trace["attentions"]
    keep = ("--attention", mode, "--dtype", "keep")
    write_store(
        tmp_path / "s.zarr",
        traces,
        score=lambda k: None if k > 7 else (3 if k == 4 else k) / 3,
        attention=mode,
        dtype="keep",
    )
    one, two = round_trip(tmp_path, tmp_path / "s.zarr", "pkl", *keep)
    assert list(one) == ["scores.csv", *(f"traces_batch_{k:04d}.pkl" for k in range(3))]
    assert list(one) == list(two) and one["scores.csv"] == two["scores.csv"]
    # pickle.load returns the saved dicts, with an id added.
    found, again = ([t for name in list(one)[1:] for t in pickle.loads(side[name])] for side in (one, two))
    assert_same(found, again)
    # torch writes addresses of its storages into pickles.
    assert one == two or dtype == "bfloat16"
    for trace, saved in zip(found, traces, strict=True):
        if mode == "mean":
            means = [np.asarray(torch.as_tensor(a).double()).mean(0)[None] for a in saved.pop("attentions")]
            for a, b in zip(trace.pop("attentions"), means, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-3)
        assert_same(trace, saved | {"tokens": np.asarray(saved["tokens"]).astype("i4")})
    rows = list(csv.DictReader(one["scores.csv"].decode().splitlines()))
    scores = {(r["question_id"], int(r["sample"])): float(r["score"]) for r in rows}
    assert scores[("q3", 1)] == 1.0 and scores[("q7", 0)] == 7 / 3 and ("q8", 0) not in scores


@pytest.mark.parametrize("format", ["pt-lstm", "pt-gnn"])
def test_scores_without_a_default_threshold_give_no_labels(tmp_path, format):
    import torch

    traces = make_traces(4)
    write_store(tmp_path / "s.zarr", traces, score=lambda k: 20 + 20 * k, label=lambda k: 1 if k == 1 else None)
    round_trip(tmp_path, tmp_path / "s.zarr", format)
    found = torch.load(next((tmp_path / "one").glob("*.pt")), weights_only=False)["labels"]
    np.testing.assert_array_equal(found.numpy(), np.array([np.nan, 1, np.nan, np.nan], "f4"))
    done = command("export", tmp_path / "s.zarr", tmp_path / "again", "--format", format)
    assert "left out: labels of 3 scores outside [0, 1]" in done.stderr + done.stdout


def test_last_tokens_round_trip(tmp_path):
    import torch

    write_store(
        tmp_path / "s.zarr", make_traces(9), score=lambda k: None if k == 2 else k / 10,
        label=lambda k: 0 if k == 1 else None,
    )  # fmt: skip
    one, two = round_trip(tmp_path, tmp_path / "s.zarr", "pt-lstm")
    assert one == two
    found = torch.load(tmp_path / "one" / "preprocessed_batch_0000.pt", weights_only=True)
    assert found["sequences"].shape == (4, 3, 8) and found["sequences"].dtype == torch.float16
    assert found["question_ids"] == [f"q{k}" for k in range(4)]
    np.testing.assert_array_equal(found["labels"].numpy(), np.array([1, 0, np.nan, 1], "f4"))
    store = tracestore.open(tmp_path / "s.zarr")
    for k in range(4):
        np.testing.assert_array_equal(found["sequences"][k].numpy(), store[k].last_token)


def test_values_of_tokens_without_ids_become_extras_of_last_tokens(tmp_path):
    trace = make_trace(0, tokens=4) | {"answer_span": (1, 3), "generated_mask": [0, 0, 1, 1]}
    trace = {name: value for name, value in trace.items() if name != "tokens"}
    write_store(tmp_path / "s.zarr", [trace, make_trace(1)])
    store = tracestore.open(tmp_path / "s.zarr")
    assert store[0].answer_span == (1, 3) and store[0].tokens is None
    one, two = round_trip(tmp_path, tmp_path / "s.zarr", "pt-lstm")
    assert one == two
    again = tracestore.open(tmp_path / "again.zarr")[0].extras
    assert again["answer_span"] == [1, 3] and again["tokens_decoded"] == store[0].tokens_decoded
    np.testing.assert_array_equal(again["generated_mask"], [0, 0, 1, 1])


@pytest.mark.parametrize("source", ["attention", "square", "heads", "edges", "reversed edges"])
def test_graphs_round_trip(tmp_path, source):
    import torch

    traces = make_traces(7, causal=source != "square")
    data = tmp_path / "data"
    data.mkdir()
    if source in ("edges", "reversed edges"):
        graphs = [make_graphs(t, reverse=source == "reversed edges", threshold=0.3) for t in traces]
        labels = torch.tensor([0.0, 1, 1, 0, 1, float("nan"), 0])
        ids = [t["question_id"] for t in traces]
        torch.save({"graphs": graphs, "labels": labels, "question_ids": ids}, data / "preprocessed_0.pt")
    else:
        write_pickle(data / "a.pkl", traces)
    convert(data, tmp_path / "s.zarr", "--attention", "heads" if source == "heads" else "mean")
    one, two = round_trip(tmp_path, tmp_path / "s.zarr", "pt-gnn")
    assert list(one) == list(two) and one.pop("scores.csv", None) == two.pop("scores.csv", None)
    for name in one:
        loaded = [torch.load(tmp_path / side / name, weights_only=False) for side in ("one", "two")]
        assert_same(*loaded)
    found = [torch.load(tmp_path / "one" / n, weights_only=False) for n in one]
    back = [layers for part in found for layers in part["graphs"]]
    assert [q for part in found for q in part["question_ids"]] == [f"q{k}" for k in range(7)]
    if source in ("edges", "reversed edges"):
        assert_same(back, graphs)
        assert_same(torch.cat([p["labels"] for p in found]), labels)
    elif source != "square":
        assert_same(back, [make_graphs(t) for t in traces])


def test_errors_are_one_line(tmp_path):
    traces = [{k: v for k, v in make_trace(1).items() if k != "attentions"}]
    write_store(tmp_path / "none.zarr", traces, attention="none")
    assert "--format pt-lstm" in export(tmp_path / "none.zarr", tmp_path / "x", "--format", "pt-gnn", check=2).stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert "not empty" in export(tmp_path / "none.zarr", tmp_path / "full", check=2).stderr
    assert "not a folder" in export(tmp_path / "none.zarr", tmp_path / "full" / "mine.txt", check=2).stderr
    assert "no such store" in export(tmp_path / "nowhere.zarr", tmp_path / "x", check=2).stderr
    done = export(ROOT / "tests" / "golden" / "v1_edges.zarr", tmp_path / "edges", check=2)
    assert "--format pt-" in done.stderr and done.stderr.count("\n") == 1
    with pytest.raises(UsageError, match="expected one of pkl"):
        export_store(tracestore.open(tmp_path / "none.zarr"), tmp_path / "y", format="csv")


def test_only_complete_files_appear(tmp_path, monkeypatch):
    write_store(tmp_path / "s.zarr", make_traces(6))
    done = []

    def interrupt(number, total):
        done.append(number)
        if number == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_store(tracestore.open(tmp_path / "s.zarr"), tmp_path / "out", traces_per_file=2, progress=interrupt)
    assert list(files(tmp_path / "out")) == ["traces_batch_0000.pkl", "traces_batch_0001.pkl"]
    monkeypatch.setattr(tracestore.export.file_formats.pickle, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_store(tracestore.open(tmp_path / "s.zarr"), tmp_path / "two")
    assert [p.name for p in (tmp_path / "two").iterdir()] == ["tracestore_export.json"]


def test_json(tmp_path):
    write_store(tmp_path / "s.zarr", [make_trace(3)], score=math.pi)
    report = json.loads(export(tmp_path / "s.zarr", tmp_path / "out", "--json").stdout)
    assert report["num_traces"] == report["num_files"] == 1 and report["format"] == "pkl"
    assert report["scores_file"] == str(tmp_path / "out" / "scores.csv")
    assert (tmp_path / "out" / "scores.csv").read_bytes() == f"question_id,score\r\nq3,{math.pi!r}\r\n".encode()


def test_labels_are_in_the_table_of_scores(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(3), label=lambda k: 1.0 if k else None, group="g")
    done = export(tmp_path / "s.zarr", tmp_path / "out")
    assert "left out" not in done.stdout
    lines = (tmp_path / "out" / "scores.csv").read_text().splitlines()
    assert lines == ["question_id,label,score,group", "q0,,,g", "q1,1.0,,g", "q2,1.0,,g"]


def test_files_of_graphs_are_limited_in_bytes(tmp_path, monkeypatch):
    write_store(tmp_path / "s.zarr", make_traces(6, tokens=20))
    monkeypatch.setattr(tracestore.export.exporter, "MAX_FILE_BYTES", 2 * (20 * 3 * 8 * 2 + 3 * 210 * 20))
    export_store(tracestore.open(tmp_path / "s.zarr"), tmp_path / "out", format="pt-gnn")
    assert len(files(tmp_path / "out")) == 3


def test_bfloat16_edges_are_bfloat16(tmp_path):
    import torch

    graphs = [[g.apply(lambda t: t.bfloat16() if t.is_floating_point() else t) for g in make_graphs(make_trace(4))]]
    torch.save({"graphs": graphs, "labels": torch.zeros(1), "question_ids": ["q"]}, tmp_path / "preprocessed_0.pt")
    convert(tmp_path / "preprocessed_0.pt", tmp_path / "s.zarr", "--attention", "heads", "--dtype", "keep")
    export(tmp_path / "s.zarr", tmp_path / "out", "--format", "pt-gnn")
    found = torch.load(tmp_path / "out" / "preprocessed_batch_0000.pt", weights_only=False)
    assert_same(found["graphs"], graphs)
