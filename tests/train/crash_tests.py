"""Train in forked processes that are killed: python -m tests.train.crash_tests.

Reads one request per line, a JSON list of a function of this module and its arguments, and writes
one JSON result per line. All modules are imported once, so that a run takes little more than its training.
"""

import contextlib
import errno
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

from tests.machine import wait_until
from tests.train.runs import outcome
from tracestore.cli import main
from tracestore.evaluation import metrics
from tracestore.experiment import training_run
from tracestore.store.io import fsio
from tracestore.train.model_runner import ModelRunner

# These take most of the time of a short run.
training_run.write_report = lambda *_: None
metrics.BOOTSTRAP_SAMPLES = 20


def start(argv, folder, *more, before=None, error_file=None):
    """Start a process that trains, with its standard error in FOLDER.err. Return its id."""
    child = os.fork()
    if child:
        return child
    for number, path in ((1, os.devnull), (2, error_file or f"{folder}.err")):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    try:
        if before is not None:
            before()
        os._exit(main(["train", *argv, "--output-dir", str(folder), *more]))
    except SystemExit as ended:
        os._exit(ended.code)
    except BaseException:
        traceback.print_exc()
        os._exit(99)


def wait(child):
    """Return the exit code of a process, or its negative signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def expect(code, child, folder):
    """Wait for a process and check its exit code."""
    found = wait(child)
    assert found == code, f"exit {found}, expected {code}: {Path(f'{folder}.err').read_text()}"


def undisturbed(argv, folder):
    """Run without interruption. Return the outcome and the seconds."""
    began = time.monotonic()
    expect(0, start(argv, folder / "whole"), folder / "whole")
    return outcome(folder / "whole"), time.monotonic() - began


def killed_at_random(argv, folder, kills, seed):
    """Kill and resume runs. Each run that finishes must equal an undisturbed one."""
    rng = random.Random(seed)
    expected, seconds = undisturbed(argv, folder)
    done = compared = 0
    while done < kills or not compared:
        out = folder / f"cut{compared}"
        child = start(argv, out, "--resume", "--checkpoint-interval", rng.choice(["0", "0.02", "300"]))
        if done < kills:
            time.sleep(rng.uniform(0, 0.7 * seconds))
            os.kill(child, signal.SIGKILL)
        code = wait(child)
        if code == -signal.SIGKILL:
            done += 1
            continue
        assert code == 0, Path(f"{out}.err").read_text()
        assert outcome(out) == expected, f"the result differs after {done} kills"
        compared += 1
    return {"kills": done, "compared": compared}


class TornFile:
    """A file of which only the first half is written before `end` is called."""

    def __init__(self, file, end):
        self.file, self.end = file, end

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        self.end()


def torn(number, end):
    """Return a hook that cuts the write of the number-th file in half and then calls `end`."""
    original, calls = fsio.atomic_write, [0]

    @contextlib.contextmanager
    def atomic_write(path):
        calls[0] += 1
        with original(path) as file:
            yield TornFile(file, end) if calls[0] == number else file

    def before():
        fsio.atomic_write = atomic_write

    return before


def killed_while_writing(argv, folder):
    """Kill runs while they write a checkpoint: the previous checkpoint stays valid."""
    expected, _ = undisturbed(argv, folder)
    out, found = folder / "torn", 0
    for number in range(2, 9):
        before = torn(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        child = start(argv, out, "--checkpoint-interval", "0", "--resume", before=before)
        expect(-signal.SIGKILL, child, out)
        for path in out.glob("*/last.pt"):
            assert "optimizer" in torch.load(path, weights_only=True)
            found += 1
    expect(0, start(argv, out, "--resume"), out)
    assert outcome(out) == expected
    return {"valid_checkpoints": found}


def disk_full(argv, folder):
    """Fill the disk after split.json and three checkpoints."""

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    out = folder / "full"
    expect(4, start(argv, out, "--checkpoint-interval", "0", before=torn(5, full)), out)
    (model,) = out.glob("*/")
    batch = torch.load(model / "last.pt", weights_only=True)["progress"]["batch"]
    return {"stderr": Path(f"{out}.err").read_text(), "files": os.listdir(model), "batch": batch}


def waiting(signaled):
    """Return a hook that lets a run wait after its first checkpoint until the file `signaled` exists."""
    original, is_first = fsio.atomic_write, [True]

    @contextlib.contextmanager
    def atomic_write(path):
        with original(path) as file:
            yield file
        if path.name == "last.pt" and is_first:
            is_first.clear()
            wait_until(signaled.exists)

    def before():
        fsio.atomic_write = atomic_write

    return before


def signal_after_checkpoint(out, signaled, child, signum):
    """Send a signal to a process after the first checkpoint of a run whose hook is `waiting(signaled)`."""
    wait_until(lambda: list(out.glob("*/last.pt")))
    os.kill(child, signum)
    signaled.touch()


def stopped(argv, folder, signum):
    """Interrupt a run in its second epoch, and resume it."""
    expected, _ = undisturbed(argv, folder)
    out, signaled = folder / "stopped", folder / "signaled"
    child = start(argv, out, before=waiting(signaled))
    signal_after_checkpoint(out, signaled, child, signum)
    expect(128 + signum, child, out)
    stderr = Path(f"{out}.err").read_text()
    expect(0, start(argv, out, "--resume"), out)
    assert outcome(out) == expected
    return {"stderr": stderr}


def start_ranks(count, argv, folder, *more, before=None):
    """Start processes as torchrun does. Return their ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}

    def one(rank):
        def begin():
            if before is not None:
                before()
            own = shared | {"RANK": rank, "LOCAL_RANK": rank}
            os.environ.update({name: str(value) for name, value in own.items()})

        return start(argv, folder, *more, error_file=f"{folder}.{rank}.err", before=begin)

    return [one(rank) for rank in range(count)]


