"""Write an HTML page about a store.

The page shows classes, scores, fields, distributions, example traces with attention and tokens, the findings of
lint, provenance and sizes. It is one file that needs no network.

Example: tracestore report store.zarr --output store.html
"""

import argparse
from pathlib import Path

import tracestore
from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser, Progress
from tracestore.store.io.destinations import check_output_file
from tracestore.store_page import write_report


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add_shared(parser, "stores", "--allow-mixed-provenance", "--overwrite", "--score", "--score-threshold")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the page, .html; replaces one of tracestore"
    )
    parser.add_argument("--no-lint", action="store_true", help="skip lint, which reads every value")


def run(args: argparse.Namespace, output: Output) -> None:
    """Write the page."""
    check_output_file(args.output, (".html",), overwrite=args.overwrite, inputs=args.stores)
    options = {"score_threshold": args.score_threshold, "lint": not args.no_lint}
    mixed = args.allow_mixed_provenance
    with (
        tracestore.open(args.stores, score=args.score, allow_mixed_provenance=mixed) as store,
        Progress(output) as progress,
    ):
        write_report(store, args.output, **options, progress=progress.update)
    output.print_json({"store": str(store.path), "output": str(args.output)})
    output.info(f"{args.output}: open it in a browser")
