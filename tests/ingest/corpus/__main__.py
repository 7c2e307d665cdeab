"""Write every folder of the corpus: `python -m tests.ingest.corpus OUT [NAME ...]`."""

import sys
from pathlib import Path

from tests.ingest.corpus.registry import load


def main(argv):
    """Write the folders below the first argument; other arguments restrict the names."""
    out, names = Path(argv[0]), argv[1:]
    for name, kind in load().items():
        if names and name not in names:
            continue
        if missing := kind.missing():
            print(f"{name}: skipped, {', '.join(missing)} is not installed")
            continue
        (out / name).mkdir(parents=True)
        traces = kind.write(out / name)
        print(f"{name}: {len(traces)} traces")


if __name__ == "__main__":
    main(sys.argv[1:])
