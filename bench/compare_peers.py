"""Compare the loading of batches with other storage systems.

Each system (peers.py) writes the same synthetic traces and then delivers the same random batches of 16: gathered
hidden states and every causal edge with its weight. A system whose values differ is not measured.
Rounds alternate between the systems; the table has medians.

    make bench-peers            both shapes, a table
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from benchmarks.common import Memcpy, timed
from peers import BATCH, SHAPES, SYSTEMS, trace


class Server:
    """The process of one system."""

    def __init__(self, name, python, folder, shape):
        self.name, self.rates = name, []
        folder.mkdir(exist_ok=True)
        command = [python, Path(__file__).with_name("peers.py"), name, folder, shape]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def request(self, **order):
        """Send a request and return the answer."""
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (json.JSONDecodeError, BrokenPipeError):
            self.log.seek(0)
            raise RuntimeError(f"{self.name}: {self.log.read()[-400:]}") from None

    def close(self):
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


def compare(shape, peers_python, names, rounds, seconds):
    """Measure some systems on one shape and print the table."""
    layers, dim, count = SHAPES[shape]
    root = Path(tempfile.mkdtemp(prefix="peers-"))
    servers, failed = [], {}
    try:
        sizes = [trace(k, layers, dim) for k in range(count)]
        mean_bytes = sum(h.nbytes + a.nbytes for h, a in sizes) / count
        del sizes
        # Several epochs in a row keep the share of start and end small.
        ids = np.concatenate([np.random.default_rng(s).permutation(count) for s in range(1 + 1000 // count)])
        expected = None
        for name in names:
            cls, _, is_peer, ordered = SYSTEMS[name]
            owner = next(n for n in SYSTEMS if SYSTEMS[n][0] in cls.__mro__ and SYSTEMS[n][0].write is cls.write)
            folder = root / owner.replace(" ", "_").replace(",", "")
            fresh = not folder.exists()
            server = Server(name, peers_python if is_peer else sys.executable, folder, shape)
            try:
                if fresh:
                    server.request(do="write")
                if ordered:
                    found = server.request(do="check", ids=ids[: 3 * BATCH].tolist())
                    expected = expected or found
                    if found != expected:
                        raise RuntimeError(f"{name}: values differ")
                server.request(do="time", ids=ids.tolist(), seconds=seconds)
                servers.append(server)
            except RuntimeError as error:
                failed[name] = str(error).splitlines()[-1]
                server.close()
        copy, copies = Memcpy(int(mean_bytes * count)), []
        for _ in range(rounds):
            # The first copy after a pause is slower.
            copies.append(mean_bytes * count / min(timed(copy) for _ in range(3)))
            for server in servers:
                server.rates.append(server.request(do="time", ids=ids.tolist(), seconds=seconds))
    finally:
        for server in servers:
            server.close()
        shutil.rmtree(root, ignore_errors=True)
    limit = statistics.median(copies) / mean_bytes
    print(f"\nL={layers} D={dim}, {count} traces of {mean_bytes / 1e6:.1f} MB, batches of {BATCH}, {rounds} rounds")
    print(f"limit, 2-thread memcpy of the same bytes: {limit:,.0f} traces/s, {limit * mean_bytes / 1e9:.1f} GB/s")
    tracestore_rate = statistics.median(servers[0].rates)
    for server in servers:
        rate = statistics.median(server.rates)
        of_limit = statistics.median(r * mean_bytes / c for r, c in zip(server.rates, copies, strict=True))
        print(
            f"{server.name:38} {rate:10,.0f} traces/s   {of_limit:6.3f} of memcpy   coo is {tracestore_rate / rate:7.1f} times"
        )
    for name, reason in failed.items():
        print(f"{name:38} not measured: {reason[:120]}")


def main():
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=".venv-peers/bin/python", help="interpreter with the peers")
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--only", action="append", help="systems to run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of one measurement")
    args = parser.parse_args()
    names = [n for n in SYSTEMS if args.only is None or n in args.only]
    for shape in SHAPES if args.shape == "both" else [args.shape]:
        compare(shape, args.peers_python, names, args.rounds, args.seconds)


if __name__ == "__main__":
    main()
