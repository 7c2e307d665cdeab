"""The `tracestore` command.

Each command is a module of `tracestore.cli.commands`. It is imported only if its command runs, which
keeps the start-up of the other commands short.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import NoReturn

import tracestore
from tracestore import console, process
from tracestore.cli.help import COMMANDS, CommandParser, ProgramParser
from tracestore.console import Output, Parser
from tracestore.errors import UsageError

# Commands whose steps allocate and free the same tensors again and again.
_COMPUTING = ("train", "predict", "benchmark", "plan")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tracestore` and return the exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments. Default: those of the process, which may then change settings of the process.
        With `argv`, output, signal handlers, warning filters and the allocator keep their settings.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        process.configure_program()
    if words and words[0] in COMMANDS:
        return _run(words[0], f"tracestore {words[0]}", words[1:], is_program=argv is None)

    def command() -> int:
        parser = make_parser()
        parser.parse_args(words[:1])  # exits on help, version or an unknown command
        parser.error("the first word must be a COMMAND")

    return console.run_command("tracestore", command, is_program=argv is None)


def run_script(name: str, prog: str) -> NoReturn:
    """Run one command with the arguments of the process, and exit with its exit code."""
    process.configure_program()
    process.exit_ignoring_sigint(_run(name, prog, sys.argv[1:], is_program=True))


def _run(name: str, prog: str, words: list[str], *, is_program: bool) -> int:
    # Under torchrun every rank finds the same wrong usage. Only the first rank of each machine prints it.
    prints_errors = os.environ.get("LOCAL_RANK", "0") == "0"

    def command() -> int:
        with process.imports_uncollected() if is_program else nullcontext():
            module, parser = _command(name, CommandParser(prog=prog))
        try:
            args = parser.parse_args(words)
            args.prog, args.words, args.is_program = prog, words, is_program
            if is_program and name in _COMPUTING:
                process.reuse_freed_memory()
            return module.run(args, Output(args.json)) or 0
        except UsageError as error:
            if prints_errors:
                raise
            return error.exit_code

    as_json = prints_errors and "--json" in words
    return console.run_command(prog, command, as_json=as_json, is_program=is_program)


def _command(name: str, parser: CommandParser) -> tuple[ModuleType, Parser]:
    """Return the module of a command, and `parser` with the arguments of the command."""
    module = importlib.import_module(f"tracestore.cli.commands.{name}")
    parser.command = name
    parser.description, _, parser.epilog = (module.__doc__ or "").strip().rpartition("\n\n")
    module.add_arguments(parser)
    if name == "completion":
        parser.set_defaults(json=False)
    else:
        parser.add_argument(
            "--json", action="store_true", help="print one JSON document on standard output, also for an error"
        )
    return module, parser


def command_parser(name: str) -> Parser:
    """Return the parser of one command."""
    return _command(name, CommandParser(prog=f"tracestore {name}"))[1]


def make_parser(*, with_arguments: bool = False) -> Parser:
    """Return the parser of `tracestore`, with or without the arguments of its commands."""
    parser = ProgramParser(prog="tracestore", description="Stores of language-model traces.")
    parser.add_argument("--version", action="version", version=f"tracestore {tracestore.__version__}")
    commands: argparse._SubParsersAction[CommandParser] = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if with_arguments:
            _command(name, command)
    return parser
