"""How well each order mixes: the tables of docs/shuffle.md.

100,000 ids in store order whose labels come in runs of 500 (traces of one file are alike);
a perfect shuffle has rank correlation 0, neighbours 33,333 apart and label runs of 2.
"""

import numpy as np

from tracestore.data.order import EpochOrder

N, RUN = 100_000, 500


def measure(mode: str, size: int) -> tuple[float, float, float, float]:
    """Spearman's rank correlation of position and id; mean distance of neighbours in the
    epoch; mean length of runs of one label; share of pairs that are in one batch of 16 in
    two epochs, over what chance gives."""
    epochs = [EpochOrder(N, 7, e, mode, size, size).ids_at(np.arange(N)) for e in range(2)]
    ids = epochs[0]
    correlation = abs(float(np.corrcoef(ids, np.arange(N))[0, 1]))  # ids are ranks
    distance = float(np.abs(np.diff(ids)).mean())
    label = (ids // RUN) % 2
    runs = N / (1 + int((np.diff(label) != 0).sum()))
    batch = np.empty((2, N), np.int64)
    for e in range(2):
        batch[e, epochs[e]] = np.arange(N) // 16
    then = batch[1][epochs[0][: N // 16 * 16].reshape(-1, 16)]
    i, j = np.triu_indices(16, 1)
    again = float((then[:, i] == then[:, j]).mean())
    return correlation, distance, runs, again / (15 / (N - 1))


def main() -> None:
    print("| order | rank correlation | neighbours apart | label runs | pairs met again, times chance |")
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
