"""Run exports in children of one process, and kill them.

python -m tests.export.interrupted MODULE... reads a JSON line for each case, {"words": arguments of tracestore, "after": seconds
until SIGKILL or null}, and writes {"code": exit code or minus the signal, "seconds": duration}. The children inherit
all imports.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time

from tests.helpers import ROOT
from tracestore import cli
from tracestore.cli.commands import export  # noqa: F401 - imported before the forks
from tracestore.export import parquet_file  # noqa: F401


def run(words, after):
    """Run a command in a child. Return its exit code, or minus the signal that ended it, and its duration."""
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        os._exit(cli.main(words))
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.monotonic() - begin


class Exports:
    """The process that runs the exports; it imports further modules before the first one."""

    def __init__(self, *modules):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.export.interrupted", *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def run(self, *words, after=None):
        """Run one command; see `run`."""
        case = {"words": ["export", *map(str, words)], "after": after}
        print(json.dumps(case), file=self._process.stdin, flush=True)
        found = json.loads(self._process.stdout.readline())
        return found["code"], found["seconds"]

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait(timeout=60)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for text in sys.stdin:
        case = json.loads(text)
        code, seconds = run(case["words"], case["after"])
        print(json.dumps({"code": code, "seconds": seconds}), flush=True)
