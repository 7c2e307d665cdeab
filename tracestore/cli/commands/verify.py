"""Check every byte of a store. Exit code 0: intact. 3: damaged; each damaged file is named.

Example: tracestore verify store.zarr --quick
"""

import argparse
import sys

from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser, Progress
from tracestore.store.maintain.verify import repair_store, verify_store
from tracestore.words import format_size, plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add_shared(parser, "store")
    parser.add_argument("--quick", action="store_true", help="check the manifest and the sizes of files only")
    parser.add_argument(
        "--repair", action="store_true", help="restore a damaged newest manifest from its copy, or else set it aside"
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Verify or repair a store, and print the damaged files."""
    with Progress(output, "B") as progress:
        if args.repair:
            report = repair_store(args.store)
        else:
            report = verify_store(args.store, quick=args.quick, progress=progress.update)
    output.print_json(report)
    for line in report.repaired:
        output.info(f"repaired: {line}")
    for name, problem in sorted(report.damaged.items()):
        print(f"damaged: {name}: {problem}", file=sys.stderr)
    if report.damaged:
        return 3
    depth = "sizes of" if args.quick else "every byte of"
    size = format_size(report.num_bytes)
    output.info(f"intact: generation {report.generation}, {depth} {plural(report.num_files, 'file')}, {size}")
    for name in report.leftovers:
        output.info(f"uncommitted file (of a running writer, or left for tracestore clean to remove): {name}")
    return 0
