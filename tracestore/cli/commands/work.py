"""Read the sources of a planned conversion and write their traces into its store, which `commit` makes visible.

Example: tracestore work tasks.json --shard 0/4 --workers 2
"""

import argparse
import sys
from concurrent.futures import as_completed
from pathlib import Path

from tracestore import process
from tracestore.cli.flags import add_shard
from tracestore.console import Output, Parser, positive_int
from tracestore.convert.options import ConvertOptions
from tracestore.store.io.fsio import map_os_errors
from tracestore.tasks.task_files import read_tasks
from tracestore.tasks.task_plan import Task
from tracestore.tasks.task_writing import write_task
from tracestore.tasks.workers import LocalWorkers
from tracestore.words import format_size, parse_size, plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    text = "tasks that convert --plan has written; - reads their lines from standard input, and prints the hash of each"
    parser.add_argument("file", type=Path, metavar="FILE", help=text)
    add_shard(parser, "write the tasks I, I + N, I + 2 N, ... that are not written")
    text = "processes of this machine; a task whose process is killed is tried three times"
    parser.add_argument("--workers", type=positive_int, metavar="N", default=1, help=text)
    text = f"memory for waiting traces, of all processes (default: {format_size(ConvertOptions.memory_budget)})"
    parser.add_argument(
        "--memory-budget", type=parse_size, metavar="SIZE", default=ConvertOptions.memory_budget, help=text
    )


def run(args: argparse.Namespace, output: Output) -> None:
    """Write the tasks of a shard."""
    if args.is_program:
        process.reuse_freed_memory(args.memory_budget, num_arenas=1)
    if str(args.file) == "-":
        for line in sys.stdin:
            task = Task.from_json(line)
            _write(task, args.memory_budget)
            print(task.hash, flush=True)
        return
    first, step = args.shard
    tasks = read_tasks(args.file)
    chosen = tasks[first::step]

    def report(task: Task) -> None:
        output.info(f"task {task.number:,} is written")

    if args.workers > 1 and len(chosen) > 1:
        with LocalWorkers(args.workers, args.memory_budget) as workers:
            for future in as_completed([workers.submit(task) for task in chosen]):
                report(future.result())
    else:
        for task in chosen:
            _write(task, args.memory_budget)
            report(task)
    num_bytes = sum(task.num_bytes for task in chosen)
    output.print_json({"tasks": len(chosen), "bytes": num_bytes})
    if chosen:
        output.info(f"{plural(len(chosen), 'task')} of {format_size(num_bytes)} written; tracestore commit adds them")
    else:
        output.info(f"shard {first}/{step} has no task: the plan has {plural(len(tasks), 'task')}")


def _write(task: Task, memory_budget: int) -> None:
    with map_os_errors(Path(task.store)):
        write_task(task, memory_budget=memory_budget)
