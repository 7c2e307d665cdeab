"""Export of a store to a folder of files of other formats, for programs that read those; one process at a time."""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import compress
from pathlib import Path

import numpy as np

from tracestore.errors import DiskFullError, StoreLockedError, UsageError
from tracestore.export.file_formats import FORMATS, WRITERS, ExportFormat
from tracestore.export.trace_values import json_line, row_of, score_columns
from tracestore.extras import needs
from tracestore.ingest.exports import STORE_FILE
from tracestore.ingest.exports.export_manifest import (
    DATA_FOLDER,
    SCORES_FILE,
    TABLE_FILE,
    DataFile,
    ExportManifest,
    side_file,
)
from tracestore.store.format import schema
from tracestore.store.format.labels import SCORE_COLUMNS, is_in_unit_range, used_scores
from tracestore.store.format.paths import TEMPORARY_PREFIX
from tracestore.store.format.provenance import Provenance
from tracestore.store.io.destinations import check_output_dir
from tracestore.store.io.fsio import atomic_write, map_os_errors, remove_tree, require_free_bytes, write_rows
from tracestore.store.io.locks import lock_error
from tracestore.store.io.provenance_file import PROVENANCE_FILE, write_provenance
from tracestore.store.maintain.selection import check_token_counts, large_array_bytes
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace
from tracestore.words import plural

OnProgress = Callable[[int, int], None] | None  # receives the traces done and the total
TRACES_PER_FILE = 500
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
        The table of scores, if the store has labels, scores or groups.
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

    def continues(self, total: int) -> str:
        """Return how many traces an export has written that ends early, and how to continue it."""
        return f"{self.num_traces:,} of {plural(total, 'trace')} are exported; run the same command to continue"


def export_store(
    store: TraceStore,
    out_dir: str | os.PathLike[str],
    *,
    format: ExportFormat = "pkl",
    traces_per_file: int = TRACES_PER_FILE,
    progress: OnProgress = None,
) -> ExportReport:
    """Write each trace of a store to files.

    Next to them are ``traces.jsonl``, all values of each trace that are no large arrays, ``store.json``, the facts of the
    store, ``scores.csv``, labels, scores and groups as a table, and ``provenance.json``, what the provenances have in
    common. A file appears under its name only when it is complete, and ``tracestore_export.json``, the list of them,
    last. An export that ended early is continued, if the store and the arguments are the same. A .pt file is made in
    memory; the other formats need the memory of a trace, or of a row group.

    Parameters
    ----------
    store : TraceStore
        The store.
    out_dir : str or PathLike
        A new or empty folder, or one with an unfinished export.
    format : {"pkl", "pt-lstm", "pt-gnn", "safetensors", "datasets"}
        "pkl": pickled lists of dicts. "pt-lstm": the last token of each layer. "pt-gnn": one PyG
        Data per layer, whose edges are the pairs with a head-averaged attention above 0. "safetensors": one file of
        arrays per trace. "datasets": Parquet files, a row per trace.
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
        If a trace lacks what the format needs, or the folder holds anything but the same export, unfinished.
    StoreLockedError
        If another process exports into the folder.
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
        with lock_folder(out):
            manifest = ExportManifest(_digest(store), format, traces_per_file, len(store), score_columns(store))
            is_begun = check_folder(out, manifest)
            _require_space(store, out, format)
            _check(store, format)
            if not is_begun:
                manifest.write(out)
            try:
                _write(store, out, manifest, report, progress)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"interrupted: {report.continues(len(store))}") from None
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                text = f"no space left on the file system of {out}: {report.continues(len(store))}"
                raise DiskFullError(text) from error
    return report


def _write(store: TraceStore, out: Path, manifest: ExportManifest, report: ExportReport, progress: OnProgress) -> None:
    """Write the files of an export that are not there yet, and the list of all of them at last."""
    format: ExportFormat = report.format  # type: ignore[assignment]
    write, name, in_table = WRITERS[format]
    (out / name).parent.mkdir(exist_ok=True)
    index, known = store.internals.index, store.provenance
    # The position of the provenance of each trace in that of the store, -1 without one.
    numbers = [-1 if source.provenance is None else known.index(source.provenance) for source in index.sources()]
    provenances: np.ndarray = np.array(numbers, "<i8")[index.read_column("source")]
    files: list[DataFile] = []
    for number, (begin, end) in enumerate(_file_ranges(store, format, manifest.traces_per_file, provenances)):
        path = out / name.format(number)
        if not path.exists():
            with atomic_write(path) as file:
                write(store, (store[k] for k in range(begin, end)), file)
        written, provenance = side_file(path), int(provenances[begin])
        stored = None if provenance < 0 else provenance
        files.append(
            DataFile(name.format(number), written.num_bytes, written.crc32c, end - begin, stored, table_begin=0)
        )
        report.num_files += 1
        report.num_traces += end - begin
        report.bytes += written.num_bytes
        if progress is not None:
            progress(report.num_traces, len(store))
    files = _write_table(store, out / TABLE_FILE, files, in_table)
    with atomic_write(out / STORE_FILE) as file:
        file.write(json.dumps(store.internals.attributes.to_json(), indent=1).encode())
    names = [TABLE_FILE, STORE_FILE]
    if known and -1 not in numbers:
        write_provenance(out / PROVENANCE_FILE, reduce(Provenance.agreement, known))
        names.append(PROVENANCE_FILE)
    if _write_scores(store, out / SCORES_FILE):
        report.scores_file = str(out / SCORES_FILE)
        names.append(SCORES_FILE)
    report.left_out = _left_out(store, format)
    manifest.complete(out, files, names)


def _digest(store: TraceStore) -> str:
    """Return a digest of the generation of the store and of the score that is used as the default one."""
    text = store.internals.manifest.to_bytes() + repr(store.score_name).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


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
    done = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())  # by an interrupted export
    require_free_bytes(out, needed - done, f"the export of {plural(num_traces, 'trace')}")


def _write_table(store: TraceStore, path: Path, files: list[DataFile], arrays: tuple[str, ...]) -> list[DataFile]:
    """Write a line for each trace, with the arrays that the files lack; return the files with their first lines."""
    found, index = [], 0
    with atomic_write(path) as table:
        for file in files:
            found.append(replace(file, table_begin=table.tell()))
            for trace in map(store.__getitem__, range(index, index + file.num_traces)):
                table.write(json_line(store, trace, file.name, arrays).encode() + b"\n")
            index += file.num_traces
    return found


def _left_out(store: TraceStore, format: ExportFormat) -> list[str]:
    """Return what the files of a format lack."""
    found = []
    if format == "pt-lstm" and bool(store.num_tokens.any()):
        found.append("hidden states of all tokens, and attention: the format holds the last token of each layer")
    if format == "pt-gnn" and store.num_stored_heads > 1:
        found.append("the attention of each head: the format holds the mean")
    is_list = format.startswith("pt-")
    if is_list and (used := used_scores(store.scores, store.labels)).size and not is_in_unit_range(used):
        found.append(f"labels of {plural(len(used), 'score')} outside [0, 1], which have no default threshold")
    if store.lens is not None:
        found.append("the lens (final norm and unembedding matrix)")
    return found


def _check(store: TraceStore, format: ExportFormat) -> None:
    """Raise an error if a library is missing or a trace lacks what the format needs, before anything is written."""
    if format == "datasets":
        with needs("hub"):
            import pyarrow  # noqa: F401
    if format in ("safetensors", "datasets"):
        return
    for trace in store:
        if (problem := _problem(trace, format)) is not None:
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


def _file_ranges(
    store: TraceStore, format: ExportFormat, traces_per_file: int, provenances: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Yield the first trace of each file and the trace after its last one. The traces of a file share a provenance."""
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
        is_full = k - begin == traces_per_file or num_bytes + size > MAX_FILE_BYTES
        if k > begin and (is_full or provenances[k] != provenances[k - 1]):
            yield begin, k
            begin, num_bytes = k, 0
        num_bytes += size
    if total > begin:
        yield begin, total


