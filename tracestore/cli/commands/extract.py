"""The command `tracestore extract`."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracestore.console import Output, Parser, Progress, float_where, positive_int
from tracestore.errors import UsageError
from tracestore.extract.questions import FACTS, Question, make_scorer, questions_file, read_questions
from tracestore.extras import needs
from tracestore.store.format.schema import CODECS
from tracestore.store.io.files import parse_location

if TYPE_CHECKING:
    from tracestore.extract.run import ExtractReport


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.description = "Let a language model answer questions, and record its hidden states and attention."
    parser.epilog = (
        "Example: tracestore extract --model HuggingFaceTB/SmolLM2-135M-Instruct --questions package:facts "
        "--out traces_data"
    )
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face id, folder, .gguf file, or package:NAME")
    add(
        "--questions",
        required=True,
        type=questions_file,
        metavar="FILE",
        help=f"CSV: question_id, question, answers (a|b), group; {FACTS}: 1,653 facts of this package",
    )
    add("--out", required=True, type=parse_location, help="folder for .pkl files, or a store (ends with .zarr)")
    add("--limit", type=positive_int, metavar="N", help="use only the first N questions")
    add("--traces-per-file", type=positive_int, default=500, metavar="N")
    add("--shard", type=_shard, default=(0, 1), metavar="I/N", help="write only every Nth file, from file I on")
    add("--scorer", choices=("containment", "bleurt"), default="containment")
    add("--max-new-tokens", type=positive_int, default=32, metavar="N")
    add("--instruction", help="system prompt")
    add("--attention", choices=("mean", "heads", "none"), default="mean", help="attention to store (for a store)")
    add("--codec", choices=CODECS, default="none", help="compression (for a store; default: none)")
    add(
        "--commit-interval",
        type=float_where(lambda s: 0 <= s < math.inf, "seconds, at least 0"),
        metavar="SECONDS",
        help="time between commits, which a kill can lose (for a store; default: 60, or a twentieth of the time so "
        "far if that is more; 0: commit after each trace)",
    )
    add("--batch-size", type=positive_int, default=1, metavar="N", help="questions per forward pass (default: 1)")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="dtype of the model")


def run(args: argparse.Namespace, output: Output) -> int:
    """Extract traces, print progress and a summary."""
    questions = read_questions(args.questions)[: args.limit]
    scorer = make_scorer(args.scorer)
    to_store = args.out.name.endswith(".zarr")
    if not to_store and not isinstance(args.out, Path):
        raise UsageError(f"--out {args.out}: .pkl files need a local folder; the name of a store ends with .zarr")
    if to_store and args.shard[1] > 1:
        raise UsageError("--shard writes files; merge them with tracestore convert, or give each machine its own store")
    # Imported here, because loading the libraries takes seconds: wrong usage is reported at once.
    with needs("extract"):
        from tracestore.extract import run as extraction
        from tracestore.extract.model import answer_questions, load_model

    lm = load_model(args.model, device=args.device, dtype=args.dtype)
    instruction = args.instruction or extraction.INSTRUCTION

    def answer(batch: Sequence[Question]) -> list[dict[str, Any]]:
        texts = [question.text for question in batch]
        return answer_questions(lm, texts, instruction=instruction, max_new_tokens=args.max_new_tokens)

    if to_store:
        total = len(questions)
        interval = extraction.COMMIT_INTERVAL_S if args.commit_interval is None else args.commit_interval
        steps = extraction.extract_to_store(
            args.out,
            questions,
            answer,
            scorer,
            attention=args.attention,
            codec=args.codec,
            commit_interval_s=interval,
            batch_size=args.batch_size,
        )
    else:
        batches = extraction.plan_batches(questions, args.traces_per_file, args.shard, "traces")
        total = sum(len(b.questions) for b in batches)
        steps = extraction.extract_to_folder(args.out, batches, answer, scorer, batch_size=args.batch_size)
    output.info(f"{total:,} questions to {args.model} -> {args.out}")
    report = extraction.ExtractReport(str(args.out))
    with Progress(output) as progress:
        for is_correct in steps:
            report.add(is_correct)
            if is_correct is not None:
                progress.update(lambda s: _progress_line(report, total, s))
    output.info(
        f"{args.out}: {report.made:,} new traces, {report.already_there:,} existing traces, "
        f"{report.right / max(1, report.made):.0%} of the new answers correct"
    )
    output.print_json(asdict(report))
    return 0


def _progress_line(report: "ExtractReport", total: int, seconds: float) -> str:
    made, done = report.made, report.made + report.already_there
    return (
        f"{done:,} of {total:,} traces, {made / seconds:.2f} traces/s, {report.right / made:.0%} correct, "
        f"{(total - done) * seconds / made:,.0f} s left"
    )


def _shard(text: str) -> tuple[int, int]:
    """Return (I, N) of the text I/N with 0 <= I < N, for argparse."""
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected I/N with 0 <= I < N")
    return index, count
