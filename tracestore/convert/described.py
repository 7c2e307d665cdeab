"""Sources that a layout describes, and their labels: stored when the accounts of the run close."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracestore.console import plural
from tracestore.errors import InvalidInputError, UsageError, escape_unprintable
from tracestore.ingest.execute.claims import FileGroup, list_files
from tracestore.ingest.execute.execution import Execution
from tracestore.ingest.exports.manifest import read_export
from tracestore.ingest.layout.fields import score_of
from tracestore.ingest.layout.language import Layout, parse_layout, read_layout
from tracestore.ingest.sources import SourceFile
from tracestore.store.format.labels import CORRECT, HALLUCINATION, ScoreField
from tracestore.store.format.provenance import Provenance
from tracestore.store.io.scratch import Scratch
from tracestore.store.read.columns import TraceValues
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.writer import StoreWriter

_LABEL = "label"
_COPY = re.compile(r"( \(\d+\)|[-_ .](checkpoint|copy ?\d*|bak|backup|old|orig))+$", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class DescribedFiles:
    """The files of one source, and how they are read."""

    execution: Execution
    group: FileGroup
    fingerprint: bytes

    def read(
        self, need_attention: bool | None, scratch: Scratch, on_refused: Callable[[InvalidInputError], None] | None
    ) -> Iterator[TraceRecord]:
        """Yield the records of the source, as `Execution.read`."""
        return self.execution.read(self.group, need_attention, scratch, on_refused)


class DescribedRun:
    """A conversion by a layout: its sources, the labels to store, and the accounts.

    Parameters
    ----------
    layout : Layout
    arguments : list of Path
        Files and folders.
    folder : Path
        Folder of the store.
    scores : str, optional
        Path of the scores file, which no line of the layout needs to name.

    Attributes
    ----------
    sources : list of SourceFile
    """

    def __init__(self, layout: Layout, arguments: list[Path], folder: Path, scores: str | None = None) -> None:
        self._owned = () if scores is None else (Path(scores),)
        self._arguments, self._folder, self._layout = arguments, folder, layout
        self._execution = Execution(layout, list_files(arguments, folder), self._owned)
        self.sources = _sources(self._execution)
        for folder in {place for source in self.sources for path in source.files for place in path.parents[:2]}:
            read_export(folder)  # refuses an unfinished or damaged export
        self._directions = layout.directions()
        self._found: dict[tuple[str, int], dict[str, float]] = {}
        self._layers: tuple[tuple[int, ...] | None] | None = None  # those of the first source
        self._ids_of_states: dict[tuple[int, int], str] = {}
        self.num_replaced = self.num_equal = 0

    def probes(self) -> list[SourceFile]:
        """Return the sources for a look at their first traces, which leaves the accounts of the run alone."""
        return _sources(Execution(self._layout, list_files(self._arguments, self._folder), self._owned))

    def states_attention(self) -> bool | None:
        """Return whether the layout states attention; None if its records may hold it."""
        if "attentions" in self._layout.addresses:
            return True
        return None if self._layout.records else False

    def check_layers(self, layer_ids: tuple[int, ...] | None) -> None:
        """Rule 1: every source has the same numbers of layers."""
        if self._layers is None:
            self._layers = (layer_ids,)
        elif layer_ids != self._layers[0]:
            expected = "none" if self._layers[0] is None else list(self._layers[0])
            found = "none" if layer_ids is None else list(layer_ids)
            raise InvalidInputError(
                f"found {found!s:.80}, expected {expected!s:.80} as in the first source", field="layer_ids"
            )

    def provenance(self, known: Provenance | None) -> Provenance | None:
        """Return the provenance of the sources, with the place of its layers that the layout states (rule 1b)."""
        what = self._layout.settings.get("L.what")
        return known if what is None else replace(known or Provenance(), hidden_states_at=what)

    def add(self, packed: PackedTrace) -> dict[str, float]:
        """Keep the labels and scores of a trace; return its named scores that are stored at once.

        Raises
        ------
        InvalidInputError
            Rule 10b: the states are those of another id, and one name is marked as a copy of the other.
        """
        record = packed.record
        self._add_states(packed)
        own = {} if record.label is None else {_LABEL: record.label}
        found = {**record.scores, **own, **{score_of(n): v for n, v in record.deferred_scores.items()}}
        if found:
            self._found[record.question_id, record.sample] = found
        return record.scores

    def _add_states(self, packed: PackedTrace) -> None:
        if "hidden_states" not in packed.crcs:
            return
        question_id, states = packed.record.question_id, (packed.crcs["hidden_states"], packed.num_tokens)
        other = self._ids_of_states.setdefault(states, question_id)
        if other == question_id:
            return
        self.num_equal += 1
        if without_copy_mark(other) == without_copy_mark(question_id) and "duplicates" not in self._layout.settings:
            raise InvalidInputError(
                f"{escape_unprintable(question_id, 60)} has the states of {escape_unprintable(other, 60)}: a copy; "
                'remove it, or duplicates = "keep"',
                position=packed.record.position,
            )

    def define(self, writer: StoreWriter) -> None:
        """Define the scores of the layout in the store."""
        for name, direction in self._directions.items():
            stored = writer.attributes.scores.get(score_of(name))
            if name != _LABEL and (stored is None or stored.direction != direction):
                writer.define_score(score_of(name), ScoreField(direction, f"{name} of the layout"[:1024]))

    def is_settled(self, writer: StoreWriter) -> bool:
        """Return whether no trace of the store lacks a label of the layout: sources of an interrupted run may."""
        columns = writer.read_columns()
        names = [score_of(name) for name in self._directions if name != _LABEL]
        has_all = all(name in writer.attributes.scores for name in names)
        return has_all and not any(any(map(math.isnan, columns.score(name).tolist())) for name in names)

    def close(self, writer: StoreWriter) -> Iterator[str]:
        """Close the accounts, and yield the lines of `Execution.close`."""
        yield from self._execution.close(lambda text: writer.index.find(text, 0) >= 0)

    def fill(self, writer: StoreWriter) -> None:
        """Store the labels and scores of the traces, instead of earlier ones."""
        self.define(writer)
        columns = writer.read_columns()
        updates: dict[int, TraceValues] = {}
        for (question_id, sample), found in self._found.items():
            index = writer.index.find(question_id, sample)
            if index < 0:
                continue  # dropped by skip_bad
            scores = {n: v for n, v in found.items() if n != _LABEL and not math.isnan(v)}
            label = found.get(_LABEL, math.nan)
            stored: Mapping[str, Any] = {n: float(columns.score(n)[index]) for n in scores}
            if scores == stored and (math.isnan(label) or label == columns.labels[index]):
                continue
            self.num_replaced += any(not math.isnan(v) and v != scores[n] for n, v in stored.items())
            updates[index] = TraceValues(scores, label)
        writer.update_values(updates)
        writer.commit()

    def lines(self) -> Iterator[str]:
        """Yield what was stored as labels."""
        for name, direction in self._directions.items():
            values = [found[score_of(name)] for found in self._found.values() if score_of(name) in found]
            known = [value for value in values if not math.isnan(value)]
            meaning = {CORRECT: "correct", HALLUCINATION: HALLUCINATION}.get(direction, direction)
            ones = sum(value == 1 for value in known)
            zeros = sum(value == 0 for value in known)
            counts = (
                f"{ones:,} times 1, {zeros:,} times 0" if ones + zeros == len(known) else plural(len(known), "value")
            )
            yield f"{name} (high: {meaning}): {counts}, {len(values) - len(known):,} missing"
        if self.num_equal:
            yield f"{plural(self.num_equal, 'trace')} with the hidden states of another id"
        if self.num_replaced:
            yield f"{plural(self.num_replaced, 'stored label')} replaced by changed ones"


def without_copy_mark(name: str) -> str:
    """Return a name without what a file manager or an editor adds to the name of a copy."""
    return _COPY.sub("", name)


def _sources(execution: Execution) -> list[SourceFile]:
    fingerprint = execution.fingerprint()
    return [
        SourceFile(
            group.paths[0], group.name, parts=group.paths, described=DescribedFiles(execution, group, fingerprint)
        )
        for group in execution.groups
    ]


def layout_of_options(layout: Any, lines: Any) -> Layout | None:
    """Return the layout of the options `layout` and `field`, None without them.

    Parameters
    ----------
    layout : Layout, mapping, str, Path or None
        A layout, its entries, or the path of a TOML file.
    lines : sequence of str or None
        Lines of `--field`.
    """
    if isinstance(layout, Layout):
        if lines:
            raise UsageError("field lines extend a file or a mapping, not a Layout")
        return layout
    if isinstance(layout, Mapping):
        return parse_layout(layout)
    if layout is None and not lines:
        return None
    return read_layout(None if layout is None else Path(layout), lines or ())
