"""The command `tracestore report`."""

import argparse
from pathlib import Path

import tracestore
from tracestore.console import Output, Parser, Progress
from tracestore.report import write_report


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Write an HTML page about a store: lengths, scores, classes, sizes, sources, samples and the findings of "
        "lint. The page needs no network and runs no scripts."
    )
    parser.epilog = "Example: tracestore report store.zarr --output store.html"
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--output", required=True, metavar="FILE", help="the page, .html")
    parser.add_argument(
        "--score-threshold", type=float, default=0.5, metavar="T", help="threshold between the classes (default: 0.5)"
    )
    parser.add_argument("--no-lint", action="store_true", help="skip lint, which reads every value")


def run(args: argparse.Namespace, output: Output) -> int:
    """Write the page."""
    with tracestore.open(args.store) as store, Progress(output) as progress:
        write_report(
            store,
            Path(args.output),
            score_threshold=args.score_threshold,
            lint=not args.no_lint,
            progress=progress.update_traces,
        )
    output.print_json({"store": str(args.store), "output": str(args.output)})
    if not args.json:
        output.info(f"{args.output}: open it in a browser")
    return 0
