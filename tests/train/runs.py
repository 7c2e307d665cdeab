"""Stores, flags and results of small training runs, and graphs of some layers."""

import hashlib
import json
import os
import struct
from collections import defaultdict
from dataclasses import replace
from itertools import accumulate

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


_BLOCK = 32 << 10


def tensorboard_steps(folder):
    """Return the steps of each key in the events of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {key: [point.step for point in events.Scalars(key)] for key in events.Tags()["scalars"]}


def wandb_records(data):
    """Yield the records of a .wandb file: seven bytes, and blocks of 32 KiB of pieces (crc, length, kind)."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""


def wandb_steps(folder):
    """Return the steps of each key in the files of the offline runs of Weights & Biases.

    A training that is killed before its first checkpoint leaves a run without numbers.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    found = defaultdict(list)
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            for key in values.keys() - {"_step", "_runtime", "_timestamp"}:
                found[key].append(values["_step"])
    return {key: sorted(steps) for key, steps in found.items()}


def mlflow_steps(folder):
    """Return the steps of each key in the runs of MLflow in a folder."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlruns").as_uri())
    found = defaultdict(list)
    for run in client.search_runs([client.get_experiment_by_name("tracestore").experiment_id]):
        for key in run.data.metrics:
            found[key] += [metric.step for metric in client.get_metric_history(run.info.run_id, key)]
    return found


STEPS_OF = {"tensorboard": tensorboard_steps, "wandb": wandb_steps, "mlflow": mlflow_steps}


def select_layers(inputs, layers):
    """Return `GraphInputs` with copies of the graphs of some layers of the language model."""
    held = inputs.held_layers
    places = [held.index(layer) for layer in layers]
    graphs = [t * inputs.num_layers + place for t in range(inputs.num_traces) for place in places]
    node_ptr, weight_ptr = inputs.node_ptr.tolist(), inputs.weight_ptr.tolist()
    nodes, weights = ([slice(ptr[g], ptr[g + 1]) for g in graphs] for ptr in (node_ptr, weight_ptr))

    def pointers(slices):
        ends = accumulate((s.stop - s.start for s in slices), initial=0)
        return torch.tensor(list(ends), device=inputs.x.device)

    edge_index = None
    new_node_ptr = pointers(nodes)
    if inputs.edge_index is not None:
        moved = zip(weights, nodes, new_node_ptr.tolist(), strict=False)
        edge_index = torch.cat([inputs.edge_index[:, w] + (begin - n.start) for w, n, begin in moved], dim=1)
    return replace(
        inputs,
        x=torch.cat([inputs.x[s] for s in nodes]),
        node_ptr=new_node_ptr,
        weight=torch.cat([inputs.weight[s] for s in weights]),
        weight_ptr=pointers(weights),
        num_layers=len(layers),
        edge_index=edge_index,
        layers=tuple(layers),
        in_degree=None if inputs.in_degree is None else torch.cat([inputs.in_degree[s] for s in nodes]),
        index=None,
    )
