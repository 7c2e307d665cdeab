"""The `tracestore` command.

Each command is a module of this package with `add_arguments(parser)` and `run(args, output)`. It is
imported when its command runs, so that a command pays for nothing that only others use.
"""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import tracestore
from tracestore import console, process
from tracestore.console import Output, Parser
from tracestore.errors import UsageError

# The order of the help. Each name is a module of this package.
COMMANDS = {
    "convert": "files of traces into a store",
    "info": "what a store holds",
    "verify": "check every byte",
    "lint": "look for values that training would stumble over",
    "score": "join or replace scores without touching a trace",
    "view": "one trace: texts, attention, norms of hidden states",
    "report": "a store as one HTML page",
    "serve": "a store in the browser of this machine",
    "merge": "traces of several stores into one",
    "subset": "some traces of a store into another one",
    "export": "a store into pickles or .pt files",
    "plan": "what training takes: memory, time an epoch, the batch that fits",
    "train": "train detectors of hallucinated answers from a store",
    "predict": "hallucination scores of every trace by a trained detector",
    "compare": "test the difference between several trainings",
    "extract": "record the traces of a language model that answers questions",
    "doctor": "versions, processor, memory, limits and disk, with advice",
    "completion": "what a shell needs to complete these words",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tracestore` with the words `argv` and return the exit code.

    Without `argv` the words are those of the process, and settings of the process may change; with
    `argv` signal handlers, warning filters and the allocator stay as they were.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        process.configure_program()
    if words and words[0] in COMMANDS:
        return _run(words[0], f"tracestore {words[0]}", words[1:], is_program=argv is None)

    def command() -> int:
        parser = make_parser()
        parser.parse_args(words[:1])  # help, version or an unknown command: ends here
        parser.error("the first word must be a COMMAND")

    return console.run_command("tracestore", command)


def run_script(name: str, prog: str) -> NoReturn:
    """End the process with the exit code of one command, run with the words of the process."""
    process.configure_program()
    process.exit_ignoring_sigint(_run(name, prog, sys.argv[1:], is_program=True))


def _run(name: str, prog: str, words: list[str], *, is_program: bool) -> int:
    # Under torchrun every rank finds the same wrong usage: the first of each machine prints it.
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"

    def command() -> int:
        module, parser = _command(name, Parser(prog=prog))
        with contextlib.nullcontext() if speaks else contextlib.redirect_stderr(None):
            args = parser.parse_args(words)
        args.prog, args.words, args.is_program = prog, words, is_program
        try:
            return int(module.run(args, Output(args.json)))
        except UsageError as error:
            if speaks:
                raise
            return error.exit_code

    return console.run_command(prog, command)


def _command(name: str, parser: Parser) -> tuple[ModuleType, Parser]:
    """Return the module of a command, and `parser` with the command's arguments."""
    module = importlib.import_module(f"tracestore.cli.commands.{name}")
    module.add_arguments(parser)
    if name == "completion":
        parser.set_defaults(json=False)
    else:
        parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return module, parser


def command_parser(name: str) -> Parser:
    """Return the parser of one command."""
    return _command(name, Parser(prog=f"tracestore {name}"))[1]


def make_parser(*, with_arguments: bool = False) -> Parser:
    """Return the parser of `tracestore`: the names of the commands, with their arguments on demand."""
    parser = Parser(prog="tracestore", description="Stores of language-model traces.")
    parser.add_argument("--version", action="version", version=f"tracestore {tracestore.__version__}")
    commands: argparse._SubParsersAction[Parser] = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if with_arguments:
            _command(name, command)
    return parser
