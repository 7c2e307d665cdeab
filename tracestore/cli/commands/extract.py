"""tracestore extract."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracestore.console import Output, Parser, Progress, float_where, positive_int
from tracestore.errors import UsageError
from tracestore.extract.questions import FACTS, Question, make_scorer, questions_file, read_questions
from tracestore.extras import needs
from tracestore.store.format.schema import CODECS
from tracestore.store.io.files import parse_location


def add_arguments(parser: Parser) -> None:
    parser.description = "Let a language model answer questions and keep what happens inside."
    parser.epilog = (
        "Example: tracestore extract --model HuggingFaceTB/SmolLM2-135M-Instruct --questions package:facts "
        "--out traces_data"
    )
    parser.add_argument("--model", required=True, help="Hugging Face id, folder, .gguf file, or package:NAME")
    parser.add_argument(
        "--questions",
        required=True,
        type=questions_file,
        metavar="FILE",
        help=f"CSV: question_id, question, answers (a|b), group; {FACTS}: 1,653 facts that the package brings",
    )
    parser.add_argument(
        "--out", required=True, type=parse_location, help="folder for .pkl files, or a store (ends with .zarr)"
    )
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N questions")
    parser.add_argument("--traces-per-file", type=positive_int, default=500, metavar="N")
    parser.add_argument("--shard", type=_shard, default=(0, 1), metavar="I/N", help="this machine's share of the files")
    parser.add_argument("--scorer", choices=("containment", "bleurt"), default="containment")
    parser.add_argument("--max-new-tokens", type=positive_int, default=32, metavar="N")
    parser.add_argument("--instruction", help="system prompt")
    parser.add_argument(
        "--attention", choices=("mean", "heads", "none"), default="mean", help="for a store: what to keep"
    )
    parser.add_argument("--codec", choices=CODECS, default="none", help="for a store: compression (none)")
    parser.add_argument(
        "--commit-interval",
        type=float_where(lambda s: 0 <= s < math.inf, "seconds, at least 0"),
        metavar="SECONDS",
        help="for a store: about this much is lost in a kill (60, or a twentieth of the time so far; 0: nothing)",
    )
    parser.add_argument(
        "--batch-size", type=positive_int, default=1, metavar="N", help="questions answered at once; pays on a GPU (1)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the model")


def run(args: argparse.Namespace, output: Output) -> int:
    questions = read_questions(args.questions)[: args.limit]
    scorer = make_scorer(args.scorer)
    to_store = args.out.name.endswith(".zarr")
    if not to_store and not isinstance(args.out, Path):
        raise UsageError(f"--out {args.out}: files of traces go into a folder here; a store's name ends with .zarr")
    if to_store and args.shard[1] > 1:
        raise UsageError("--shard writes files; merge them with tracestore convert, or give each machine its own store")
    # Imported here: wrong usage answers at once, and loading a model takes seconds.
    with needs("extract"):
        from tracestore.extract import run as extraction
        from tracestore.extract.model import answer_questions, load_model

    lm = load_model(args.model, device=args.device, dtype=args.dtype)
    instruction = args.instruction or extraction.INSTRUCTION

    def answer(asked: Sequence[Question]) -> list[dict[str, Any]]:
        texts = [question.text for question in asked]
        return answer_questions(lm, texts, instruction=instruction, max_new_tokens=args.max_new_tokens)

    if to_store:
        total = len(questions)
        every = extraction.COMMIT_INTERVAL_S if args.commit_interval is None else args.commit_interval
        steps = extraction.extract_to_store(
            args.out,
            questions,
            answer,
            scorer,
            attention=args.attention,
            codec=args.codec,
            commit_interval_s=every,
            batch_size=args.batch_size,
        )
    else:
        batches = extraction.plan_batches(questions, args.traces_per_file, args.shard, "traces")
        total = sum(len(b.questions) for b in batches)
        steps = extraction.extract_to_folder(args.out, batches, answer, scorer, batch_size=args.batch_size)
    output.info(f"{total:,} questions to {args.model} -> {args.out}")
    progress = Progress(output)
    made = right = there = 0
    for _, position, scored_right in steps:
        if scored_right is None:
            there += 1 if to_store else position
            continue
        made += 1
        right += scored_right
        progress.update(
            lambda s: (
                f"{made + there:,} of {total:,} traces, {made / s:.2f} traces/s, "
                f"{right / made:.0%} right, {(total - there - made) * s / made:,.0f} s left"
            )
        )
    progress.clear()
    output.info(
        f"{args.out}: {made:,} traces made, {there:,} were there, {right / max(1, made):.0%} of the new answers right"
    )
    output.print_json({"out": str(args.out), "made": made, "already_there": there, "right": right})
    return 0


def _shard(text: str) -> tuple[int, int]:
    """I/N with 0 <= I < N."""
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected I/N with 0 <= I < N")
    return index, count
