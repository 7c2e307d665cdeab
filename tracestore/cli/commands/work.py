"""Read the sources of a planned conversion and write their traces into its store, which `commit` makes visible.

Example: tracestore work plan.json --shard 0/4
"""

import argparse
import re
from pathlib import Path

from tracestore.console import Output, Parser
from tracestore.store.io.fsio import map_os_errors
from tracestore.tasks.task_files import read_tasks
from tracestore.tasks.task_writing import write_task
from tracestore.words import format_size, plural


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected I/N with I from 0 to N - 1")
    return int(match[1]), int(match[2])


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="tasks that convert --plan has written")
    text = "write the tasks I, I + N, I + 2 N, ... (default: all that are not written)"
    parser.add_argument("--shard", type=_shard, metavar="I/N", default=(0, 1), help=text)


def run(args: argparse.Namespace, output: Output) -> None:
    """Write the tasks of a shard."""
    first, step = args.shard
    tasks = read_tasks(args.file)[first::step]
    receipts = []
    for task in tasks:
        with map_os_errors(Path(task.store)):
            receipts.append(write_task(task))
        output.info(f"task {task.number:,}: {plural(receipts[-1].num_traces, 'trace')}")
    num_bytes = sum(receipt.num_bytes for receipt in receipts)
    output.print_json({"tasks": len(tasks), "traces": sum(r.num_traces for r in receipts), "bytes": num_bytes})
    output.info(f"{plural(len(tasks), 'task')} written, {format_size(num_bytes)}; tracestore commit adds them")
