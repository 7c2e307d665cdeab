"""The command `tracestore verify`."""

import argparse
import sys
from dataclasses import asdict

from tracestore.console import Output, Parser, Progress, format_size
from tracestore.store.maintain.verify import repair_store, verify_store


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.description = "Check every byte of a store. Exit code 0: intact. 3: damaged; each damaged file is named."
    parser.epilog = "Example: tracestore verify store.zarr --quick"
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--quick", action="store_true", help="check the manifest and the sizes of files only")
    parser.add_argument("--repair", action="store_true", help="set a damaged newest manifest aside")


def run(args: argparse.Namespace, output: Output) -> int:
    """Verify or repair a store, and print the damaged files."""
    with Progress(output) as progress:
        if args.repair:
            report = repair_store(args.store)
        else:
            report = verify_store(
                args.store,
                quick=args.quick,
                progress=lambda done, total: progress.update(
                    lambda s: f"{100 * done / max(1, total):.0f} % of {format_size(total)}, {done / s / 1e6:,.0f} MB/s"
                ),
            )
    output.print_json(asdict(report))
    for line in report.repaired:
        output.info(f"repaired: {line}")
    if report.damaged:
        for name, problem in sorted(report.damaged.items()):
            print(f"damaged: {name}: {problem}", file=sys.stderr)
        return 3
    if not args.json:
        depth = "sizes of" if args.quick else "every byte of"
        output.info(
            f"intact: generation {report.generation}, {depth} {report.num_files:,} files, {format_size(report.num_bytes)}"
        )
        for name in report.leftovers:
            output.info(f"leftover of an unfinished write, which the next writer removes: {name}")
    return 0
