"""Make the golden inputs and stores. Run it once for a format version; later versions read the committed files.

python -m tests.golden.make_golden
"""

import shutil
from pathlib import Path

import numpy as np
import torch

import tracestore
from tests.helpers import as_torch, convert, make_graphs, make_traces, write_pickle

HERE = Path(__file__).resolve().parent


def main() -> None:
    inputs = HERE / "inputs"
    for name in ("inputs", "v1_heads.zarr", "v1_edges.zarr", "v1_bfloat16.zarr"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    inputs.mkdir()
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
        (HERE / name / "lock").unlink()
        with tracestore.open(HERE / name) as store:
            print(store)


if __name__ == "__main__":
    main()
