"""Update the scores of the traces of a store."""

import math
from dataclasses import dataclass
from pathlib import Path

from tracestore.ingest.scores import Scores
from tracestore.store.format.labels import CORRECT, DEFAULT_THRESHOLD, describe
from tracestore.store.read.store import open_store
from tracestore.store.write.writer import StoreWriter


@dataclass(frozen=True)
class ScoreReport:
    """Counts of an update; the JSON document of `tracestore score --json`."""

    store: str
    num_updated: int
    num_scored: int
    num_traces: int
    num_scores_without_trace: int
    generation: int
    score_direction: str
    labels: str


def update_scores(path: str | Path, scores: Scores) -> ScoreReport:
    """Set the scores and groups of the traces of a store, and commit.

    Parameters
    ----------
    path : str or Path
        The store: a folder or a URL of an object store.
    scores : Scores
        If it has no samples, a score applies to every sample of its question.

    Returns
    -------
    ScoreReport

    Raises
    ------
    UsageError
        If there is no store.
    """
    # Open first: the writer would create a missing store.
    open_store(path).close()
    with StoreWriter(path) as writer:
        columns = writer.read_columns()
        updates, unknown = {}, 0
        by_id: dict[str, list[int]] = {}
        if not scores.has_samples:
            for index in range(len(columns)):
                by_id.setdefault(writer.index.question_id(index), []).append(index)
        for (question_id, sample), (score, group) in scores.values.items():
            found = writer.index.find(question_id, sample)
            indices = by_id.get(question_id, []) if not scores.has_samples else [found] if found >= 0 else []
            unknown += not indices
            for index in indices:
                if not (math.isnan(score) and not group):
                    updates[index] = (score, math.nan, group or None)
        replaced = {index for index, (score, _, _) in updates.items() if not math.isnan(score)}
        if replaced:
            writer.set_score_direction(scores.direction, replaced)
        writer.update_values(updates)
        writer.commit()
        stored, direction = writer.read_columns().scores, writer.attributes.score_direction or CORRECT
        return ScoreReport(
            store=str(path),
            num_updated=len(updates),
            num_scored=writer.manifest.num_scored,
            num_traces=writer.manifest.num_traces,
            num_scores_without_trace=unknown,
            generation=writer.manifest.generation,
            score_direction=direction,
            labels=describe(stored, DEFAULT_THRESHOLD, direction),
        )
