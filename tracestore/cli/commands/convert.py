"""The command `tracestore convert`."""

import argparse
from dataclasses import asdict, fields
from pathlib import Path

from tracestore.console import Output, Parser, format_size, parse_size, positive_int
from tracestore.convert.options import ON_CONFLICT, ConvertOptions
from tracestore.convert.runner import Conversion
from tracestore.process import reuse_freed_memory
from tracestore.store.format.labels import DIRECTIONS
from tracestore.store.format.schema import ATTENTION_MODES, CODECS
from tracestore.store.io.fsio import map_os_errors


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    defaults = ConvertOptions()
    parser.description = "Convert trace files (.pkl, .pkl.gz, .pt) into a store. A second run continues the first."
    parser.epilog = "Example: tracestore convert traces_data/ store.zarr"
    parser.add_argument("src", nargs="+", metavar="SRC", help="trace files, or folders of them")
    parser.add_argument("dst", metavar="DST", help="the store to create or to extend: a folder, s3:// or gs://")
    parser.add_argument(
        "--scores", metavar="CSV", help="scores by question_id (default: the only *scores*.csv in a SRC folder)"
    )
    parser.add_argument("--score-column", metavar="NAME", help="column of the scores")
    parser.add_argument(
        "--score-direction", choices=DIRECTIONS, help="meaning of a high score (default: by the column's name)"
    )
    parser.add_argument(
        "--group-column", metavar="NAME", help="column of groups, which splits keep together (default: group)"
    )
    parser.add_argument("--attention", choices=ATTENTION_MODES, help="attention to store (default: mean over heads)")
    parser.add_argument("--codec", choices=CODECS, help="compression (default: none)")
    parser.add_argument("--dtype", choices=("float16", "keep"), help="dtype to store (default: float16)")
    parser.add_argument(
        "--workers", type=positive_int, metavar="N", help=f"files read in parallel (default: {defaults.workers})"
    )
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="read with a Dask cluster that shares the file system: address of the scheduler, or local",
    )
    parser.add_argument(
        "--memory-budget",
        type=parse_size,
        metavar="SIZE",
        help=f"memory for waiting traces (default: {format_size(defaults.memory_budget)})",
    )
    parser.add_argument(
        "--on-conflict",
        choices=tuple(ON_CONFLICT),
        help="a trace whose question id and sample exist with other content (default: error)",
    )
    parser.add_argument("--skip-bad", action="store_true", help="continue after a file that is refused")
    parser.add_argument("--overwrite", action="store_true", help="replace the store")
    parser.set_defaults(**asdict(defaults))


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the command and return the exit code."""
    options = ConvertOptions(**{field.name: getattr(args, field.name) for field in fields(ConvertOptions)})
    if args.is_program:
        reuse_freed_memory(options.memory_budget)
    conversion = Conversion([Path(source) for source in args.src], args.dst, options, output)
    with map_os_errors(conversion.folder):
        report = conversion.run()
    output.print_json(asdict(report))
    return 0
