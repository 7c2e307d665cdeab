"""Let a language model answer questions, and record its hidden states and attention.

Example: tracestore extract --model HuggingFaceTB/SmolLM2-135M-Instruct --questions package:facts --output traces_data
"""

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

from tracestore.cli.flags import add_shard, add_shared, values
from tracestore.console import Output, Parser, Progress, float_where, int_between, int_list, positive_int
from tracestore.errors import UsageError
from tracestore.extract import extraction
from tracestore.extract.judges import DEFAULT_JUDGES, JUDGES
from tracestore.extract.questions import FACTS, GENERATED, read_questions, with_samples
from tracestore.extract.select import Select
from tracestore.extras import needs
from tracestore.store.format.labels import unlabeled_note
from tracestore.store.format.schema import ATTENTION_MODES, CODECS
from tracestore.store.io.destinations import check_output_dir
from tracestore.store.io.files import parse_location
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.io.local_folders import local_dir
from tracestore.store.io.ownership import check_store_destination
from tracestore.store.read.store import open_store
from tracestore.words import plural

# Fields of AnswerOptions that flags set directly.
_OPTIONS = ("instruction", "max_new_tokens", "temperature", "seed", "top_logprobs")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face id, folder, .gguf file, or package:NAME")
    text = (
        f"CSV: question_id, question, answers (a|b), group; or JSON lines; or a set of this package: {FACTS}, "
        f"{', '.join(GENERATED)}"
    )
    add("--questions", required=True, metavar="FILE", help=text)
    text = "folder for .pkl files, or a store (ends with .zarr)"
    add("--output", "--out", required=True, type=parse_location, metavar="DIR|STORE", help=text)
    add("--limit", type=positive_int, metavar="N", help="use only the first N questions (default: all)")
    add("--traces-per-file", type=positive_int, default=500, metavar="N", help="answers in a .pkl file")
    text = "only every Nth question from question I on (with pickles: file); all shards may write to one store"
    add_shard(parser, text)
    add("--max-new-tokens", type=positive_int, default=32, metavar="N", help="tokens of an answer")
    add("--instruction", default=extraction.INSTRUCTION, help="system prompt; '' for none")
    text = "chat template in Jinja (NAME.jinja), or text with {instruction} and {question}; default: that of the model"
    add("--prompt-template", type=Path, metavar="FILE", help=text)
    add("--samples", type=positive_int, default=1, metavar="K", help="answers per question")
    temperature = float_where(lambda t: 0 <= t < math.inf, "a number of at least 0")
    add("--temperature", type=temperature, default=0.0, metavar="T", help="0 (default): the most likely tokens")
    add(
        "--seed",
        type=int_between(0, 2**63 - 1, "an integer from 0"),
        default=0,
        metavar="S",
        help="seed of --temperature",
    )
    text = "also record the K most likely tokens at each generated token (default: none)"
    add("--top-logprobs", type=positive_int, default=0, metavar="K", help=text)
    text = (
        f"score of the answers, can be repeated; the first is the default score (default: {', '.join(DEFAULT_JUDGES)})"
    )
    add("--judge", action="append", choices=JUDGES, dest="judges", help=text)
    text = "blocks to record, counted from 1 or from the end, such as 8,12-16 or --layers=-4--1 (default: all)"
    add("--layers", type=_layers, metavar="LIST", help=text)
    text = "tokens to record: all (default), answer, or the last K"
    add("--positions", type=_positions, default="all", metavar="all|answer|K", help=text)
    add("--attention", choices=ATTENTION_MODES, default="mean", help="attention to store (for a store)")
    add("--codec", choices=CODECS, default="none", help="compression (for a store)")
    text = "store the final norm and the unembedding matrix of the model, for a logit lens (for a store)"
    add("--lens", action="store_true", help=text)
    add(
        "--commit-interval",
        type=float_where(lambda s: 0 <= s < math.inf, "seconds, at least 0"),
        default=extraction.COMMIT_INTERVAL_S,
        metavar="SECONDS",
        help="time between commits, which a kill can lose (for a store; default: 60; less at first, and a twentieth of "
        "the time so far if that is more; 0: commit after each trace)",
    )
    add("--batch-size", type=positive_int, default=1, metavar="N", help="questions per forward pass")
    add("--device", default="auto", help="auto (a GPU if there is one), cpu or cuda")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="dtype of the model")
    add_shared(parser, "--allow-mixed-provenance")


