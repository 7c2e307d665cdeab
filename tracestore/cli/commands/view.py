"""Show one trace: texts, attention and norms of hidden states.

Example: tracestore view store.zarr tc_1234 --layer 12 --output trace.png
"""

import argparse
from pathlib import Path

import tracestore
from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser, non_negative_int
from tracestore.store.io.destinations import check_output_file
from tracestore.store.io.files import parse_location
from tracestore.trace_view import PICTURES, View, as_json, find_trace, render_terminal, save_picture


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("store", metavar="STORE", help="folder or URL of a store")
    add("trace", metavar="INDEX_OR_ID", help="a question id, or an index if no trace has that id")
    add("--sample", type=non_negative_int, default=0, metavar="N", help="which of several answers")
    add("--layer", type=int, metavar="N", help="number of the layer in the store, from 0 (default: the middle layer)")
    add("--head", type=int, metavar="N", help="head of the attention (default: the mean of the heads)")
    add(
        "--output",
        "--save",
        type=Path,
        metavar="FILE",
        help="save a picture (.png, .pdf or .svg) instead of printing (default: print)",
    )
    add_shared(parser, "--overwrite")


def run(args: argparse.Namespace, output: Output) -> None:
    """Print a trace, or save a picture of it."""
    if args.output is not None:
        check_output_file(args.output, PICTURES, overwrite=args.overwrite, inputs=[parse_location(args.store)])
    with tracestore.open(args.store) as store:
        view = View.read(store, find_trace(store, args.trace, args.sample), args.layer, args.head)
        if args.output is not None:
            save_picture(view, args.output)
            output.info(f"{args.output}: attention and hidden states of trace {view.trace.index}")
        if args.json:
            output.print_json(as_json(view))
        elif args.output is None:
            output.info("\n".join(render_terminal(view)))
