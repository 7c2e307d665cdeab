"""Scores of a conversion: from a scores file, or from the traces themselves."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tracestore.console import Output
from tracestore.convert.options import ConvertOptions
from tracestore.errors import UsageError, escape_unprintable
from tracestore.ingest.roles.keys import INPUTS_PAGE, KeyOptions, parse_map
from tracestore.ingest.scores import Scores, direction_of, read_scores, score_name
from tracestore.ingest.sources import find_scores
from tracestore.store.format.labels import CORRECT, HALLUCINATION, ScoreField
from tracestore.store.read.columns import TraceValues
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.writer import StoreWriter


class Scoring:
    """Choose the scores of a conversion.

    A scores file replaces scores and labels inside traces, which are then extras only.

    Parameters
    ----------
    sources : list of Path
        Folders that may hold the scores file.
    options : ConvertOptions
        Options of the conversion.
    output : Output
        Receives a note about the file.

    Attributes
    ----------
    file : Scores or None
        The scores file.
    keys : KeyOptions
        Names of the fields of a trace, with the key of its score.

    Raises
    ------
    UsageError
        If the scores file is missing or ambiguous, or an option needs one.
    InvalidInputError
        If the content of the scores file is invalid.
    """

    def __init__(self, sources: list[Path], options: ConvertOptions, output: Output) -> None:
        self.file = _read_file(sources, options, output)
        self._direction = options.score_direction
        self._name = ""  # of the file's scores in the store
        self._used: Counter[str] = Counter()
        renamed = () if options.map is None else parse_map(options.map)
        if self.file is not None:
            self.keys = KeyOptions(renamed, has_scores_file=True)
            return
        if options.group_column is not None:
            raise UsageError("--group-column needs a scores file: give --scores")
        column = options.score_column
        if column is None and options.score_direction is not None:
            raise UsageError("--score-direction needs a scores file (--scores) or the key of a score (--score-column)")
        if column is not None and options.score_direction is None and direction_of(column) is None:
            raise UsageError(
                f"a high {column} may mean a correct or a hallucinated answer; "
                "choose --score-direction correct or --score-direction hallucination"
            )
        if options.id_column is not None:
            if any(field == "question_id" for field, _ in renamed):
                raise UsageError("--id-column and --map question_id=KEY name the same field")
            renamed = (*renamed, ("question_id", options.id_column))
        self.keys = KeyOptions(renamed, score_key=column)

    def begin(self, writer: StoreWriter) -> None:
        """Define the score of the file in the store."""
        if self.file is not None:
            self._name = writer.attributes.default_score or self.file.name
            writer.define_score(self._name, self.file.score_field)

    def values(self, writer: StoreWriter, record: TraceRecord) -> tuple[Mapping[str, float], str]:
        """Return the named scores and the group of a trace; its scores are defined in the store."""
        if self.file is not None:
            score, group = self.file.lookup(record.question_id, record.sample)
            return {self._name: score}, group
        found = {}
        for key, score in record.scores.items():
            name = score_name(key)
            direction = self._direction or direction_of(key) or CORRECT
            stored = writer.attributes.scores.get(name)
            if stored is None or stored.direction != direction:
                writer.define_score(name, ScoreField(direction, f"key {key} of the traces"[:1024]))
            found[name] = score
            self._used[f"score {escape_unprintable(key, 60)} (high: {direction})"] += 1
        if record.label is not None:
            self._used[f"label (1: {HALLUCINATION})"] += 1
        return found, ""

    def fill(self, writer: StoreWriter) -> None:
        """Set the scores of committed traces that have none, from the file."""
        if self.file is None:
            return
        updates = {}
        for index in np.flatnonzero(np.isnan(writer.read_columns().score(self._name))).tolist():
            score, group = self.file.lookup(writer.index.question_id(index), writer.index.row(index).sample)
            if not math.isnan(score):
                updates[index] = TraceValues({self._name: score}, group=group or None)
        writer.update_values(updates)
        writer.commit()

    def num_without_trace(self, writer: StoreWriter) -> int:
        """Return how many scores of the file belong to no trace."""
        return 0 if self.file is None else sum(writer.index.find(q, s) < 0 for q, s in self.file.values)

    def lines(self) -> Iterator[str]:
        """Yield what was found inside the traces."""
        for name, count in self._used.items():
            yield f"{name}: found inside {count:,} traces and used; see {INPUTS_PAGE}#scores"


def _read_file(sources: list[Path], options: ConvertOptions, output: Output) -> Scores | None:
    path = options.scores or find_scores(sources)
    if path is None:
        return None
    scores = read_scores(
        Path(path), options.score_column, options.group_column, options.score_direction, options.id_column
    )
    output.info(f"scores: {path}, column {scores.column}, {len(scores.values):,} questions")
    return scores
