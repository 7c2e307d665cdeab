"""Test an installed tracestore: convert, info, verify, train and predict through its command.

python -I tests/smoke.py [--without-torch]

The interpreter that runs this script is the one that tracestore is installed for. The script needs nothing
else from the checkout: it makes its own traces and works in a temporary folder.
"""

import argparse
import csv
import json
import pickle
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

NUM_TRACES, NUM_LAYERS, HIDDEN_DIM, NUM_HEADS = 60, 3, 8, 2
MODELS = ("lstm_solo", "gnn_det_lstm", "gvae_lstm")


def write_traces(folder: Path) -> None:
    """Write two pickles of small traces and their scores, one class each for even and odd traces."""
    rng = np.random.default_rng(0)
    traces = []
    for k in range(NUM_TRACES):
        tokens = 4 + k % 3
        attention = np.tril(rng.random((NUM_LAYERS, NUM_HEADS, tokens, tokens))).astype("f2")
        traces.append(
            {
                "hidden_states": list(rng.standard_normal((NUM_LAYERS, tokens, HIDDEN_DIM)).astype("f2")),
                "attentions": list(attention),
                "tokens": rng.integers(0, 50_000, tokens),
                "tokens_decoded": [f"t{i}" for i in range(tokens)],
                "generated_answer_clean": f"answer {k}",
                "question_id": f"q{k}",
            }
        )
    folder.mkdir()
    half = NUM_TRACES // 2
    for number, part in enumerate((traces[:half], traces[half:])):
        (folder / f"batch_{number:04}.pkl").write_bytes(pickle.dumps(part, protocol=4))
    with open(folder / "scores.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("question_id", "score"), *((f"q{k}", k % 2) for k in range(NUM_TRACES))])


def run(folder: Path, *args: str) -> str:
    """Run the installed `tracestore` in a folder; return its standard output."""
    command = [str(Path(sysconfig.get_path("scripts")) / "tracestore"), *args]
    print("$ tracestore", *args, flush=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def check_store(folder: Path) -> None:
    run(folder, "convert", "traces", "store.zarr")
    info = json.loads(run(folder, "info", "store.zarr", "--json"))
    expected = {
        "num_traces": NUM_TRACES,
        "num_scored": NUM_TRACES,
        "num_layers": NUM_LAYERS,
        "hidden_dim": HIDDEN_DIM,
        "num_heads": NUM_HEADS,
    }
    found = {name: info[name] for name in expected}
    assert found == expected, found
    assert not json.loads(run(folder, "verify", "store.zarr", "--json"))["damaged"]


def check_training(folder: Path) -> None:
    run(folder, "train", "--store", "store.zarr", "--epochs", "2", "--output-dir", "results")
    models = json.loads((folder / "results" / "results.json").read_text(encoding="utf-8"))["models"]
    for name in MODELS:
        assert 0 <= models[name]["test"]["auroc"] <= 1, models[name]["test"]
    checkpoint = str(Path("results", MODELS[0], "best.pt"))
    run(folder, "predict", "--checkpoint", checkpoint, "--store", "store.zarr", "--output", "predicted.csv")
    with open(folder / "predicted.csv", newline="", encoding="utf-8") as file:
        scores = [float(row["hallucination_score"]) for row in csv.DictReader(file)]
    assert len(scores) == NUM_TRACES and all(0 <= score <= 1 for score in scores), scores


def main() -> None:
    parser = argparse.ArgumentParser(description="Test an installed tracestore through its command.")
    parser.add_argument("--without-torch", action="store_true", help="convert, info and verify only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_traces(folder / "traces")
        check_store(folder)
        if not args.without_torch:
            check_training(folder)
    print("smoke test passed")


if __name__ == "__main__":
    main()
