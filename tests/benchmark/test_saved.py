"""Checkpoints of fitted detectors, and `tracestore predict` with them."""

import csv

import numpy as np
import pytest
import torch

import tracestore
from tests.detectors.published.conftest import COUNT, make_labeled, write_published
from tests.detectors.published.test_published import FAST
from tests.helpers import command, error_of, make_traces, write_store
from tracestore.detectors.registry import make_detector, select
from tracestore.detectors.saved import content, from_content
from tracestore.errors import UsageError
from tracestore.evaluation.metrics import auroc
from tracestore.train.checkpoint import load_checkpoint, save_checkpoint

LABELS = np.arange(COUNT) % 2


@pytest.mark.parametrize("name", select("features"))
def test_saved_detector_gives_the_same_scores(name, store, tmp_path):
    detector = make_detector(name, **FAST.get(name, {})).fit(store, np.arange(40), LABELS[:40])
    save_checkpoint(tmp_path / "d.pt", content(name, detector, store, store.indices, 2.0, 1.0, 0.5))
    loaded = from_content(load_checkpoint(tmp_path / "d.pt"), "d.pt")
    indices = np.arange(COUNT)
    np.testing.assert_array_equal(loaded.logits(store, indices), 2 * detector.score(store, indices) + 1)
    assert loaded.detector.parameters == detector.parameters and loaded.threshold == 0.5
    assert loaded.detector.chosen == detector.chosen


@pytest.mark.long
def test_predict_scores_another_store(store, tmp_path):
    out = tmp_path / "out"
    words = ("--detectors", "probe_mean,mean_logprob", "--output-dir", out, "--workers", 1, "--save-detectors")
    command("benchmark", store.path, *words, check=0)
    other = write_published(tmp_path / "other.zarr", [make_labeled(k) for k in range(COUNT, 2 * COUNT)])
    for name in ("probe_mean", "mean_logprob"):
        csv_path = tmp_path / f"{name}.csv"
        checkpoint = ("--checkpoint", out / "checkpoints" / f"{name}.pt")
        done = command("predict", *checkpoint, "--store", other, "--output", csv_path, check=0)
        assert f"predicted hallucinations by {name}" in done.stdout
        with open(csv_path, newline="") as file:
            rows = list(csv.DictReader(file))
        p, predicted = (np.array([float(r[c]) for r in rows]) for c in ("hallucination_score", "predicted"))
        assert [r["question_id"] for r in rows] == [f"q{k}" for k in range(COUNT, 2 * COUNT)]
        assert auroc(LABELS, p) > 0.6 and 0.1 < p.mean() < 0.9 and 0 < predicted.sum() < COUNT
        detector = make_detector(name)
        detector.seed, detector.keep_together = 42, "group"
        expected = detector.fit(store, np.arange(COUNT), LABELS).score(tracestore.open(other), np.arange(COUNT))
        assert (np.argsort(p) == np.argsort(expected)).all()


@pytest.mark.long
@pytest.mark.parametrize("saves", [True, False])
def test_checkpoints_of_earlier_results_go_with_them(store, tmp_path, saves):
    out = tmp_path / "out"
    words = ["--output", out, "--workers", 1]
    command("benchmark", store.path, *words, "--detectors", "probe_mean,mean_logprob", "--save-detectors", check=0)
    (out / "checkpoints/mine.pt").write_text("mine")
    words += ["--overwrite", "--detectors", "mean_logprob"]
    command("benchmark", store.path, *words, *["--save-detectors"] * saves, check=0)
    found = {path.stem for path in (out / "checkpoints").iterdir()}
    assert "mine" in found and "probe_mean" not in found and ("mean_logprob" in found) == saves


def test_store_of_another_shape_is_refused(store, tmp_path):
    detector = make_detector("probe_last").fit(store, np.arange(40), LABELS[:40])
    save_checkpoint(tmp_path / "d.pt", content("probe_last", detector, store, store.indices, 1.0, 0.0, 0.0))
    small = write_store(tmp_path / "small.zarr", make_traces(4, dim=4))
    message = error_of("predict", "--checkpoint", tmp_path / "d.pt", "--store", small, code=2)
    assert "fitted to 3 layers of 8 columns, this store has 3 of 4" in message


def with_heads(k, heads):
    """Return a trace with an attention of so many heads."""
    trace = make_labeled(k)
    return trace | {"attentions": [np.repeat(a[:1], heads, axis=0) for a in trace["attentions"]]}


