"""Set scores and groups by question_id (and by sample, if that is a column).

Example: tracestore score store.zarr --scores new_scores.csv
"""

import argparse
from pathlib import Path

from tracestore.cli.flags import SCORE_FLAGS, add_flags, values
from tracestore.console import Output, Parser
from tracestore.convert.options import ConvertOptions
from tracestore.ingest.scores import read_scores, update_scores


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    text = "file with the columns question_id and a score"
    parser.add_argument("--scores", type=Path, required=True, metavar="CSV", help=text)
    add_flags(parser, ConvertOptions, SCORE_FLAGS)
    parser.add_argument("store", metavar="STORE")


def run(args: argparse.Namespace, output: Output) -> None:
    """Replace the scores and print a summary."""
    report = update_scores(args.store, read_scores(args.scores, **values(args, SCORE_FLAGS)))
    output.print_json(report)
    output.info(
        f"{report.num_updated:,} traces updated, {report.num_scored:,} of {report.num_traces:,} "
        f"have a score; {report.num_scores_without_trace:,} scores belong to no trace"
    )
    output.info(report.labels)
