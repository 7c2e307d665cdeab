"""tracestore export."""

import argparse
from dataclasses import asdict

import tracestore
from tracestore.console import Output, Parser, format_size, positive_int, traces_done
from tracestore.export.exporter import FORMATS, SCORES_FILE, TRACES_PER_FILE, export_store


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "Formats: pkl, lists of dicts; pt-lstm, last tokens; pt-gnn, PyG graphs. Scores go into scores.csv."
    )
    parser.epilog = "Example: tracestore export store.zarr traces_data/ --format pkl"
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("out_dir", metavar="OUT_DIR", help="a new or empty folder")
    parser.add_argument("--format", choices=FORMATS, default="pkl", help="default: pkl")
    parser.add_argument(
        "--traces-per-file",
        type=positive_int,
        default=TRACES_PER_FILE,
        metavar="N",
        help="at most (default: 500; files of graphs end at 1 GiB)",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    progress, on_traces = traces_done(output)
    with tracestore.open(args.store) as store:
        report = export_store(
            store, args.out_dir, format=args.format, traces_per_file=args.traces_per_file, progress=on_traces
        )
    progress.clear()
    output.print_json(asdict(report))
    if not args.json:
        scores = f", scores in {SCORES_FILE}" if report.scores_file else ""
        output.info(
            f"{report.out_dir}: {report.num_traces:,} traces in {report.num_files:,} files, "
            f"{format_size(report.bytes)}{scores}"
        )
        if report.num_labels_left_out:
            output.info(
                f"{report.num_labels_left_out:,} traces have a label of their own, for which pickles have no field: "
                "it is left out"
            )
    return 0
