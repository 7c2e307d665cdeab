"""Trains in forked processes that are killed, for test_resume.py, which writes one request a
line and reads one answer a line. Everything is imported once, so that a run costs what
training costs."""

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

from tests.train.runs import outcome
from tracestore.cli import main
from tracestore.evaluation import metrics
from tracestore.experiment import run
from tracestore.store.io import fsio
from tracestore.train.model_runner import ModelRunner

# What is not training costs most of a short run.
run.write_plots = lambda *_: []
run.write_page = lambda *_: None
metrics.BOOTSTRAP_SAMPLES = 20


def start(argv, folder, *more, before=None, error_file=None):
    """A process that trains with these arguments; its standard error goes to FOLDER.err."""
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
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def expect(code, child, folder):
    found = wait(child)
    assert found == code, f"exit {found}, expected {code}: {Path(f'{folder}.err').read_text()}"


def whole(argv, folder):
    """What a run that nothing disturbs leaves, and its seconds."""
    began = time.monotonic()
    expect(0, start(argv, folder / "whole"), folder / "whole")
    return outcome(folder / "whole"), time.monotonic() - began


def killed_at_random(argv, folder, kills, seed):
    """Kills and resumes; each time a run reaches its end it must be the reference run."""
    rng = random.Random(seed)
    expected, whole_s = whole(argv, folder)
    done = compared = 0
    while done < kills or not compared:
        out = folder / f"cut{compared}"
        child = start(argv, out, "--resume", "--checkpoint-interval", rng.choice(["0", "0.02", "300"]))
        if done < kills:
            time.sleep(rng.uniform(0, 0.7 * whole_s))
            os.kill(child, signal.SIGKILL)
        code = wait(child)
        if code == -signal.SIGKILL:
            done += 1
            continue
        assert code == 0, Path(f"{out}.err").read_text()
        assert outcome(out) == expected, f"after {done} kills: another result"
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
    """SIGKILL in the middle of some checkpoints: the one before stays whole."""
    expected, _ = whole(argv, folder)
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
    return {"whole_checkpoints": found}


def disk_full(argv, folder):
    """split.json and three checkpoints are written, the next one finds the disk full."""

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    out = folder / "full"
    expect(4, start(argv, out, "--checkpoint-interval", "0", before=torn(5, full)), out)
    (model,) = out.glob("*/")
    batch = torch.load(model / "last.pt", weights_only=True)["progress"]["batch"]
    return {"stderr": Path(f"{out}.err").read_text(), "files": os.listdir(model), "batch": batch}


def stopped(argv, folder, signum):
    """A signal within the second epoch, and the run that goes on from there."""
    expected, _ = whole(argv, folder)
    out = folder / "stopped"
    child = start(argv, out)
    while not list(out.glob("*/last.pt")):
        time.sleep(0.001)
    os.kill(child, signum)
    expect(128 + signum, child, out)
    said = Path(f"{out}.err").read_text()
    expect(0, start(argv, out, "--resume"), out)
    assert outcome(out) == expected
    return {"stderr": said}


def start_ranks(count, argv, folder, *more, before=None):
    """Processes as torchrun starts them."""
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
    for rank, child in enumerate(start_ranks(count, argv, folder, "--resume")):
        expect(0, child, f"{folder}.{rank}")
    return {}


def ranks_out_of_memory(argv, folder, count, steps):
    """All ranks find, after some steps, that no trace fits; one process then goes on."""

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
    said = [Path(f"{out}.{rank}.err").read_text() for rank in range(count)]
    by_ranks(argv, out, 1)
    (path,) = out.glob("*/last.pt")
    size = torch.load(path, weights_only=True)["guard"]["sizes"]["size"]
    losses = [results(folder / name)["history"]["train_loss"] for name in ("whole", "ranks")]
    events = [(e["size_before"], e["size_after"]) for e in results(out)["oom_events"]]
    return {"codes": codes, "stderr": said, "size": size, "losses": losses, "events": events}


def results(folder):
    """The entry of the one model."""
    (entry,) = json.loads((folder / "results.json").read_text())["models"].values()
    return entry


def rank_signalled(argv, folder, signum):
    """A signal for rank 1 alone within the second epoch, and one process that goes on."""
    by_ranks(argv, folder / "whole", 1)
    out = folder / "ranks"
    children = start_ranks(2, argv, out)
    while not list(out.glob("*/last.pt")):
        time.sleep(0.001)
    os.kill(children[1], signum)
    codes = [wait(child) for child in children]
    said = [Path(f"{out}.{rank}.err").read_text() for rank in range(2)]
    by_ranks(argv, out, 1)
    results = [json.loads((folder / name / "results.json").read_text())["models"] for name in ("whole", "ranks")]
    losses = [[entry["history"]["train_loss"] for entry in entries.values()] for entries in results]
    return {"codes": codes, "stderr": said, "losses": losses}


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
