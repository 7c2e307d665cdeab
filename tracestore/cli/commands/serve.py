"""The command `tracestore serve`."""

import argparse
from pathlib import Path

import tracestore
from tracestore.console import Output, Parser, port
from tracestore.serve import make_server


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Browse a store on this machine: search traces, and view attention, hidden states and predictions of "
        "detectors. The server listens on 127.0.0.1 only."
    )
    parser.epilog = "Example: tracestore serve store.zarr --results results"
    parser.add_argument("store", metavar="STORE")
    parser.add_argument(
        "--results", metavar="DIR", help="output folder of tracestore train, for predictions and curves"
    )
    parser.add_argument("--port", type=port, default=0, metavar="N", help="default: any free port")
    parser.add_argument(
        "--score-threshold", type=float, default=0.5, metavar="T", help="threshold of the labels (default: 0.5)"
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Serve a store until the command is interrupted."""
    with tracestore.open(args.store) as store:
        results = None if args.results is None else Path(args.results)
        server = make_server(store, results, port=args.port, score_threshold=args.score_threshold)
        output.print_json({"store": str(args.store), "url": server.url, "port": server.port})
        if not args.json:
            output.info(f"{args.store}: {len(store):,} traces at {server.url}")
            output.info("The address contains a secret and works on this machine only. Press Ctrl-C to stop.")
        try:
            server.run()
        except KeyboardInterrupt:
            output.info("stopped")
    return 0
