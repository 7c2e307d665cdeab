"""Print what files hold, and the layouts that they may have. Nothing is stored.

Example: tracestore inspect dumps/ --write layout.toml
"""

import argparse
from pathlib import Path

from tracestore.console import Output, Parser
from tracestore.ingest.propose import propose_folder
from tracestore.store.io.fsio import map_os_errors


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("src", nargs="+", type=Path, metavar="SRC", help="files, or folders of them")
    text = "write the layout; several are written as comments, of which one is to be chosen (default: print only)"
    parser.add_argument("--write", type=Path, metavar="FILE.toml", help=text)


def run(args: argparse.Namespace, output: Output) -> None:
    """Look at the files and print the layouts that they may have."""
    proposal = propose_folder(args.src)
    output.print_json(
        {
            "tree": proposal.tree(),
            "layout": None if proposal.layout is None else proposal.layout.to_entries(),
            "candidates": [
                {"layout": candidate.layout.to_entries(), "gives": candidate.describe()}
                for candidate in proposal.candidates
            ],
        }
    )
    if not args.json:
        for line in proposal.tree():
            output.info(line)
        output.info(proposal.message())
    if args.write is not None:
        with map_os_errors(args.write.parent):
            args.write.write_text(proposal.to_toml(), encoding="utf-8")
