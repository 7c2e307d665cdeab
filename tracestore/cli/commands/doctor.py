"""The command `tracestore doctor`."""

import argparse
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from tracestore.console import Output, Parser
from tracestore.doctor import run_checks


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.description = "Check versions, processor, memory, limits and disk of this machine, with advice."
    parser.epilog = "Example: tracestore doctor --folder /data"
    parser.add_argument("--folder", default=".", metavar="DIR", help="folder for stores (default: .)")


def run(args: argparse.Namespace, output: Output) -> int:
    """Check this machine and print the results by topic."""
    results = list(run_checks(Path(args.folder)))
    output.print_json([asdict(result) for result in results])
    if args.json:
        return 0
    for topic, group in groupby(results, key=lambda result: result.topic):
        output.info(topic)
        for result in group:
            output.info(f"  {result.name:18} {result.value}")
            if result.advice:
                output.info(f"  {'':18} advice: {result.advice}")
    return 0
