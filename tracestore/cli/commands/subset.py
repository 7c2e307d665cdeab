"""Copy some traces of a store into another store.

Example: tracestore subset store.zarr train.zarr --split train
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import tracestore
from tracestore.cli.commands.merge import add_destination, copy_traces
from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser, int_ranges
from tracestore.errors import UsageError, escape_unprintable
from tracestore.store.maintain.merge import MergeReport, merge_stores
from tracestore.store.maintain.selection import indices_of_segments, read_ids
from tracestore.words import plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add_shared(parser, "store", "--score", "--score-threshold")
    chosen = parser.add_mutually_exclusive_group(required=True)
    text = "file with one question id per line; copies all their samples"
    chosen.add_argument("--ids", type=Path, metavar="FILE", help=text)
    chosen.add_argument("--split", choices=("train", "val", "test"), help="a split of tracestore train")
    chosen.add_argument("--segments", type=int_ranges, metavar="RANGES", help="segments, such as 0-3,7")
    parser.add_argument("--seed", type=int, default=42, help="seed of --split")
    text = "leave traces with NaN or infinite values out of --split, as train with this option does"
    parser.add_argument("--drop-nonfinite", action="store_true", help=text)
    add_destination(parser)


def run(args: argparse.Namespace, output: Output) -> None:
    """Copy the chosen traces and print a summary."""

    def copy(**options: Any) -> MergeReport:
        with tracestore.open(args.store, score=args.score) as store:
            indices = _chosen_indices(store, args, output)
            if args.split is not None and not args.overwrite:
                _check_same_split(store.question_ids.take(indices), args.dst)
        return merge_stores([args.store], args.dst, chosen=[indices], **options)

    copy_traces(args, output, copy)


def _check_same_split(ids: Iterable[str], destination: str | Path) -> None:
    """Raise UsageError if the store to write has traces of another split: an interrupted copy has none."""
    try:
        with tracestore.open(destination) as found:
            others = sorted({*found.question_ids} - {*ids})
    except UsageError:
        return  # no store yet
    if others:
        raise UsageError(
            f"{destination}: found {plural(len(others), 'question')} of another split, such as "
            f"{escape_unprintable(others[0], 60)}; choose another store, or --overwrite"
        )


def _chosen_indices(store: tracestore.TraceStore, args: argparse.Namespace, output: Output) -> np.ndarray:
    if args.drop_nonfinite and args.split is None:
        raise UsageError("--drop-nonfinite is an option of --split")
    if args.ids is not None:
        return np.sort(store[read_ids(args.ids)].indices)
    if args.segments is not None:
        return indices_of_segments(store, args.segments)
    from tracestore.evaluation.store_split import check_finite, describe_dropped, drop_nonfinite, make_split

    targets = store.targets(args.score_threshold)
    if args.drop_nonfinite:
        targets, dropped = drop_nonfinite(store, targets)
        output.info(describe_dropped(dropped))
    split = make_split(store, targets, args.seed)
    # Training refuses such traces: that without them has another split.
    check_finite(store, np.concatenate(list(split.indices.values())))
    return split.indices[args.split]
