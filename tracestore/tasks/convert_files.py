"""Convert files, also by tasks that processes of this machine or workers of a cluster write: `tracestore.convert_files`."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from tracestore.console import Output
from tracestore.convert.choosing import input_files
from tracestore.convert.dry_run import DryRunReport, dry_run
from tracestore.convert.options import ConvertOptions
from tracestore.convert.runner import Conversion
from tracestore.convert.summary import ConvertReport
from tracestore.ingest.layout.language import Layout
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.io.local_folders import local_dir
from tracestore.store.io.ownership import check_store_destination
from tracestore.store.write.plan_files import open_plan_files
from tracestore.tasks.committing import Workers, commit_plan, unwritten, whole_tasks
from tracestore.tasks.plan_parts import identity_of
from tracestore.tasks.task_plan import TaskPlan, kept_plan, new_plan
from tracestore.tasks.workers import DaskWorkers, LocalWorkers
from tracestore.words import plural

_log = logging.getLogger("tracestore.convert")


class _Notes(Output):
    """Notes of a conversion as records of the logger `tracestore.convert`."""

    def info(self, text: str) -> None:
        """Log a note."""
        _log.info("%s", text)


def convert_files(
    sources: str | PathLike[str] | Iterable[str | PathLike[str]],
    store: str | PathLike[str],
    *,
    layout: Layout | Mapping[str, Any] | str | PathLike[str] | None = None,
    **options: Any,
) -> ConvertReport | DryRunReport:
    """Convert trace files into a store, as the command `tracestore convert` does.

    Parameters
    ----------
    sources : path or iterable of paths
        Trace files, and folders that are searched for them.
    store : str or PathLike
        The store to create or to extend.
    layout : Layout, mapping or path, optional
        Where the fields lie in the files: entries such as ``{"hidden_states": "*.pkl : []/hs -> L S D"}``, or the path
        of a TOML file with such lines. By default the layouts that the store keeps, a built-in layout, or the only one
        that the files prove.
    **options
        Fields of `tracestore.convert.options.ConvertOptions`: the flags of the command.

    Returns
    -------
    ConvertReport, or DryRunReport with ``dry_run=True``
        What the command prints with ``--json``.

    Raises
    ------
    UsageError
        If an option, the layout or a path is wrong.
    InvalidInputError
        If a source is refused, or the accounts of the run do not close.

    Examples
    --------
    >>> layout = {"hidden_states": "{id}.npz : hs -> L S D", "is_correct": "labels.csv : [id=qid]/label"}
    >>> tracestore.convert_files("dumps/", "store.zarr", layout=layout)  # doctest: +SKIP
    """
    paths = [Path(path) for path in ([sources] if isinstance(sources, str | PathLike) else sources)]
    given = ConvertOptions(layout=layout, **options)
    name = str(store)
    with map_os_errors(local_dir(name)):
        check_store_destination(name, overwrite=given.overwrite)
        if given.dry_run:
            return dry_run(paths, name, given, _Notes())
        return convert(paths, name, given, _Notes())


def convert(
    sources: Iterable[str | PathLike[str]], store: str | PathLike[str], options: ConvertOptions, output: Output
) -> ConvertReport:
    """Convert files into a store with the processes that the options state.

    A conversion of one task or of one worker runs in this process. A plan of the same sources and options that was not
    committed is continued in any case; then files that were added since are converted.

    Parameters
    ----------
    sources : iterable of paths
    store : str or PathLike
    options : ConvertOptions
    output : Output
        Receives notes and progress.

    Returns
    -------
    ConvertReport

    Raises
    ------
    UsageError
        If an option is wrong, or no scheduler is found.
    InvalidInputError
        If a source is refused, or its worker was killed three times. The sources before it are committed.
    ClusterError
        If Dask gives up. The sources before the failed one are committed.
    """
    arguments, files = [Path(path) for path in sources], open_plan_files(store)
    with ExitStack() as stack:
        workers: Workers | None = None
        if options.dask is not None:
            workers = stack.enter_context(DaskWorkers(options.dask, options.workers, options.memory_budget))
        plan, known = kept_plan(arguments, files, options, output), None
        is_replaced, added = plan is not None and _has_changed(plan), set[Path]()
        if plan is not None and is_replaced:
            plan.remove(whole_tasks(plan, plan.described().sources))
            plan = None
        if plan is not None:
            found, order = input_files(arguments, str(store), options)[0], set(plan.facts["order"])
            added = {path for path in found if str(path.absolute()) not in order}
        else:
            conversion = Conversion(arguments, str(store), options, output)
            if options.workers == 1 and workers is None and not is_replaced:
                return conversion.run()
            plan = new_plan(conversion, arguments, files, options, output, min_tasks=2 if workers is None else 1)
            if plan is None:
                return conversion.run()
            conversion.described.release()
            known = conversion.known()
        if workers is None:
            workers = LocalWorkers(options.workers, options.memory_budget)
        report = commit_plan(plan, output, workers, num_workers=options.workers, known=known)
    if added:
        output.info(f"{plural(len(added), 'file')} added since the plan")
        planned, options = report, replace(options, overwrite=False)
        report = Conversion(arguments, str(store), options, output, new=added).run()
        report.add_earlier(planned)
    return report


def _has_changed(plan: TaskPlan) -> bool:
    """Return whether a source that no task has read differs from that of the plan."""
    sources = plan.described().sources
    found = [source for task in unwritten(plan.tasks()) for source in plan.facts["tasks"][task.number]]
    return any(list(identity_of(sources[k])[:2]) != expected for k, _, *expected in found)
