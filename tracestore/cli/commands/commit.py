"""Add what the tasks of a planned conversion have written to its store.

Example: tracestore commit plan.json --wait 60
"""

import argparse
from pathlib import Path

from tracestore.console import Output, Parser, float_where
from tracestore.tasks.committing import commit_tasks
from tracestore.tasks.task_files import read_tasks, wait_for


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="tasks that convert --plan has written")
    text = "how long to wait for tasks that are not written, or that the file system shows late (default: 0)"
    parser.add_argument(
        "--wait", type=float_where(lambda s: s >= 0, "seconds"), metavar="SECONDS", default=0, help=text
    )


def run(args: argparse.Namespace, output: Output) -> None:
    """Commit the tasks and print a summary."""
    tasks = read_tasks(args.file)
    wait_for(tasks, args.wait)
    report = commit_tasks(tasks, output=output)
    output.print_json(report)
    if report is None:
        output.info(f"{args.file}: no task, because the store had all sources")
