"""Detectors of other packages: whatever they do is a row of the table, and hinders no other detector."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.detectors.plugins import install
from tests.detectors.published.conftest import write_published
from tests.helpers import ROOT, command
from tests.machine import is_running, wait_until
from tests.tiers import long
from tracestore.benchmark.run import BenchmarkOptions, run_benchmark
from tracestore.detectors import registry
from tracestore.detectors.apart import run_apart

CONTROLS = {"length", "group_rate", "probe_prompt", "mean_logprob"}
HEAD = """
import contextlib, ctypes, os, signal, sys, threading
import numpy as np
from norm_detector import NormDetector

class Bad(NormDetector):
    '''A detector.'''
"""
# What a detector does, as the body of its module, and what the table reports.
BEHAVIORS = {
    "exits at import": ("sys.exit(3)", "it called sys.exit(3)"),
    "exits at import without code": ("sys.exit()", "it called sys.exit()"),
    "interrupts at import": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "ends at import": ("os._exit(0)", "its process ended with exit code 0 and without a result"),
    "crashes at import": ("ctypes.string_at(0)", "its process was killed by SIGSEGV"),
    "exits in fit": ("def fit(self, *_): sys.exit(7)", "it called sys.exit(7)"),
    "ends in fit": ("def fit(self, *_): os._exit(0)", "its process ended with exit code 0 and without a result"),
    "ends in score": ("def score(self, *_): os._exit(5)", "its process ended with exit code 5 and without a result"),
    "crashes in fit": ("def fit(self, *_): ctypes.string_at(0)", "its process was killed by SIGSEGV"),
    "aborts": ("def fit(self, *_): os.abort()", "its process was killed by SIGABRT"),
    "is killed": ("def fit(self, *_): os.kill(os.getpid(), 9)", "was killed by SIGKILL; if memory ran out"),
    "is terminated": ("def fit(self, *_): os.kill(os.getpid(), 15)", "its process was killed by SIGTERM"),
    "interrupts": ("def fit(self, *_): raise KeyboardInterrupt", "KeyboardInterrupt"),
    "interrupts itself": ("def fit(self, *_): signal.raise_signal(2)", "KeyboardInterrupt"),
    "raises an error": ("def fit(self, *_): 1 / 0", "ZeroDivisionError: division by zero (BAD_detector.py, line 8)"),
    "raises a base exception": (
        "class Odd(BaseException): pass\n    def fit(self, *_): raise self.Odd('a\\x1b[31mb')", r"Odd: a\x1b[31mb",
    ),
    "runs out of memory": ("def fit(self, *_): raise MemoryError('much')", "MemoryError: much"),
    "reserves too much": ("def fit(self, *_): self.x = np.ones(1 << 50)", "MemoryError: Unable to allocate"),
    "recurses": ("def fit(self, *_): return self.fit()", "RecursionError"),
    "raises an error without text": (
        "class Odd(Exception):\n        def __str__(self): raise ValueError\n    def fit(self, *_): raise self.Odd",
        "Odd: no message",
    ),
    "returns another shape": ("def score(self, store, indices): return np.zeros(1)", "returned the shape (1,)"),
    "returns texts": ("def score(self, store, indices): return ['high'] * len(indices)", "could not convert string"),
    "returns nothing": ("def score(self, *_): return None", "returned the shape ()"),
    "chooses a text with control characters": (
        "chosen = {'layer\\x1b': 'a\\x1b[2Jb', 'x': np.float32(1), 'y': np.zeros(2), 'z': object}", None,
    ),
    "returns NaN": ("def score(self, store, indices): return np.full(len(indices), np.nan)", None),
    "prints without end for a while": (
        "def fit(self, *a):\n        for _ in range(300): print('\\x1b[2J' + 'x' * 100_000)\n"
        "        return super().fit(*a)", None,
    ),
    "prints and ends": (
        "def fit(self, *_):\n        print('assertion \\x1b[31m failed', flush=True)\n        os._exit(1)",
        r"exit code 1 and without a result; its last output: assertion \x1b[31m failed",
    ),
    "leaves a process": (
        "def fit(self, *a):\n        if not os.fork(): signal.pause()\n        return super().fit(*a)", None,
    ),
    "leaves a process and ends": (
        "def fit(self, *a):\n        if not os.fork(): signal.pause()\n        os._exit(0)", "ended with exit code 0",
    ),
    "leaves a process and a part of an answer": (
        "def fit(self, *a):\n        if not os.fork(): signal.pause()\n        for k in range(3, 64):\n"
        "            with contextlib.suppress(OSError): os.write(k, bytes(3))\n        os._exit(0)",
        "ended with exit code 0",
    ),
    "leaves a thread": (
        "def fit(self, *a):\n        threading.Thread(target=signal.pause).start()\n        return super().fit(*a)", None,
    ),
    "reads its input": ("def fit(self, *a): return super().fit(*a) if sys.stdin.read() == '' else None", None),
    "closes every file": ("def fit(self, *_): os.closerange(0, 256); os._exit(0)", "exit code 0 and without a result"),
    "has no fields": ("fields = 7", "TypeError: 'int' object is not iterable"),
    "has another kind": ("kind = 'magic'", "kind: found 'magic', expected one of"),
    "has an unknown field": ("fields = ('nowhere',)", "found field 'nowhere'"),
    "is no detector": ("\nBad = np.float64", "is a float64, expected a tracestore"),
}  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return write_published(tmp_path / "s.zarr")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Return a function that installs a detector with this body."""

    def make(body, name="bad", module="bad_detector"):
        at_import = body.startswith(("sys.", "raise", "os.", "ctypes.", "\n"))
        site = install(tmp_path / f"site-{module}", f"{name} = {module}:Bad", f"{module}-package")
        text = f"{HEAD}\n{body}\n" if at_import else f"{HEAD}    {body}\n"
        (site / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(site))
        registry.registry.cache_clear()
        return site

    yield make
    registry.registry.cache_clear()


