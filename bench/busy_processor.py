"""Compare training, predict and benchmark next to a busy process with the same on an idle machine.

python bench/busy_processor.py STORE [--what NAME ...] [--rounds 9]

The other process computes in one thread and is not pinned. `bench/startup.py --make STORE` writes a store. The times
are medians: of an epoch and its checkpoint for training, of a call for predict. States alternate: each program runs
all the time, and is stopped while it is not its turn. The epochs or calls of the first second of a turn, in which
threads adapt to the state, do not count; those of the next second do. The command benchmark is measured as a whole, in
processes of their own. bench/checkouts.py compares training alone with another checkout.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from benchmarks.common import ROOT, timed

MODELS = ("lstm_solo", "gnn_det_lstm", "gnn_det_lstm_no_edges", "gvae_lstm", "gvae_lstm_no_edges")
MANY = 1_000_000
PREDICT = f"""
import contextlib, io, sys
from pathlib import Path
from tracestore import process
process.configure_program()
from tracestore.cli import main
for call in range({MANY}):
    Path(sys.argv[-1]).unlink(missing_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(sys.argv[1:]) == 0
    print(f"epoch {{call}}/", flush=True)
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


class Program:
    """A Python process that is stopped while it is not its turn. Its turns end with lines that contain "epoch N/"."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, "-u", *map(str, words)]
        self._process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        """Wait for the end of the first epoch."""
        self._wait_for_line()
        self.stop()
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _wait_for_line(self) -> None:
        assert self._process.stdout is not None
        if not any(re.search(r"epoch \d+/", line) for line in iter(self._process.stdout.readline, "")):
            sys.exit(f"{self._process.args}: exit code {self._process.wait()}")

    def stop(self) -> None:
        """Stop until the next turn."""
        self._process.send_signal(signal.SIGSTOP)

    def turn(self) -> float:
        """Return the mean seconds of the epochs of a second, after those of another second."""
        self._process.send_signal(signal.SIGCONT)
        self._run_for_a_second()
        seconds = self._run_for_a_second()
        self.stop()
        return seconds

    def _run_for_a_second(self) -> float:
        """Run epochs until a second has passed, and return their mean seconds."""
        begin, count, seconds = time.perf_counter(), 0, 0.0
        while seconds < 1:
            self._wait_for_line()
            count, seconds = count + 1, time.perf_counter() - begin
        return seconds / count


def train_words(store: Path, folder: Path, model: str, epochs: int) -> list[object]:
    """Return the command that trains one model."""
    return [
        *("-m", "tracestore", "train", "--store", store, "--output-dir", folder),
        *("--epochs", epochs, "--no-probe", "--overwrite", "--models", model),
    ]


def measure(what: str, store: Path, folder: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds of each state."""
    with ExitStack() as stack:
        if what == "benchmark":
            words = ["--detectors", "lstm_solo,gnn_det_lstm", "--folds", "2", "--output-dir", folder, "--overwrite"]
            command = [sys.executable, "-m", "tracestore", "benchmark", store, *words]
            options = {"cwd": ROOT, "env": ENVIRONMENT, "check": True, "stdout": subprocess.DEVNULL}

            def turn() -> float:
                return timed(lambda: subprocess.run(command, **options))

        elif what == "predict":
            words = train_words(store, folder, "gnn_det_lstm", 1)
            subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            checkpoint = folder / "gnn_det_lstm/best.pt"
            words = ["--checkpoint", checkpoint, "--store", store, "--output", f"{folder}.csv"]
            turn = stack.enter_context(Program("-c", PREDICT, "predict", *words)).turn
        else:
            turn = stack.enter_context(Program(*train_words(store, folder, what, MANY))).turn
        busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        stack.callback(busy.kill)
        times: dict[str, list[float]] = {"alone": [], "busy": []}
        for number in range(rounds):
            for state in list(times)[:: 1 if number % 2 else -1]:
                busy.send_signal(signal.SIGCONT if state == "busy" else signal.SIGSTOP)
                times[state].append(turn())
    return {state: statistics.median(seconds) for state, seconds in times.items()}


def main() -> None:
    """Print a row for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    names = [*MODELS, "predict", "benchmark"]
    parser.add_argument("--what", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        for what in args.what:
            seconds = measure(what, args.store.resolve(), Path(work) / what, args.rounds)
            alone, busy = seconds["alone"], seconds["busy"]
            print(f"{what:24}alone {alone:.3f} s, busy {busy:.3f} s, busy/alone {busy / alone:.2f}", flush=True)


if __name__ == "__main__":
    main()