@pytest.mark.parametrize("name", [n for n in select("features") if "attention" in make_detector(n).fields])
def test_store_of_other_heads_is_refused(name, store, tmp_path):
    """The attention score of LLM-Check is a sum over the heads, the others have columns of each head."""
    detector = make_detector(name).fit(store, np.arange(40), LABELS[:40])
    save_checkpoint(tmp_path / "d.pt", content(name, detector, store, store.indices, 1.0, 0.0, 0.0))
    traces = [make_labeled(k) for k in range(8)]
    more = [with_heads(k, 3) for k in range(8)]
    for number, other in enumerate(((traces, "mean"), (more, "heads"))):
        path = write_store(tmp_path / f"{number}.zarr", other[0], attention=other[1])
        message = error_of("predict", "--checkpoint", tmp_path / "d.pt", "--store", path, code=2)
        assert f"fitted to attention of 2 heads (a mean is one), found {1 + 2 * number}" in message
    same = write_store(tmp_path / "same.zarr", traces, attention="heads")
    command("predict", "--checkpoint", tmp_path / "d.pt", "--store", same, "--output", tmp_path / "o.csv", check=0)


def test_traces_without_a_field_that_a_detector_reads_are_counted(store, tmp_path):
    detector = make_detector("probe_mean").fit(store, np.arange(40), LABELS[:40])
    save_checkpoint(tmp_path / "d.pt", content("probe_mean", detector, store, store.indices, 1.0, 0.0, 0.0))
    traces = [make_labeled(k) for k in range(4)]
    del traces[2]["prompt_length"]
    words = "--store", write_store(tmp_path / "s.zarr", traces), "--output", tmp_path / "o.csv"
    out = command("predict", "--checkpoint", tmp_path / "d.pt", *words, check=0).stdout
    assert "no score for 1 trace" in out and "without a field that probe_mean reads" in out
    assert (tmp_path / "o.csv").read_text().splitlines()[3].endswith(",,")


def damaged(saved):
    """Yield changes of a checkpoint, and a part of the message of its refusal."""
    yield {"detector_version": 99}, "another version"
    yield {"name": "nowhere"}, "no detector nowhere"
    yield {"parameters": '{"depth": 3}'}, "unexpected keyword argument"
    yield {"parameters": "{"}, "not a complete detector"
    yield {"store": {}}, "not a complete detector"
    yield {"threshold": "x"}, "not a complete detector"
    yield {"model": {}}, "not a complete detector"
    linear = saved["model"]["_models"][0]["linear"]
    yield {"model": saved["model"] | {"_models": [{"linear": [linear[0][:3], *linear[1:]]}]}}, "not a complete detector"
    yield {"model": saved["model"] | {"_models": []}}, "not a complete detector"
    yield {"model": saved["model"] | {"_models": [None]}}, "not a complete detector"
    yield {"model": saved["model"] | {"_layers": [99]}}, "not a complete detector"


def test_damaged_checkpoints_are_refused_in_one_line(store, tmp_path):
    detector = make_detector("probe_last").fit(store, np.arange(40), LABELS[:40])
    saved = content("probe_last", detector, store, store.indices, 1.0, 0.0, 0.0)
    for change, message in damaged(saved):
        torch.save(saved | change, tmp_path / "d.pt")
        found = error_of("predict", "--checkpoint", tmp_path / "d.pt", "--store", store.path, code=2)
        assert message in found, change


def test_detector_without_a_state_cannot_be_saved(store):
    with pytest.raises(UsageError, match="TorchModel cannot be saved"):
        content("lstm_solo", make_detector("lstm_solo"), store, store.indices, 1.0, 0.0, 0.0)


def test_traces_with_nan_have_no_score(store, tmp_path):
    detector = make_detector("length").fit(store, np.arange(40), LABELS[:40])
    save_checkpoint(tmp_path / "d.pt", content("length", detector, store, store.indices, 1.0, 0.0, 0.0))
    traces = [make_labeled(k) for k in range(4)]
    traces[2]["hidden_states"][0][0, 0] = np.nan
    words = "--store", write_store(tmp_path / "s.zarr", traces), "--output", tmp_path / "o.csv"
    assert "no score for 1 trace" in command("predict", "--checkpoint", tmp_path / "d.pt", *words, check=0).stdout
    assert (tmp_path / "o.csv").read_text().splitlines()[3].endswith(",,")
