"""What every command shares: wrong usage is one line with a hint, exit code 2, help with an example."""

import pytest

from tests.helpers import ROOT, run_cli

COMMANDS = [
    "convert",
    "info",
    "verify",
    "lint",
    "score",
    "view",
    "report",
    "doctor",
    "merge",
    "subset",
    "export",
    "plan",
]
WRONG = {
    "inof s.zarr": "did you mean info?",
    "s.zarr": "invalid choice",
    "info": "the following arguments are required: STORE",
    "info s.zarr --jsno": "did you mean --json?",
    "info nowhere.zarr": "nowhere.zarr: no such store",
    "info tests": "tests: not a store",
    "verify s.zarr --quik": "did you mean --quick?",
    "convert": "the following arguments are required: SRC, DST",
    "convert nowhere s.zarr": "nowhere: no such file or folder",
    "convert . s.zarr --memory-budget much": "expected one like 512MiB",
    "convert . s.zarr --workers 0": "expected a whole number of at least 1",
    "export s.zarr out --format pk": "did you mean pkl?",
    "subset s.zarr d.zarr": "one of the arguments --ids --split --segments is required",
    "subset s.zarr d.zarr --segments 3-1": "expected numbers as 0-9,20,29",
    "plan s.zarr --model lstm": "expected one of lstm_solo",
    "plan s.zarr --gnn-hiden 64": "did you mean --gnn-hidden?",
    "score s.zarr": "the following arguments are required: --scores",
    "report s.zarr --otput x.html": "the following arguments are required: --output",
    "view s.zarr": "the following arguments are required: INDEX_OR_ID",
}


@pytest.mark.parametrize("usage", WRONG)
def test_wrong_usage(usage):
    done = run_cli("-m", "tracestore", *usage.split(), check=2)
    assert WRONG[usage] in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_an_empty_word():
    assert "unrecognized arguments" in run_cli("-m", "tracestore", "info", "x", "", check=2).stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    out = run_cli("-m", "tracestore", command, "--help", check=0).stdout
    assert out.startswith(f"usage: tracestore {command}") and "--json" in out


def test_every_command_is_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{command}`" in text or f"`tracestore {command}`" in text for command in COMMANDS)
