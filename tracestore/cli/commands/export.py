"""Write traces to files.

Formats: pkl, lists of dicts; pt-lstm, last tokens; pt-gnn, PyG graphs; safetensors, a file per trace and a table; datasets, Parquet files for Hugging Face datasets. Labels, scores and all other values are written next to them, so that `tracestore convert` restores the traces. The same command continues an interrupted export.

Example: tracestore export store.zarr traces_data/ --format pkl
"""

import argparse

import tracestore
from tracestore.cli.flags import add_shared
from tracestore.console import Output, Parser, Progress, positive_int
from tracestore.export.exporter import TRACES_PER_FILE, export_store
from tracestore.export.file_formats import FORMATS
from tracestore.ingest.exports.export_manifest import SCORES_FILE
from tracestore.words import format_size, plural


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add_shared(parser, "store")
    parser.add_argument(
        "out_dir", metavar="OUT_DIR", help="a new or empty folder, or one with an unfinished export of the same store"
    )
    parser.add_argument("--format", choices=FORMATS, default="pkl", help="default: pkl")
    parser.add_argument(
        "--traces-per-file",
        type=positive_int,
        default=TRACES_PER_FILE,
        metavar="N",
        help="maximum number of traces in a file (default: 500; files of graphs and data sets end at 1 GiB; safetensors: always 1)",
    )


def run(args: argparse.Namespace, output: Output) -> None:
    """Export a store and print a summary."""
    with tracestore.open(args.store) as store, Progress(output) as progress:
        options = {"format": args.format, "traces_per_file": args.traces_per_file}
        report = export_store(store, args.out_dir, **options, progress=progress.update)
    output.print_json(report)
    output.info(
        f"{report.out_dir}: {plural(report.num_traces, 'trace')} in {plural(report.num_files, 'file')}, "
        f"{format_size(report.bytes)}{f', scores in {SCORES_FILE}' if report.scores_file else ''}"
    )
    for text in report.left_out:
        output.info(f"left out: {text}")
