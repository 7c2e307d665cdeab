"""Which traces a writer has by key, and what another trace of the same key does."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.format import manifest as mf
from tracestore.store.io.files import StoreFiles
from tracestore.store.read.chunk_cache import ChunkCache
from tracestore.store.read.index import StoreIndex
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.pending import NAN, Pending, PendingRow
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.texts import TextFields, first_difference, packed_texts, stored_texts


class KeyResolver:
    """The keys of one generation and of what is pending upon it.

    `undo` takes back, last step first, what was added since the writer emptied it;
    `num_conflicts` counts since then the traces whose key was there with other content.
    See StoreWriter for on_conflict.
    """

    def __init__(
        self,
        files: StoreFiles,
        index: StoreIndex,
        pending: Pending,
        on_conflict: str,
        labels: Callable[[], np.ndarray],
    ) -> None:
        self._files, self.index, self.pending = files, index, pending
        self._on_conflict, self._labels = on_conflict, labels
        self.num_conflicts = 0
        self.undo: list[Callable[[], None]] = []
        self._committed: dict[int, SegmentReader] = {}  # those that were looked into

    def resolve_new(self, trace: PackedTrace) -> set[int]:
        """Which of the two places the trace brings that its key does not have yet."""
        record = trace.record
        brings = {mf.GROUP_GRAPH: trace.graph_crc} if "hidden_states" in trace.arrays else {}
        if "last_token" in trace.arrays:
            brings[mf.GROUP_SEQUENCE] = trace.sequence_crc
        key = (record.question_id, record.sample)
        pending = self.pending.keys.get(key)
        if pending is not None:
            has = self.pending.rows[pending].values
        else:
            index = self.index.find(*key)
            if index < 0:
                return set(brings)
            has = vars(self.index.row(index)) | {}
            for group, name in ((mf.GROUP_GRAPH, "graph"), (mf.GROUP_SEQUENCE, "sequence")):
                patch = self.pending.patches.get((index, group))
                if patch is not None:
                    has |= {f"{name}_{part}": patch[f"patch_{part}"] for part in ("segment", "row", "crc32c")}
        wanted: set[int] = set()
        field = None
        for group, crc in brings.items():
            name = "graph" if group == mf.GROUP_GRAPH else "sequence"
            if has[f"{name}_segment"] < 0:
                wanted.add(group)
            elif has[f"{name}_crc32c"] != crc:
                field = "arrays"
        if field is None:
            field = first_difference(packed_texts(trace), self._texts(has))
        if field is None:
            return wanted
        if self._on_conflict == "error":
            raise InvalidInputError(
                f"found a second trace of question id {record.question_id!r} (sample {record.sample}) with other "
                f"content ({field}), expected one a key (see --on-conflict)"
            )
        self.num_conflicts += 1
        # Half of one trace and half of another would be neither.
        return set(brings) if self._on_conflict == "keep-last" else set()

    def _texts(self, places: Mapping[str, int]) -> TextFields:
        """What lies beside the arrays of a trace with these places."""
        name = "graph" if places["graph_segment"] >= 0 else "sequence"
        number, row = places[f"{name}_segment"], places[f"{name}_row"]
        for segment in self.pending.segments:
            if segment.number == number:
                return packed_texts(segment.packed(row))
        if number not in self._committed:
            entries = {f.path: f for f in self.index.segment_files(number)}
            attributes, num_rows = self.index.manifest.attributes, self.index.segment_rows(number)
            self._committed[number] = SegmentReader(self._files, number, entries, ChunkCache(0), attributes, num_rows)
        return stored_texts(self._committed[number], row)

    def add_places(
        self, record: TraceRecord, places: dict[str, int], wanted: set[int], score: float, label: float, group: str
    ) -> None:
        pending, key = self.pending, (record.question_id, record.sample)
        if key in pending.keys:
            row = pending.rows[pending.keys[key]]
            before = (dict(row.values), row.label)
            self.undo.append(lambda: row.__dict__.update(values=before[0], label=before[1]))
            for name in places:
                if self._group_of(name) in wanted:
                    row.values[name] = places[name]
            row.values["nonfinite"] |= places["nonfinite"]
            row.label = self._one_label(row.label, label)
            return
        index = self.index.find(*key)
        if index < 0:
            pending.keys[key] = len(pending.rows)
            pending.rows.append(PendingRow(record.question_id, places, score, label, group))

            def forget() -> None:
                pending.rows.pop()
                del pending.keys[key]

            self.undo.append(forget)
            return
        for wanted_group in sorted(wanted):
            name = "graph" if wanted_group == mf.GROUP_GRAPH else "sequence"
            patch = {f"patch_{n}": places[n] for n in ("hidden_row", "attention_start", "num_tokens", "layout")}
            patch |= {f"patch_{n}": places[n] for n in ("last_token_row", "nonfinite")}
            patch |= {"patch_trace": index, "patch_group": wanted_group, "patch_segment": places[f"{name}_segment"]}
            patch |= {"patch_row": places[f"{name}_row"], "patch_crc32c": places[f"{name}_crc32c"]}
            self._add_patch((index, wanted_group), patch)
        self.add_label(record)

    def _add_patch(self, place: tuple[int, int], patch: dict[str, int]) -> None:
        pending, before = self.pending, self.pending.patches.get(place)

        def restore() -> None:
            del pending.patches[place]
            if before is not None:
                pending.patches[place] = before

        pending.patches[place] = patch
        self.undo.append(restore)

    def add_label(self, record: TraceRecord) -> None:
        """Gives the label of a second source to a key that is there; one that differs is refused."""
        pending, label = self.pending, record.label
        if label is None:
            return
        key = (record.question_id, record.sample)
        if key in pending.keys:
            row = pending.rows[pending.keys[key]]
            before_label = row.label
            self.undo.append(lambda: setattr(row, "label", before_label))
            row.label = self._one_label(row.label, label)
            return
        index = self.index.find(*key)
        earlier = pending.updates.get(index)
        stored = float(self._labels()[index]) if earlier is None else earlier[1]
        label = self._one_label(stored, label)
        if math.isnan(label) or label == stored:
            return

        def restore() -> None:
            if earlier is None:
                del pending.updates[index]
            else:
                pending.updates[index] = earlier

        pending.updates[index] = (NAN, label, None) if earlier is None else (earlier[0], label, earlier[2])
        self.undo.append(restore)

    @staticmethod
    def _group_of(name: str) -> int | None:
        if name.startswith("sequence") or name == "last_token_row":
            return mf.GROUP_SEQUENCE
        graph = ("graph", "hidden_row", "attention_start", "num_tokens", "layout")
        return mf.GROUP_GRAPH if name.startswith(graph) else None

    def _one_label(self, stored: float, label: float) -> float:
        if not math.isnan(stored) and not math.isnan(label) and stored != label:
            if self._on_conflict != "error":
                return label if self._on_conflict == "keep-last" else stored
            raise InvalidInputError(
                f"found label {label:g}, expected {stored:g} as stored for this key", field="labels"
            )
        return stored if math.isnan(label) else label
