"""Test what all commands share: usage errors in one line, help with an example, JSON output."""

import argparse
import dataclasses
import json
import re
import subprocess
from typing import Literal, get_args, get_origin

import pytest

import tracestore
from tests.helpers import ROOT, command, make_traces, run_cli, write_pickle, write_scores
from tests.train.runs import FAST, ONLY, write_labeled
from tracestore import cli
from tracestore.cli import COMMANDS
from tracestore.cli.flags import option_names
from tracestore.cli.help import OPTION_GROUPS
from tracestore.convert.options import ConvertOptions
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.errors import UsageError
from tracestore.experiment.train_options import TrainOptions
from tracestore.extract.questions import FACTS
from tracestore.train.config import StepOptions, TrainConfig

# `completion` prints a shell script and has no --json.
WITH_JSON = [name for name in COMMANDS if name != "completion"]
USAGE_ERRORS = {
    "inof s.zarr": "did you mean info?",
    "s.zarr": "invalid choice",
    "info": "the following arguments are required: STORE",
    "inspect": "the following arguments are required: SRC",
    "inspect nowhere": "nowhere: no such file or folder",
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
    "plan s.zarr --gnn-hiden 64": "did you mean --gnn-hidden?",  # codespell:ignore hiden
    "score s.zarr": "the following arguments are required: --scores",
    "report s.zarr --otput x.html": "the following arguments are required: --output",  # codespell:ignore otput
    "-- convert a b": "COMMAND",
    "": "the following arguments are required: COMMAND",
    "train --store s.zarr --eposh 3": "did you mean --epochs?",
    "train --store nowhere.zarr": "nowhere.zarr: no such store",
    "train --store tests --no-run-lstm --no-run-gnn-det --no-run-gvae": "every model is switched off",
    "train --preprocessed-dir old": "python -m tracestore.convert old store.zarr; then: tracestore train store.zarr",
    "detectors nowhere.zarr": "nowhere.zarr: no such store",
    "benchmark nowhere.zarr": "nowhere.zarr: no such store",
    "benchmark tests --scores judge": "--scores judge: expected NAME=FILE.csv",
    "benchmark tests --detectors nowhere": "no detector nowhere, expected all, features",
    "predict --store s.zarr": "the following arguments are required: --checkpoint",
    "predict --store s.zarr --checkpoint nowhere.pt": "nowhere.pt: no such checkpoint",
    "compare results": "at least two runs",
    "extract --model m --questions nowhere.csv --out t": "nowhere.csv: no such file",
    "view s.zarr": "the following arguments are required: INDEX_OR_ID",
}


@pytest.mark.parametrize("usage", USAGE_ERRORS)
def test_usage_error_is_one_line_with_a_hint(usage):
    done = command(*usage.split(), check=2)
    assert USAGE_ERRORS[usage] in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_empty_argument_is_a_usage_error():
    assert "unrecognized arguments" in command("info", "x", "", check=2).stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_usage_and_an_example(name):
    out = command(name, "--help", check=0).stdout
    assert out.startswith(f"usage: tracestore {name}") and "Example: " in out
    assert ("--json" in out) == (name in WITH_JSON)


def test_help_lists_every_command():
    out = command("--help", check=0).stdout
    assert all(f"    {name}" in out for name in COMMANDS)
    assert command("--version", check=0).stdout == f"tracestore {tracestore.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_is_in_one_group_of_the_help(name):
    parser = cli.command_parser(name)
    names = [n for names in OPTION_GROUPS.values() for n in names.split()]
    assert len(set(names)) == len(names)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    text = parser.format_help()
    for action in shown:
        line = f"  {(action.option_strings or [action.metavar or '{'])[0]}"
        assert len(re.findall(rf"^{re.escape(line)}[ ,\nb]", text, re.MULTILINE)) == 1, (
            f"add {action.dest} to OPTION_GROUPS of tracestore/cli/help.py"
        )


def test_the_help_of_train_has_options_that_no_group_lists(monkeypatch):
    monkeypatch.setitem(OPTION_GROUPS, "training", "epochs batch_size")
    text = cli.command_parser("train").format_help()
    assert re.findall(r"^training:\n  --epochs.*\n  --lr LR .*\n\ndata:", text, re.MULTILINE | re.DOTALL)
    assert "--lr" not in cli.command_parser("plan").format_help()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("convert", ConvertOptions),
        ("train", ModelConfig),
        ("train", TrainConfig),
        ("train", TrainOptions),
        ("plan", ModelConfig),
        ("plan", StepOptions),
    ],
)
def test_an_option_is_declared_by_its_field_alone(name, options):
    actions = {action.dest: action for action in cli.command_parser(name)._actions}
    declared = [field for field in dataclasses.fields(options) if field.name in option_names(options)]
    assert len(declared) > 3
    for field in declared:
        action = actions[field.name]
        assert (action.default, action.help) == (field.default, field.metadata["text"]), field.name
        choices = next((get_args(t) for t in (field.type, *get_args(field.type)) if get_origin(t) is Literal), None)
        assert choices is None or action.choices == choices


