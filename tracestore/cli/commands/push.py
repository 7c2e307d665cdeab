"""Upload a store to the Hugging Face Hub, with a data set card. A second run uploads what has changed.

Example: tracestore push store.zarr USER/NAME --license cc-by-4.0
"""

import argparse

from tracestore.console import Output, Parser, Progress
from tracestore.words import format_size, plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", metavar="STORE", help="a folder")
    parser.add_argument("repo_id", metavar="REPO_ID", help="the data set, USER/NAME; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create a private data set")
    parser.add_argument("--revision", metavar="BRANCH", help="branch, created if it does not exist (default: main)")
    text = "identifier of the license on the Hub, such as mit or cc-by-4.0 (default: that of the data set)"
    parser.add_argument("--license", metavar="LICENSE", help=text)


def run(args: argparse.Namespace, output: Output) -> None:
    """Upload the store and print a summary."""
    # Imported here, because the library is an extra.
    from tracestore.hub.push import push_store

    options = {"private": args.private, "revision": args.revision, "license": args.license}
    with Progress(output, "files") as progress:
        report = push_store(args.store, args.repo_id, **options, progress=progress.update)
    output.print_json(report)
    output.info(
        f"{report.url}: generation {report.generation}, {plural(report.num_traces, 'trace')}, {plural(report.num_files, 'file')}, "
        f"{format_size(report.num_bytes)}, commit {report.commit}"
    )
