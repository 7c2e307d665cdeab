"""Sources of which each is a task of its own, and workers that fail."""

import contextlib
import subprocess
import sys

import pytest

from tests.helpers import make_trace, write_pickle
from tracestore.convert import cutting

PROGRAM = """
import os, signal, sys
from tracestore import cli, errors
from tracestore.cli.commands import work
write = work.write_task
def fail(task, **options):
    if task.number == NUMBER:
        FAILURE
    return write(task, **options)
work.write_task = fail
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """Make a task of each source."""
    monkeypatch.setattr(cutting, "MIN_BYTES", 1)


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data")


def write_data(folder):
    """Write six sources of four traces each; return the folder."""
    folder.mkdir()
    for k in range(6):
        traces = [make_trace(10 * k + i, tokens=3 + i) | {"rare": i, "temperature": 0.5} for i in range(4)]
        write_pickle(folder / f"batch_{k}{'.pkl.gz' if k % 2 else '.pkl'}", traces)
    return folder


@pytest.fixture
def failing(monkeypatch):
    """Return a context in which each worker that gets the task of a number runs a statement; it yields the workers."""
    run = subprocess.Popen

    @contextlib.contextmanager
    def patched(number, statement):
        started, program = [], PROGRAM.replace("NUMBER", str(number)).replace("FAILURE", statement)

        def start(words, **options):
            started.append(run([sys.executable, "-c", program, *words[3:]], **options))
            return started[-1]

        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", start)
            yield started

    return patched
