"""Download a store from the Hugging Face Hub and verify it. A second run continues an interrupted one.

Example: tracestore pull USER/NAME store.zarr
"""

import argparse

from tracestore.console import Output, Parser, Progress
from tracestore.errors import escape_unprintable
from tracestore.words import format_size, plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("repo_id", metavar="REPO_ID", help="the data set, USER/NAME")
    parser.add_argument("dst", metavar="DST", help="the folder to create")
    parser.add_argument("--revision", help="branch, tag or commit (default: main)")


def run(args: argparse.Namespace, output: Output) -> None:
    """Download the store and print a summary."""
    # Imported here, because the library is an extra.
    from tracestore.hub.pull import pull_store

    with Progress(output, "B") as progress:
        report = pull_store(args.repo_id, args.dst, revision=args.revision, progress=progress.update)
    output.print_json(report)
    if report.ignored:
        first = escape_unprintable(", ".join(report.ignored[:3]), 200)
        output.info(
            f"left out {plural(len(report.ignored), 'file')} of the data set that the store does not name: {first}"
        )
    output.info(
        f"{report.store}: generation {report.generation}, {plural(report.num_traces, 'trace')}, {plural(report.num_files, 'file')}, "
        f"{format_size(report.num_bytes)}, verified, from commit {report.commit}"
    )
