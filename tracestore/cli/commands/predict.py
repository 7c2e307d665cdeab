"""Write a hallucination score for every trace of a store. Labels are not needed.

hallucination_score: the detector's probability that the answer is a hallucination. predicted: 1 where its
logit is at or above the threshold that was chosen on validation. Both are empty where a trace holds NaN or
infinite values. With several stores, the last column names the store of the trace.

Example: tracestore predict other.zarr --checkpoint results/gnn_det_lstm/best.pt
"""

import argparse
from pathlib import Path

from tracestore.cli.flags import add_shared, require_existing, values
from tracestore.console import Output, Parser, Progress, positive_int
from tracestore.store.io.destinations import check_output_file
from tracestore.words import parse_size, plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, metavar="BEST.PT", help="checkpoint of tracestore train or benchmark")
    add_shared(parser, "stores", "--overwrite", "--num-threads", "--allow-mixed-provenance")
    text = "the file (.csv), which appears when all traces are scored"
    add("--output", type=Path, default=Path("predictions.csv"), metavar="FILE", help=text)
    add("--batch-size", type=positive_int, default=16, metavar="N", help="traces in a batch")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    text = "memory for scoring in addition to the libraries, e.g. 8GiB (default: no limit)"
    add("--memory-budget", type=parse_size, metavar="SIZE", help=text)


def run(args: argparse.Namespace, output: Output) -> None:
    """Write the scores and print a summary."""
    require_existing(args.checkpoint, what="checkpoint")
    require_existing(*args.stores)
    check_output_file(args.output, (".csv",), overwrite=args.overwrite, inputs=[args.checkpoint, *args.stores])
    # Imported here, because torch takes seconds to import and wrong usage is reported before.
    from tracestore.inference.predict import predict_store

    with Progress(output) as progress:
        report = predict_store(
            args.checkpoint,
            args.stores,
            args.output,
            **values(
                args, ("overwrite", "batch_size", "device", "num_threads", "memory_budget", "allow_mixed_provenance")
            ),
            log=output.info,
            progress=progress.update,
        )
    if report.num_without_score:
        output.info(
            f"no score for {plural(report.num_without_score, 'trace')} with NaN or infinite values, which tracestore lint "
            f"lists, or without a field that {report.model} reads"
        )
    output.info(
        f"{args.output}: {plural(report.num_traces, 'trace')}, {plural(report.num_predicted, 'predicted hallucination')} "
        f"by {report.model}"
    )
    output.print_json(report)
