"""tracestore merge."""

import argparse
from dataclasses import asdict

import tracestore
from tracestore.console import Output, Parser, traces_done
from tracestore.store.format.schema import CODECS
from tracestore.store.io.files import local_dir
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.maintain.merge import MergeReport, merge_stores


def add_arguments(parser: Parser) -> None:
    parser.description = "Traces that are there already are counted and left out; run again, it continues."
    parser.epilog = "Example: tracestore merge one.zarr two.zarr all.zarr"
    parser.add_argument("stores", nargs="+", metavar="STORE")
    add_destination(parser)


def add_destination(parser: Parser) -> None:
    """Add the arguments of the store that merge and subset write."""
    parser.add_argument("dst", metavar="DST", help="the store to make or to add to")
    parser.add_argument("--codec", choices=CODECS, help="compression of DST (none)")
    parser.add_argument("--overwrite", action="store_true", help="replace DST")


def run(args: argparse.Namespace, output: Output) -> int:
    progress, on_traces = traces_done(output)
    with map_os_errors(local_dir(args.dst)):
        report = merge_stores(args.stores, args.dst, codec=args.codec, overwrite=args.overwrite, progress=on_traces)
    progress.clear()
    return say_copied(args, output, report)


def say_copied(args: argparse.Namespace, output: Output, report: MergeReport) -> int:
    """Says what a merge or a subset did."""
    with tracestore.open(args.dst) as store:
        num_traces = len(store)
    output.print_json({"store": str(args.dst), "num_traces": num_traces, **asdict(report)})
    if not args.json:
        output.info(
            f"{args.dst}: {report.num_traces_new:,} traces added, {num_traces:,} in all; "
            f"{report.num_duplicates:,} were there already"
        )
        if report.num_scores_filled:
            output.info(f"{report.num_scores_filled:,} of those had no score and got one")
        if report.num_scores_differing:
            output.info(f"{report.num_scores_differing:,} of those have another score, which stays")
    return 0
