"""Conversion of pickles, compared with the minimal work for it.

    python -m benchmarks.conversion convert SOURCE STORE | load SOURCE (in bench/)

imports everything, waits for `common.run_measured`, then converts the pickles or loads them.
"""

import pickle
import statistics
import sys
from pathlib import Path

from .common import PICKLED, Fixtures, baseline, convert, inflate, open_source, pickle_dir, wait_for_start, warm

ROUNDS = 5


class Conversion(Fixtures):
    """Conversion by one worker, in a separate process."""

    params = (list(PICKLED), ["mean", "heads"])
    param_names = ("source", "attention")

    def setup(self, folder, suffix, attention):
        """Read the pickles into the page cache."""
        self.source = pickle_dir(folder, suffix)
        self.store, self.raw = Path(folder) / "out.zarr", Path(folder) / "raw"
        warm(self.source)

    def _convert(self, attention):
        return convert(self.source, self.store, "--attention", attention, "--workers", "1")

    def track_time(self, folder, suffix, attention):
        """Return the milliseconds per trace."""
        return self._convert(attention)["seconds"] / PICKLED[suffix] * 1e3

    track_time.unit = "ms/trace"

    def track_limit(self, folder, suffix, attention):
        """Return the time of a conversion as a multiple of its limit.

        The limit of .pkl is pickle.load with a write and fsync of the store's bytes, that of .pkl.gz is
        isal's inflate.
        """
        ratios = []
        for _ in range(ROUNDS):
            ours = self._convert(attention)
            limit = inflate(self.source) if suffix == ".pkl.gz" else baseline(self.source, self.raw, int(ours["bytes"]))
            ratios.append(ours["seconds"] / limit)
        return statistics.median(ratios)

    track_limit.unit = "of the limit's time"


def main(what, source, store=None):
    """Convert or load the pickles of a folder."""
    from tracestore.cli import main as command

    wait_for_start()
    if what == "convert":
        raise SystemExit(command(["convert", source, store, "--workers", "1", "--overwrite"]))
    for path in Path(source).iterdir():
        with open_source(path, "rb") as file:
            traces = pickle.load(file)  # trusted: written by common.Fixtures
            print(len(traces))


if __name__ == "__main__":
    main(*sys.argv[1:])
