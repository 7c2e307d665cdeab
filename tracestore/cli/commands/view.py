"""The command `tracestore view`."""

import argparse
from pathlib import Path

import tracestore
from tracestore.console import Output, Parser, non_negative_int
from tracestore.view import View, as_json, find_trace, render_terminal, save_picture


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.description = "Show one trace: texts, attention and norms of hidden states."
    parser.epilog = "Example: tracestore view store.zarr tc_1234 --layer 12 --save trace.png"
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("trace", metavar="INDEX_OR_ID", help="a question id, or an index if no trace has that id")
    parser.add_argument(
        "--sample", type=non_negative_int, default=0, metavar="N", help="which of several answers (default: 0)"
    )
    parser.add_argument("--layer", type=int, metavar="N", help="layer of the attention (default: the middle layer)")
    parser.add_argument("--head", type=int, metavar="N", help="head of the attention (default: the mean of the heads)")
    parser.add_argument("--save", metavar="FILE", help="save a picture: .png, .pdf or .svg")


def run(args: argparse.Namespace, output: Output) -> int:
    """Print a trace, or save a picture of it."""
    with tracestore.open(args.store) as store:
        view = View.read(store, find_trace(store, args.trace, args.sample), args.layer, args.head)
        if args.save is not None:
            save_picture(view, Path(args.save))
            output.info(f"{args.save}: attention and hidden states of trace {view.trace.index}")
        if args.json:
            output.print_json(as_json(view))
        elif args.save is None:
            output.info("\n".join(render_terminal(view)))
    return 0
