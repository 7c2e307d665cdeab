"""Read whole trees, and files that differ from valid ones."""

import contextlib
import functools
import gc
import io
import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.helpers import ROOT
from tests.machine import assert_within, peak_bytes
from tests.malicious_inputs.runner import in_fork
from tracestore.cli import main
from tracestore.errors import InvalidInputError
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Group, Items, Value, as_array
from tracestore.process import frozen_garbage

MAX_MEMORY_BYTES = 256 << 20
MAX_SECONDS = 5.0
_SCALARS = frozenset((str, int, float, bool))


def plain(value: Value):
    """Return a tree as dicts, lists, arrays and scalars."""
    if isinstance(value, Array):
        return value.read()
    if isinstance(value, Group):
        return {key: plain(value[key]) for key in value}
    return [plain(item) for item in value] if isinstance(value, Items) else value


def touch(value: Value) -> int:
    """Read every value of a tree, keep none, and return their number."""
    if value is None or type(value) in _SCALARS:
        return 1
    if isinstance(value, Array):
        part = np.ascontiguousarray(value.read())
        assert part.shape == value.shape
        return int(part.size and part.reshape(-1).view("u1")[::4096].sum() >= 0)
    if isinstance(value, Group):
        return 1 + sum(touch(value[key]) for key in value)
    if isinstance(value, Items):
        if not value.is_stream and (array := as_array(value)) is not None:
            return touch(array)
        return 1 + sum(map(touch, value))
    raise AssertionError(type(value))


def read_tree(path: Path):
    """Return the tree of a file as plain values."""
    with open_tree(path) as root:
        return plain(root)


def refusal(path: Path) -> str:
    """Read every value of a file and return the reason of its refusal, one line; "" if it is read."""
    try:
        with open_tree(path) as root:
            touch(root)
    except InvalidInputError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) <= 600, text
        return text
    return ""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Return a process that has imported everything, with little memory, and forks a child for each request."""
    words = [sys.executable, "-m", __name__]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _in_child(action: str, path: Path) -> dict[str, Any]:
    """Return the result of an action in a process of its own, which needs at most MAX_MEMORY_BYTES more than it has."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps([action, str(path)]), file=server.stdin, flush=True)
    found = json.loads(server.stdout.readline())
    assert isinstance(found, dict), found
    assert found["grown"] < MAX_MEMORY_BYTES, f"{found['grown'] >> 20} MiB"
    return found


def refusal_in_child(path: Path) -> str:
    """Return what `refusal` returns in a process of its own, within MAX_MEMORY_BYTES and MAX_SECONDS.

    Seconds are those of the processor, which other programs slow down, so that one of three times decides.
    """
    for _ in range(3):
        found = _in_child("read", path)
        if found["seconds"] < MAX_SECONDS:
            return str(found["text"])
    raise AssertionError(found["seconds"])


def refusal_of_convert(path: Path) -> str:
    """Convert a file in a process of its own within MAX_MEMORY_BYTES, and return its refusal."""
    return str(_in_child("convert", path)["text"])


def _convert(path: Path) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(text):
        assert main(["convert", str(path), str(path.with_suffix(".zarr"))]) == 3, text.getvalue()
    return text.getvalue()


def _measured(action: Callable[[Path], str], path: Path) -> dict[str, object]:
    """Return what an action says, its processor time and its memory; the process ends if it waits for two minutes."""
    signal.alarm(120)
    before, begin = peak_of_all(), _seconds_of_all()
    text = action(path)
    return {"text": text, "seconds": _seconds_of_all() - begin, "grown": peak_of_all() - before}


def _seconds_of_all() -> float:
    """Return the processor time of this process and of its children, running and ended, such as that of HDF5."""
    own = psutil.Process()
    return sum(own.cpu_times()[:4]) + sum(sum(child.cpu_times()[:2]) for child in own.children())


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a change: some bytes, a piece left out or repeated, or an end cut off."""
    kind, begin = rng.randrange(6), rng.randrange(len(data))
    end = min(len(data), begin + rng.choice((1, 2, 4, 8, 100, 5_000)))
    if kind == 0:
        return data[:begin]
    if kind == 1:
        return data[:begin] + data[end:]
    if kind == 2:
        return data[:end] + data[begin:]
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        out[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(out)


def check_mutations(data: bytes, path: Path, count: int, seed: int = 0) -> int:
    """Read `count` changed files at `path` and return how many were refused, each in one line."""
    rng = random.Random(seed)
    refused = 0
    for _ in range(count):
        path.write_bytes(mutated(data, rng))
        refused += bool(refusal(path))
    return refused


def read_values(*paths: Path) -> None:
    """Read every value of files, which all stay open until the last is read."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            touch(stack.enter_context(open_tree(path)))


def check_time(small: Path, large: Path, clock: Callable[[], float] = time.process_time) -> None:
    """Check that reading four times as much takes at most 1.3 times as long as reading the small file four times.

    This finds what grows with the square of the input from a tenth of the small file's time on: 0.9 + 4 x 0.1. Both sides
    hold the same number of objects, because more objects than the caches of a busy processor keep take longer.
    """
    gc.collect()
    with frozen_garbage():  # as in a conversion: other objects of this process are not scanned
        assert_within(1.3, partial(read_values, large), partial(read_values, *[small] * 4), clock=clock)


def peak_of_all() -> int:
    """Return the memory that this process needed at most, and that of its largest child."""
    return max(peak_bytes(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)


if __name__ == "__main__":
    for line in sys.stdin:
        name, file = json.loads(line)
        print(
            json.dumps(in_fork(partial(_measured, {"read": refusal, "convert": _convert}[name], Path(file)))),
            flush=True,
        )
