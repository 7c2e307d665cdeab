"""Trains the three detectors from a store.

python tools/train.py --store store.zarr
"""

import argparse
import contextlib
import math
import os
import shlex
import sys
from pathlib import Path

from tracestore.console import Output, Parser, Progress, leave, number, parse_size, positive, run
from tracestore.errors import RankLostError, UsageError
from tracestore.store.files import place_of
from tracestore.store.fsio import translated_errors
from tracestore.train.flags import add_flags, model_sizes, step_options


def seed(text: str) -> int:
    """What every random generator in use takes."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 0 to 2^32 - 1")
    return int(text)


def folds(text: str) -> int:
    """At least two."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number of at least 2")
    return int(text)


def workers(text: str) -> int:
    """auto or a count of DataLoader workers."""
    if text == "auto":
        return 0
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected auto or a whole number")
    return int(text)


class OldFlag(argparse.Action):
    """--preprocessed-dir and --data-pattern of the old scripts: say what to run instead."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.exit(
            2,
            f"train.py: {option_string} is gone; run: python -m tracestore.convert "
            f"{values if option_string == '--preprocessed-dir' else 'traces_data/'} store.zarr; "
            "then: python tools/train.py --store store.zarr\n",
        )


def make_parser() -> Parser:
    parser = Parser(prog="train.py", description="Train detectors of hallucinated answers from a store.")
    add = parser.add_argument
    add("--store", required=True, type=place_of)
    add("--output-dir", type=Path, default=Path("results"))
    add_flags(parser)
    add("--epochs", type=positive, default=50)
    for flag, name in (("lstm", "lstm_solo"), ("gnn-det", "gnn_det_lstm"), ("gvae", "gvae_lstm")):
        add(f"--run-{flag}", action=argparse.BooleanOptionalAction, default=True, help=f"train {name}")
    add("--probe", action=argparse.BooleanOptionalAction, default=True, help="logistic probe beside the models")
    add("--accumulate", type=positive, default=1, metavar="N", help="batches a step: as one batch of N times the size")
    add(
        "--memory-budget", type=parse_size, metavar="SIZE", help="what training may take above the libraries, e.g. 8GiB"
    )
    add("--score-threshold", type=float, default=0.5, help="label 1 (hallucination) where score < this")
    add("--lr", type=number(lambda r: 0 < r < math.inf, "a number above 0"), default=0.001)
    add("--seed", type=seed, default=42)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--num-workers", type=workers, default=0, metavar="auto|N", help="0: threads (default); N: DataLoader workers")
    add("--shuffle", choices=("global", "buffer", "block", "none"), default="global")
    add("--shuffle-buffer", type=positive, default=1000, metavar="TRACES")
    add("--folds", type=folds, metavar="K", help="cross-validation by question: each is tested in one of K folds")
    add("--seeds", type=positive, metavar="N", help="N trainings of each model and split, from --seed on")
    add("--resume", action="store_true", help="continue the run in --output-dir")
    add(
        "--checkpoint-every",
        type=number(lambda s: 0 <= s < math.inf, "seconds, at least 0"),
        default=300.0,
        metavar="SECONDS",
        help="write last.pt this often within an epoch, and after each (default 300; 0: after every step)",
    )
    add("--tensorboard", action="store_true", help="events for TensorBoard in OUTPUT_DIR/<model>/events")
    add("--json", action="store_true", help="results as one JSON document on standard output")
    for flag in ("--preprocessed-dir", "--data-pattern"):
        add(flag, action=OldFlag, help=argparse.SUPPRESS)
    return parser


def chosen_models(args: argparse.Namespace) -> list[str]:
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


def command(args: argparse.Namespace) -> int:
    names = chosen_models(args)
    # Imported here: wrong usage answers at once, and torch takes seconds.
    import torch

    from tracestore.train import report
    from tracestore.train.config import TrainConfig
    from tracestore.train.ranks import Ranks
    from tracestore.train.run import pick_device, run_training

    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    device = pick_device(args.device)
    if args.precision == "fp16" and device == "cpu":
        raise UsageError("--precision fp16 needs a GPU, found none in use; on the CPU: --precision bf16")
    output = Output(args.json)
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
    with translated_errors(args.output_dir), Ranks.connect(device) as ranks:
        results = run_training(
            args.store,
            args.output_dir,
            names,
            config,
            model_sizes(args),
            memory_budget=args.memory_budget,
            with_probe=args.probe,
            num_folds=args.folds,
            num_seeds=args.seeds,
            resume_command=args.resume_command,
            log=output.say,
            line=Progress(output),
            ranks=ranks,
        )
    if not ranks.is_first:
        return 0
    output.say("\n" + report.table(results) + "\n")
    for name in ("results.json", "predictions.csv", *report.PLOTS, "report.html"):
        output.say(str(args.output_dir / name))
    output.document(results)
    return 0


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    # With several ranks the first of each machine says what all of them find.
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    launcher = ["python"]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        launcher = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]

    def parse_and_run() -> int:
        with contextlib.nullcontext() if speaks else contextlib.redirect_stderr(None):
            args = make_parser().parse_args(words)
        again = [w for w in words if w != "--resume"]
        args.resume_command = shlex.join([*launcher, "tools/train.py", *again, "--resume"])
        try:
            return command(args)
        except UsageError as error:
            if speaks:
                raise
            return error.exit_code
        except RankLostError as error:
            raise RankLostError(f"{error}; continue with: {args.resume_command}") from None

    return run("train.py", parse_and_run)


if __name__ == "__main__":
    leave(main())
