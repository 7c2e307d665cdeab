"""Compare runs of tracestore train that differ in other options on the same test traces.

The runs must share store, --seed and --folds; only the seeds that all runs have are compared. For each
detector that all runs have, the table shows AUROC with its 95 % interval, and the pairwise differences with
a paired test.

Example: tracestore compare results results_heads results_top_k --output comparison.html
"""

import argparse
import shlex
from pathlib import Path

from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser
from tracestore.errors import UsageError
from tracestore.store.io.destinations import check_output_file
from tracestore.store.io.fsio import map_os_errors
from tracestore.words import plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="output folders of tracestore train")
    text = "write a page (.html) about all runs; replaces an earlier one of tracestore (default: none)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    add_shared(parser, "--overwrite", "--allow-mixed-provenance")


def run(args: argparse.Namespace, output: Output) -> None:
    """Print the metrics of the runs and the tests of their differences."""
    folders = list(dict.fromkeys(args.folders))
    if len(folders) < 2:
        raise UsageError("give the folders of at least two runs")
    if args.output is not None:
        check_output_file(args.output, (".html",), overwrite=args.overwrite, inputs=folders)
    # Imported here, so that wrong usage is reported at once.
    from tracestore.experiment.compare_runs import compare_runs, differences_of_traces, load_runs
    from tracestore.reports.detector_tables import format_table

    results = load_runs(folders)
    document = compare_runs(results, allow_mixed_provenance=args.allow_mixed_provenance)
    notes = differences_of_traces(results)
    for note in notes:
        output.info(f"note: {note}")
    if args.output is not None:
        from tracestore.reports.comparison_page import write_comparison

        with map_os_errors(args.output):
            write_comparison(document, results, args.output, shlex.join([*args.prog.split(), *args.words]), notes)
    for name, found in document.items():
        count = found["num_runs"]
        output.info(f"{name}, {plural(count, 'run')} each")
        output.info(format_table(found) + "\n")
    if args.output is not None:
        output.info(str(args.output))
    output.print_json(document)
