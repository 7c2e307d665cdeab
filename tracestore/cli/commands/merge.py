"""Copy the traces of several stores into one. Running it again continues; duplicates are skipped.

Example: tracestore merge one.zarr two.zarr all.zarr
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict

import tracestore
from tracestore.cli.flags import add_shared, values
from tracestore.console import Output, Parser, Progress
from tracestore.store.format.schema import CODECS
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.io.local_folders import local_dir
from tracestore.store.io.ownership import check_store_destination
from tracestore.store.maintain.merge import MergeReport, merge_stores
from tracestore.words import plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("stores", nargs="+", metavar="STORE", help="folders or URLs of stores")
    add_destination(parser)


def add_destination(parser: Parser) -> None:
    """Add the arguments for the store that merge and subset write."""
    parser.add_argument("dst", metavar="DST", help="store to create or to append to")
    parser.add_argument("--codec", choices=CODECS, help="compression of DST (default: none)")
    parser.add_argument("--overwrite", action="store_true", help="replace DST")
    add_shared(parser, "--allow-mixed-provenance")


def run(args: argparse.Namespace, output: Output) -> None:
    """Merge stores and print a summary."""
    copy_traces(args, output, lambda **options: merge_stores(args.stores, args.dst, **options))


def copy_traces(args: argparse.Namespace, output: Output, copy: Callable[..., MergeReport]) -> None:
    """Copy traces to the store of `add_destination` with `copy`, which takes its options, and print a summary."""
    with map_os_errors(local_dir(args.dst)), Progress(output) as progress:
        check_store_destination(args.dst, overwrite=args.overwrite)
        report = copy(**values(args, ("codec", "overwrite", "allow_mixed_provenance")), progress=progress.update)
    with tracestore.open(args.dst) as store:
        num_traces = len(store)
    output.print_json({"store": str(args.dst), "num_traces": num_traces, **asdict(report)})
    output.info(
        f"{args.dst}: {plural(report.num_traces_new, 'trace')} added, {num_traces:,} in all; "
        f"{plural(report.num_duplicates, 'duplicate')}"
    )
    if report.num_scores_filled:
        output.info(f"{plural(report.num_scores_filled, 'duplicate')} without a score got one")
    for what, count in (("score", report.num_scores_differing), ("group", report.num_groups_differing)):
        if count:
            output.info(f"{plural(count, 'duplicate')} with a different {what}: the {what} of {args.dst} was kept")
    why = f"stored labels count, and the default score of {args.dst} is {report.default_score}"
    for what, counts in (("without a", report.labels_lost), ("with another", report.labels_changed)):
        for source, count in counts.items():
            output.info(f"{source}: {plural(count, 'trace')} {what} label in {args.dst}: {why}")
    if report.unlabeled is not None:
        output.info(report.unlabeled)
    if report.lens == "different":
        output.info("the lenses of the stores differ (final norm, unembedding matrix): none was copied")
