"""Look for data-quality issues. Exit code 0: none. 1: issues found. 3: the store is damaged.

Example: tracestore lint store.zarr --json
"""

import argparse

from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser, Progress
from tracestore.store.maintain.lint import lint_store
from tracestore.words import plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add_shared(parser, "store", "--score", "--score-threshold")


def run(args: argparse.Namespace, output: Output) -> int:
    """Check the values of a store, and print one line for each kind of issue."""
    with Progress(output) as progress:
        report = lint_store(
            args.store, score=args.score, score_threshold=args.score_threshold, progress=progress.update
        )
    output.print_json(report)
    for kind, count in report.counts.items():
        listed = [f for f in report.findings if f.kind == kind]
        first, names = listed[0], [f"{f.index} ({f.question_id})" for f in listed[:3] if f.index is not None]
        where = f"{plural(count, 'trace')}, the first {', '.join(names)}" if count > 1 else f"trace {', '.join(names)}"
        where = f" {where}:" if names else ""
        output.info(f"{first.severity}: {kind}:{where} {first.found}. {first.advice[:1].upper()}{first.advice[1:]}.")
    if not report.counts:
        output.info(f"clean: {plural(report.num_traces, 'trace')}")
    return 1 if report.counts else 0
