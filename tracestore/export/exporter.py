"""Export of a store to files of other formats, for programs that read those."""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import compress
from pathlib import Path

import numpy as np

from tracestore.console import plural
from tracestore.errors import UsageError
from tracestore.export.file_formats import FORMATS, WRITERS, ExportFormat, write_provenance
from tracestore.export.trace_values import json_line, row_of
from tracestore.extras import needs
from tracestore.ingest.sources import PROVENANCE_FILE
from tracestore.store.format import schema
from tracestore.store.format.labels import SCORE_COLUMNS
from tracestore.store.format.provenance import Provenance
from tracestore.store.io.destinations import check_output_dir
from tracestore.store.io.fsio import atomic_write, map_os_errors, require_free_bytes, write_rows
from tracestore.store.maintain.selection import check_token_counts, large_array_bytes
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace

TRACES_PER_FILE = 500
SCORES_FILE = "scores.csv"
TABLE_FILE, STORE_FILE = "traces.jsonl", "store.json"
# Formats that hold every field and score of a trace.
_COMPLETE = ("safetensors", "datasets")
# Bound of the bytes of the arrays in a file of graphs, which is made in memory, or of a data set.
MAX_FILE_BYTES = 1 << 30


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
    left_out : list of str
        What the store holds and the files do not, because the format has no place for it.
    """

    store: str
    out_dir: str
    format: str
    num_traces: int = 0
    num_files: int = 0
    bytes: int = 0
    scores_file: str | None = None
    left_out: list[str] = field(default_factory=list)


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
    complete. A .pt file is made in memory; the other formats need the memory of a trace, or of a row group.

    Parameters
    ----------
    store : TraceStore
        The store.
    out_dir : str or PathLike
        A new or empty folder.
    format : {"pkl", "pt-lstm", "pt-gnn", "safetensors", "datasets"}
        "pkl": pickled lists of dicts. "pt-lstm": the last token of each layer. "pt-gnn": one PyG
        Data per layer, whose edges are the pairs with a head-averaged attention above 0. "safetensors": one file of
        arrays per trace, and the texts, numbers and scores in ``traces.jsonl``. "datasets": Parquet files, a row per
        trace. The last two hold all fields and scores, and ``store.json`` the attributes of the store.
    traces_per_file : int
        Largest number of traces in a file. A file of graphs or of a data set also ends at `MAX_FILE_BYTES`.
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
    MissingExtraError
        If pyarrow is not installed, for "datasets".
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
        check_output_dir(out)
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out}: not empty; use an empty or new folder")
        _require_space(store, out, format)
        _check(store, format)
        write, name = WRITERS[format]
        (out / name).parent.mkdir(exist_ok=True)
        for number, (begin, end) in enumerate(_file_ranges(store, format, traces_per_file)):
            traces = (store[k] for k in range(begin, end))
            with atomic_write(out / name.format(number)) as file:
                write(store, traces, file)
                report.bytes += file.tell()
            report.num_files += 1
            report.num_traces += end - begin
            if progress is not None:
                progress(report.num_traces, len(store))
        if format == "safetensors":
            _write_table(store, out / TABLE_FILE, name)
        if format in _COMPLETE:
            with atomic_write(out / STORE_FILE) as file:
                file.write(json.dumps(store.internals.attributes.to_json(), indent=1).encode())
        report.left_out = _left_out(store, format)
        _write_common_provenance(store, out)
        scores = _write_scores(store, out)
        report.scores_file = None if scores is None else str(scores)
    return report


def _require_space(store: TraceStore, out: Path, format: ExportFormat) -> None:
    """Raise DiskFullError if the arrays that the files hold at least do not fit on the disk."""
    if format == "datasets":  # Parquet files are compressed.
        return
    num_traces, itemsize = len(store), schema.storage_dtype(store.hidden_dtype).itemsize
    if format == "pt-lstm":
        needed = num_traces * store.num_layers * store.hidden_dim * itemsize
    elif format == "pt-gnn":
        check_token_counts(store, store.indices)
        needed = int(store.num_tokens.sum()) * store.num_layers * store.hidden_dim * itemsize
    else:
        needed = int(large_array_bytes(store, np.arange(num_traces)).sum())
    require_free_bytes(out, needed, f"the export of {plural(num_traces, 'trace')}")


def _write_table(store: TraceStore, path: Path, file_name: str) -> None:
    with atomic_write(path) as file:
        for trace in store:
            row = {"file": file_name.format(trace.index)} | row_of(store, trace)
            file.write(json_line(row).encode() + b"\n")


def _left_out(store: TraceStore, format: ExportFormat) -> list[str]:
    """Return what the files of a format lack, apart from the fields that a .pt file never has."""
    found = []
    labels = int((~np.isnan(store.labels)).sum())
    if format == "pkl" and labels:
        found.append(f"{labels:,} stored labels: pickles have no field for them")
    if format not in _COMPLETE and len(store.score_fields) > 1:
        names = ", ".join(sorted(store.score_fields.keys() - {store.score_name}))
        found.append(f"the scores {names}: {SCORES_FILE} holds {store.score_name}")
    if store.lens is not None:
        found.append("the lens (final norm and unembedding matrix)")
    return found


def _check(store: TraceStore, format: ExportFormat) -> None:
    """Raise an error if a library is missing or a trace lacks what the format needs, before anything is written."""
    if format == "datasets":
        with needs("hub"):
            import pyarrow  # noqa: F401
    if format in _COMPLETE:
        return
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
    if format == "safetensors":
        traces_per_file = 1
    if format in ("pt-gnn", "datasets"):
        tokens, pairs = store.token_and_pair_counts(np.arange(total))
        itemsize = schema.storage_dtype(store.hidden_dtype).itemsize
        # An edge takes two int64 and a weight of at most 4 bytes, a value of dense attention as much in all heads.
        sizes = tokens * (store.num_layers * store.hidden_dim * itemsize)
        sizes += pairs * (16 + 4 if format == "pt-gnn" else 8 * store.num_stored_heads)
    begin, num_bytes = 0, 0
    for k, size in enumerate(sizes.tolist()):
        if k > begin and (k - begin == traces_per_file or num_bytes + size > MAX_FILE_BYTES):
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
    write_rows(out / SCORES_FILE, list(compress(header, kept)), (list(compress(r, kept)) for r in rows))
    return out / SCORES_FILE
