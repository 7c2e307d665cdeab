"""tracestore serve."""

import argparse
from pathlib import Path

import tracestore
from tracestore.console import Output, Parser, port
from tracestore.serve import make_server


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "Search traces, look at attention and hidden states, and at what detectors say. Answers 127.0.0.1 only."
    )
    parser.epilog = "Example: tracestore serve store.zarr --results results"
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--results", metavar="DIR", help="what tracestore train wrote: predictions and curves")
    parser.add_argument("--port", type=port, default=0, metavar="N", help="default: any that is free")
    parser.add_argument("--score-threshold", type=float, default=0.5, metavar="T", help="of the labels (0.5)")


def run(args: argparse.Namespace, output: Output) -> int:
    with tracestore.open(args.store) as store:
        results = None if args.results is None else Path(args.results)
        server = make_server(store, results, port=args.port, score_threshold=args.score_threshold)
        output.print_json({"store": str(args.store), "url": server.url, "port": server.port})
        if not args.json:
            output.info(f"{args.store}: {len(store):,} traces at {server.url}")
            output.info("The address is for this machine and carries a secret; Ctrl-C ends.")
        try:
            server.run()
        except KeyboardInterrupt:
            output.info("ended")
    return 0
