"""tracestore info."""

import argparse

import tracestore
from tracestore.console import Output, Parser, format_size


def add_arguments(parser: Parser) -> None:
    parser.epilog = "Example: tracestore info store.zarr --json"
    parser.add_argument("store", metavar="STORE")


def run(args: argparse.Namespace, output: Output) -> int:
    with tracestore.open(args.store) as store:
        info = store.info()
    if args.json:
        output.print_json(info)
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
