"""List the detectors that tracestore benchmark compares, with what they need and cost.

With a store, the last column tells whether the store has the fields that the detector reads. A package adds
detectors through entry points of the group tracestore.detectors.

Example: tracestore detectors store.zarr
"""

import argparse

from tracestore.cli.flags import require_existing
from tracestore.console import Output, Parser
from tracestore.store.io.files import parse_location


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", metavar="STORE", nargs="?", type=parse_location, help="check what this store lacks")


def run(args: argparse.Namespace, output: Output) -> None:
    """Print one line for each detector, and then its description, cost and reference."""
    require_existing(args.store)
    from tracestore.detectors.apart import list_detectors
    from tracestore.store.read.store import open_store

    rows = list_detectors(None if args.store is None else open_store(args.store))
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        if "error" in row:
            output.info(f"{row['name']:{width}}  {row['error']}")
            continue
        output.info(f"{row['name']:{width}}  {row['kind']:9}  {row['summary']}")
        needs = f"reads {', '.join(row['fields']) or 'lengths'}; layers: {row['layers']}"
        details = [
            needs,
            row["cost"],
            row["reference"],
            row["source"],
            "" if row["package"] == "tracestore" else row["package"],
        ]
        output.info(f"{'':{width}}  {'; '.join(filter(None, details))}")
        for missing in row.get("missing", []):
            output.info(f"{'':{width}}  cannot run: {missing}")
    output.print_json(rows)
