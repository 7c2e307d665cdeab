"""Measure how well each order shuffles: the tables of docs/shuffle.md.

The 100,000 ids have labels in runs of 500, because traces of one file are similar. A perfect shuffle
has rank correlation 0, neighbors that are 33,333 apart and label runs of length 2.
"""

import numpy as np

from tracestore.data.order import EpochOrder

N, RUN = 100_000, 500


def measure(mode: str, size: int) -> tuple[float, float, float, float]:
    """Return four measures of an order.

    Returns
    -------
    correlation : float
        Spearman's rank correlation of position and id.
    distance : float
        Mean distance of the ids of neighboring positions.
    runs : float
        Mean length of runs of one label.
    repeats : float
        Share of the pairs in a batch of 16 that share a batch in the next epoch too, relative to chance.
    """
    epochs = [EpochOrder(N, 7, e, mode, size, size).ids_at(np.arange(N)) for e in range(2)]
    ids = epochs[0]
    correlation = abs(float(np.corrcoef(ids, np.arange(N))[0, 1]))  # ids are ranks
    distance = float(np.abs(np.diff(ids)).mean())
    label = (ids // RUN) % 2
    runs = N / (1 + int((np.diff(label) != 0).sum()))
    batch = np.empty((2, N), np.int64)
    for e in range(2):
        batch[e, epochs[e]] = np.arange(N) // 16
    second = batch[1][epochs[0][: N // 16 * 16].reshape(-1, 16)]
    i, j = np.triu_indices(16, 1)
    repeats = float((second[:, i] == second[:, j]).mean())
    return correlation, distance, runs, repeats / (15 / (N - 1))


def main() -> None:
    """Print the table."""
    print("| order | rank correlation | distance of neighbors | label runs | repeated pairs, times chance |")
    print("|---|---|---|---|---|")
    for name, mode, size in (
        ("global", "global", 1),
        ("buffer, 100", "buffer", 100),
        ("buffer, 1,000 (default)", "buffer", 1000),
        ("buffer, 10,000", "buffer", 10_000),
        ("block, 150 traces (256 MiB of 1.8 MB)", "block", 150),
        ("block, 1,500 traces", "block", 1500),
        ("none", "none", 1),
    ):
        c, d, r, a = measure(mode, size)
        print(f"| {name} | {c:.3f} | {d:,.0f} | {r:.1f} | {a:,.0f} |")


if __name__ == "__main__":
    main()
