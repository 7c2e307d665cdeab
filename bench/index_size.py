"""Measure the size of an index, the time to open it, to look up an id, and the private memory of the open store.

python bench/index_size.py TRACES SEGMENTS [FOLDER]

The store has an index without arrays, and ids of 36 bytes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import ROOT, median_seconds

sys.path.insert(0, str(ROOT))

import tracestore
from tests.store.synthetic import make_index_only_store

PRIVATE_BYTES = """
import sys, psutil, tracestore
tracestore.open(sys.argv[2])
before = psutil.Process().memory_full_info().uss
store = tracestore.open(sys.argv[1])
store.index_of(sys.argv[3])
print(psutil.Process().memory_full_info().uss - before)
"""
ID_BYTES = 36


def question_id(number: int) -> str:
    """Return an id of ID_BYTES bytes."""
    return f"q{number:0{ID_BYTES - 1}d}"


def main() -> None:
    num_traces, num_segments = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as folder:
        path, small = Path(folder) / "s.zarr", Path(folder) / "small.zarr"
        make_index_only_store(path, num_traces, num_segments, 11, question_id)
        make_index_only_store(small, 10, 2, 1, question_id)
        size = sum(p.stat().st_size for p in (path / "index").glob("*.zip"))
        bound = (64 + ID_BYTES) * num_traces + 200 * num_segments
        print(f"index: {size / num_traces:.1f} bytes per trace with its id, {size / bound:.2f} of the bound")
        print(f"open: {1e3 * median_seconds(lambda: tracestore.open(path)):.1f} ms")
        store = tracestore.open(path)
        ids = [question_id(k) for k in range(0, num_traces, num_traces // 1000)]
        seconds = median_seconds(lambda: [store.index_of(k) for k in ids])
        print(f"index_of: {1e6 * seconds / len(ids):.2f} us")
        words = [sys.executable, "-c", PRIVATE_BYTES, str(path), str(small), ids[0]]
        private = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        print(f"private memory: {private / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
