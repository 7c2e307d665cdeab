"""Print what files hold, and the layouts that they may have. Nothing is stored.

Example: tracestore inspect dumps/ --output layout.toml
"""

import argparse
from pathlib import Path, PurePath
from typing import Any

from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser
from tracestore.errors import escape_unprintable, some_of
from tracestore.ingest.builtin.claiming import claim
from tracestore.ingest.builtin.library import builtins
from tracestore.ingest.execute.claims import is_other, list_files
from tracestore.ingest.propose.leaves import observe
from tracestore.ingest.propose.proposal import Proposal, propose
from tracestore.ingest.score_files import is_named_scores
from tracestore.store.io.destinations import check_output_file
from tracestore.store.io.fsio import atomic_write, map_os_errors


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("src", nargs="+", type=Path, metavar="SRC", help="files, or folders of them")
    text = "write the layout; several are written as comments, of which one is to be chosen (default: print only)"
    parser.add_argument("--output", "--write", type=Path, metavar="FILE.toml", help=text)
    add_shared(parser, "--overwrite")


def run(args: argparse.Namespace, output: Output) -> None:
    """Look at the files and print the layouts that they may have."""
    files = {name: path for name, path in list_files(args.src, Path("-")).items() if not is_other(name)}
    if args.output is not None:
        check_output_file(args.output, (".toml",), overwrite=args.overwrite, inputs=[*args.src, *files.values()])
    claims = claim(files, builtins())
    others = [name for name in claims.rest if not is_named_scores(PurePath(name))]
    rest = f"; {some_of(others)} may need --scores, a layout, or ignore" * bool(others)
    text = [
        f"{escape_unprintable(next(iter(own)), 60)}{f' and {len(own) - 1:,} more' if len(own) > 1 else ''}: "
        f"built-in layout {builtin.name}, read without a flag{rest}"
        for builtin, own in claims.owned.items()
    ]
    # The first file of each reason; what it has instead may differ in every file.
    near = {why.partition(": found ")[0]: f"{name}: {why}" for name, why in reversed(claims.near.items())}
    text += map(escape_unprintable, near.values())
    found: dict[str, Any] = {"builtin": {b.name: list(own) for b, own in claims.owned.items()}, "near": claims.near}
    if claims.owned and not others:
        found |= {"tree": Proposal(observe(files)).tree(), "layout": None, "candidates": []}
        toml = "".join(f"# {line}\n" for line in text)
    else:
        proposal = propose(files)
        found |= {
            "tree": proposal.tree(),
            "layout": None if proposal.layout is None else proposal.layout.to_entries(),
            "candidates": [{"layout": c.layout.to_entries(), "gives": c.describe()} for c in proposal.candidates],
        }
        text.append(proposal.message(has_tree=False))  # it is printed in front
        toml = proposal.to_toml()
    output.print_json(found)
    if not args.json:
        for line in (*found["tree"], *text):
            output.info(line)
    if args.output is not None:
        with map_os_errors(args.output), atomic_write(args.output) as file:
            file.write(toml.encode())
