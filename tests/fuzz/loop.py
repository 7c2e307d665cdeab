"""Seeded mutations without a fuzzer.

    python -m tests.fuzz.loop MODE COUNT SEED FILE

FILE always holds the current input, so that it is available after a crash.
"""

import random
import sys
from pathlib import Path

from tests.fuzz.mutate import mutate
from tests.fuzz.seeds import valid_inputs
from tests.fuzz.target import TARGETS


def main() -> None:
    mode, count, seed, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    rng = random.Random(f"{mode} {seed}")
    pool = valid_inputs(mode)
    kept = list(pool)
    accepted = 0
    for k in range(count):
        data = mutate(mode, rng.choice(kept), rng, rng.choice(pool))
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        if TARGETS[mode](data):
            accepted += 1
            # Accepted inputs are better starting points than refused ones.
            kept = [*kept[-200:], data] if len(data) < 20_000 else kept
        elif k % 7 == 0 and len(data) < 20_000:
            kept = [*kept[-200:], data, rng.choice(pool)]
    print(f"{mode}: {count} files, {accepted} accepted")


if __name__ == "__main__":
    main()
