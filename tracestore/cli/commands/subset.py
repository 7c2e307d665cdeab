"""tracestore subset."""

import argparse
from pathlib import Path

import tracestore
from tracestore.cli.commands.merge import add_destination, say_copied
from tracestore.console import Output, Parser, int_ranges, traces_done
from tracestore.store.io.files import local_dir
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.maintain.merge import subset_store
from tracestore.store.read.selection import indices_of_ids, indices_of_segments, read_ids


def add_arguments(parser: Parser) -> None:
    parser.epilog = "Example: tracestore subset store.zarr train.zarr --split train"
    parser.add_argument("store", metavar="STORE")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--ids", metavar="FILE", help="one question id a line; every sample of it")
    chosen.add_argument("--split", choices=("train", "val", "test"), help="a part of the split of tracestore train")
    chosen.add_argument("--segments", type=int_ranges, metavar="RANGES", help="traces of these segments: 0-3,7")
    parser.add_argument("--score-threshold", type=float, default=0.5, metavar="T", help="of --split (0.5)")
    parser.add_argument("--seed", type=int, default=42, help="of --split (42)")
    add_destination(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    with tracestore.open(args.store) as store:
        if args.ids is not None:
            indices = indices_of_ids(store, read_ids(Path(args.ids)))
        elif args.split is not None:
            from tracestore.evaluation.split import make_split

            split = make_split(store, store.targets(args.score_threshold), args.seed)
            indices = split.indices[args.split]
        else:
            indices = indices_of_segments(store, args.segments)
    progress, on_traces = traces_done(output)
    with map_os_errors(local_dir(args.dst)):
        report = subset_store(
            args.store, args.dst, indices, codec=args.codec, overwrite=args.overwrite, progress=on_traces
        )
    progress.clear()
    return say_copied(args, output, report)
