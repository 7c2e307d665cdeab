"""Remove files of a store that no generation or plan names: those of writers that were stopped before they committed.

Example: tracestore clean store.zarr --dry-run
"""

import argparse
import re

from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser
from tracestore.errors import UsageError
from tracestore.store.maintain.clean import DAY_S, clean_store
from tracestore.tasks.committing import files_of_plans
from tracestore.words import format_size, plural

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}


def _age(text: str) -> int:
    """Return the seconds of an age such as 7d."""
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an age like 7d, 36h, 90m or 60s")
    return int(match[1]) * _UNITS[match[2]]


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add_shared(parser, "store")
    parser.add_argument(
        "--older-than",
        type=_age,
        default="7d",
        metavar="AGE",
        help="keep what was written in this time, because a writer may be about to commit it (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    text = "no other process writes the store: accept an age below 1d, and remove plans that are not committed"
    parser.add_argument("--force", action="store_true", help=text)


def run(args: argparse.Namespace, output: Output) -> None:
    """Remove the files, and print their paths."""
    if args.older_than < DAY_S and not args.force:
        raise UsageError("--older-than below 1d may remove what a running writer is about to commit; add --force")
    kept = () if args.force else files_of_plans(args.store)
    report = clean_store(args.store, older_than_s=args.older_than, dry_run=args.dry_run, kept=kept)
    output.print_json(report)
    for path in report.removed:
        output.info(path)
    verb = "would remove" if args.dry_run else "removed"
    output.info(f"{verb} {plural(len(report.removed), 'unnamed item')}, {format_size(report.num_bytes)}")
