"""Convert changed dumps and print the counts: python -m tests.ingest.corpus.changed [--folders N] [--seed S].

Each folder is converted in three ways: with the layout of the dump, alone, and by each candidate that is proposed.
"""

import argparse
import os
import tomllib
from collections import Counter

import numpy as np

from tests.helpers import ROOT
from tests.ingest.corpus.changed import campaign
from tests.ingest.corpus.registry import load


def main(argv=None):
    """Print each wrong outcome, and a table of the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folders", type=int, default=10_000, help="generated folders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", help="change these kinds of the corpus, all without names")
    parser.add_argument("--ways", nargs="*", choices=campaign.WAYS, default=tuple(campaign.WAYS))
    parser.add_argument("--refused", action="store_true", help="print refusals that the mutation does not demand")
    options = parser.parse_args(argv)
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    outcomes = []

    def take(found):
        for outcome in found:
            outcomes.append(outcome)
            if outcome.result == "wrong" or (options.refused and outcome.result == "refused"):
                print(
                    f"{outcome.result} {outcome.way} {outcome.kind} {outcome.mutation}: {outcome.detail[:300]}",
                    flush=True,
                )

    take(campaign.of_generated(options.folders, options.seed, options.ways))
    if options.kinds is not None:
        layouts = tomllib.loads((ROOT / "tests/ingest/corpus/layouts.toml").read_text())
        for k, (name, kind) in enumerate(load().items()):
            if name in layouts and not kind.missing() and (not options.kinds or name in options.kinds):
                take(campaign.of_kind(kind, layouts[name], np.random.default_rng([options.seed, k]), options.ways))
    print("\n".join(campaign.table(outcomes)))
    for way in options.ways:
        print(way, dict(Counter(outcome.result for outcome in outcomes if outcome.way == way)))


if __name__ == "__main__":
    main()
