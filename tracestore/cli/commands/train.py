"""Train hallucination detectors on a store.

Example: tracestore train store.zarr --epochs 10
"""

import argparse
import math
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tracestore.cli.flags import (
    DROP_NONFINITE_HELP,
    MODEL_FLAGS,
    PROVENANCE_FLAGS,
    STEP_FLAGS,
    THRESHOLD_HELP,
    Flags,
    add_flags,
    add_num_threads,
    add_stores,
    values,
)
from tracestore.console import Output, Parser, Progress, float_where, int_between
from tracestore.detectors.model_config import ModelConfig
from tracestore.detectors.registry import DEFAULT_MODELS, MODELS
from tracestore.errors import RankFailedError, UsageError
from tracestore.experiment.train_options import TrainOptions
from tracestore.extras import require
from tracestore.store.io.files import parse_location
from tracestore.store.io.fsio import map_os_errors
from tracestore.train.config import TrainConfig
from tracestore.words import parse_size

# Further fields of TrainConfig.
_TRAIN_FLAGS: Flags = {
    "epochs": "passes over the training split",
    "grad_accum_steps": "batches per optimizer step; equals one batch of N times the size",
    "score": {"metavar": "NAME", "help": "named score that labels are derived from (default: the store's)"},
    "score_threshold": {"metavar": "T", "help": THRESHOLD_HELP},
    "drop_nonfinite": DROP_NONFINITE_HELP,
    "lr": {"type": float_where(lambda r: 0 < r < math.inf, "a number above 0"), "help": "learning rate of Adam"},
    "seed": {
        "type": int_between(0, 2**32 - 1, "a whole number from 0 to 2^32 - 1"),
        "help": "seed of split and weights",
    },
    "shuffle": "order of the traces in an epoch",
    "shuffle_buffer": {"metavar": "TRACES", "help": "traces in the window of --shuffle buffer"},
    "checkpoint_interval_s": {
        "type": float_where(lambda s: 0 <= s < math.inf, "seconds, at least 0"),
        "metavar": "SECONDS",
        "help": "write last.pt this often within an epoch, and after each (default: 300; 0: after every step)",
    },
    "logger": "write the metrics of steps and epochs for this library, too, below OUTPUT/<model>/events (default: none)",
    **PROVENANCE_FLAGS,
}
# Fields of TrainOptions.
_RUN_FLAGS: Flags = {
    "probe": {"action": argparse.BooleanOptionalAction, "help": "fit a logistic-regression probe as a baseline"},
    "memory_budget": {
        "type": parse_size,
        "metavar": "SIZE",
        "help": "memory for training in addition to the libraries, e.g. 8GiB (default: no limit)",
    },
    "folds": {
        "type": int_between(2, 2**31 - 1, "a whole number of at least 2"),
        "metavar": "K",
        "help": "cross-validation by question: each question is tested in one of K folds (default: one split)",
    },
    "seeds": "N trainings of each model and split, from --seed on (default: 1)",
}


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add_stores(parser, parse_location)
    text = "folder for checkpoints, results.json and report.html"
    add("--output", "--output-dir", type=Path, default=Path("results"), metavar="DIR", help=text)
    for name in DEFAULT_MODELS:
        text = f"train {name} (default: yes)"
        add(f"--run-{MODELS[name].flag}", dest=name, action=argparse.BooleanOptionalAction, help=text)
    text = f"train these instead: {', '.join(MODELS)} (default: {', '.join(DEFAULT_MODELS)})"
    add("--models", type=_models, metavar="NAME,...", help=text)
    add("--twins", action="store_true", help="also train the edge-free twins of the graph detectors")
    add_flags(parser, ModelConfig, MODEL_FLAGS)
    add_flags(parser, TrainConfig, {**STEP_FLAGS, **_TRAIN_FLAGS})
    add_flags(parser, TrainOptions, _RUN_FLAGS)
    add_num_threads(parser)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add("--num-workers", type=_workers, default=0, metavar="auto|N", help="0: threads (default); N: DataLoader workers")
    earlier_run = parser.add_mutually_exclusive_group()
    add_flags(earlier_run, TrainConfig, {"resume": "continue the run in --output"})
    add_flags(earlier_run, TrainOptions, {"overwrite": "replace the run in --output"})
    add("--preprocessed-dir", type=_removed(parser.prog, "{}"), help=argparse.SUPPRESS)
    add("--data-pattern", type=_removed(parser.prog, "traces_data/"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace, output: Output) -> None:
    """Train, and print the metrics of the test split."""
    models, resume_command = _selected_models(args), _resume_command(args.prog, args.words)
    require("train")  # Plots are drawn at the end; a missing library is reported at the start.
    # Imported here, because torch takes seconds to import and wrong usage is reported before.
    from tracestore.evaluation.metric_table import format_table
    from tracestore.experiment.training_run import run_experiment
    from tracestore.train.devices import pick_device, torch_threads
    from tracestore.train.distributed import DistributedContext

    device = pick_device(args.device)
    if args.precision == "fp16" and device == "cpu":
        raise UsageError("--precision fp16 needs a GPU, found none in use; on the CPU: --precision bf16")
    config = TrainConfig(
        **values(args, STEP_FLAGS, _TRAIN_FLAGS),
        device=device,
        num_workers=args.num_workers,
        loader_threads=args.num_threads or 2,
        resume=args.resume,
    )
    options = TrainOptions(
        models,
        config,
        values(args, MODEL_FLAGS),
        **values(args, _RUN_FLAGS),
        overwrite=args.overwrite,
        command=_command(args.prog, [*args.words]),
        resume_command=resume_command,
    )
    try:
        with (
            torch_threads(args.num_threads),
            map_os_errors(args.output),
            DistributedContext.connect(device) as ranks,
        ):
            results = run_experiment(
                args.stores, args.output, options, log=output.info, line=Progress(output, "batches"), ranks=ranks
            )
    except RankFailedError as error:
        raise RankFailedError(f"{error}; continue with: {resume_command}") from None
    if not ranks.is_rank_zero:
        return
    output.info("\n" + format_table(results) + "\n")
    for name in ("results.json", "predictions.csv", "report.html", "*.svg"):
        output.info(str(args.output / name))
    output.print_json(results)


def _models(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of models."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(f"found {name!r}, expected names of {', '.join(MODELS)}")
    return names


def _workers(text: str) -> int:
    """Parse "auto" or a number of DataLoader workers."""
    if text == "auto":
        return 0
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected auto or a whole number")
    return int(text)


def _selected_models(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the models to train. Raise UsageError where the options contradict each other."""
    switches = {name: getattr(args, name) for name in DEFAULT_MODELS}
    if args.models is not None and set(switches.values()) != {None}:
        raise UsageError("found --models and a switch of a model, expected one or the other")
    chosen = args.models or [name for name, is_on in switches.items() if is_on is not False]
    twins = [name for name, spec in MODELS.items() if args.twins and spec.twin_of in chosen]
    models = tuple(name for name in MODELS if name in chosen or name in twins)
    if not models:
        raise UsageError("every model is switched off")
    if args.twins and not twins:
        raise UsageError(f"--twins needs a model that has a twin, found {', '.join(models)}")
    if args.seed + (args.seeds or 1) > 2**32:
        raise UsageError(f"found --seed {args.seed}, --seeds {args.seeds}; the last seed must be below 2^32")
    for store in args.stores:
        if isinstance(store, Path) and not store.exists():
            raise UsageError(f"{store}: no such store")
    return models


def _resume_command(prog: str, words: Sequence[str]) -> str:
    """Return the command that continues the run, under torchrun if it was started so."""
    return _command(prog, [*(word for word in words if word not in ("--resume", "--overwrite")), "--resume"])


def _command(prog: str, words: Sequence[str]) -> str:
    """Return the command of a run, under torchrun if it was started so."""
    launcher, world_size = [], int(os.environ.get("WORLD_SIZE", "1"))
    command = prog.split()
    if world_size > 1:
        launcher = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
        command = command[1:] if command[0] == "python" else ["-m", *command]
    return shlex.join([*launcher, *command, *words])


def _removed(prog: str, source: str) -> Callable[[str], NoReturn]:
    """Return the type of an option of the scripts before tracestore, which names the commands that replace it."""

    def parse(text: str) -> NoReturn:
        raise argparse.ArgumentTypeError(
            f"removed; run: python -m tracestore.convert {source.format(text)} store.zarr; then: {prog} store.zarr"
        )

    return parse
