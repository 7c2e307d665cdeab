"""Test that `main(argv)` leaves the process unchanged, and that a program configures its own process."""

import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import tomllib
import warnings

import pytest
import torch

from tests.conftest import FROZEN_GARBAGE
from tests.helpers import ROOT, command, run_cli
from tests.train.runs import FAST, ONLY, write_labeled
from tracestore import cli, process

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)


def process_state():
    return {
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "filters": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "frozen": gc.get_freeze_count(),
        "switch interval": sys.getswitchinterval(),
        "garbage collection": gc.get_threshold(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "streams": (sys.stdout, sys.stderr),
    }


@pytest.mark.long
def test_command_with_argv_leaves_the_process_unchanged(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "reuse_freed_memory", lambda *_, **__: pytest.fail("changed the allocator"))
    monkeypatch.setattr(process, "frozen_garbage", FROZEN_GARBAGE)
    gc.unfreeze()  # as in the process of a user
    store = write_labeled(tmp_path / "labeled.zarr")
    train = ["train", "--store", store, *FAST, *ONLY["lstm_solo"], "--epochs", 1, "--output-dir", tmp_path / "r"]
    train[train.index("--num-threads") + 1] = torch.get_num_threads() + 1
    command("train", "--help")  # imports may change the environment once
    importlib.import_module("sklearn")
    before = process_state()

    for code, words in (
        (0, ["convert", folder, tmp_path / "s.zarr"]),
        (0, ["info", tmp_path / "s.zarr"]),
        (2, ["info", tmp_path / "nowhere.zarr"]),
        (2, ["convert"]),
        (0, train),
        (0, ["predict", "--checkpoint", tmp_path / "r/lstm_solo/best.pt", "--store", store, "--num-threads", 1,
             "--output", tmp_path / "s.csv"]),
        (0, ["plan", store, "--model", "lstm_solo", "--num-threads", torch.get_num_threads() + 1]),
    ):  # fmt: skip
        command(*words, check=code)
        assert process_state() == before, words
    gc.freeze()


def test_program_configures_the_allocator(folder, tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(process, "reuse_freed_memory", lambda *words, **names: calls.append((words, names)))
    monkeypatch.setattr(sys, "argv", ["tracestore", "convert", str(folder), str(tmp_path / "s.zarr")])
    assert cli.main() == 0
    assert calls == [((512 << 20,), {"num_arenas": 1})]
    monkeypatch.setattr(sys, "argv", ["tracestore", "train", "--store", str(tmp_path / "none.zarr")])
    assert cli.main() == 2
    assert calls[1:] == [((), {})]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's allocator alone is configured")
def test_freed_memory_is_used_again_until_memory_runs_out():
    code = (
        "import resource, torch; from tracestore import process\n"
        "process.reuse_freed_memory()\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for size in range(20, 30): torch.ones(size << 18)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "print(faults() > 5000, min(faults() for _ in range(5)) < 500)\n"  # the system may take pages away
        "process.return_freed_memory()\n"
        "print(faults() > 5000)"
    )
    assert run_cli("-c", code, check=0).stdout == "True True\nTrue\n"


@pytest.mark.long
def test_command_imports_no_heavy_libraries(store_path):
    code = (
        "import sys; from tracestore.cli import main; assert main(sys.argv[1:]) == 0\n"
        "heavy = {'torch', 'zarr', 'sklearn', 'scipy', 'matplotlib', 'transformers', 'bokeh', 'distributed'}\n"
        "print(sorted(m for m in sys.modules if m in heavy or m.startswith(('tracestore.cli.commands.', 'tracestore.train'))),"
        " file=sys.stderr)"
    )
    assert run_cli("-c", code, "--help", check=0).stderr == "[]\n"
    assert run_cli("-c", code, "info", store_path, check=0).stderr == "['tracestore.cli.commands.info']\n"


@pytest.mark.long
@pytest.mark.parametrize(
    "program", [("-m", "tracestore"), ("-c", "import sys, tracestore.cli; sys.exit(tracestore.cli.main())")]
)
@pytest.mark.parametrize("words", ["info {store}", "info {store} --json", "verify nowhere.zarr"])
def test_closed_output_ends_a_program_silently(store_path, program, words):
    """No process reads standard output, or the line of an error on standard error."""
    read, write = os.pipe()
    os.close(read)
    streams = {"stderr" if "nowhere" in words else "stdout": write}
    words = words.format(store=store_path).split()
    done = subprocess.run([sys.executable, *program, *words], cwd=ROOT, **{"stderr": subprocess.PIPE, **streams})
    os.close(write)
    assert done.returncode == 128 + signal.SIGPIPE and not done.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("words", ["info {store}", "info nowhere.zarr", "nothing"])
def test_command_with_argv_leaves_closed_output_as_it_is(store_path, number, words):
    """The output is that of the host, which may write on or handle the error."""
    code = f"""
import os, sys
from tracestore.cli import main
closed = os.fstat({number}).st_ino
code = main(sys.argv[1:])
os.write(REPORT, f"{{code}} {{os.fstat({number}).st_ino == closed}}".encode())
os._exit(0)
"""
    read, write = os.pipe()
    os.close(read)
    report, into = os.pipe()
    is_error, words = "{store}" not in words, words.format(store=store_path).split()
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {("stdout", "stderr")[number - 1]: write}
    code = code.replace("REPORT", str(into))
    subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, pass_fds=[into], **streams)
    os.close(write), os.close(into)
    with open(report) as file:
        code, is_same = file.read().split()
    assert is_same == "True" and (code == str(128 + signal.SIGPIPE)) == (is_error == (number == 2))


def test_a_closed_connection_is_an_error_of_a_program():
    """Workers that are killed and servers that close a connection do not end the program that writes to them."""
    code = """
import os, sys
from tracestore import cli, console, process
process.configure_program()

def command():
    read, write = os.pipe()
    os.close(read)
    os.write(write, b"x")

sys.exit(console.run_command("program", command))
"""
    done = run_cli("-c", code, check=1)
    assert "BrokenPipeError" in done.stderr and done.stderr.count("\n") == 1


def test_program_ends_with_its_threads_callbacks_and_output_but_clears_no_modules():
    code = """
import atexit, threading, time
from tracestore.process import exit_ignoring_sigint

class Kept:
    def __del__(self):
        print("cleared")

kept = Kept()
atexit.register(print, "callback")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
exit_ignoring_sigint(3)
"""
    ended = run_cli("-c", code, check=3)
    assert ended.stdout == "thread\ncallback\n" and not ended.stderr


@pytest.mark.long
def test_the_console_script_ends_as_the_module_does(tmp_path):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["tracestore"].partition(":")
    script = (
        f"import sys; sys.argv = ['tracestore', *sys.argv[1:]]; from {module} import {function} as run; sys.exit(run())"
    )
    for words, code in ((["--version"], 0), (["info"], 2), (["info", tmp_path / "nowhere.zarr"], 2)):
        of_script, of_module = (
            run_cli("-c", script, *words, check=code),
            run_cli("-m", "tracestore", *words, check=code),
        )
        assert (of_script.stdout, of_script.stderr) == (of_module.stdout, of_module.stderr)


def test_a_profiler_gets_the_end_of_a_program(tmp_path):
    run_cli("-m", "cProfile", "-o", tmp_path / "profile", "-m", "tracestore", "--version", check=0)
    assert (tmp_path / "profile").stat().st_size
