"""Measure an epoch over an S3 server on this machine.

Compares it with the rate at which the server streams the same files, and with the store as a folder.

python bench/remote.py STORE [--rounds 5]
"""

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch_geometric  # noqa: F401 - imported before the measurement

import tracestore
from tests.store.remote.server import BUCKET, s3_server
from tests.store.remote.stores import committed_files
from tracestore.store.remote.object_store import ObjectStore

URL = f"s3://{BUCKET}/store.zarr"


def upload(store: Path, bucket: ObjectStore) -> None:
    """Copy a store to the server."""
    for path in sorted(store.rglob("*")):
        if path.is_file():
            bucket.put(path.relative_to(store).as_posix(), path)


def stream(bucket: ObjectStore, files: list[tuple[str, int]], num_threads: int) -> float:
    """Return the seconds to read the files and discard them."""
    began = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lambda file: bucket.stream(*file, lambda chunk, offset: None), files))
    return time.perf_counter() - began


def epoch(store: str | Path, shuffle: str) -> float:
    """Return the seconds of an epoch of graph batches, opening included."""
    gc.collect()  # unmap the files of an earlier epoch before the measurement
    began = time.perf_counter()
    with tracestore.open(store) as opened:
        for _ in tracestore.TraceLoader(opened, view="graph", batch_size=16, shuffle=shuffle, seed=1):
            pass
        return time.perf_counter() - began


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    times: dict[str, list[float]] = {}
    with s3_server() as endpoint, tempfile.TemporaryDirectory(dir=args.store.parent) as cache:
        os.environ.update(
            AWS_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1"
        )
        os.environ["TRACESTORE_CACHE_DIR"] = cache
        bucket = ObjectStore(URL)
        upload(args.store, bucket)
        with tracestore.open(args.store) as store:
            wanted = ("/hidden_states/c/", "/attention/c/")
            files = [(f.path, f.size) for f in committed_files(store) if any(w in f.path for w in wanted)]
        size = sum(size for _, size in files)

        def cold(shuffle: str) -> float:
            gc.collect()
            shutil.rmtree(cache)
            os.sync()
            return epoch(URL, shuffle)

        cases = {
            "server, one request at a time": lambda: stream(bucket, files, 1),
            "server, four at once": lambda: stream(bucket, files, 4),
            "epoch, cold cache, block shuffle": lambda: cold("block"),
            "epoch, warm cache, block shuffle": lambda: epoch(URL, "block"),
            "epoch, folder, block shuffle": lambda: epoch(args.store, "block"),
            "epoch, cold cache, global shuffle": lambda: cold("global"),
            "epoch, warm cache, global shuffle": lambda: epoch(URL, "global"),
            "epoch, folder, global shuffle": lambda: epoch(args.store, "global"),
        }
        for case in cases.values():
            case()
        for _ in range(args.rounds):
            for name, case in cases.items():
                times.setdefault(name, []).append(case())
    first = statistics.median(times["server, one request at a time"])
    print(f"{size / 1e6:,.0f} MB, medians of {args.rounds} rounds; ratio to the server, one request at a time")
    for name, found in times.items():
        seconds = statistics.median(found)
        print(f"{name:36} {size / seconds / 1e6:8,.0f} MB/s {first / seconds:6.2f}")


if __name__ == "__main__":
    main()
