"""Measure memory and time of training with a few real steps per model, and discard the result.

Example: tracestore plan store.zarr --model gnn_det_lstm --memory 8GiB
"""

import argparse
from typing import Any

from tracestore.cli.flags import add_flags, add_shared, option_names, values
from tracestore.console import Output, Parser
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import MODELS
from tracestore.errors import UsageError
from tracestore.platform_support import memory_use
from tracestore.store.format.labels import DEFAULT_THRESHOLD
from tracestore.train.config import StepOptions, TrainConfig
from tracestore.words import format_size, parse_size


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    text = f"one of {', '.join(MODELS)} (default: those that train trains by default, if the store has the data)"
    parser.add_argument("--model", metavar="NAME", help=text)
    parser.add_argument(
        "--memory",
        type=parse_size,
        metavar="SIZE",
        help="memory that the process may use, e.g. 8GiB (default: only print what is needed)",
    )
    add_flags(parser.add_argument_group("model"), ModelConfig)
    add_flags(parser.add_argument_group("training"), StepOptions)
    add_shared(parser, "--num-threads", "store")


def run(args: argparse.Namespace, output: Output) -> None:
    """Measure each detector, and print its memory and time."""
    # Imported here, because --help needs none of it. The run module is imported for its memory, which is
    # part of a plan.
    import tracestore.experiment.training_run
    from tracestore.planning.plan import detectors_for, plan_training, training_traces

    if args.model is not None and args.model not in MODELS:
        raise UsageError(f"found --model {args.model}, expected one of {', '.join(MODELS)}")
    if args.precision == "fp16":
        raise UsageError("found --precision fp16, which needs a GPU; plan is for the CPU")
    options = values(args, option_names(StepOptions))
    config = TrainConfig(**options, loader_threads=args.num_threads or 2, score_threshold=DEFAULT_THRESHOLD)
    model_options = values(args, option_names(ModelConfig))
    plans = []
    with tracestore.open(args.store) as store:
        names = [args.model] if args.model else detectors_for(store)
        for name in names:
            store.require_view(MODELS[name].view)
        training_traces(store)
        start = memory_use()
        for name in names:
            plan = plan_training(name, store, config, model_options, start=start, num_threads=args.num_threads)
            plans.append(plan.as_json(args.memory))
            output.info(_plan_lines(plans[-1]))
    output.print_json({"store": str(args.store), "models": plans})


def _plan_lines(plan: dict[str, Any]) -> str:
    lines = [
        f"{plan['model']}: batches of {plan['batch_size']} take "
        f"{format_size(plan['peak_memory_bytes'])} at the peak, libraries included, and "
        f"{plan['seconds_per_epoch']:,.1f} s per epoch",
        f"  and {format_size(plan['file_bytes'])} of mapped files, which the system can reclaim",
        f"  smallest --memory-budget: {format_size(plan['floor_bytes'])}",
    ]
    if "memory_bytes" in plan:
        fits = f"largest batch {plan['largest_batch']:,}" if plan["largest_batch"] else "not even a batch of one fits"
        fits += f", largest micro-batch of batches of {plan['batch_size']}: {plan['largest_micro_batch']:,}"
        lines.append(f"  in {format_size(plan['memory_bytes'])}: {fits}")
    return "\n".join(lines)
