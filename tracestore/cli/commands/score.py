"""The command `tracestore score`."""

import argparse
from dataclasses import asdict
from pathlib import Path

from tracestore.console import Output, Parser
from tracestore.ingest.scores import read_scores, update_scores
from tracestore.store.format.labels import DIRECTIONS


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.description = "Set scores and groups by question_id (and by sample, if that is a column)."
    parser.epilog = "Example: tracestore score store.zarr --scores new_scores.csv"
    parser.add_argument("--scores", required=True, metavar="CSV", help="file with the columns question_id and a score")
    parser.add_argument("--score-column", metavar="NAME", help="column of the scores")
    parser.add_argument(
        "--score-direction", choices=DIRECTIONS, help="meaning of a high score (default: by the column's name)"
    )
    parser.add_argument(
        "--group-column", metavar="NAME", help="column of groups, which splits keep together (default: group)"
    )
    parser.add_argument("store", metavar="STORE")


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the command and return the exit code."""
    scores = read_scores(Path(args.scores), args.score_column, args.group_column, args.score_direction)
    report = update_scores(args.store, scores)
    output.print_json(asdict(report))
    if not args.json:
        output.info(
            f"{report.num_updated:,} traces updated, {report.num_scored:,} of {report.num_traces:,} "
            f"have a score; {report.num_scores_without_trace:,} scores belong to no trace"
        )
        output.info(report.labels)
    return 0
