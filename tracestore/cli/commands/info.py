"""Print the properties of a store.

Example: tracestore info store.zarr --json
"""

import argparse

import tracestore
from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser
from tracestore.words import format_size, plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add_shared(parser, "store")


def run(args: argparse.Namespace, output: Output) -> None:
    """Print the properties of a store."""
    with tracestore.open(args.store) as store:
        info, provenance = store.info(), store.provenance
    output.print_json(info)
    del info["provenance"]
    for name, value in info.items() if not args.json else ():
        if name == "bytes":
            value = f"{value:,} ({format_size(value)})"
        elif name in ("attention_layout", "attention_dtype", "lens") and value is None:
            value = "none"
        elif isinstance(value, list):
            value = ", ".join(value)
        elif name == "lens":
            value = f"{plural(value['num_tokens'], 'token')}, {value['dtype']}, norm {value['norm']}"
        elif isinstance(value, dict):
            value = ", ".join(f"{key} ({field['direction']})" for key, field in value.items()) or None
        elif isinstance(value, int) and not isinstance(value, bool):
            value = f"{value:,}"
        output.info(f"{name:17} {'unknown' if value is None else value}")
    for text in map(str, provenance or ("unknown",)) if not args.json else ():
        output.info(f"{'provenance':17} {text}")
