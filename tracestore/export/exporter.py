"""Export of a store to files of the input formats, for programs that read those."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from pathlib import Path

import numpy as np

from tracestore.errors import UsageError
from tracestore.export.file_formats import FORMATS, WRITERS, ExportFormat, write_provenance
from tracestore.ingest.sources import PROVENANCE_FILE
from tracestore.store.format import schema
from tracestore.store.format.labels import SCORE_COLUMNS
from tracestore.store.format.provenance import Provenance
from tracestore.store.io.fsio import atomic_write, map_os_errors, write_rows
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace

TRACES_PER_FILE = 500
SCORES_FILE = "scores.csv"
# A file of graphs is made in memory. This bounds the bytes of its arrays.
MAX_GRAPH_BYTES = 1 << 30


@dataclass
class ExportReport:
    """The result of an export.

    Attributes
    ----------
    store, out_dir, format : str
        What was exported, where and how.
    num_traces, num_files, bytes : int
        Traces, and the number and total size of the files that hold them.
    scores_file : str, optional
        The file of scores, if the store has any.
    num_labels_left_out : int
        Stored labels that were lost because the pickle schema has no field for them.
    """

    store: str
    out_dir: str
    format: str
    num_traces: int = 0
    num_files: int = 0
    bytes: int = 0
    scores_file: str | None = None
    num_labels_left_out: int = 0


def export_store(
    store: TraceStore,
    out_dir: str | os.PathLike[str],
    *,
    format: ExportFormat = "pkl",
    traces_per_file: int = TRACES_PER_FILE,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write each trace of a store to files.

    Scores and groups are written to ``scores.csv``, and what is known of all traces' provenance and does not differ
    between them to ``provenance.json``. A file appears under its name only when it is
    complete. Pickles are written trace by trace; a .pt file is made in memory.

    Parameters
    ----------
    store : TraceStore
        The store.
    out_dir : str or PathLike
        A new or empty folder.
    format : {"pkl", "pt-lstm", "pt-gnn"}
        "pkl": pickled lists of dicts. "pt-lstm": the last token of each layer. "pt-gnn": one PyG
        Data per layer, whose edges are the pairs with a head-averaged attention above 0.
    traces_per_file : int
        Largest number of traces in a file. A file of graphs also ends at `MAX_GRAPH_BYTES`.
    progress : callable, optional
        Called with the traces done and the total after each file.

    Returns
    -------
    ExportReport
        What was written.

    Raises
    ------
    UsageError
        If a trace lacks what the format needs, or the folder is not empty.
    DiskFullError, StorageError
        If the file system refuses.

    Examples
    --------
    >>> import tracestore
    >>> from tracestore.export.exporter import export_store
    >>> with tracestore.open("store.zarr") as store:
    ...     report = export_store(store, "pickles", traces_per_file=5)
    >>> report.num_traces, report.num_files
    (12, 3)
    """
    if format not in FORMATS:
        raise UsageError(f"found format {format!r}, expected one of {', '.join(FORMATS)}")
    out = Path(out_dir)
    report = ExportReport(str(store.path), str(out), format)
    with map_os_errors(out):
        try:
            out.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{out}: not a folder") from None
        if any(out.iterdir()):
            raise UsageError(f"{out}: not empty; use an empty or new folder")
        _check(store, format)
        for number, (begin, end) in enumerate(_file_ranges(store, format, traces_per_file)):
            traces = (store[k] for k in range(begin, end))
            name = f"traces_batch_{number:04d}.pkl" if format == "pkl" else f"preprocessed_batch_{number:04d}.pt"
            with atomic_write(out / name) as file:
                WRITERS[format](store, traces, file)
                report.bytes += file.tell()
            report.num_files += 1
            report.num_traces += end - begin
            if progress is not None:
                progress(report.num_traces, len(store))
        if format == "pkl":
            report.num_labels_left_out = int((~np.isnan(store.labels)).sum())
        _write_common_provenance(store, out)
        scores = _write_scores(store, out)
        report.scores_file = None if scores is None else str(scores)
    return report


def _check(store: TraceStore, format: ExportFormat) -> None:
    """Raise UsageError if a trace lacks what the format needs, before anything is written."""
    for trace in store:
        problem = _problem(trace, format)
        if problem is not None:
            raise UsageError(f"{store.path}: trace {trace.index} ({trace.question_id}) {problem}")


def _problem(trace: Trace, format: ExportFormat) -> str | None:
    """Return why a trace does not fit a format, and the format that it fits."""
    if format != "pkl" and trace.sample > 0:
        return "is a further answer to its question, which .pt files cannot express: --format pkl"
    if format == "pt-lstm":
        return None
    if trace.num_tokens == 0:
        return "has only last tokens: --format pt-lstm"
    if format == "pkl" and trace.attention_layout == "edges":
        return "has edges, from which attention cannot be restored: --format pt-gnn"
    if format == "pt-gnn" and trace.attention_layout is None:
        return "has no attention: --format pt-lstm"
    return None


def _file_ranges(store: TraceStore, format: ExportFormat, traces_per_file: int) -> Iterator[tuple[int, int]]:
    """Yield the first trace of each file and the trace after its last one."""
    total = len(store)
    sizes = np.zeros(total, np.int64)
    if format == "pt-gnn":
        tokens, pairs = store.token_and_pair_counts(np.arange(total))
        itemsize = schema.storage_dtype(store.hidden_dtype).itemsize
        # An edge takes two int64 and a weight of at most 4 bytes.
        sizes = tokens * (store.num_layers * store.hidden_dim * itemsize) + pairs * (16 + 4)
    begin, num_bytes = 0, 0
    for k, size in enumerate(sizes.tolist()):
        if k > begin and (k - begin == traces_per_file or num_bytes + size > MAX_GRAPH_BYTES):
            yield begin, k
            begin, num_bytes = k, 0
        num_bytes += size
    if total > begin:
        yield begin, total


def _write_common_provenance(store: TraceStore, out: Path) -> None:
    if store.provenance and all(source.provenance for source in store.internals.index.sources()):
        write_provenance(out / PROVENANCE_FILE, reduce(Provenance.agreement, store.provenance))


def _write_scores(store: TraceStore, out: Path) -> Path | None:
    """Write the file that `convert` and `score` read. Return None if no trace has a score or a group.

    Columns that hold nothing are left out: the sample if no question of the store has further answers, because
    readers apply a score without a sample to all samples of its question.
    """
    header = ("question_id", "sample", SCORE_COLUMNS[store.score_direction], "group")
    rows: list[tuple[str | int, ...]] = [
        (trace.question_id, trace.sample, "" if math.isnan(trace.score) else repr(trace.score), trace.group)
        for trace in store
    ]
    with_sample, with_group = any(row[1] for row in rows), any(row[3] for row in rows)
    rows = [row for row in rows if row[2] or row[3]]
    if not rows:
        return None
    kept = (True, with_sample, True, with_group)
    # Question ids may hold lone surrogates.
    write_rows(
        out / SCORES_FILE, list(compress(header, kept)), (list(compress(r, kept)) for r in rows), "surrogatepass"
    )
    return out / SCORES_FILE
