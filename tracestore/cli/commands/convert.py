"""Convert files of hidden states into a store. A second run continues the first.

Example: tracestore convert traces_data/ store.zarr
"""

import argparse
from pathlib import Path
from typing import Any

from tracestore import process
from tracestore.cli.flags import add_flags, option_names, values
from tracestore.console import Output, Parser, float_where
from tracestore.convert.options import ConvertOptions
from tracestore.convert.runner import Conversion
from tracestore.errors import UsageError
from tracestore.store.format.paths import RECEIPTS
from tracestore.store.io.files import parse_location
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.io.local_folders import local_dir
from tracestore.store.io.ownership import check_store_destination

# Options of other tools and of drafts of this one; using them prints the lines of --field that say the same.
_AS_FIELDS = ("--map", "--axes")
# Containers whose keys name arrays; those of the others hold items.
_OF_KEYS = (".npz", ".safetensors", ".h5", ".hdf5")
_TEXTS = (".csv", ".tsv", ".json", ".txt", ".md")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("src", nargs="+", type=Path, metavar="SRC", help="trace files, or folders of them")
    parser.add_argument("dst", metavar="DST", help="the store to create or to extend: a folder, s3:// or gs://")
    add_flags(parser, ConvertOptions)
    text = "cut the conversion into tasks, write them to FILE and convert nothing, see docs/tasks.md (default: convert)"
    parser.add_argument("--plan", type=Path, metavar="FILE", help=text)
    for flag in _AS_FIELDS:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--watch", action="store_true", help="keep converting files that are added to the folders")
    text = "with --watch, end when no file has been added for this time (default: at Ctrl-C)"
    parser.add_argument("--watch-timeout", type=float_where(lambda s: s >= 0, "seconds"), metavar="SECONDS", help=text)


def run(args: argparse.Namespace, output: Output) -> None:
    """Convert the sources and print a summary."""
    if args.map is not None or args.axes is not None:
        raise UsageError(
            f"{' and '.join(flag for flag in _AS_FIELDS if getattr(args, flag[2:]) is not None)}: lines of a layout say "
            f"this: {_field_lines(args.src, args.map or '', args.axes)}; `tracestore inspect SRC` prints whole layouts"
        )
    options = ConvertOptions(**values(args, option_names(ConvertOptions)))
    if args.is_program:
        process.reuse_freed_memory(options.memory_budget, num_arenas=1)
    if args.plan is not None:
        from tracestore.tasks.task_files import check_tasks_file, report_tasks, write_tasks
        from tracestore.tasks.task_plan import plan_tasks

        if options.dask is not None or options.dry_run or args.watch:
            raise UsageError("--plan excludes --dask, --dry-run and --watch")
        with map_os_errors(local_dir(args.dst)):
            check_tasks_file(args.plan, args.dst, args.src)
            tasks = plan_tasks(args.src, args.dst, options, output=output)
            write_tasks(args.plan, tasks)
        report_tasks(args.plan, tasks, output)
        return
    if args.watch_timeout is not None and not args.watch:
        raise UsageError("--watch-timeout needs --watch")
    report: Any
    with map_os_errors(local_dir(args.dst)):
        check_store_destination(args.dst, overwrite=options.overwrite)
        # Imported here, because most conversions are neither dry nor watch their folders, and are one task.
        if options.dry_run:
            from tracestore.convert.dry_run import dry_run

            report = dry_run(args.src, args.dst, options, output)
        elif args.watch:
            if options.dask is not None:
                raise UsageError("--watch excludes --dask")
            from tracestore.convert.watch import Watch

            report = Watch(args.src, args.dst, options, output, args.watch_timeout).run()
        elif options.workers == 1 and options.dask is None and not _may_have_plan(args.dst):
            report = Conversion(args.src, args.dst, options, output).run()
        else:
            from tracestore.tasks.convert_files import convert

            report = convert(args.src, args.dst, options, output)
        output.print_json(report)


def _may_have_plan(store: str) -> bool:
    location = parse_location(store)
    return not isinstance(location, Path) or (location / RECEIPTS).is_dir()


def _field_lines(sources: list[Path], names: str, axes: str | None) -> str:
    """Return the --field lines of keys as FIELD=KEY,..., and of the axes of hidden states, for the files of the sources."""
    files = (
        path
        for source in sources
        for path in ([source] if source.is_file() else source.rglob("*.*"))
        if path.is_file() and path.suffix not in _TEXTS
    )
    first = next(files, Path("x.pkl"))
    suffix = first.suffix
    pattern = first.name if first in sources else f"*{suffix}"
    pairs = [pair.partition("=")[::2] for pair in names.split(",") if "=" in pair]
    keys = {field.strip(): key.strip() for field, key in pairs}
    if axes is not None:
        keys.setdefault("hidden_states", "hidden_states")
    before = "" if suffix in _OF_KEYS else "[]/"
    lines = []
    for field, key in keys.items():
        of_states = f" -> {' '.join(axes)}" if axes and field == "hidden_states" else ""
        place = pattern if suffix == ".npy" else f"{pattern} : {before}{key}"
        lines.append(f"--field '{field} = {place}{of_states}'")
    return " ".join(lines) or f"--field 'FIELD = {pattern} : {before}KEY'"
