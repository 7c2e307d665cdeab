"""Print how many tasks of a planned conversion are written, the rate and the time left.

Example: tracestore status plan.json
"""

import argparse
from pathlib import Path

from tracestore.console import Output, Parser
from tracestore.tasks.task_files import read_tasks, status_of
from tracestore.words import format_size, plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="tasks that convert --plan has written")


def run(args: argparse.Namespace, output: Output) -> None:
    """Print the status."""
    found = status_of(read_tasks(args.file))
    output.print_json(found)
    rate = "" if found.bytes_per_s is None else f", {format_size(found.bytes_per_s)}/s since the plan"
    left = "" if not found.seconds_left else f", {found.seconds_left:,.0f} s left"
    output.info(
        f"{found.num_written:,} of {plural(found.num_tasks, 'task')} written, "
        f"{format_size(found.bytes_written)} of {format_size(found.num_bytes)}{rate}{left}"
    )
    if found.missing:
        output.info(f"not written: {', '.join(map(str, found.missing[:20]))}{', ...' * (len(found.missing) > 20)}")