def test_the_help_of_train_begins_with_what_most_need():
    text = command("train", "--help", check=0).stdout
    titles = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert titles == ["what", "where", "model", "training", "data", "resources", "output"]
    first = [re.findall(rf"^{title}:\n  (\S+)", text, re.MULTILINE)[0] for title in titles]
    assert first == ["STORE", "--output", "--edge-features", "--epochs", "--score", "--device", "--logger"]


OTHER_SPELLINGS = {
    "info --store S": "info S",
    "info --store=S --json": "info S --json",
    "merge --store A --store B C": "merge A B C",
    "view --store S 3 --save t.png": "view S 3 --output t.png",
    "train --store S --output-dir D --epochs 3": "train S --output D --epochs 3",
    "train --epochs 3 --store S": "train S --epochs 3",
    "predict --checkpoint c.pt --store S": "predict S --checkpoint c.pt",
    "benchmark --store A --output-dir D": "benchmark A --output D",
    "extract --model m --questions q --out D": "extract --model m --questions q --output D",
    "inspect d --write l.toml": "inspect d --output l.toml",
    "detectors --store S": "detectors S",
    "push --store S USER/NAME": "push S USER/NAME",
}


@pytest.mark.parametrize("other", OTHER_SPELLINGS)
def test_both_spellings_are_the_same(other):
    """The help shows one of them."""
    words, shown = other.split(), OTHER_SPELLINGS[other].split()
    parser = cli.command_parser(words[0])
    assert vars(parser.parse_args(words[1:])) == vars(parser.parse_args(shown[1:]))
    hidden = {word.partition("=")[0] for word in words} - set(shown) - {"S", "A", "B"}
    assert hidden and not any(re.search(rf"{flag}\b", parser.format_help()) for flag in hidden)


def test_a_flag_of_a_store_needs_a_value():
    done = command("info", "--store", check=2)
    assert "arguments are required: STORE" in done.stderr and done.stderr.count("\n") == 1


def two_values(action):
    """Return two words that an option accepts, or none if there are none."""

    def is_valid(word):
        try:
            return action.type is None or action.type(word) is not None
        except (argparse.ArgumentTypeError, ValueError, UsageError):
            return False

    return [*filter(is_valid, action.choices or ("1", "2", "0/2", "1/2", "1MiB", "2MiB", "lstm_solo", "gvae_lstm"))][:2]


def test_an_option_of_one_file_name_or_list_refuses_two():
    """Both may be meant, and one would have no effect. Of numbers and choices the last one counts."""
    refused, accepted = set(), set()
    for name in COMMANDS:
        for action in cli.command_parser(name)._actions:
            takes_one = action.option_strings and action.nargs != 0 and not isinstance(action, argparse._AppendAction)
            if takes_one and len(words := two_values(action)) == 2:
                flag = action.option_strings[0]
                try:
                    cli.command_parser(name).parse_args([f"{flag}={word}" for word in words])
                except UsageError as error:
                    (refused if f"{flag}" in str(error) and "found two values" in str(error) else accepted).add(flag)
    assert {"--scores", "--output", "--models", "--layers", "--ids", "--checkpoint", "--name", "--shard"} <= refused
    assert {"--seed", "--epochs", "--attention", "--memory-budget", "--score-threshold", "--device"} <= accepted
    parsed = cli.command_parser("score").parse_args(["--scores=a.csv", "s.zarr", "--scores=a.csv"])
    assert str(parsed.scores) == "a.csv"
    assert cli.command_parser("train").parse_args(["--seed=1", "s.zarr", "--seed=2"]).seed == 2


def test_a_switch_is_not_both_on_and_off():
    switches = [
        (name, action.option_strings)
        for name in COMMANDS
        for action in cli.command_parser(name)._actions
        if isinstance(action, argparse.BooleanOptionalAction)
    ]
    assert ("train", ["--probe", "--no-probe"]) in switches
    for name, (on, off) in switches:
        for words in ((on, off), (off, on)):
            with pytest.raises(UsageError, match=f"{on}/{off}: found {words[0]} and {words[1]}, expected one"):
                cli.command_parser(name).parse_args(["s.zarr", *words])
            parser = cli.command_parser(name)
            for word in words:  # a parser may be used again
                parser.parse_args(["s.zarr", word, word])


@pytest.mark.long
@pytest.mark.parametrize("name", ["train", "extract"])
def test_scripts_have_the_options_of_their_commands(name):
    script = ROOT / "tools" / f"{name}.py"
    assert len(script.read_text().splitlines()) < 10
    done = run_cli(f"tools/{name}.py", "--help", check=0)
    assert done.stdout.startswith(f"usage: python tools/{name}.py ")
    expected = command(name, "--help").stdout
    flags = re.compile(r"^  (--[\w-]+)", re.MULTILINE)
    assert flags.findall(done.stdout) == flags.findall(expected) != []


