"""Set a named score and groups by question_id (and by sample, if that is a column).

Example: tracestore score store.zarr --scores judged.csv --name judge --version 2
"""

import argparse
from pathlib import Path

from tracestore.cli.flags import add_flags, add_shared, values
from tracestore.console import Output, Parser
from tracestore.convert.options import ON_CONFLICT, ConvertOptions
from tracestore.ingest.score_files import COLUMN_OPTIONS
from tracestore.ingest.scores import read_scores
from tracestore.ingest.stored_values import update_scores
from tracestore.words import plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    text = "CSV, TSV, JSON, JSON Lines, .npy or .npz file with the columns question_id and a score"
    parser.add_argument("--scores", type=Path, required=True, metavar="FILE", help=text)
    add_flags(parser, ConvertOptions, *COLUMN_OPTIONS)
    parser.add_argument("--name", help="name of the score (default: the store's default score)")
    parser.add_argument("--source", metavar="TEXT", help="where the values come from (default: file and column)")
    parser.add_argument("--version", metavar="TEXT", help="version of the source (default: none)")
    text = "make it the score that training and other commands use; the first score of a store is in any case"
    parser.add_argument("--default", action="store_true", help=text)
    text = "a stored score or group whose cell is empty in the file: refuse, keep or remove it"
    parser.add_argument("--on-conflict", choices=ON_CONFLICT, default="error", help=text)
    add_shared(parser, "store")


def run(args: argparse.Namespace, output: Output) -> None:
    """Replace the scores and print a summary."""
    scores = read_scores(args.scores, **values(args, COLUMN_OPTIONS), name=args.name)
    output.info(f"scores: {args.scores}, column {scores.column}")
    report = update_scores(
        args.store,
        scores,
        name=args.name,
        source=args.source,
        version=args.version,
        is_default=args.default,
        on_conflict=args.on_conflict,
    )
    output.print_json(report)
    output.info(
        f"{plural(report.num_updated, 'trace')} updated, {report.num_scored:,} of {report.num_traces:,} "
        f"with the score {report.score}; {plural(report.num_scores_without_trace, 'score')} without a trace"
    )
    for line in filter(None, (*report.notes, report.labels, report.unlabeled)):
        output.info(line)
    if report.num_labels_unused:
        output.info(f"{plural(report.num_labels_unused, 'label')} of the file not used: only `convert` stores labels")
    if report.default_score != report.score:
        output.info(f"the default score is {report.default_score}; --default makes {report.score} the default")
