"""Run conversions under the shim, each case in a forked child, and check the store that each leaves.

python -m tests.fault_injection.driver SHIM DATA WORK reads cases as JSON lines and writes one JSON line
for each: {"wrong": message}, or {"wrong": null} if the case passed. The children inherit all imports.
"""

import contextlib
import ctypes
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

import tracestore
from tests.helpers import read_all, tree_bytes
from tracestore import cli
from tracestore.cli.commands import convert  # noqa: F401 - imported before the forks
from tracestore.convert import cutting
from tracestore.errors import UsageError
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write import writer

ACTIONS = {"pass": 0, "kill": 1, "fail": 2, "short": 3, "full": 4}
# Expected exit codes of a conversion by the error that one of its calls returned.
CODES = {errno.EIO: {1}, errno.ENOSPC: {4}, errno.EINTR: {0}}


def small_commits(patch, commit_bytes=1):
    """Make writers commit after every source."""
    patch.setattr(cutting, "MIN_BYTES", commit_bytes)
    patch.setitem(writer.StoreWriter.__init__.__kwdefaults__, "commit_bytes", commit_bytes)


def run_convert(arguments):
    """Run a conversion in this process with its output discarded. Return the exit code."""
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        return cli.main(["convert", *map(str, arguments)])


class Driver:
    """Conversions of one folder under the shim, compared with one that was not interrupted."""

    def __init__(self, library, data, work):
        self.library = ctypes.CDLL(library)
        self.work, self.store = Path(work), Path(work) / "s.zarr"
        self.arguments = [data, self.store]
        self.commit_log = Path(work) / "commits"
        small_commits(pytest.MonkeyPatch())
        self.run(None, fork=False)
        self.expected = tree_bytes(self.store)
        with tracestore.open(self.store) as store:
            self.truth = {t["question_id"]: t for t in read_all(store)}

    def run(self, case, fork=True, after=None):
        """Convert. Return the exit code, or minus the signal number.

        `after` is the number of seconds until SIGKILL. None sends no signal.
        """
        self.commit_log.write_bytes(b"")
        if not fork:
            return self._convert(case)
        child = os.fork()
        if child == 0:
            code = 70
            try:
                out = os.open(self.work / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1), os.dup2(out, 2)
                code = self._convert(case)
                sys.stdout.flush(), sys.stderr.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if after is not None:
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _convert(self, case):
        original = writer.StoreWriter.commit
        log = os.open(self.commit_log, os.O_WRONLY | os.O_APPEND)

        def logged(own, **keywords):
            original(own, **keywords)
            os.write(log, f"{own.manifest.num_traces}\n".encode())

        writer.StoreWriter.commit = logged
        case = case or {"action": "pass"}
        calls = os.open(self.work / "calls", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if case.get("log") else -1
        if case["action"] != "random":
            what = ACTIONS[case["action"]]
            self.library.faults_arm(
                os.fsencode(self.store), ctypes.c_long(case.get("at", 0)), what, case.get("error", 0), calls
            )
        try:
            return run_convert(self.arguments)
        finally:
            self.library.faults_disarm()
            writer.StoreWriter.commit = original
            os.close(log)

    def committed(self):
        """Return the number of traces of the last commit that returned."""
        lines = self.commit_log.read_text().split()
        return int(lines[-1]) if lines else 0

    def check_store(self):
        """Return a description of the first error in the store, or None if it holds all committed traces."""
        try:
            store = tracestore.open(self.store)
        except UsageError as error:
            return None if self.committed() == 0 else f"does not open: {error}"
        with store:
            found = read_all(store)
            if len(found) < self.committed():
                return f"{len(found)} traces of {self.committed()}"
            for trace in found:
                if trace != self.truth[trace["question_id"]]:
                    return f"{trace['question_id']} has other values"
        damaged = verify_store(self.store, num_threads=1).damaged
        return f"damaged: {damaged}" if damaged else None

    def run_case(self, case):
        """Run a case in an empty store. Return a description of the first error, or None."""
        shutil.rmtree(self.store, ignore_errors=True)
        if case["action"] == "random":
            generator = random.Random(case["seed"])
            code = self.run(case, after=generator.random() * case["span_s"])
        else:
            code = self.run(case)
        output = (self.work / "output").read_text()
        allowed = {"kill": {-signal.SIGKILL}, "random": {-signal.SIGKILL, 0}, "short": {0}, "full": {0, 4}}.get(
            case["action"], CODES.get(case.get("error"), {0})
        )
        if code not in allowed:
            return f"exit {code}: {output}"
        if code > 0 and ("unexpected" in output or output.count("\n") != 1):
            return f"expected one line of a known error: {output}"
        if code == 4 and "needed" not in output:
            return f"the message lacks the space needed: {output}"
        wrong = self.check_store()
        if wrong:
            return wrong
        if code != 0 and case.get("rerun", True):
            code = self.run(None)
            if code != 0:
                return f"rerun: exit {code}: {(self.work / 'output').read_text()}"
        elif code != 0:
            return None
        found = tree_bytes(self.store)
        if found != self.expected:
            names = [n for n in {*found, *self.expected} if found.get(n) != self.expected.get(n)]
            return f"files differ from those of an uninterrupted run: {sorted(names)[:5]}"
        return None

    def answer(self, case):
        """Run a case and return the JSON object that describes its result."""
        if case.get("log"):
            shutil.rmtree(self.store, ignore_errors=True)
            begin = time.perf_counter()
            self.run(case)
            return {"calls": (self.work / "calls").read_text().splitlines(), "span_s": time.perf_counter() - begin}
        return {"wrong": self.run_case(case)}


def main():
    """Answer cases from standard input until it ends."""
    driver = Driver(*sys.argv[1:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(driver.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