@pytest.mark.long
@pytest.mark.parametrize("program", [["-m", "tracestore"], ["-m", "tracestore.convert"], ["tools/train.py"]])
def test_usage_error_of_a_program_is_one_line(program):
    done = run_cli(*program, "--no-such-flag", check=2)
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_script_completes_commands(shell, tmp_path):
    text = command("completion", shell, check=0).stdout
    assert all(name in text for name in COMMANDS)
    assert all(flag in text for flag in ("--memory-budget", "--attention", "--checkpoint", "--questions"))
    if shell == "bash":
        (tmp_path / "completion").write_text(text)
        ask = "COMP_WORDS=(tracestore ver) COMP_CWORD=1; _shtab_tracestore; echo ${COMPREPLY[@]}"
        done = subprocess.run(
            ["bash", "-c", f"source {tmp_path}/completion; {ask}"], capture_output=True, text=True, check=True
        )
        assert done.stdout == "verify\n"


@pytest.mark.long
def test_every_command_prints_one_json_document(store_path, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / "cache"))
    scores = write_scores(tmp_path / "scores.csv", {"q0": 0.5})
    write_pickle(tmp_path / "a.pkl", make_traces(3))
    command("convert", tmp_path / "a.pkl", tmp_path / "planned.zarr", "--plan", tmp_path / "tasks.json", check=0)
    labeled = write_labeled(tmp_path / "labeled.zarr")
    run = ["--store", labeled, *FAST, *ONLY["lstm_solo"], "--epochs", 1, "--no-probe"]
    command("train", *run, "--output-dir", tmp_path / "other", check=0)
    usages = {
        "train": [*run, "--output-dir", tmp_path / "run"],
        "predict": [
            *("--checkpoint", tmp_path / "run/lstm_solo/best.pt", "--store", labeled),
            *("--output", tmp_path / "predicted.csv"),
        ],
        "compare": [tmp_path / "run", tmp_path / "other"],
        "extract": [
            *("--model", tiny_model, "--questions", FACTS, "--limit", 1, "--max-new-tokens", 2),
            *("--out", tmp_path / "extracted"),
        ],
        "convert": [tmp_path / "a.pkl", tmp_path / "new.zarr"],
        "work": [tmp_path / "tasks.json"],
        "status": [tmp_path / "tasks.json"],
        "commit": [tmp_path / "tasks.json"],
        "inspect": [tmp_path / "a.pkl"],
        "info": [store_path],
        "verify": [store_path],
        "clean": [store_path],
        "lint": [store_path],
        "score": [store_path, "--scores", scores],
        "view": [store_path, "q3"],
        "report": [store_path, "--output", tmp_path / "r.html"],
        "doctor": [],
        "merge": [store_path, tmp_path / "merged.zarr"],
        "subset": [store_path, tmp_path / "part.zarr", "--segments", "0"],
        "export": [store_path, tmp_path / "out"],
        "plan": [store_path, "--model", "lstm_solo"],
        "detectors": [store_path],
        "benchmark": [
            *(labeled, "--detectors", "probe_last", "--folds", 2, "--workers", 1),
            *("--output-dir", tmp_path / "benchmark"),
        ],
    }
    # serve runs until interrupted: tests/serve; push and pull need a server: tests/hub.
    assert sorted({*usages, "serve", "push", "pull"}) == sorted(WITH_JSON)
    for name, words in usages.items():
        done = command(name, *words, "--json", check=1 if name == "lint" else 0)
        assert json.loads(done.stdout), name
        assert "Traceback" not in done.stderr


def test_readme_lists_every_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text or f"`tracestore {name}`" in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_has_a_help_text_with_its_default(name):
    parser = cli.command_parser(name)
    shown = {
        a: a.help and parser._get_formatter()._expand_help(a) for a in parser._actions if a.help != argparse.SUPPRESS
    }
    assert [a.dest for a, text in shown.items() if not text] == []
    required = {a for g in parser._mutually_exclusive_groups if g.required for a in g._group_actions}
    with_value = [a for a in shown if a.option_strings and a.nargs != 0 and not a.required and a not in required]
    assert [a.dest for a in with_value if "default" not in shown[a]] == []


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (("info", "nowhere.zarr"), "UsageError", 2),
        (("info", "nowhere.zarr", "--no-such-flag"), "UsageError", 2),
        (("info", "{damaged}"), "CorruptStoreError", 3),
        (("convert", "{folder}/bad.pkl", "{folder}/new.zarr"), "InvalidInputError", 3),
    ],
)
def test_error_with_json_is_a_document(tmp_path, words, kind, code):
    (tmp_path / "bad.pkl").write_bytes(b"no pickle")
    damaged = tmp_path / "s.zarr"
    write_pickle(tmp_path / "t.pkl", make_traces(1))
    command("convert", tmp_path / "t.pkl", damaged, check=0)
    for manifest in (damaged / "manifest").glob("*"):
        manifest.write_bytes(b"{")
    done = command(*(word.format(damaged=damaged, folder=tmp_path) for word in words), "--json", check=code)
    error = json.loads(done.stdout)["error"]
    assert (error["type"], error["exit_code"]) == (kind, code)
    assert done.stderr.endswith(f": {error['message']}\n")
