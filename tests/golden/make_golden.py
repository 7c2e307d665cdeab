"""Make the golden inputs and stores that do not exist. Later versions read the committed files.

python -m tests.golden.make_golden
"""

import shutil
from pathlib import Path

import numpy as np
import torch

import tracestore
from tests.helpers import as_torch, convert, make_graphs, make_traces, write_pickle

HERE = Path(__file__).resolve().parent


def layered_traces():
    """Return three traces whose layers have 16 KiB on average."""
    return make_traces(3, tokens=11, layers=2, dim=768)


def make_layers() -> None:
    """Make a store with checksums of layers, a stated layout, and names that are hashes, by two commits."""
    source, store = HERE / "source", HERE / "v1_layers.zarr"
    source.mkdir()
    for k, trace in enumerate(layered_traces()):
        np.savez(source / f"{trace['question_id']}.npz", hs=np.stack(trace["hidden_states"]))
        layout = {"hidden_states": "{id}.npz : hs -> L S D"}
        if k != 1:
            tracestore.convert_files(source, store, layout=layout)
    shutil.rmtree(source)
    finish(store)


def finish(store: Path) -> None:
    """Remove the lock, which is no part of the data."""
    (store / "lock").unlink()
    with tracestore.open(store) as opened:
        print(opened)


def make_first() -> None:
    """Make the inputs and the stores of the first version, whose segments have numbers as names."""
    inputs = HERE / "inputs"
    traces = make_traces(5)
    write_pickle(inputs / "protocol0.pkl", traces[:2], 0)
    write_pickle(inputs / "protocol2_torch.pkl.gz", [as_torch(t) for t in traces[2:3]], 2)
    write_pickle(inputs / "protocol5.pkl", traces[3:], 5)
    (inputs / "scores.csv").write_text("question_id,score\nq0,0.25\nq3,0.75\n")
    convert(inputs, HERE / "v1_heads.zarr", "--attention", "heads")
    brain = [as_torch(t, torch.bfloat16) for t in make_traces(2, dtype="f4")]
    write_pickle(HERE / "brain.pkl", brain)
    convert(HERE / "brain.pkl", HERE / "v1_bfloat16.zarr", "--dtype", "keep", "--attention", "heads")
    (HERE / "brain.pkl").unlink()
    pre = inputs / "preprocessed"
    for name in ("gnn", "lstm_solo"):
        (pre / name).mkdir(parents=True)
    ids, labels = [t["question_id"] for t in traces], torch.tensor([0.0, 1, 1, 0, 1])
    graphs = {"graphs": [make_graphs(t) for t in traces], "labels": labels, "question_ids": ids}
    torch.save(graphs, pre / "gnn/preprocessed_0.pt")
    sequences = torch.stack([torch.from_numpy(np.stack(t["hidden_states"])[:, -1]) for t in traces])
    value = {"sequences": sequences, "labels": labels, "question_ids": ids}
    torch.save(value, pre / "lstm_solo/preprocessed_0.pt", _use_new_zipfile_serialization=False)
    convert(pre, HERE / "v1_edges.zarr")
    for name in ("v1_heads.zarr", "v1_edges.zarr", "v1_bfloat16.zarr"):
        finish(HERE / name)


def main() -> None:
    for make, name in ((make_first, "v1_heads.zarr"), (make_layers, "v1_layers.zarr")):
        if not (HERE / name).exists():
            make()


if __name__ == "__main__":
    main()
