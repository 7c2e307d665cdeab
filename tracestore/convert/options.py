"""Options of a conversion, with their defaults."""

from dataclasses import dataclass
from typing import Any, Literal

from tracestore.console import option
from tracestore.errors import UsageError
from tracestore.store.format.labels import DIRECTIONS
from tracestore.store.format.provenance import ALLOW_HELP
from tracestore.store.format.schema import CODECS
from tracestore.words import format_size, parse_size

OnConflict = Literal["error", "keep-first", "keep-last"]
# What happens to a trace whose key exists with different content.
ON_CONFLICT: dict[OnConflict, str] = {
    "error": "refused",
    "keep-first": "skipped",
    "keep-last": "stored instead of the first",
}
_MEMORY_BUDGET, _MIN_MEMORY_BUDGET = 512 << 20, 64 << 20


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
        Bytes of memory for traces that wait, and for the readers of compressed files; at least 64 MiB.
    on_conflict : {"error", "keep-first", "keep-last"}
        Handling of a trace whose key exists with different content.
    skip_bad : bool
        Continue after a trace that is refused, and list it in STORE.refused.jsonl.
    overwrite : bool
        Replace the store.
    dry_run : bool
        Read and check all files, describe the first traces of each, and write nothing.
    """

    layout: Any = option(
        None,
        "where the fields of the traces lie in the files, see docs/inputs.md (default: the layout that the store keeps, a built-in one, or the one that the files prove)",
        metavar="FILE.toml",
    )
    field: Any = option(
        None,
        "a line of a layout, for one field; may be repeated (default: none)",
        action="append",
        metavar='"FIELD = FILES : PATH -> AXES"',
    )
    scores: str | None = option(
        None, "scores by question_id (default: the only *scores*.csv or .tsv in a SRC folder)", metavar="FILE"
    )
    id_column: str | None = option(
        None, "column of the question ids (default: question_id or a usual other name)", metavar="NAME"
    )
    score_column: str | None = option(
        None, "column of the scores (default: score or another usual name)", metavar="NAME"
    )
    score_direction: str | None = option(
        None, "meaning of a high score (default: by the name of the column)", choices=DIRECTIONS
    )
    group_column: str | None = option(
        None, "column of groups, which splits keep together (default: group)", metavar="NAME"
    )
    provenance: str | None = option(
        None, "model, layers and prompt of the traces (default: provenance.json in a SRC folder)", metavar="JSON"
    )
    allow_mixed_provenance: bool = option(False, ALLOW_HELP)
    attention: Literal["mean", "heads", "none"] | None = option(
        None, "attention to store (default: mean over heads; none if the first traces have none)"
    )
    padding: Literal["mask", "none"] = option(
        "mask", "padding of batches: given by attention_mask or lengths, or none if batches without them have none"
    )
    codec: str | None = option(None, "compression (default: none)", choices=CODECS)
    dtype: Literal["float16", "keep"] | None = option(None, "dtype to store (default: float16)")
    workers: int = option(
        1, "processes that read files; a single one (--watch, one task) reads with as many threads, at least two"
    )
    dask: str | None = option(
        None,
        "read with a Dask cluster that shares the file system: address of the scheduler, or local for --workers processes (default: none)",
        metavar="ADDRESS",
    )
    memory_budget: int = option(
        _MEMORY_BUDGET,
        f"memory for waiting traces (default: {format_size(_MEMORY_BUDGET)})",
        type=parse_size,
        metavar="SIZE",
    )
    on_conflict: OnConflict = option("error", "a trace whose question id and sample exist with other content")
    skip_bad: bool = option(False, "continue after a trace that is refused, and list it in DST.refused.jsonl")
    overwrite: bool = option(False, "replace the store")
    dry_run: bool = option(
        False, "check all files, and print their layout and what would be stored of the first traces; write nothing"
    )

    def __post_init__(self) -> None:
        if self.memory_budget < _MIN_MEMORY_BUDGET:
            raise UsageError(f"--memory-budget must be at least {format_size(_MIN_MEMORY_BUDGET)}")
