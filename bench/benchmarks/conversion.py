"""Conversion of pickles, beside the least that has to be done for it.

    python -m benchmarks.conversion convert SOURCE STORE | load SOURCE (in bench/)

waits for `common.run_measured` once everything is imported, then converts the pickles or loads them.
"""

import pickle
import statistics
import sys
from pathlib import Path

from .common import PICKLED, Fixtures, baseline, convert, inflate, open_source, pickle_dir, wait_for_start, warm

ROUNDS = 2


class Conversion(Fixtures):
    """One worker, in a process of its own."""

    params = (list(PICKLED), ["mean", "heads"])
    param_names = ("source", "attention")

    def setup(self, folder, suffix, attention):
        self.source = pickle_dir(folder, suffix)
        self.store, self.raw = Path(folder) / "out.zarr", Path(folder) / "raw"
        warm(self.source)

    def _convert(self, attention):
        return convert(self.source, self.store, "--attention", attention, "--workers", "1")

    def track_time(self, folder, suffix, attention):
        return self._convert(attention)["seconds"] / PICKLED[suffix] * 1e3

    track_time.unit = "ms/trace"

    def track_limit(self, folder, suffix, attention):
        """For .pkl, the limit is pickle.load and one write and fsync of the store's bytes; for .pkl.gz,
        it is isal's inflate."""
        ratios = []
        for _ in range(ROUNDS):
            ours = self._convert(attention)
            limit = inflate(self.source) if suffix == ".pkl.gz" else baseline(self.source, self.raw, int(ours["bytes"]))
            ratios.append(ours["seconds"] / limit)
        return statistics.median(ratios)

    track_limit.unit = "of the limit's time"


def main(what, source, store=None):
    from tracestore.cli import main as command

    wait_for_start()
    if what == "convert":
        raise SystemExit(command(["convert", source, store, "--workers", "1", "--overwrite"]))
    for path in Path(source).iterdir():
        with open_source(path, "rb") as file:
            traces = pickle.load(file)  # of common.Fixtures
            print(len(traces))


if __name__ == "__main__":
    main(*sys.argv[1:])
