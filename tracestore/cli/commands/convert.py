"""Convert files of hidden states into a store. A second run continues the first.

Example: tracestore convert traces_data/ store.zarr
"""

import argparse
from pathlib import Path

from tracestore.cli.flags import PROVENANCE_FLAGS, SCORE_FLAGS, Flags, add_flags, values
from tracestore.console import Output, Parser, float_where, format_size, parse_size
from tracestore.convert.dry_run import dry_run
from tracestore.convert.options import ConvertOptions
from tracestore.convert.runner import Conversion
from tracestore.convert.watch import Watch
from tracestore.errors import UsageError
from tracestore.process import reuse_freed_memory
from tracestore.store.format.schema import CODECS
from tracestore.store.io.files import local_dir
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.io.ownership import check_store_destination

_FLAGS: Flags = {
    "layout": {
        "metavar": "FILE.toml",
        "help": "where the fields of the traces lie in the files, see docs/inputs.md (default: a built-in layout, or the one that the files prove)",
    },
    "field": {
        "action": "append",
        "metavar": '"FIELD = FILES : PATH -> AXES"',
        "help": "a line of a layout, for one field; may be repeated (default: none)",
    },
    "scores": {
        "metavar": "FILE",
        "help": "scores by question_id (default: the only *scores*.csv in a SRC folder)",
    },
    **SCORE_FLAGS,
    "provenance": {
        "metavar": "JSON",
        "help": "model, layers and prompt of the traces (default: provenance.json in a SRC folder)",
    },
    **PROVENANCE_FLAGS,
    "attention": "attention to store (default: mean over heads; none if no trace has attention)",
    "padding": "padding of batches: given by attention_mask or lengths, or none if batches without them have none",
    "codec": {"choices": CODECS, "help": "compression (default: none)"},
    "dtype": "dtype to store (default: float16)",
    "workers": "files read in parallel",
    "dask": {
        "metavar": "ADDRESS",
        "help": "read with a Dask cluster that shares the file system: address of the scheduler, or local (default: threads of this process)",
    },
    "memory_budget": {
        "type": parse_size,
        "metavar": "SIZE",
        "help": f"memory for waiting traces (default: {format_size(ConvertOptions.memory_budget)})",
    },
    "on_conflict": "a trace whose question id and sample exist with other content",
    "skip_bad": "continue after a trace that is refused, and list it in DST.refused.jsonl",
    "overwrite": "replace the store",
    "dry_run": "print the layout of the files and what would be stored of their first traces; write nothing",
}


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("src", nargs="+", type=Path, metavar="SRC", help="trace files, or folders of them")
    parser.add_argument("dst", metavar="DST", help="the store to create or to extend: a folder, s3:// or gs://")
    add_flags(parser, ConvertOptions, _FLAGS)
    parser.add_argument("--watch", action="store_true", help="keep converting files that are added to the folders")
    text = "with --watch, end when no file has been added for this time (default: at Ctrl-C)"
    parser.add_argument("--watch-timeout", type=float_where(lambda s: s >= 0, "seconds"), metavar="SECONDS", help=text)


def run(args: argparse.Namespace, output: Output) -> None:
    """Convert the sources and print a summary."""
    options = ConvertOptions(**values(args, _FLAGS))
    if args.is_program:
        reuse_freed_memory(options.memory_budget)
    if options.dry_run:
        output.print_json(dry_run(args.src, args.dst, options, output))
        return
    if args.watch_timeout is not None and not args.watch:
        raise UsageError("--watch-timeout needs --watch")
    with map_os_errors(local_dir(args.dst)):
        check_store_destination(args.dst, overwrite=options.overwrite)
    conversion: Conversion | Watch
    if args.watch:
        conversion = Watch(args.src, args.dst, options, output, args.watch_timeout)
    else:
        conversion = Conversion(args.src, args.dst, options, output)
    with map_os_errors(local_dir(args.dst)):
        output.print_json(conversion.run())
