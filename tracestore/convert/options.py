"""Options of a conversion, with their defaults."""

from dataclasses import dataclass
from typing import Any, Literal

from tracestore.errors import UsageError
from tracestore.words import format_size

OnConflict = Literal["error", "keep-first", "keep-last"]
# What happens to a trace whose key exists with different content.
ON_CONFLICT: dict[OnConflict, str] = {
    "error": "refused",
    "keep-first": "skipped",
    "keep-last": "stored instead of the first",
}
_MIN_MEMORY_BUDGET = 64 << 20


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `tracestore convert`; the command line takes its defaults from here.

    Parameters
    ----------
    scores : str, optional
        Path of the scores file; by default those that `ingest.score_files.find_score_files` finds, without a layout.
    layout : Layout, mapping, str or Path, optional
        Where the fields lie in the files: a layout, its entries, or the path of a TOML file (docs/inputs.md). By default
        the layouts that the store keeps, a built-in layout, or the only one that the files prove.
    field : sequence of str, optional
        Lines of a layout, ``FIELD = FILES : PATH -> AXES``, which replace those of the file.
    id_column, score_column, score_direction, group_column : str, optional
        See `ingest.scores.read_scores`. Without a scores file, `id_column` and `score_column` are keys of the traces,
        which become lines of built-in layouts.
    provenance : str, optional
        Path of a file that gives the provenance of all sources; by default provenance.json directly in a source
        folder gives that of the files below it.
    allow_mixed_provenance : bool
        Accept sources whose provenance conflicts with each other or with the store.
    attention : {"mean", "heads", "none"}, optional
        Attention to store. By default that of the store; for a new one "none" if no trace has attention, else "mean".
    padding : {"mask", "none"}
        Padding of batches: given by a mask or lengths, or "none" if batches without them have none: the line
        ``S.padding = "none"``.
    codec : str, optional
        Compression. By default that of the store, "none" for a new one.
    dtype : {"float16", "keep"}, optional
        By default that of the store, "float16" for a new one.
    workers : int
        Number of processes that read files. A process that reads alone does so with as many threads, at least two.
    dask : str, optional
        Address of a Dask scheduler, or "local".
    memory_budget : int
        Bytes of memory for traces that wait; at least 64 MiB.
    on_conflict : {"error", "keep-first", "keep-last"}
        Handling of a trace whose key exists with different content.
    skip_bad : bool
        Continue after a trace that is refused, and list it in STORE.refused.jsonl.
    overwrite : bool
        Replace the store.
    dry_run : bool
        Describe the first traces of each file, and write nothing.
    """

    layout: Any = None
    field: Any = None
    scores: str | None = None
    id_column: str | None = None
    score_column: str | None = None
    score_direction: str | None = None
    group_column: str | None = None
    provenance: str | None = None
    allow_mixed_provenance: bool = False
    attention: Literal["mean", "heads", "none"] | None = None
    padding: Literal["mask", "none"] = "mask"
    codec: str | None = None
    dtype: Literal["float16", "keep"] | None = None
    workers: int = 1
    dask: str | None = None
    memory_budget: int = 512 << 20
    on_conflict: OnConflict = "error"
    skip_bad: bool = False
    overwrite: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.memory_budget < _MIN_MEMORY_BUDGET:
            raise UsageError(f"--memory-budget must be at least {format_size(_MIN_MEMORY_BUDGET)}")
