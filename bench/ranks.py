"""Measure the bytes that concurrent ranks fetch of a store on an S3 server on this machine.

python bench/ranks.py STORE [--ranks 4] [--cache 0.25] [--own] [--batch 16] [--epochs 1] [--shuffle global]
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tracestore
from tests.store.remote.server import BUCKET, s3_server
from tests.store.remote.stores import upload
from tracestore.store.remote.object_store import ObjectStore

URL = f"s3://{BUCKET}/store.zarr"


def run_rank(rank: int, args: argparse.Namespace, cache: str, num_bytes: int, barrier: Any, results: Any) -> None:
    """Run the epochs of one rank, and put their bytes, requests and seconds into `results`."""
    os.environ.update(TRACESTORE_CACHE_DIR=cache, TRACESTORE_CACHE_SIZE=str(num_bytes))
    counts = [0, 0]

    def count(name: str) -> None:
        original = getattr(ObjectStore, name)

        def counted(self: ObjectStore, *arguments: Any) -> Any:
            *others, take = arguments

            def took(piece: Any, offset: int) -> None:
                counts[0] += len(memoryview(piece))
                take(piece, offset)

            counts[1] += 1
            return original(self, *others, took)

        setattr(ObjectStore, name, counted)

    count("stream")
    count("stream_range")
    options = {"batch_size": args.batch, "shuffle": args.shuffle, "seed": 1, "as_pyg": False, "edge_format": "packed"}
    loader = tracestore.TraceLoader(URL, "graph", rank=rank, world_size=args.ranks, **options)
    for epoch in range(args.epochs):
        counts[:] = 0, 0
        barrier.wait()
        began = time.perf_counter()
        for _ in loader:
            pass
        results.put((epoch, *counts, time.perf_counter() - began))


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cache", type=float, default=0.25, help="bytes of the cache, times those of the store")
    parser.add_argument("--own", action="store_true", help="a cache for each rank")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--shuffle", default="global")
    args = parser.parse_args()
    total = sum(path.stat().st_size for path in args.store.glob("segments/**/c/**/*") if path.is_file())
    with s3_server() as endpoint, tempfile.TemporaryDirectory(dir=args.store.parent) as cache:
        os.environ.update(
            AWS_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1"
        )
        os.environ["LOCAL_WORLD_SIZE"] = "1" if args.own else str(args.ranks)
        upload(args.store, URL)
        context = multiprocessing.get_context("spawn")
        barrier, results = context.Barrier(args.ranks), context.Queue()
        folders = [f"{cache}/{rank if args.own else 0}" for rank in range(args.ranks)]
        processes = [
            context.Process(target=run_rank, args=(rank, args, folder, int(args.cache * total), barrier, results))
            for rank, folder in enumerate(folders)
        ]
        for process in processes:
            process.start()
        found = [results.get() for _ in range(args.ranks * args.epochs)]
        for process in processes:
            process.join()
    for epoch in range(args.epochs):
        num_bytes, requests, seconds = zip(*(f[1:] for f in found if f[0] == epoch), strict=True)
        print(
            f"epoch {epoch}: {sum(num_bytes) / total:.3f} times the {total / 1e6:,.0f} MB of the arrays, "
            f"{sum(requests):,} requests, {max(seconds):.2f} s"
        )


if __name__ == "__main__":
    main()
