"""Compare detectors on frozen folds, by question and by group.

Every detector is fitted and scored on the same folds, with its choices nested inside of the training part, and
compared with controls: answer length, group rate, a probe on the prompt only, mean log-probability. The folds are
written once, with a hash. Of several stores, each is also tested with the detectors of each other one.

Example: tracestore benchmark store.zarr --detectors features --scores judge=judge.csv
"""

import argparse
import shlex
from pathlib import Path

from tracestore.cli.flags import add_flags, add_shared, require_existing, values
from tracestore.console import Output, Parser, Progress, int_between, positive_int
from tracestore.errors import UsageError
from tracestore.extras import require
from tracestore.platform_support import num_processors
from tracestore.store.io.files import parse_location
from tracestore.store.io.fsio import map_os_errors
from tracestore.train.config import TrainConfig

# In a log, a line tells at least this often what runs.
_LOG_INTERVAL_S = 3.0
# Fields of BenchmarkOptions that flags set directly.
_OPTIONS = ("folds", "seed", "score", "score_threshold", "drop_nonfinite", "folds_dir", "save_detectors", "resume",
            "overwrite", "allow_mixed_provenance")  # fmt: skip


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("stores", metavar="STORE", nargs="+", type=parse_location, help="one store, or several for a transfer matrix")
    add(
        "--detectors",
        default="features",
        metavar="NAMES",
        help="all, features (default: all but the models of train), or names; tracestore detectors lists them",
    )
    add(
        "--scores",
        action="append",
        default=[],
        metavar="NAME=CSV",
        help="scores that were computed elsewhere; may be given several times (default: none)",
    )
    add("--output", "--output-dir", type=Path, default=Path("benchmark"), metavar="DIR", help="folder for results")
    add(
        "--folds-dir",
        type=Path,
        metavar="DIR",
        help="folder of the files of folds, to share them (default: --output)",
    )
    add(
        "--folds",
        type=int_between(2, 1000, "a whole number from 2 to 1000"),
        default=5,
        metavar="K",
        help="each trace is tested in one of K folds",
    )
    add_flags(parser, TrainConfig, "seed")
    add("--as-one", action="store_true", help="read several stores as one, without a transfer matrix")
    add_flags(parser, TrainConfig, "score", "score_threshold", "drop_nonfinite")
    add("--workers", type=positive_int, metavar="N", help="processes side by side (default: processors, at most 4)")
    add("--save-detectors", action="store_true", help="write detectors for tracestore predict to OUTPUT/checkpoints")
    earlier_run = parser.add_mutually_exclusive_group()
    earlier_run.add_argument("--resume", action="store_true", help="continue an interrupted run")
    earlier_run.add_argument(
        "--overwrite", action="store_true", help="replace earlier results; folds are never replaced"
    )
    add_shared(parser, "--allow-mixed-provenance")


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the detectors, and print the tables. Return 1 if one failed, or one given by its name could not run."""
    require_existing(*args.stores)
    scores = dict(map(_named_file, args.scores))
    if len(scores) != len(args.scores):
        raise UsageError("--scores: a name is given twice")
    if args.folds_dir is not None and not args.folds_dir.is_dir():
        raise UsageError(f"--folds-dir {args.folds_dir}: no such folder")
    require("train")  # The report is written at the end; a missing library is reported at the start.
    # Imported here, so that wrong usage is reported at once.
    from tracestore.benchmark.run import REPORT, RESULTS, BenchmarkOptions, run_benchmark
    from tracestore.detectors.registry import select
    from tracestore.reports.benchmark_page import format_results

    options = BenchmarkOptions(
        tuple(select(args.detectors)),
        scores=scores,
        workers=args.workers or min(4, num_processors()),
        command=shlex.join([*args.prog.split(), *args.words]),
        **values(args, _OPTIONS),
    )
    with map_os_errors(args.output), Progress(output, "steps", _LOG_INTERVAL_S) as progress:

        def log(line: str) -> None:
            progress.clear()
            output.info(line)

        results = run_benchmark(
            [args.stores] if args.as_one else args.stores, args.output, options, log, progress.update
        )
    output.info(f"\n{format_results(results)}\n\n{args.output / RESULTS}\n{args.output / REPORT}")
    output.print_json(results)
    named = {word.strip() for word in args.detectors.split(",")}
    return int(any(entry["failed"] or named & {*entry["skipped"]} for entry in results["stores"].values()))


def _named_file(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise UsageError(f"--scores {text}: expected NAME=FILE.csv")
    return name, Path(path)
