"""The traces that a receipt describes, without their arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.io.files import ReadableFiles
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.pending import WrittenSegment
from tracestore.store.write.record import TraceRecord
from tracestore.tasks.task_plan import Plan

DIMENSIONS = ("num_layers", "hidden_dim", "hidden_dtype", "num_heads", "attention_dtype")
# Arrays of a segment that a commit needs.
_ROWS = (
    *("sample", "source_position", "num_tokens", "attention_layout", "num_nonfinite", "fields"),
    *("graph_crc32c", "sequence_crc32c", "last_token_row"),
)
_NO_COUNTS = np.zeros(0, "<i8")
_MAX_TRACES = 1 << 31


class TracesOfReceipt:
    """The traces of a receipt, made segment by segment and taken source by source."""

    def __init__(
        self, plan: Plan, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray], groups: list[str]
    ) -> None:
        names, num_traces = [(str(name), int(k)) for name, k in document["scores"]], len(arrays["facts"])
        self._options, self._kinds = plan.facts["store_options"], [Facts(*facts) for facts in document["facts"]]
        self._attributes = [facts.attributes(self._options) for facts in self._kinds]
        self.facts: list[int] = arrays["facts"].tolist()
        has_value = arrays["has_value"].reshape(num_traces, 1 + len(names)).astype(bool)
        values = arrays["values"].reshape(num_traces, 1 + len(names))
        labels = (value if has else None for value, has in zip(values[:, 0].tolist(), has_value[:, 0], strict=True))
        scores = (
            [
                {name: float(row[1 + k]) for k, (name, kind) in enumerate(names) if has[1 + k] and kind == wanted}
                for wanted in (0, 1)
            ]
            for row, has in zip(values, has_value, strict=True)
        )
        crcs, sizes = arrays["states_crc32c"].tolist(), arrays["source_bytes"].tolist()
        if min(self.facts, default=0) < 0 or min(sizes, default=0) < 0 or num_traces > _MAX_TRACES:
            raise ValueError("a number is out of bounds")
        self._rest = zip(labels, scores, groups, crcs, sizes, strict=True)
        self._traces: list[PackedTrace] = []

    def add_segment(self, files: ReadableFiles, name: str, num_traces: int, size: int, crc: int) -> WrittenSegment:
        """Make the traces of the next segment."""
        kinds = self.facts[:num_traces]
        del self.facts[:num_traces]
        if type(num_traces) is not int or not num_traces or len(kinds) != num_traces:
            raise ValueError(f"{name!r:.80} with {num_traces!r:.40} traces")
        rows = FileEntry(paths.segment_rows(paths.segment(name)), size, crc)
        attributes = schema.Attributes(attention=self._options["attention"], options=self._options)
        for kind in dict.fromkeys(kinds):
            attributes = joined(attributes, self._attributes[kind])
        segment = WrittenSegment(files, name, num_traces, rows, attributes)
        reader, small = segment.reader, segment.reader.small
        ids, extras = small.strings("question_id", 0, num_traces), small.strings("extras", 0, num_traces)
        tokens, ends = reader.values("tokens"), reader.values("tokens_offsets").tolist()
        columns = zip(*(reader.values(column).tolist() for column in _ROWS), strict=True)
        for row, (found, kind) in enumerate(zip(columns, kinds, strict=True)):
            sample, position, num_tokens, layout, nonfinite, bits, graph_crc, sequence_crc, last_row = found
            label, scores, group, states_crc, source_bytes = next(self._rest)
            facts = self._kinds[kind]
            record = TraceRecord(
                ids[row],
                sample,
                position,
                tokens=tokens[ends[row] : ends[row + 1]] if bits & schema.FIELD_BITS["tokens"] else None,
                label=label,
                has_own_id=bool(bits & schema.FIELD_BITS["question_id"]),
                is_without_embeddings=facts.is_without_embeddings,
                layer_ids=facts.layer_ids,
                scores=scores[0],
                deferred_scores=scores[1],
                group=group,
                extra_names=facts.extra_names,
                dropped=facts.dropped,
            )
            trace = PackedTrace(
                record,
                facts.num_layers,
                num_tokens,
                facts.hidden_dim,
                facts.hidden_dtype,
                layout,
                edge_counts=_NO_COUNTS if layout == schema.LAYOUT_EDGES else None,
                num_nonfinite=nonfinite,
                extras=extras[row],
                field_bits=bits,
                crcs={"hidden_states": states_crc} if num_tokens else {},
                graph_crc=graph_crc,
                sequence_crc=sequence_crc,
                num_heads=facts.num_heads,
                attention_dtype=facts.attention_dtype,
                rounded_from=facts.rounded_from,
                has_states=num_tokens > 0,
                has_last_token=last_row >= 0,
                source_bytes=source_bytes,
                segment=segment,
                row=row,
            )
            self._traces.append(trace)
        return segment

    @property
    def num_left(self) -> int:
        """The number of traces that were made and not taken."""
        return len(self._traces)

    def take(self, count: int) -> list[PackedTrace]:
        """Return the next traces."""
        if type(count) is not int or not 0 <= count <= len(self._traces):
            raise ValueError(f"{count!r:.40} traces of a source")
        taken = self._traces[:count]
        del self._traces[:count]
        return taken


@dataclass
class Facts:
    """The facts that many traces share, in the order of _OF_TRACE and _OF_RECORD."""

    num_layers: int
    hidden_dim: int
    hidden_dtype: str
    num_heads: int | None
    attention_dtype: str | None
    rounded_from: str | None
    layer_ids: tuple[int, ...] | None
    extra_names: tuple[str, ...]
    dropped: list[str] | None
    is_without_embeddings: bool

    def __post_init__(self) -> None:
        self.layer_ids = None if self.layer_ids is None else tuple(map(int, self.layer_ids))
        self.extra_names = tuple(map(str, self.extra_names))
        self.dropped = None if self.dropped is None else list(map(str, self.dropped))
        if self.rounded_from not in (None, "float32", "float64", "bfloat16"):
            raise ValueError(f"rounded from {self.rounded_from!r:.40}")

    def attributes(self, options: dict[str, str]) -> schema.Attributes:
        """Return the attributes of a store with such traces."""
        known = {name: getattr(self, name) for name in DIMENSIONS}
        given = schema.Attributes(attention=options["attention"], options=options, **known)
        return schema.Attributes.from_json(given.to_json())


def joined(one: schema.Attributes, other: schema.Attributes) -> schema.Attributes:
    """Return the attributes of both; ValueError if they differ."""
    values: dict[str, Any] = {}
    for name in DIMENSIONS:
        found = {getattr(attributes, name) for attributes in (one, other)} - {None}
        if len(found) > 1:
            raise ValueError(f"{name}: {sorted(map(str, found))}")
        values[name] = next(iter(found), None)
    return replace(one, **values)
