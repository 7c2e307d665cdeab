"""Convert files from Python: `tracestore.convert_files`."""

import logging
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from tracestore.console import Output
from tracestore.convert.dry_run import DryRunReport, dry_run
from tracestore.convert.options import ConvertOptions
from tracestore.convert.summary import ConvertReport
from tracestore.ingest.layout.language import Layout
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.io.local_folders import local_dir
from tracestore.store.io.ownership import check_store_destination
from tracestore.tasks.converting import convert

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
