"""Compares runs of tools/train.py with other flags on the same traces.

python tools/compare.py results results_heads results_top_k
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tracestore.console import Output, Parser, leave, run
from tracestore.errors import UsageError

_SAME = "train on the same store with the same --seed and --folds"


def make_parser() -> Parser:
    parser = Parser(
        prog="compare.py",
        description="Compare what several runs of tools/train.py, with other flags, give on the same test traces.",
        epilog="The runs must share store, --seed and --folds. Of several seeds those count that all have. Of each "
        "detector that all have: AUROC with its interval, and the differences to each other with a paired test.",
    )
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="output folders of tools/train.py")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def load_results(folder: Path) -> dict[str, Any]:
    """What results.json says. UsageError where it is none of a finished run."""
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path}: not the results of a run of tools/train.py") from None
    if not isinstance(results, dict) or "comparisons" not in results:
        raise UsageError(f"{path}: not the results of a finished run of tools/train.py")
    return results


def entries(results: dict[str, Any]) -> dict[str, dict[tuple[int, int], dict[str, Any]]]:
    """Of each detector the entries of its runs, by fold and seed."""
    runs = results.get("runs") or [{"fold": None, "seed": results["config"]["seed"], "models": results["models"]}]
    found: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for of in runs:
        for name, entry in of["models"].items():
            found.setdefault(name, {})[of["fold"] or 0, of["seed"]] = entry
    return found


def command(args: argparse.Namespace) -> int:
    folders = list(dict.fromkeys(args.folders))
    if len(folders) < 2:
        raise UsageError("give the folders of at least two runs")
    loaded = {str(folder): load_results(folder) for folder in folders}
    # Imported here: wrong usage answers at once.
    from tracestore.train import report
    from tracestore.train.compare import compare
    from tracestore.train.evaluate import RunScores, evaluate_runs

    output, by_folder = Output(args.json), {folder: entries(results) for folder, results in loaded.items()}
    first = by_folder[str(folders[0])]
    names = [name for name in first if all(name in of for of in by_folder.values())]
    if not names:
        raise UsageError("the runs have no detector in common")
    document: dict[str, Any] = {}
    for name in names:
        common = [key for key in first[name] if all(key in of[name] for of in by_folder.values())]
        if {fold for fold, _ in common} != {fold for of in by_folder.values() for fold, _ in of[name]}:
            raise UsageError(f"{name}: the runs have no fold and seed in common; {_SAME}")
        scores = {
            folder: [RunScores.from_entry(of[name][key], key[0]) for key in common] for folder, of in by_folder.items()
        }
        seed = int(loaded[str(folders[0])]["config"]["seed"])
        try:
            pairs = compare(scores, seed)
        except ValueError as error:
            raise UsageError(f"{name}: {error}; {_SAME}") from None
        document[name] = {
            "models": {folder: evaluate_runs(runs, seed) for folder, runs in scores.items()},
            "comparisons": pairs,
        }
        output.say(f"{name}, {len(common)} {'run' if len(common) == 1 else 'runs'} each")
        output.say(report.table(document[name]) + "\n")
    output.document(document)
    return 0


if __name__ == "__main__":
    leave(run("compare.py", lambda: command(make_parser().parse_args())))
