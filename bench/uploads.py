"""Measure a conversion to an object store by two workers, of the speed at which two processes upload the same files.

python bench/uploads.py DATA s3://BUCKET/FOLDER [--rounds 3]

DATA is a folder of trace files of at least two tasks. The usual environment variables name the server.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tracestore.store.remote.object_store import ObjectStore


def upload(folder: Path, url: str, number: int) -> None:
    """Upload every second segment of a store, one after the other, as writers do."""
    objects = ObjectStore(url)
    for segment in sorted((folder / "segments").iterdir())[number::2]:
        files = [path for path in segment.rglob("*") if path.is_file()]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda path: objects.put(path.relative_to(folder).as_posix(), path), files))


def timed(*commands: list[str]) -> float:
    """Return the seconds that commands take which run at the same time.

    Their modules are compiled once, by the first command: a conversion has a process more.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    processes = [
        subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL) for words in commands
    ]
    if sum(process.wait() for process in processes):
        raise SystemExit("a command failed")
    return time.perf_counter() - began


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--upload", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.upload:
        upload(Path(args.upload[0]), args.upload[1], int(args.upload[2]))
        return
    ratios = []
    with tempfile.TemporaryDirectory(dir=args.data.parent) as folder:
        convert = ["-m", "tracestore", "convert", str(args.data)]
        timed([*convert, f"{folder}/store.zarr", "--workers", "2"])
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        for number in range(args.rounds):
            urls = [f"{args.url}/{kind}-{time.time_ns()}" for kind in ("upload", "convert")]
            words = [__file__, str(args.data), args.url, "--upload", f"{folder}/store.zarr", urls[0]]
            uploading = timed([*words, "0"], [*words, "1"])
            converting = timed([*convert, urls[1], "--workers", "2"])
            ratios.append(uploading / converting)
            rates = (f"{size / seconds / 1e6:,.0f} MB/s" for seconds in (uploading, converting))
            print(f"round {number}: {size / 1e6:,.0f} MB, upload {', conversion '.join(rates)}: {ratios[-1]:.2f}")
            for url in urls:
                objects = ObjectStore(url)
                objects.delete(objects.list_recursive(""))
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
