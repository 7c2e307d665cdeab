"""Print a completion script for a shell.

Example: tracestore completion bash > ~/.local/share/bash-completion/completions/tracestore
"""

import argparse

from tracestore.console import Output, Parser


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")


def run(args: argparse.Namespace, output: Output) -> None:
    """Print the completion script of a shell."""
    import shtab

    from tracestore.cli import make_parser

    output.info(shtab.complete(make_parser(with_arguments=True), args.shell))
