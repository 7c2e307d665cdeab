"""tracestore convert."""

import argparse
from dataclasses import asdict

from tracestore.console import Output, Parser, format_size, parse_size, positive_int
from tracestore.convert.runner import ON_CONFLICT, Conversion
from tracestore.errors import UsageError
from tracestore.process import reuse_freed_memory
from tracestore.store.format.labels import DIRECTIONS
from tracestore.store.format.schema import ATTENTION_MODES, CODECS
from tracestore.store.io.fsio import map_os_errors

_DEFAULT_MEMORY_BUDGET = 512 << 20
_MIN_MEMORY_BUDGET = 64 << 20


def add_arguments(parser: Parser) -> None:
    parser.description = "Convert files of traces (.pkl, .pkl.gz, .pt) into a store. Running it again continues."
    parser.epilog = "Example: tracestore convert traces_data/ store.zarr"
    parser.add_argument("src", nargs="+", metavar="SRC", help="folders or files of traces")
    parser.add_argument("dst", metavar="DST", help="the store to make or to add to: a folder, s3:// or gs://")
    parser.add_argument(
        "--scores", metavar="CSV", help="scores by question_id (default: the *scores*.csv in a SRC folder)"
    )
    parser.add_argument("--score-column", metavar="NAME", help="column of the scores file")
    parser.add_argument(
        "--score-direction", choices=DIRECTIONS, help="what a high score says (default: what the column's name says)"
    )
    parser.add_argument(
        "--group-column", metavar="NAME", help="its column that questions stay together by when split (group)"
    )
    parser.add_argument("--attention", choices=ATTENTION_MODES, help="what to store (default: mean over the heads)")
    parser.add_argument("--codec", choices=CODECS, help="compression (default: none)")
    parser.add_argument("--dtype", choices=("float16", "keep"), help="default: float16")
    parser.add_argument(
        "--workers", type=positive_int, default=2, metavar="N", help="files read side by side (default: 2)"
    )
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="read on a Dask cluster that shares the file system: a scheduler's address, or local",
    )
    parser.add_argument(
        "--memory-budget", type=parse_size, default=_DEFAULT_MEMORY_BUDGET, metavar="SIZE", help="default: 512MiB"
    )
    parser.add_argument(
        "--on-conflict",
        choices=tuple(ON_CONFLICT),
        default="error",
        help="a trace whose question id and sample are there with other content (default: error)",
    )
    parser.add_argument("--skip-bad", action="store_true", help="go on after a file that is refused")
    parser.add_argument("--overwrite", action="store_true", help="replace the store")


def run(args: argparse.Namespace, output: Output) -> int:
    if args.memory_budget < _MIN_MEMORY_BUDGET:
        raise UsageError(f"--memory-budget is at least {format_size(_MIN_MEMORY_BUDGET)}")
    if args.is_program:
        reuse_freed_memory(args.memory_budget)
    conversion = Conversion(args, output)
    with map_os_errors(conversion.folder):
        summary = conversion.run()
    output.print_json(asdict(summary))
    return 0
