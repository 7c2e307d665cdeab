"""What every command shares: wrong usage is one line with a hint, exit code 2, help with an example."""

import json
import subprocess

import pytest

from tests.helpers import ROOT, make_traces, run_cli, write_pickle, write_scores

COMMANDS = [
    "convert",
    "info",
    "verify",
    "lint",
    "score",
    "view",
    "report",
    "serve",
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
    "-- convert a b": "invalid choice: '--'",
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
    assert out.startswith(f"usage: tracestore {command}") and "--json" in out and "Example: " in out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell, tmp_path):
    text = run_cli("-m", "tracestore", "completion", shell, check=0).stdout
    assert all(command in text for command in COMMANDS) and "--memory-budget" in text and "--attention" in text
    if shell == "bash":
        (tmp_path / "completion").write_text(text)
        ask = "COMP_WORDS=(tracestore ver) COMP_CWORD=1; _shtab_tracestore; echo ${COMPREPLY[@]}"
        done = subprocess.run(
            ["bash", "-c", f"source {tmp_path}/completion; {ask}"], capture_output=True, text=True, check=True
        )
        assert done.stdout == "verify\n"


def test_json_of_every_command(store_path, tmp_path):
    """One JSON document on standard output, whatever else is said."""
    scores = write_scores(tmp_path / "scores.csv", {"q0": 0.5})
    write_pickle(tmp_path / "a.pkl", make_traces(3))
    usages = {
        "convert": [tmp_path / "a.pkl", tmp_path / "new.zarr"],
        "info": [store_path],
        "verify": [store_path],
        "lint": [store_path],
        "score": [store_path, "--scores", scores],
        "view": [store_path, "q3"],
        "report": [store_path, "--output", tmp_path / "r.html"],
        "doctor": [],
        "merge": [store_path, tmp_path / "merged.zarr"],
        "subset": [store_path, tmp_path / "part.zarr", "--segments", "0"],
        "export": [store_path, tmp_path / "out"],
        "plan": [store_path, "--model", "lstm_solo"],
    }
    assert sorted({*usages, "serve"}) == sorted(COMMANDS)  # serve goes on: tests/serve
    for command, words in usages.items():
        done = run_cli("-m", "tracestore", command, *words, "--json", check=1 if command == "lint" else 0)
        assert json.loads(done.stdout), command
        assert "Traceback" not in done.stderr


def test_every_command_is_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{command}`" in text or f"`tracestore {command}`" in text for command in COMMANDS)
