"""Scores traces with a trained detector.

python tools/score.py --checkpoint results/gnn_det_lstm/best.pt --store other.zarr
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tracestore.console import Output, Parser, Progress, format_size, leave, parse_size, positive, run
from tracestore.errors import UsageError
from tracestore.store.files import place_of
from tracestore.store.fsio import translated_errors

HEADER = ("question_id", "sample", "hallucination_score", "predicted")


def make_parser() -> Parser:
    parser = Parser(
        prog="score.py",
        description="Write a hallucination score for every trace of a store. Labels are not needed.",
        epilog="hallucination_score: the detector's probability that the answer is a hallucination. predicted: 1 "
        "where its logit is at or above the threshold that was chosen on validation. Both are empty where a trace "
        "holds NaN or infinite values.",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, metavar="BEST.PT", help="of a run of tools/train.py")
    add("--store", required=True, type=place_of)
    add("--output", type=Path, default=Path("scores.csv"), metavar="CSV", help="replaced when all is scored")
    add("--batch-size", type=positive, default=16)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--num-threads", type=positive, metavar="N", help="threads of torch and of the loader")
    add("--memory-budget", type=parse_size, metavar="SIZE", help="what scoring may take above the libraries, e.g. 8GiB")
    add("--json", action="store_true", help="a summary as one JSON document on standard output")
    return parser


def command(args: argparse.Namespace) -> int:
    for path, what in ((args.checkpoint, "checkpoint"), (args.store, "store")):
        if isinstance(path, Path) and not path.exists():
            raise UsageError(f"{path}: no such {what}")
    if not args.output.absolute().parent.is_dir():
        raise UsageError(f"--output {args.output}: no such folder")
    # Imported here: wrong usage answers at once, and torch takes seconds.
    import numpy as np
    import torch

    from tracestore.data.batch_format import BatchFormat, GraphOptions
    from tracestore.data.epoch import mean_trace_bytes
    from tracestore.store.reader import open_store
    from tracestore.train.memory import RESERVE_BYTES, MemoryBudget, memory_use
    from tracestore.train.metrics import probability
    from tracestore.train.model_config import VIEWS
    from tracestore.train.run import pick_device
    from tracestore.train.scoring import load_detector, score_traces
    from tracestore.train.tables import write_rows

    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    output, device = Output(args.json), pick_device(args.device)
    detector = load_detector(args.checkpoint)
    start = memory_use()
    store = open_store(args.store)
    detector.check(store)
    for difference in detector.differences(store):
        output.say(f"note: {difference}; scores may not carry over")
    budget = None
    if args.memory_budget is not None:
        # A few traces on their way, one at work, and the threads' own.
        edges = detector.config.edge_form(store, "cpu") if VIEWS[detector.name] == "graph" else "coo"
        form = BatchFormat(VIEWS[detector.name], GraphOptions(edges=edges))
        floor = 2 * RESERVE_BYTES + 8 * mean_trace_bytes(store, form)
        if args.memory_budget < floor:
            raise UsageError(
                f"--memory-budget {format_size(args.memory_budget)} is below {format_size(floor)}, what one trace needs"
            )
        budget = MemoryBudget(args.memory_budget, start)
    total, without, hallucinated = len(store), 0, 0
    progress = Progress(output)

    def rows() -> Iterator[tuple[Any, ...]]:
        nonlocal without, hallucinated
        done = 0
        for indices, logits in score_traces(
            detector,
            store,
            batch_size=args.batch_size,
            device=device,
            num_threads=args.num_threads or 2,
            memory_budget=None if args.memory_budget is None else args.memory_budget // 2,
            on_event=lambda event: output.say(
                f"out of memory: {event['size_before']} traces at once -> {event['size_after']}"
            ),
        ):
            scored, predicted = probability(logits), logits >= detector.threshold
            for k, question, score, hit, there in zip(
                indices, store.question_ids.at(indices), scored, predicted, ~np.isnan(logits), strict=True
            ):
                yield question, store[int(k)].sample, *((float(score), int(hit)) if there else ("", ""))
                without += not there
                hallucinated += bool(hit)
            done += len(indices)
            progress.update(lambda s: f"{done:,} of {total:,} traces, {done / s:,.0f} traces/s")

    try:
        with translated_errors(args.output):
            write_rows(args.output, HEADER, rows())
    finally:
        if budget is not None:
            budget.release()
    progress.clear()
    if without:
        output.say(f"{without:,} traces hold NaN or infinite values and have no score; tracestore lint names them")
    output.say(f"{args.output}: {total:,} traces, {hallucinated:,} predicted hallucinations by {detector.name}")
    output.document(
        {
            "output": str(args.output),
            "checkpoint": str(args.checkpoint),
            "store": str(args.store),
            "model": detector.name,
            "threshold": detector.threshold,
            "num_traces": total,
            "num_predicted": hallucinated,
            "num_without_score": without,
        }
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    return run("score.py", lambda: command(make_parser().parse_args(argv)))


if __name__ == "__main__":
    leave(main())
