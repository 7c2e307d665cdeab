"""tracestore plan."""

import argparse
from typing import Any

from tracestore.cli.training_flags import add_flags, model_sizes, step_options
from tracestore.console import Output, Parser, format_size, parse_size
from tracestore.errors import UsageError


def add_arguments(parser: Parser) -> None:
    parser.description = "Runs real training steps for a few seconds a model, and throws the result away."
    parser.epilog = "Example: tracestore plan store.zarr --model gnn_det_lstm --memory 8GiB"
    parser.add_argument(
        "--model", metavar="NAME", help="lstm_solo, gnn_det_lstm or gvae_lstm (all that the store has the data for)"
    )
    parser.add_argument("--memory", type=parse_size, metavar="SIZE", help="what the process may take, e.g. 8GiB")
    add_flags(parser)
    parser.add_argument("store", metavar="STORE")


def run(args: argparse.Namespace, output: Output) -> int:
    # Imported here: help needs none of it. The memory of what training imports is part of a plan.
    import tracestore.experiment.run
    from tracestore.detectors.registry import DETECTORS
    from tracestore.planning.measure import Measurer
    from tracestore.planning.plan import detectors_for, training_part
    from tracestore.train.config import TrainConfig

    if args.model is not None and args.model not in DETECTORS:
        raise UsageError(f"found --model {args.model}, expected one of {', '.join(DETECTORS)}")
    if args.precision == "fp16":
        raise UsageError("found --precision fp16, which needs a GPU; plan is for the CPU")
    config, sizes = TrainConfig(**step_options(args)), model_sizes(args)
    plans = []
    with tracestore.open(args.store) as store:
        names = [args.model] if args.model else detectors_for(store)
        for name in names:
            store.require(DETECTORS[name].view)
        training_part(store)
        measure = Measurer(store, config, sizes, args.num_threads)
        for name in names:
            plans.append(measure(name).as_json(args.memory))
            if not args.json:
                output.info(_plan_lines(plans[-1]))
    output.print_json({"store": str(args.store), "models": plans})
    return 0


def _plan_lines(plan: dict[str, Any]) -> str:
    lines = [
        f"{plan['model']}: batches of {plan['batch_size']} take "
        f"{format_size(plan['peak_memory_bytes'])} at the peak, libraries included, and "
        f"{plan['seconds_per_epoch']:,.1f} s an epoch",
        f"  and {format_size(plan['file_bytes'])} of mapped files, which the system may take back",
        f"  smallest --memory-budget: {format_size(plan['floor_bytes'])}",
    ]
    if "memory_bytes" in plan:
        fits = f"largest batch {plan['largest_batch']:,}" if plan["largest_batch"] else "not even a batch of one fits"
        fits += f", largest micro-batch of batches of {plan['batch_size']}: {plan['largest_micro_batch']:,}"
        lines.append(f"  in {format_size(plan['memory_bytes'])}: {fits}")
    return "\n".join(lines)