def run(path, out, *names, **options):
    return run_benchmark([path], out, BenchmarkOptions(names, folds=2, **options), lambda _: None)


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_what_a_detector_does_is_a_row(path, tmp_path, plugin):
    names = {f"bad{k}": kind for k, kind in enumerate(BEHAVIORS)}
    sites = {name: plugin(BEHAVIORS[kind][0], name, f"{name}_detector") for name, kind in names.items()}
    out = tmp_path / "out"
    words = ("--detectors", ",".join(names), "--folds", 2, "--workers", 1, "--output-dir", out)
    done = command("benchmark", path, *words, check=1)
    (entry,) = json.loads((out / "benchmark.json").read_text())["stores"].values()
    assert done.stderr == "" and set(entry["detectors"]) >= CONTROLS
    assert {*entry["detectors"], *entry["skipped"]} == {*names, *CONTROLS}
    # The list imports each package in a process of its own: only those that fail then stay.
    others = ("has no fields", "has another kind", "is no detector")
    at_import = {name for name, kind in names.items() if "import" in kind or kind in others}
    for name in names.keys() - at_import:
        sys.path.remove(str(sites[name]))
    registry.registry.cache_clear()
    table, listed = (out / "table.txt").read_text(), command("detectors", check=0).stdout
    for name, kind in names.items():
        reported = BEHAVIORS[kind][1] and BEHAVIORS[kind][1].replace("BAD", name)
        if reported is None:
            assert name in entry["detectors"], (kind, entry["skipped"].get(name))
            continue
        assert reported in entry["skipped"].get(name, ""), kind
        (row,) = [line for line in table.splitlines() if line.startswith(f"not run: {name}: ")]
        assert reported in row and reported in done.stdout
        if name in at_import:
            assert any(f"{name}_detector-package: " in line and reported in line for line in listed.splitlines()), kind
    for text in (done.stdout, table, listed):
        assert "\x1b" not in text and "xxx" not in text


@pytest.mark.long
def test_two_workers_give_the_same_table(path, tmp_path, plugin):
    plugin(BEHAVIORS["crashes in fit"][0], "one", "one")
    plugin(BEHAVIORS["reads its input"][0], "two", "two")
    found = [run(path, tmp_path / f"out{n}", "one", "two", "probe_mean", workers=n) for n in (1, 3)]
    for results in found:
        (entry,) = results["stores"].values()
        assert set(entry["detectors"]) == {"two", "probe_mean", *CONTROLS} and "SIGSEGV" in entry["skipped"]["one"]
    assert (tmp_path / "out1/scores.csv").read_bytes() == (tmp_path / "out3/scores.csv").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("name", ["a\x1b[31mb", *long("../up", "a b", "a/b", "é", "x" * 200, "\u202ename")])