def run(args: argparse.Namespace, output: Output) -> None:
    """Extract traces, print progress and a summary."""
    questions = read_questions(args.questions)[: args.limit]
    to_store = args.output.name.endswith(".zarr")
    if not to_store and not isinstance(args.output, Path):
        raise UsageError(f"--output {args.output}: .pkl files need a local folder; the name of a store ends with .zarr")
    if args.lens and not to_store:
        raise UsageError(f"--output {args.output}: --lens needs a store; the name of a store ends with .zarr")
    if args.samples > 1 and not args.temperature:
        raise UsageError("--samples needs a --temperature above 0, because the most likely tokens are always the same")
    select = Select(args.layers, args.positions, "none" if to_store and args.attention == "none" else "all")
    with map_os_errors(local_dir(args.output)):
        if to_store:
            check_store_destination(args.output)
        else:
            check_output_dir(args.output)
    if to_store:
        shard, count = args.shard
        questions = with_samples(questions[shard::count], args.samples)
        total = len(questions)
    else:
        batches = extraction.plan_batches(with_samples(questions, args.samples), args.traces_per_file, args.shard)
        total = sum(len(b.questions) for b in batches)
    output.info(f"{plural(total, 'answer')} of {args.model} -> {args.output}")
    # Imported here, because loading the libraries takes seconds: wrong usage is reported at once.
    with needs("extract"):
        from tracestore.extract.answering import AnswerOptions, answer_questions, provenance_of
        from tracestore.extract.model import lens_of, load_model
        from tracestore.extract.prompts import read_template

    template = read_template(args.prompt_template) if args.prompt_template else None
    options = AnswerOptions(template=template, select=select, **values(args, _OPTIONS))
    lm = load_model(args.model, device=args.device, dtype=args.dtype)
    answer = partial(answer_questions, lm, options=options)
    common: dict[str, Any] = {
        "batch_size": args.batch_size,
        "judges": tuple(dict.fromkeys(args.judges or DEFAULT_JUDGES)),
        "provenance": provenance_of(lm, options),
        "allow_mixed_provenance": args.allow_mixed_provenance,
    }
    if to_store:
        steps = extraction.extract_to_store(
            args.output,
            questions,
            answer,
            attention=args.attention,
            codec=args.codec,
            commit_interval_s=args.commit_interval,
            lens=lens_of(lm) if args.lens else None,
            **common,
        )
    else:
        steps = extraction.extract_to_folder(args.output, batches, answer, **common)
    report = extraction.ExtractReport(str(args.output))
    with Progress(output) as progress:
        try:
            for step in steps:
                if not isinstance(step, bool):
                    report.already_there += 1
                    report.rejudged += step == "rejudged"
                    continue
                report.made, report.right = report.made + 1, report.right + step
                done = report.made + report.already_there
                progress.update(done, total, lambda: f"{report.right / report.made:.0%} correct")
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; the same command continues") from None
    share = f", {report.right / report.made:.0%} of the new answers correct" if report.made else ""
    changed = f" ({report.rejudged:,} with other scores than before)" if report.rejudged else ""
    existing = plural(report.already_there, "existing trace") + changed
    output.info(f"{args.output}: {plural(report.made, 'new trace')}, {existing}{share}")
    if to_store and report.made:
        with open_store(args.output) as store:
            columns = store.internals.columns
            if note := unlabeled_note(columns.scores, columns.labels, store.score_name):
                output.info(note)
    output.print_json(report)


def _layers(text: str) -> tuple[int, ...]:
    """Return the numbers of layers in a text, for argparse."""
    layers = int_list(text)
    if 0 in layers:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected numbers from 1, or from the end as -1")
    return layers


def _positions(text: str) -> Any:
    """Return a number as an integer and other texts unchanged, for argparse; Select checks them."""
    return int(text) if text.isdecimal() and len(text) < 10 else text
