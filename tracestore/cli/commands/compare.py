"""tracestore compare."""

import argparse
from pathlib import Path

from tracestore.console import Output, Parser
from tracestore.errors import UsageError


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "Compare what several runs of tracestore train, with other flags, give on the same test traces. The runs must "
        "share store, --seed and --folds. Of several seeds those count that all have. Of each detector that all have: "
        "AUROC with its interval, and the differences to each other with a paired test."
    )
    parser.epilog = "Example: tracestore compare results results_heads results_top_k"
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="output folders of tracestore train")


def run(args: argparse.Namespace, output: Output) -> int:
    folders = list(dict.fromkeys(args.folders))
    if len(folders) < 2:
        raise UsageError("give the folders of at least two runs")
    # Imported here: wrong usage answers at once.
    from tracestore.evaluation.report import format_table
    from tracestore.experiment.compare_runs import compare_runs

    document = compare_runs(folders)
    for name, found in document.items():
        count = found.pop("num_runs")
        output.info(f"{name}, {count} {'run' if count == 1 else 'runs'} each")
        output.info(format_table(found) + "\n")
    output.print_json(document)
    return 0
