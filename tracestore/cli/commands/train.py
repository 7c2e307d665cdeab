"""Train hallucination detectors on a store.

Example: tracestore train store.zarr --epochs 10
"""

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tracestore.cli.flags import add_flags, add_shared, option_names, require_existing, values
from tracestore.console import Output, Parser, Progress, int_between
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import DEFAULT_MODELS, MODELS
from tracestore.errors import RankFailedError, UsageError
from tracestore.experiment.train_options import TrainOptions
from tracestore.extras import require
from tracestore.store.io.fsio import map_os_errors
from tracestore.train.config import TrainConfig


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add_shared(parser, "stores", "--num-threads")
    text = "folder for checkpoints, results.json and report.html"
    add("--output", "--output-dir", type=Path, default=Path("results"), metavar="DIR", help=text)
    for name in DEFAULT_MODELS:
        text = f"train {name} (default: yes)"
        add(f"--run-{MODELS[name].flag}", dest=name, action=argparse.BooleanOptionalAction, help=text)
    text = f"train these instead: {', '.join(MODELS)} (default: {', '.join(DEFAULT_MODELS)})"
    add("--models", type=_models, metavar="NAME,...", help=text)
    add("--twins", action="store_true", help="also train the edge-free twins of the graph detectors")
    add_flags(parser.add_argument_group("model"), ModelConfig)
    training = parser.add_argument_group("training")
    add_flags(training, TrainConfig)
    add_flags(training, TrainOptions)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add("--num-workers", type=_workers, default=0, metavar="auto|N", help="0: threads (default); N: DataLoader workers")
    earlier_run = parser.add_mutually_exclusive_group()
    earlier_run.add_argument("--resume", action="store_true", help="continue the run in --output")
    earlier_run.add_argument("--overwrite", action="store_true", help="replace the run in --output")
    add("--preprocessed-dir", type=_removed(parser.prog, "{}"), help=argparse.SUPPRESS)
    add("--data-pattern", type=_removed(parser.prog, "traces_data/"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace, output: Output) -> None:
    """Train, and print the metrics of the test split."""
    models, others = _selected_models(args), [word for word in args.words if word not in ("--resume", "--overwrite")]
    resume_command = _command(args.prog, [*others, "--resume"])
    require("train")  # Plots are drawn at the end; a missing library is reported at the start.
    # Imported here, because torch takes seconds to import and wrong usage is reported before.
    from tracestore.experiment.training_run import run_experiment
    from tracestore.reports.detector_tables import format_table
    from tracestore.train.devices import pick_device, torch_threads
    from tracestore.train.distributed import DistributedContext

    device = pick_device(args.device)
    if args.precision == "fp16" and device == "cpu":
        raise UsageError("--precision fp16 needs a GPU, found none in use; on the CPU: --precision bf16")
    config = TrainConfig(
        **values(args, option_names(TrainConfig)),
        device=device,
        num_workers=args.num_workers,
        loader_threads=args.num_threads or 2,
        resume=args.resume,
    )
    options = TrainOptions(
        models,
        config,
        values(args, option_names(ModelConfig)),
        **values(args, option_names(TrainOptions)),
        overwrite=args.overwrite,
        command=_command(args.prog, args.words),
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
    """Return the number of workers; 0 for auto."""
    return 0 if text == "auto" else int_between(0, 2**31 - 1, "auto or a whole number")(text)


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
    require_existing(*args.stores)
    return models


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
