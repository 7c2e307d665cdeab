"""View "tokens" from the page cache, compared with a memory copy of the delivered bytes.

    python bench/tokens.py WORK_DIR [--traces 600] [--layers 32] [--dim 4096] [--batch-size 4096] [--rounds 9]

writes a store of float16 traces of 30 to 70 tokens into WORK_DIR unless it is there (600 traces of L=32 D=4096: 8 GB),
and times epochs of one layer and copies of the same bytes by two threads, in turn. It prints the median and the rounds
of each ratio.
"""

import argparse
import statistics
from pathlib import Path

from benchmarks.common import Memcpy, make_store, timed

import tracestore


def run_epoch(loader):
    """Iterate over one epoch and return the bytes of its hidden states."""
    return sum(batch.hidden_states.nbytes for batch in loader)


def measure(name, loader, rounds, repeats=5):
    """Print the throughput of a loader and its ratio to that of a copy of as many bytes.

    A round is `repeats` epochs and copies in turn.
    """
    first = timed(lambda: run_epoch(loader))
    num_bytes = run_epoch(loader)
    # A copy is faster between huge pages, which the system may or may not have: take the fastest of four.
    copy = min((Memcpy(num_bytes) for _ in range(4)), key=lambda found: min(timed(found) for _ in range(3)))
    pairs = []
    for _ in range(rounds):
        times = [(timed(lambda: run_epoch(loader)), timed(copy)) for _ in range(repeats)]
        pairs.append([sum(column) / repeats for column in zip(*times, strict=True)])
    ratios = sorted(limit / seconds for seconds, limit in pairs)
    seconds, limit = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{name}: {num_bytes / seconds / 1e9:.1f} GB/s, memcpy {num_bytes / limit / 1e9:.1f}, ratio "
        f"{statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)}); first epoch {first * 1e3:.0f} ms",
        flush=True,
    )


def main():
    """Measure each order, and conversion to float32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--traces", type=int, default=600)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    path = args.work_dir / f"tokens-{args.layers}-{args.dim}-{args.traces}.zarr"
    if not path.exists():
        make_store(path, args.layers, args.dim, args.traces)
    for name, options in {
        "global": {},
        "block of 64 MiB": {"shuffle": "block", "block_bytes": 64 << 20},
        "none": {"shuffle": "none"},
        "global, 4 layers": {"layers": range(0, args.layers, -(-args.layers // 4)), "batch_size": args.batch_size // 4},
        "global, float32": {"dtype": "float32"},
    }.items():
        arguments = {"layers": args.layers // 2, "batch_size": args.batch_size, **options}
        measure(name, tracestore.TraceLoader(path, "tokens", **arguments), args.rounds)


if __name__ == "__main__":
    main()
