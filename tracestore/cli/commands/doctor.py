"""Check versions, processor, memory, limits and disk of this machine, with advice.

Example: tracestore doctor --folder /data
"""

import argparse
from itertools import groupby
from pathlib import Path

from tracestore.cli.machine import run_checks
from tracestore.console import Output, Parser


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--folder", type=Path, default=".", metavar="DIR", help="folder for stores")


def run(args: argparse.Namespace, output: Output) -> None:
    """Check this machine and print the results by topic."""
    results = list(run_checks(args.folder))
    output.print_json(results)
    for topic, group in groupby(results, key=lambda result: result.topic) if not args.json else ():
        output.info(topic)
        for result in group:
            output.info(f"  {result.name:18} {result.value}")
            if result.advice:
                output.info(f"  {'':18} advice: {result.advice}")
