"""Coverage-guided fuzzing of the readers with atheris; see `make fuzz`.

    harness.py MODE FOLDER SECONDS CRASHES

FOLDER keeps the interesting inputs from run to run. This is a script and not a module, because
the folder of the checkout must come after the package built with sanitizers in sys.path.
"""

import os
import random
import sys
from pathlib import Path

import atheris

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))
with atheris.instrument_imports(
    include=["tracestore.ingest", "tracestore.store", "tracestore.data"], enable_loader_override=False
):
    from tests.fuzz.target import TARGETS

    if sys.argv[1] == "store":
        import tests.fuzz.stores  # noqa: F401 - imported here to be instrumented

from tests.fuzz.mutate import mutate
from tests.fuzz.seeds import seeds

MAX_BYTES = 1 << 16
# Share of libFuzzer's own mutations, which use the comparisons it observed.
_LIBFUZZER_SHARE = 0.2


def main() -> None:
    mode, folder, seconds, crashes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    assert mode in TARGETS
    folder.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(parents=True, exist_ok=True)
    pool = seeds(mode)
    for k, data in enumerate(pool):
        (folder / f"seed{k:04}").write_bytes(data)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < _LIBFUZZER_SHARE:
            return atheris.Mutate(data, max_size)
        return mutate(mode, data or rng.choice(pool), rng, rng.choice(pool))[:max_size]

    arguments = [
        sys.argv[0],
        str(folder),
        f"-max_total_time={seconds}",
        f"-max_len={MAX_BYTES}",
        f"-artifact_prefix={crashes}/{mode}-",
        "-timeout=60",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        "-verbosity=" + os.environ.get("FUZZ_VERBOSITY", "0"),
    ]

    def run_once(data: bytes) -> None:
        TARGETS[mode](data)

    run_once(pool[0])  # imports and set-up must not count as the time of an input
    atheris.Setup(arguments, run_once, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
