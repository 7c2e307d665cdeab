"""tracestore report."""

import argparse
from pathlib import Path

import tracestore
from tracestore.console import Output, Parser, traces_done
from tracestore.report import write_report


def add_arguments(parser: Parser) -> None:
    parser.description = "Lengths, scores, classes, sizes, sources, samples and lint's findings; no network, no script."
    parser.epilog = "Example: tracestore report store.zarr --output store.html"
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--output", required=True, metavar="FILE", help="the page, .html")
    parser.add_argument("--score-threshold", type=float, default=0.5, metavar="T", help="of the classes (0.5)")
    parser.add_argument("--no-lint", action="store_true", help="do not read every value")


def run(args: argparse.Namespace, output: Output) -> int:
    progress, on_traces = traces_done(output)
    with tracestore.open(args.store) as store:
        write_report(
            store,
            Path(args.output),
            score_threshold=args.score_threshold,
            lint=not args.no_lint,
            progress=on_traces,
        )
    progress.clear()
    output.print_json({"store": str(args.store), "output": str(args.output)})
    if not args.json:
        output.info(f"{args.output}: open it in a browser")
    return 0