def test_names_are_checked_and_escaped(path, tmp_path, plugin, name):
    plugin("pass", name)
    (found,) = set(registry.registry()) - {n for n, e in registry.registry().items() if not e.is_foreign}
    listed = command("detectors", check=0).stdout
    assert "expected letters, digits and the characters" in listed and "\x1b" not in listed and "\u202e" not in listed
    (entry,) = run(path, tmp_path / "out", found, save_detectors=True)["stores"].values()
    assert "expected letters, digits" in entry["skipped"][found] and set(entry["detectors"]) == CONTROLS
    assert not list(tmp_path.glob("*.pt")) and not list(tmp_path.glob("out/*.pt"))


@pytest.mark.long
def test_texts_of_a_detector_are_escaped(plugin):
    plugin("'''A \x1b[31mred\x07 one.'''\n    cost = 'much\\x1b]0;title\\x07'\n    reference = 'a\\nb'")
    done = command("detectors", check=0)
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout and r"much\x1b]0;title\x07; a b" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(("ending", "workers"), [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGKILL, 1)])
def test_a_detector_ends_with_its_benchmark(path, tmp_path, plugin, ending, workers):
    """Ctrl-C ends the command with 130, and the process of a detector that does not end with it; so does a kill."""
    site = plugin(
        f"def fit(self, *_):\n        open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "        while True: signal.pause()"
    )
    words = [sys.executable, "-m", "tracestore", "benchmark", path, "--detectors", "bad", "--workers", workers]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    with subprocess.Popen(
        [*map(str, words), "--output-dir", str(tmp_path / "out")], env=environment, cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        wait_until(lambda: process.poll() is not None or ((pid := tmp_path / "pid").exists() and pid.read_text()))
        assert process.poll() is None, process.stderr.read()
        if ending == signal.SIGINT:
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60) == 130 and process.stderr.read().count("\n") == 1
        else:
            process.kill()
        wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


@pytest.mark.long
def test_predict_with_a_detector_of_another_package(path, tmp_path, plugin):
    state = "state = lambda self: {'layer': self.layer, 'sign': self.sign}\n    load_state = lambda self, s: self.__dict__.update(s)"
    site = plugin(state)
    out = tmp_path / "out"
    words = ("--folds", 2, "--workers", 1, "--save-detectors", "--output-dir", out)
    command("benchmark", path, "--detectors", "bad", *words, check=0)
    predict = ("predict", "--checkpoint", out / "checkpoints/bad.pt", "--store", path, "--output", tmp_path / "p.csv")
    assert "60" in command(*predict, check=0).stdout
    for body, reported in (
        (f"{state}\n    def score(self, *_): os._exit(0)", "exit code 0 and without a result"),
        ("sys.exit(0)", "it called sys.exit(0)"),
        (f"{state}\n    def score(self, *_): return np.zeros(3)", "returned the shape (3,)"),
    ):
        at_import = body.startswith("sys")
        (site / "bad_detector.py").write_text(f"{HEAD}\n{body}\n" if at_import else f"{HEAD}    {body}\n")
        (tmp_path / "p.csv").unlink(missing_ok=True)
        done = command(*predict, check=2)
        assert reported in done.stderr and done.stderr.count("\n") == 1 and not (tmp_path / "p.csv").exists()


@pytest.mark.long
def test_results_of_another_process_are_those_of_this_one():
    assert run_apart("numpy:arange", 5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(Exception, match="ValueError: cannot reshape"):
        run_apart("numpy:reshape", np.zeros(3), (2, 2))


@pytest.mark.parametrize("as_json", [False, *long(True)])
@pytest.mark.long
def test_a_log_tells_what_runs(path, tmp_path, plugin, monkeypatch, as_json):
    """Lines go to standard output, with --json to standard error; no bar where standard error is no terminal."""
    plugin("def fit(self, *a):\n        __import__('time').sleep(0.2)\n        return super().fit(*a)")
    monkeypatch.setattr("tracestore.cli.commands.benchmark._LOG_INTERVAL_S", 0.5)
    words = ["--detectors", "bad", "--workers", 1, "--output-dir", tmp_path / "out", *["--json"] * as_json]
    done = command("benchmark", path, *words, check=0)
    log, other = (done.stderr, done.stdout) if as_json else (done.stdout, done.stderr)
    lines = [line for line in log.splitlines() if "now bad" in line]
    assert len(lines) >= 3 and re.fullmatch(r"\d+ %, \d+ of \d+ steps, .*, now bad", lines[0]), log
    assert [line for line in log.splitlines() if re.fullmatch(r"length: \d+\.\d s", line)] and "now" not in other
    assert json.loads(other)["stores"] if as_json else other == ""
