"""The command `tracestore info`."""

import argparse

import tracestore
from tracestore.console import Output, Parser, format_size


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.description = "Print the properties of a store."
    parser.epilog = "Example: tracestore info store.zarr --json"
    parser.add_argument("store", metavar="STORE")


def run(args: argparse.Namespace, output: Output) -> int:
    """Print the properties of a store."""
    with tracestore.open(args.store) as store:
        info = store.info()
    output.print_json(info)
    if args.json:
        return 0
    for name, value in info.items():
        if name == "bytes":
            value = f"{value:,} ({format_size(value)})"
        elif isinstance(value, list):
            value = ", ".join(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            value = f"{value:,}"
        output.info(f"{name:17} {'unknown' if value is None else value}")
    return 0