def by_ranks(argv, folder, count):
    """Train with several ranks, resuming a run in the folder."""
    for rank, child in enumerate(start_ranks(count, argv, folder, "--resume")):
        expect(0, child, f"{folder}.{rank}")
    return {}


def ranks_out_of_memory(argv, folder, count, steps):
    """Run out of memory for good on all ranks after some steps; one process resumes."""

    def before():
        original = ModelRunner.step_loss

        def step_loss(self, step, begin, end):
            if step.batches[0].number >= steps:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return original(self, step, begin, end)

        ModelRunner.step_loss = step_loss

    by_ranks(argv, folder / "whole", 1)
    out = folder / "ranks"
    codes = [wait(child) for child in start_ranks(count, argv, out, before=before)]
    stderr = [Path(f"{out}.{rank}.err").read_text() for rank in range(count)]
    by_ranks(argv, out, 1)
    (path,) = out.glob("*/last.pt")
    size = torch.load(path, weights_only=True)["guard"]["sizes"]["size"]
    losses = [results(folder / name)["history"]["train_loss"] for name in ("whole", "ranks")]
    events = [(e["size_before"], e["size_after"]) for e in results(out)["oom_events"]]
    return {"codes": codes, "stderr": stderr, "size": size, "losses": losses, "events": events}


def results(folder):
    """Return the results of the only detector."""
    (entry,) = json.loads((folder / "results.json").read_text())["models"].values()
    return entry


def rank_signaled(argv, folder, signum):
    """Send a signal to rank 1 in the second epoch; one process resumes."""
    by_ranks(argv, folder / "whole", 1)
    out, signaled = folder / "ranks", folder / "signaled"
    children = start_ranks(2, argv, out, before=waiting(signaled))
    signal_after_checkpoint(out, signaled, children[1], signum)
    codes = [wait(child) for child in children]
    stderr = [Path(f"{out}.{rank}.err").read_text() for rank in range(2)]
    by_ranks(argv, out, 1)
    results = [json.loads((folder / name / "results.json").read_text())["models"] for name in ("whole", "ranks")]
    losses = [[entry["history"]["train_loss"] for entry in entries.values()] for entries in results]
    return {"codes": codes, "stderr": stderr, "losses": losses}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        name, argv, folder, *more = json.loads(line)
        try:
            answer = globals()[name](argv, Path(folder), *more)
        except Exception:
            answer = {"error": traceback.format_exc()}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)
