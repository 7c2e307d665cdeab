"""Browse a store on this machine: search traces, and view attention, hidden states and predictions.

The server listens on 127.0.0.1 only.

Example: tracestore serve store.zarr --results results
"""

import argparse
from pathlib import Path

import tracestore
from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser, port
from tracestore.serve import make_server
from tracestore.words import plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    text = "output folder of tracestore train or benchmark, or a .csv file of scores; may be given several times (default: none)"
    add_shared(parser, "store", "--score", "--score-threshold")
    parser.add_argument("--results", type=Path, metavar="PATH", action="append", default=[], help=text)
    parser.add_argument("--port", type=port, default=0, metavar="N", help="default: any free port")


def run(args: argparse.Namespace, output: Output) -> None:
    """Serve a store until the command is interrupted."""
    with tracestore.open(args.store, score=args.score) as store:
        server = make_server(store, args.results, port=args.port, score_threshold=args.score_threshold)
        output.print_json({"store": str(args.store), "url": server.url, "port": server.port})
        if not args.json:
            output.info(f"{args.store}: {plural(len(store), 'trace')} at {server.url}")
            output.info("The address contains a secret and works on this machine only. Press Ctrl-C to stop.")
        try:
            server.run()
        except KeyboardInterrupt:
            output.info("stopped")