def _write_scores(store: TraceStore, path: Path) -> bool:
    """Write labels, scores and groups as a table for other programs, if a trace has one; return whether it has.

    Columns that hold nothing are left out, except that of the default score: the sample if no question of the store
    has further answers, because readers apply a score without a sample to all samples of its question.
    """
    default = SCORE_COLUMNS[store.score_direction]
    names = ["label", *(score_columns(store) or {default: ""}), "group"]
    rows = []
    for trace in store:
        row = row_of(store, trace)
        values = [repr(row[name]) if isinstance(row.get(name), float) else row.get(name, "") for name in names]
        rows.append((trace.question_id, trace.sample, *values))
    header = ("question_id", "sample", *names)
    kept = [True, any(row[1] for row in rows)]
    kept += [name == default or any(row[k] for row in rows) for k, name in enumerate(names, 2)]
    rows = [row for row in rows if any(row[2:])]
    if rows:
        write_rows(path, list(compress(header, kept)), (list(compress(r, kept)) for r in rows))
    return bool(rows)


@contextlib.contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Keep other processes from exporting into a folder. No-op on a file system without locks of folders.

    Raises
    ------
    StoreLockedError
        If another process exports into it.
    """
    fd = os.open(out, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if lock_error(fd) == errno.EWOULDBLOCK:
            raise StoreLockedError(f"{out}: another process exports into this folder")
        yield
    finally:
        os.close(fd)


def check_folder(out: Path, manifest: ExportManifest) -> bool:
    """Remove the temporary files of an interrupted export, and return whether `manifest` is that of this export.

    Raises
    ------
    UsageError
        If the folder holds anything else.
    """
    found = ExportManifest.read(out)
    if found is not None and found.is_complete:
        raise UsageError(f"{out}: holds a complete export; use an empty or new folder")
    if found not in (None, manifest):
        raise UsageError(
            f"{out}: holds an unfinished export of another store, of another state of this one, or with other options; "
            "remove the folder, or use a new one"
        )
    if found is None and not all(path.name.startswith(TEMPORARY_PREFIX) for path in out.iterdir()):
        raise UsageError(f"{out}: not empty; use an empty or new folder")
    for folder in (out, out / DATA_FOLDER):
        for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
            remove_tree(path)
    return found is not None
