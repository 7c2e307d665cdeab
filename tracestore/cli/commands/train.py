"""tracestore train."""

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracestore.cli.training_flags import add_flags, model_sizes, step_options
from tracestore.console import Output, Parser, Progress, float_where, parse_size, positive_int
from tracestore.errors import RankFailedError, UsageError
from tracestore.extras import require
from tracestore.store.io.files import parse_location
from tracestore.store.io.fsio import map_os_errors


def add_arguments(parser: Parser) -> None:
    parser.description = "Train detectors of hallucinated answers from a store."
    parser.epilog = "Example: tracestore train --store store.zarr --epochs 10"
    add = parser.add_argument
    add("--store", required=True, type=parse_location)
    add("--output-dir", type=Path, default=Path("results"))
    add_flags(parser)
    add("--epochs", type=positive_int, default=50)
    for flag, name in (("lstm", "lstm_solo"), ("gnn-det", "gnn_det_lstm"), ("gvae", "gvae_lstm")):
        add(f"--run-{flag}", action=argparse.BooleanOptionalAction, default=True, help=f"train {name}")
    add("--probe", action=argparse.BooleanOptionalAction, default=True, help="logistic probe beside the models")
    add(
        "--accumulate",
        type=positive_int,
        default=1,
        metavar="N",
        help="batches a step: as one batch of N times the size",
    )
    add(
        "--memory-budget", type=parse_size, metavar="SIZE", help="what training may take above the libraries, e.g. 8GiB"
    )
    add("--score-threshold", type=float, default=0.5, help="label 1 (hallucination) where score < this")
    add("--lr", type=float_where(lambda r: 0 < r < math.inf, "a number above 0"), default=0.001)
    add("--seed", type=_seed, default=42)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--num-workers", type=_workers, default=0, metavar="auto|N", help="0: threads (default); N: DataLoader workers")
    add("--shuffle", choices=("global", "buffer", "block", "none"), default="global")
    add("--shuffle-buffer", type=positive_int, default=1000, metavar="TRACES")
    add("--folds", type=_folds, metavar="K", help="cross-validation by question: each is tested in one of K folds")
    add("--seeds", type=positive_int, metavar="N", help="N trainings of each model and split, from --seed on")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--resume", action="store_true", help="continue the run in --output-dir")
    earlier.add_argument("--overwrite", action="store_true", help="replace the run in --output-dir")
    add(
        "--checkpoint-every",
        type=float_where(lambda s: 0 <= s < math.inf, "seconds, at least 0"),
        default=300.0,
        metavar="SECONDS",
        help="write last.pt this often within an epoch, and after each (default 300; 0: after every step)",
    )
    add("--tensorboard", action="store_true", help="events for TensorBoard in OUTPUT_DIR/<model>/events")
    for flag in ("--preprocessed-dir", "--data-pattern"):
        add(flag, action=_OldFlag, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, output: Output) -> int:
    names, resume_command = _chosen_models(args), _resume_command(args.prog, args.words)
    require("train")  # the plots come last: no library may be missing only then
    # Imported here: wrong usage answers at once, and torch takes seconds.
    from tracestore.evaluation.plots import PLOTS
    from tracestore.evaluation.report import format_table
    from tracestore.experiment.run import run_experiment
    from tracestore.train.config import TrainConfig
    from tracestore.train.devices import pick_device, torch_threads
    from tracestore.train.distributed import DistributedContext

    device = pick_device(args.device)
    if args.precision == "fp16" and device == "cpu":
        raise UsageError("--precision fp16 needs a GPU, found none in use; on the CPU: --precision bf16")
    config = TrainConfig(
        epochs=args.epochs,
        lr=args.lr,
        seed=args.seed,
        device=device,
        accumulate=args.accumulate,
        shuffle=args.shuffle,
        shuffle_buffer=args.shuffle_buffer,
        score_threshold=args.score_threshold,
        num_workers=args.num_workers,
        **step_options(args),
        checkpoint_every_s=args.checkpoint_every,
        tensorboard=args.tensorboard,
        resume=args.resume,
    )
    try:
        with (
            torch_threads(args.num_threads),
            map_os_errors(args.output_dir),
            DistributedContext.connect(device) as ranks,
        ):
            results = run_experiment(
                args.store,
                args.output_dir,
                names,
                config,
                model_sizes(args),
                memory_budget=args.memory_budget,
                with_probe=args.probe,
                num_folds=args.folds,
                num_seeds=args.seeds,
                resume_command=resume_command,
                overwrite=args.overwrite,
                log=output.info,
                line=Progress(output),
                ranks=ranks,
            )
    except RankFailedError as error:
        raise RankFailedError(f"{error}; continue with: {resume_command}") from None
    if not ranks.is_rank_zero:
        return 0
    output.info("\n" + format_table(results) + "\n")
    for name in ("results.json", "predictions.csv", *PLOTS, "report.html"):
        output.info(str(args.output_dir / name))
    output.print_json(results)
    return 0


def _seed(text: str) -> int:
    """Parse a seed that every random generator in use accepts."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 0 to 2^32 - 1")
    return int(text)


def _folds(text: str) -> int:
    """At least two."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number of at least 2")
    return int(text)


def _workers(text: str) -> int:
    """auto or a count of DataLoader workers."""
    if text == "auto":
        return 0
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected auto or a whole number")
    return int(text)


def _chosen_models(args: argparse.Namespace) -> list[str]:
    """UsageError where the arguments make no sense together."""
    names = [
        name
        for name, wanted in (
            ("lstm_solo", args.run_lstm),
            ("gnn_det_lstm", args.run_gnn_det),
            ("gvae_lstm", args.run_gvae),
        )
        if wanted
    ]
    if not names:
        raise UsageError("every model is switched off")
    if args.seed + (args.seeds or 1) > 2**32:
        raise UsageError(f"found --seed {args.seed}, --seeds {args.seeds}; the last seed must be below 2^32")
    if isinstance(args.store, Path) and not args.store.exists():
        raise UsageError(f"{args.store}: no such store")
    return names


def _resume_command(prog: str, words: Sequence[str]) -> str:
    """Return the command that continues a run, as it was started: alone or under torchrun."""
    launcher, world_size = [], int(os.environ.get("WORLD_SIZE", "1"))
    command = prog.split()
    if world_size > 1:
        launcher = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
        command = command[1:] if command[0] == "python" else ["-m", *command]
    again = [word for word in words if word not in ("--resume", "--overwrite")]
    return shlex.join([*launcher, *command, *again, "--resume"])


class _OldFlag(argparse.Action):
    """--preprocessed-dir and --data-pattern of the old scripts: print what to run instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        source = values if option_string == "--preprocessed-dir" else "traces_data/"
        parser.exit(
            2,
            f"{parser.prog}: {option_string} is gone; run: python -m tracestore.convert {source} store.zarr; "
            f"then: {parser.prog} --store store.zarr\n",
        )
