"""Writing of the columns: scores, labels and groups."""

import os
from pathlib import Path

from tracestore.store.format import paths, schema
from tracestore.store.format.manifest import ColumnsRef
from tracestore.store.io import fsio
from tracestore.store.io.ownership import require_removed
from tracestore.store.read.columns import Columns
from tracestore.store.write.segment_writer import ArrayWriter


def write_columns(store: Path, generation: int, first_trace: int, columns: Columns) -> ColumnsRef:
    """Write the folder columns/<generation> atomically and return the reference to it."""
    path = paths.columns(generation)
    require_removed(store, paths.temporary(path))
    temporary = store / paths.temporary(path)
    fsio.makedirs(temporary)
    writer = ArrayWriter(temporary, path)
    for name in schema.COLUMN_ARRAYS:
        writer.write(name, getattr(columns, name))
    writer.write_group({"tracestore": {"first_trace": first_trace, "num_traces": len(columns)}})
    require_removed(store, path)
    fsio.retry_eintr(os.rename, temporary, store / path)
    fsio.fsync_path(store / "columns")
    return ColumnsRef(path, first_trace, len(columns), tuple(writer.files))
