"""The command `tracestore predict`: apply a trained detector to other stores."""

import csv
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import expit

import tracestore
from tests.experiment.quiet import SMALL, train_quietly
from tests.helpers import command, make_traces, write_store
from tracestore.cli import command_parser
from tracestore.cli.commands import predict
from tracestore.console import Output
from tracestore.detectors.registry import MODELS
from tracestore.detectors.saved import MODEL_VERSION
from tracestore.errors import MissingFieldError, TracestoreError, UsageError
from tracestore.inference import predict as scoring
from tracestore.train.config import TrainConfig

MALICIOUS_ID = 'q"1", =cmd|\r\n<b>\x01é\udcff'


def make_store(path, count, *, scored=True, layers=3, dim=8, **options):
    traces = make_traces(count, tokens=lambda k: 2 + k % 4, layers=layers, dim=dim)
    traces = [trace | {"sample": k % 3} for k, trace in enumerate(traces)]
    return write_store(path, traces, score=lambda k: 0.9 - 0.8 * (k % 2) if scored else None, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a store, and three detectors trained on it with all options that affect scoring."""
    folder = tmp_path_factory.mktemp("trained")
    store = make_store(folder / "store.zarr", 60)
    config = TrainConfig(epochs=1, batch_size=8, attention_threshold=0.3, loader_threads=1)
    results = train_quietly(store, folder / "r", MODELS, config, SMALL | {"standardize": True})
    return store, folder / "r", results


def score(checkpoint, store, output, *args):
    words = ["--checkpoint", checkpoint, "--store", store, "--output", output, "--overwrite", "--num-threads", 1, *args]
    return predict.run(command_parser("predict").parse_args([str(w) for w in words]), Output(False))


def rows_of(path):
    with path.open(newline="", encoding="utf-8", errors="surrogatepass") as file:
        return list(csv.DictReader(file))


def test_a_file_that_appears_meanwhile_is_kept(trained, tmp_path):
    store, run, _ = trained
    output = tmp_path / "p.csv"
    with pytest.raises(UsageError, match="exists; choose another name"):
        scoring.predict_store(
            run / "lstm_solo" / "best.pt", store, output, progress=lambda *_: output.write_text("of another run")
        )
    assert output.read_text() == "of another run" and os.listdir(tmp_path) == ["p.csv"]


def test_traces_that_the_detector_has_seen_are_counted(trained, tmp_path):
    path, run, results = trained
    checkpoint = run / "lstm_solo" / "best.pt"
    seen = sum(len(results["split"][name]) for name in ("train", "val"))
    lines = []
    report = scoring.predict_store(checkpoint, path, tmp_path / "all.csv", log=lines.append)
    assert report.num_seen == seen and f"{seen} of 60 traces trained or validated" in lines[0]
    # Also in a store of other traces, in another order.
    merged = tmp_path / "merged.zarr"
    new = write_store(
        tmp_path / "new.zarr", [t | {"question_id": f"n{k}"} for k, t in enumerate(make_traces(3, layers=3, dim=8))]
    )
    command("merge", new, path, merged, check=0)
    assert scoring.predict_store(checkpoint, merged, tmp_path / "merged.csv").num_seen == seen
    lines.clear()
    assert scoring.predict_store(checkpoint, new, tmp_path / "new.csv", log=lines.append).num_seen == 0
    assert not lines


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_the_test_split_equal_those_of_the_training(trained, tmp_path, name):
    path, run, results = trained
    entry = results["models"][name]
    expected = entry["test_scores"]
    detector, store = scoring.load_detector(run / name / "best.pt"), tracestore.open(path)
    indices = np.array(expected["trace_index"])
    config = replace(detector.options, batch_size=8, loader_threads=1)
    found = list(scoring.score_traces(detector, store, config, indices=indices))
    assert np.concatenate([logits for _, logits in found]).tolist() == expected["logit"]
    assert np.concatenate([at for at, _ in found]).tolist() == expected["trace_index"]
    assert (detector.threshold, detector.temperature) == (entry["threshold"], entry["temperature"])
    # Other batches of the whole store give the same scores up to rounding.
    score(run / name / "best.pt", path, tmp_path / "s.csv", "--batch-size", 7)
    rows = rows_of(tmp_path / "s.csv")
    assert [(r["question_id"], int(r["sample"])) for r in rows] == [(f"q{k}", k % 3) for k in range(60)]
    p = np.array([float(r["hallucination_score"]) for r in rows])
    np.testing.assert_allclose(p[indices], expit(expected["logit"]), atol=1e-6)
    clear = np.abs(np.array(expected["logit"]) - entry["threshold"]) > 1e-5
    predicted = np.array([int(r["predicted"]) for r in rows])[indices]
    assert np.array_equal(predicted[clear], (np.array(expected["logit"]) >= entry["threshold"])[clear])


def test_the_command_writes_scores_and_a_summary(trained, tmp_path):
    _, run, _ = trained
    bare = make_store(tmp_path / "bare.zarr", 9, scored=False)
    words = ["predict", "--checkpoint", run / "gnn_det_lstm/best.pt", "--store", bare]
    done = command(*words, "--output", tmp_path / "s.csv", "--memory-budget", "2GiB", "--json", check=0)
    summary = json.loads(done.stdout)
    rows = rows_of(tmp_path / "s.csv")
    assert summary["num_traces"] == len(rows) == 9 and summary["model"] == "gnn_det_lstm"
    assert summary["num_predicted"] == sum(int(r["predicted"]) for r in rows)
    assert list(rows[0]) == ["question_id", "sample", "hallucination_score", "predicted"]
    refused = command(*words[:2], tmp_path / "none.pt", *words[3:], check=2)
    assert "no such checkpoint" in refused.stderr and refused.stderr.count("\n") == 1


def test_malicious_ids_and_traces_without_a_score(trained, tmp_path):
    _, run, _ = trained
    traces = make_traces(4, tokens=3)
    traces[1]["question_id"] = MALICIOUS_ID
    traces[2]["attentions"][1][0, 1, 0] = np.nan
    write_store(tmp_path / "s.zarr", traces)
    for name in MODELS:
        score(run / name / "best.pt", tmp_path / "s.zarr", tmp_path / "s.csv")
        rows = rows_of(tmp_path / "s.csv")
        assert [r["question_id"] for r in rows] == ["q0", MALICIOUS_ID, "q2", "q3"]
        assert rows[2]["hallucination_score"] == rows[2]["predicted"] == ""
        assert all(0 < float(rows[k]["hallucination_score"]) < 1 for k in (0, 1, 3))


def test_unreadable_stores_are_refused(trained, tmp_path):
    _, run, _ = trained
    checkpoint = run / "gnn_det_lstm/best.pt"
    for store, kind, words in (
        (
            make_store(tmp_path / "layers.zarr", 3, layers=4),
            UsageError,
            "fitted to 3 layers of 8 columns, this store has 4 of 8",
        ),
        (
            make_store(tmp_path / "dim.zarr", 3, dim=6),
            UsageError,
            "fitted to 3 layers of 8 columns, this store has 3 of 6",
        ),
        (make_store(tmp_path / "none.zarr", 3, attention="none"), MissingFieldError, "no graphs"),
        (tmp_path / "nowhere.zarr", UsageError, "no such store"),
    ):
        with pytest.raises(kind, match=words) as caught:
            score(checkpoint, store, tmp_path / "s.csv")
        assert caught.value.exit_code == 2 and not (tmp_path / "s.csv").exists()
    score(run / "lstm_solo/best.pt", tmp_path / "none.zarr", tmp_path / "s.csv")
    assert len(rows_of(tmp_path / "s.csv")) == 3


def test_invalid_checkpoints_are_refused(trained, tmp_path):
    store, run, _ = trained
    good = torch.load(run / "lstm_solo/best.pt", weights_only=True)
    expected = {"version", "tracestore", "torch", "name", "model", "model_config", "store", "threshold", "temperature"}
    assert expected <= set(good)
    whole = (run / "lstm_solo/best.pt").read_bytes()

    def saved(**changes):
        torch.save({**good, **changes}, tmp_path / "c.pt")
        return (tmp_path / "c.pt").read_bytes()

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    weights = dict(good["model"])
    weights.popitem()
    for data, words in (
        (whole[: len(whole) // 2], "not a checkpoint"),
        (b"", "not a checkpoint"),
        (saved(extra=Malicious()), "not a checkpoint"),
        ((run / "lstm_solo/last.pt").read_bytes(), "give the best.pt"),
        (
            saved(version=MODEL_VERSION + 1),
            f"version {MODEL_VERSION + 1}, .* reads version {MODEL_VERSION}; train again",
        ),
        (saved(version=1), "train again"),
        (saved(name="gnn_det_lstm"), "not a complete detector"),
        (saved(name="other"), "not a complete detector"),
        (saved(model=weights), "not a complete detector"),
        (saved(model_config={**good["model_config"], "lstm_hidden": 10**9}), "not a complete detector"),
        (saved(model_config={"num_layers": 3}), "not a complete detector"),
        (saved(threshold="high"), "not a complete detector"),
    ):
        (tmp_path / "bad.pt").write_bytes(data)
        with pytest.raises(UsageError, match=words):
            score(tmp_path / "bad.pt", store, tmp_path / "s.csv")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "s.csv").exists()


def test_a_failure_keeps_the_old_file(trained, tmp_path, monkeypatch):
    store, run, _ = trained
    (tmp_path / "s.csv").write_text("old")
    monkeypatch.setattr(scoring.OOMGuard, "evaluate", lambda *a: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        score(run / "lstm_solo/best.pt", store, tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text() == "old" and os.listdir(tmp_path) == ["s.csv"]
    with pytest.raises(UsageError, match="the parent folder does not exist"):
        score(run / "lstm_solo/best.pt", store, tmp_path / "nowhere" / "s.csv")


@pytest.mark.long
def test_scoring_splits_batches_that_do_not_fit(trained, tmp_path, monkeypatch):
    """A forward pass of more than two traces fails: the batch is halved, with the same scores."""
    path, run, _ = trained
    detector, store = scoring.load_detector(run / "gnn_det_lstm/best.pt"), tracestore.open(path)
    some = {"config": replace(detector.options, batch_size=8), "indices": np.arange(8)}
    ((_, whole),) = scoring.score_traces(detector, store, **some)
    forward, limit, events = type(detector.model).forward, [2], []

    def short(self, inputs, *drawn):
        if inputs.num_traces > limit[0]:
            raise MemoryError
        return forward(self, inputs, *drawn)

    monkeypatch.setattr(type(detector.model), "forward", short)
    ((_, halves),) = scoring.score_traces(detector, store, on_event=events.append, **some)
    np.testing.assert_allclose(halves, whole, atol=1e-6)
    assert events[-1]["size_after"] == 2 and all(e["phase"] == "evaluation" for e in events)
    limit[0] = 0
    with pytest.raises(TracestoreError) as caught:
        score(run / "gnn_det_lstm/best.pt", path, tmp_path / "s.csv")
    assert caught.value.exit_code == 75 and not (tmp_path / "s.csv").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_note_where_the_store_does_not_tell_its_answers(tmp_path, name):
    """A detector that reads answers reads whole traces instead, which it was not trained on; the reverse too."""
    stores = {}
    for kind, fields in (("unknown", {}), ("known", {"prompt_length": 1}), ("span", {"answer_span": (1, 3)})):
        traces = [trace | fields for trace in make_traces(40, tokens=3)]
        stores[kind] = write_store(tmp_path / f"{kind}.zarr", traces, score=lambda k: k % 2)
    reads_answers = MODELS[name].view == "graph" and not name.endswith("_v0")
    for kind, others in (("known", ["unknown"]), ("unknown", ["known", "span"])):
        train_quietly(stores[kind], tmp_path / kind, [name], TrainConfig(epochs=1, loader_threads=1), SMALL)
        detector = scoring.load_detector(tmp_path / kind / name / "best.pt")
        for other, path in stores.items():
            found = detector.differences(tracestore.open(path))
            found_of = "unknown" if other == "unknown" else "known"
            expected = f"trained on answer positions {kind!r}, this store has {found_of!r}"
            assert found == ([expected] if reads_answers and other in others else [])
