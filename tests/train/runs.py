"""Stores, flags and results of small training runs."""

import hashlib
import json

import numpy as np
import torch

from tests.helpers import make_traces, write_store

FAST = ["--lstm-hidden", 8, "--gnn-hidden", 8, "--latent-dim", 8, "--num-threads", 1]
ONLY = {
    "lstm_solo": ["--no-run-gnn-det", "--no-run-gvae"],
    "gnn_det_lstm": ["--no-run-lstm", "--no-run-gvae"],
    "gvae_lstm": ["--no-run-lstm", "--no-run-gnn-det"],
}
TIMES = ("seconds_per_epoch", "traces_per_s", "data_wait_share")


def write_labeled(path, attention="mean", **options):
    """Write a store of 60 traces whose hidden states predict the label, and 4 without a score."""
    traces = make_traces(64, tokens=lambda k: 2 + k % 4)
    for trace in traces[1::2]:
        trace["hidden_states"] = [h + np.float16(1.5) for h in trace["hidden_states"]]
    score = [None if k >= 60 else 0.9 - 0.8 * (k % 2) for k in range(64)]
    return write_store(path, traces, score=score.__getitem__, attention=attention, **options)


def timeless(value):
    """Return results without times."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return value


def _digest(value):
    if isinstance(value, torch.Tensor):
        return hashlib.blake2b(value.numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {str(k): _digest(v) for k, v in value.items()}
    return value


def outcome(folder):
    """Return what a run leaves, without times: results, and digests of weights and optimizer."""
    results = json.loads((folder / "results.json").read_text())
    found = {"models": timeless(results["models"]), "split": results["split"]}
    for path in sorted(folder.glob("*/*.pt")):
        saved = torch.load(path, weights_only=True)
        found[str(path.relative_to(folder))] = _digest({k: saved[k] for k in ("model", "optimizer") if k in saved})
    return found
