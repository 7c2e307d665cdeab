"""Short benchmarks. Each prints ratios to a limit or a peer measured in the same run.

python bench/run.py [--short]
"""

import argparse
import os
import pickle
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from benchmarks import loading, training

from tracestore import cli
from tracestore.store.fsio import whole_file
from tracestore.store.pickle_list import PickleListWriter

LAYERS, DIM, HEADS = 30, 576, 9
PICTURE = Path("build/bench-loading.png")


def make_file(path: Path, count: int) -> int:
    """A pickle of synthetic traces of 45 to 65 tokens, written as the extractor does; bytes of its arrays."""
    rng, total = np.random.default_rng(0), 0
    with whole_file(path) as file:
        writer = PickleListWriter(file)
        for k in range(count):
            tokens = int(rng.integers(45, 66))
            hidden = rng.standard_normal((LAYERS, tokens, DIM), "f4").astype("f2")
            attention = np.tril(rng.random((LAYERS, HEADS, tokens, tokens), "f4")).astype("f2")
            total += hidden.nbytes + attention.nbytes
            writer.append(
                {
                    "hidden_states": list(hidden),
                    "attentions": list(attention),
                    "tokens": np.arange(tokens),
                    "tokens_decoded": ["t"] * tokens,
                    "generated_answer_clean": "a",
                    "question_id": f"q{k}",
                }
            )
        writer.finish()
    return total


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bench_convert(folder: Path, source: Path, repeats: int) -> None:
    store, copy = folder / "store.zarr", folder / "copy"
    ours, theirs = [], []
    for _ in range(repeats):
        shutil.rmtree(store, ignore_errors=True)
        sys.stdout.flush()
        saved = os.dup(1)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        ours.append(timed(lambda: cli.main(["convert", str(source), str(store), "--attention", "heads"])))
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)

        def peer() -> None:
            with source.open("rb") as file:
                traces = pickle.load(file)
            with copy.open("wb") as out:
                for trace in traces:
                    for array in (*trace["hidden_states"], *trace["attentions"]):
                        out.write(np.tril(array) if array.ndim == 3 else array)
                out.flush()
                os.fsync(out.fileno())

        theirs.append(timed(peer))
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"convert .pkl, every head: {a:.2f} s; pickle.load + np.tril + write + fsync: {b:.2f} s; ratio {b / a:.2f}")


def draw(ratios: dict[str, list[float]], path: Path) -> None:
    """Shares of memcpy's speed, each round a point, the median a bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.bar(list(ratios), [statistics.median(r) for r in ratios.values()], color="#9ab")
    for k, rounds in enumerate(ratios.values()):
        axes.plot([k] * len(rounds), rounds, "k.", alpha=0.5)
    axes.axhline(1, color="k", linewidth=0.8)
    axes.set_ylabel("of a 2-thread memcpy")
    axes.set_title("TraceLoader, graph batches of 16, warm")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def bench_loader(folder: Path, short: bool, repeats: int) -> Path:
    """Both shapes, both forms of edges; -> the store of the small shape."""
    found = {}
    for shape, (layers, dim, count) in loading.SHAPES.items():
        path = folder / f"{shape}.zarr"
        loading.make_store(path, layers, dim, count // 4 if short else count)
        for edges in ("coo", "packed"):
            rates, ratios = loading.memcpy_ratios(path, edges, repeats)
            found[f"{shape}, {edges}"] = ratios
            print(
                f"loader, L={layers} D={dim}, graph batches of 16, {edges}: {statistics.median(rates):,.0f} traces/s; "
                f"of a 2-thread memcpy of the same bytes {statistics.median(ratios):.2f} "
                f"({', '.join(f'{r:.2f}' for r in sorted(ratios))})",
                flush=True,
            )
        if shape != "small":
            shutil.rmtree(path)
    draw(found, PICTURE)
    print(f"drawn: {PICTURE}")
    return folder / "small.zarr"


def bench_training(store_path: Path, short: bool) -> None:
    """Steps of the graph models against PyG's, and the LSTM's wait for data."""
    shapes = list(training.SHAPES)
    for model in training.GRAPH_MODELS:
        print(training.compare(model, shapes[0], 5, 1 if short else 3), flush=True)
    for shape in () if short else shapes[1:]:
        print(training.compare("gnn_det_lstm", shape, 5, 2), flush=True)
    for model in ("lstm_solo", *training.GRAPH_MODELS):
        print(training.guard_share(model, shapes[0], 20), flush=True)
    print(training.lstm_data_share(store_path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer traces and repeats")
    args = parser.parse_args()
    count, repeats = (96, 3) if args.short else (400, 5)
    print(f"{os.cpu_count()} processors, torch {torch.__version__}, {count} traces of L={LAYERS} D={DIM} H={HEADS}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_file(folder / "traces.pkl", count)
        bench_convert(folder, folder / "traces.pkl", repeats)
        shutil.rmtree(folder / "store.zarr")
        bench_training(bench_loader(folder, args.short, 5 if args.short else 9), args.short)


if __name__ == "__main__":
    main()
