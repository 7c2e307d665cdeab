"""Traces of one source as records: the values of all places that belong together."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.arrays import ArrayReader
from tracestore.ingest.execute.axes import read
from tracestore.ingest.execute.found import Columns, FoundTrace
from tracestore.ingest.execute.join import MISSING, Column
from tracestore.ingest.execute.plain import key_text
from tracestore.ingest.execute.tokens import (
    Span,
    check_left_out,
    check_zero_tokens,
    span_of_fill,
    span_of_length,
    span_of_mask,
    strip_pad,
)
from tracestore.ingest.execute.values import check_agreement, label_value, score_value, typed_value
from tracestore.ingest.layout.fields import score_of
from tracestore.ingest.layout.places import RECORDS, Place
from tracestore.ingest.tree import Group
from tracestore.store.write.record import TraceRecord, record_from_dict

# Fields that may serve several traces (rule 12a).
_SHARED = frozenset(("question", "question_id", "S.mask", RECORDS))


class TraceBuilder:
    """Build the records of a source.

    Parameters
    ----------
    columns : Columns
        What the source and the tables hold.
    source_name : str
    need_attention : bool or None
        As for `record_from_dict`.
    """

    def __init__(self, columns: Columns, source_name: str, need_attention: bool | None) -> None:
        self.columns, self._source, self._need_attention = columns, source_name, need_attention
        self.plan, self.arrays = columns.plan, ArrayReader(columns)
        self.settings = self.plan.layout.settings
        self._words = {n.partition(".")[2]: v for n, v in self.settings.items() if n.startswith("words.")}
        self._pads: set[int] = set()

    # One trace

    def record(self, trace: FoundTrace, position: int) -> TraceRecord:
        """Return the record of a trace."""
        layout, environment = self.plan.layout, trace.environment
        made = {name: pattern.fill(environment) for name, pattern in layout.templates.items()}
        labels = {n: v for n, v in made.items() if n != "id" and layout.rule(n).kind == "score"}
        values: dict[str, Any] = {n: v for n, v in made.items() if n not in labels}
        self._set_scalars(trace, values, ("question_id", "sample"))
        self._set_key(trace, values)
        names = dict.fromkeys(place.name for place in self.plan.others)
        scalars = [n for n in names if n not in (RECORDS, "question_id", "sample") and self._is_scalar(n)]
        scores = [n for n in scalars if layout.rule(n).kind == "score"]
        self._set_scalars(trace, values, [n for n in scalars if n not in scores])
        record = self._with_arrays(trace, values, position)
        self._set_scores(trace, labels, record, [*scores, *labels])
        for _, column in self.columns.of(RECORDS):
            for cell in column.cells(environment):
                if isinstance(cell.value, Group):
                    record.extras |= {k: v for k, v in cell.value.items() if k not in record.extras}
        return record

    def _is_scalar(self, name: str) -> bool:
        return self.plan.layout.rule(name).kind in ("text", "id", "number", "json", "score")

    def _set_key(self, trace: FoundTrace, values: dict[str, Any]) -> None:
        """Set question_id and sample of a trace from what it binds, unless fields say them."""
        environment = trace.environment
        if values.get("question_id") is None:
            if "question_id" in self.plan.layout.addresses:
                raise InvalidInputError("the trace has no id where the layout says", field="question_id")
            bound = values.pop("id", None) or environment.get("id")
            if bound is not None:
                values["question_id"] = key_text(bound)
        else:
            values.pop("id", None)
            values["question_id"] = key_text(values["question_id"])
        if values.get("question_id") is not None:
            environment.setdefault("id", values["question_id"])
        sample = values.get("sample", environment.get("sample", environment.get("K")))
        if sample is not None:
            text = key_text(sample)
            if not text.isdecimal():
                raise InvalidInputError(f"found {text[:40]!r}, expected the number of an answer", field="sample")
            values["sample"] = int(text)
            environment.setdefault("sample", int(text))

    def _set_scalars(self, trace: FoundTrace, values: dict[str, Any], names: Sequence[str]) -> None:
        for name in names:
            for place, column in self.columns.of(name):
                value = self._scalar(trace, place, column)
                if value is MISSING or value is None:
                    continue
                if name in values and values[name] != value:
                    raise InvalidInputError(
                        f"found {str(values[name])[:40]!r} and {str(value)[:40]!r}, expected one value", field=name
                    )
                values[name] = typed_value(name, value)
            if name in values and name not in ("question_id", "sample"):
                trace.environment.setdefault(name, key_text(values[name]))

    def _scalar(self, trace: FoundTrace, place: Place, column: Column) -> Any:
        fixed = dict(trace.fixed)
        if "N" in trace.environment:
            fixed["N"] = trace.environment["N*" if "N*" in column.names else "N"]
        if "K" in trace.environment:
            fixed["K"] = trace.environment["K"]
        value = column.scalar(trace.environment, fixed)
        if place in self.columns.tables:
            self.arrays.count(trace, place, column, is_there=value is not MISSING)
        if value is MISSING:
            return value
        times = column.use(trace.environment)
        shared = place.rule.kind in ("score", "text") and place.name not in _SHARED
        if times > 1 and shared and f"share.{place.name}" not in self.settings:
            raise InvalidInputError(
                f"one row of {place.address} serves several traces; the field needs what tells them apart, or "
                f'share.{place.name} = ["sample"]',
                field=place.name,
            )
        return value

    def _set_scores(self, trace: FoundTrace, made: dict[str, str], record: TraceRecord, names: Sequence[str]) -> None:
        found: dict[str, float] = {}
        for name in names:
            rule = self.plan.layout.rule(name)
            raw = [(p in self.columns.tables, self._scalar(trace, p, c)) for p, c in self.columns.of(name)]
            raw += [(False, made[name])] if name in made else []
            for is_late, value in raw:
                if value is MISSING:
                    continue
                direction = rule.direction or ""
                is_label = name in ("label", "is_correct", "is_hallucinated")
                number = label_value(value, name, direction, self._words) if is_label else score_value(value, name)
                found[name] = number
                if math.isnan(number):
                    continue
                if is_late:
                    record.deferred_scores[name] = number
                elif name == "label":
                    record.label = number
                else:
                    record.scores[score_of(name)] = number
        check_agreement(found)

    # Arrays

    def _with_arrays(self, trace: FoundTrace, values: dict[str, Any], position: int) -> TraceRecord:
        layout, what = self.plan.layout, self.plan.layout.states
        is_last = what == "last_token"
        blocks, sizes, ids = self.arrays.states(trace, "D" if is_last else "SD")
        if is_last:
            blocks = [layer.reshape(1, -1) for layer in blocks]
        values["hidden_states"] = blocks
        num_states = len(blocks[0])
        tokens = (
            None
            if is_last
            else self.arrays.tokens(trace, num_states, has_passes=len(sizes) > 1 and not len(trace.cells) > 1)
        )
        texts = None if is_last else self.arrays.texts(trace)
        attention = None
        if self._need_attention is not False and not is_last:
            attention = self.arrays.attention(trace, sizes, ids)
        if not is_last and self._need_attention is not False and attention is not None:
            values["attentions"] = attention
        self._set_prompt_length(trace, values, sizes)
        if not is_last:
            span = self._span(trace, values, tokens, num_states, sizes)
            self._check_new_tokens(trace, tokens, num_states, sizes)
            self._crop(values, tokens, texts, span, num_states)
            self._set_per_token(trace, values, span, num_states)
        if layout.settings.get("S.padding") in (None, "none"):
            check_zero_tokens(values["hidden_states"], what)
        values = {name: value for name, value in values.items() if name == "hidden_states" or value is not None}
        record = self._made(values, position, is_last=is_last)
        if not is_last and (record.prompt_length or 0) > record.num_tokens + 1:
            raise InvalidInputError(
                f"found {record.prompt_length}, more than {record.num_tokens} tokens", field="prompt_length"
            )
        record.layer_ids = self._layer_ids(ids, record, trace.environment)
        record.is_head_mean = attention is not None and self.arrays.is_head_mean()
        return record

    def _made(self, values: dict[str, Any], position: int, *, is_last: bool) -> TraceRecord:
        need = False if is_last else self._need_attention
        if need is None and "attentions" not in values:
            need = False
        if is_last:
            values["last_token"] = np.concatenate(values.pop("hidden_states"))
        record = record_from_dict(values, source_name=self._source, position=position, need_attention=need)
        record.dropped = []
        return record

    def _set_prompt_length(self, trace: FoundTrace, values: dict[str, Any], sizes: list[int]) -> None:
        """Rule 5b: the first pass is the prompt, if no later one has two tokens; so is the first of two parts."""
        if values.get("prompt_length") is not None or len(sizes) < 2:
            return
        if len(trace.cells) > 1:
            first = len(list(self.arrays.passes(trace.cells[0], trace.fixed)))
            values["prompt_length"] = sum(sizes[:first])
        elif sizes[0] > 1 and all(size == 1 for size in sizes[1:]):
            values["prompt_length"] = sizes[0]

    def _check_new_tokens(
        self, trace: FoundTrace, tokens: np.ndarray | None, num_states: int, sizes: list[int]
    ) -> None:
        """Rule 5: passes grow by new tokens only. 5a: without ids, passes after the first have one token each."""
        if len(sizes) < 2 or len(trace.cells) > 1 or tokens is not None or self.settings.get("P.new"):
            return
        if any(size != 1 for size in sizes[1:]):
            raise InvalidInputError(
                f"passes of {sizes!s:.60} tokens: do later ones repeat earlier tokens? P.repeats = true, or P.new = true",
                field=self.plan.layout.states,
            )

    def _span(
        self, trace: FoundTrace, values: dict[str, Any], tokens: np.ndarray | None, num_states: int, sizes: list[int]
    ) -> Span:
        """Return the tokens that are no padding."""
        layers, settings = values["hidden_states"], self.settings
        ids = None if tokens is None else tokens[:num_states]
        is_stack = "N" in trace.environment and "NS" not in trace.fixed
        fill = settings.get("S.padding")
        if (mask := self.arrays.array("S.mask", trace, "S")) is not None:
            begin, end = self._span_of_mask(mask[0], num_states, sizes)
            check_left_out(ids, (begin, end), self._pads, layers, "S.mask", lambda: self.arrays.has_full_mask(trace))
        elif "NS" not in trace.fixed and (length := self._length(trace)) is not None:
            begin, end = span_of_length(length, num_states, settings.get("S.side"), ids, layers)
        elif fill not in (None, "none"):
            begin, end = span_of_fill(fill, layers, ids)
        else:
            begin, end = 0, num_states
            if is_stack and fill is None and ids is not None and len(sizes) == 1 and "S.pad" not in settings:
                self._check_no_padding(ids)
        if tokens is None:
            return begin, end
        return begin, min(end, self._end_of_row(tokens, num_states, is_generated=is_stack and len(sizes) > 1))

    def _span_of_mask(self, flags: np.ndarray, num_states: int, sizes: list[int]) -> Span:
        """Return the tokens of a mask, which is as long as the states, the ids or the first pass."""
        if len(flags) not in (num_states, sizes[0], num_states + 1):
            raise InvalidInputError(f"found {len(flags)} values, expected {num_states} as tokens", field="S.mask")
        begin, end = span_of_mask(flags)
        if len(flags) < num_states:
            if end < len(flags):
                raise InvalidInputError("the first pass is padded behind its tokens", field="S.mask")
            return begin, num_states
        return begin, min(end, num_states)

    def _length(self, trace: FoundTrace) -> int | None:
        """Return the length that a line for S.lengths gives, None without one."""
        for place, column in self.columns.of("S.lengths"):
            value = self._scalar(trace, place, column)
            text = "" if value is MISSING or value is None else key_text(value)
            if not text.isdecimal():
                raise InvalidInputError(f"found {text[:40]!r}, expected the number of tokens", field="S.lengths")
            return int(text)
        return None

    def _end_of_row(self, tokens: np.ndarray, num_states: int, *, is_generated: bool) -> int:
        """Return the number of states before the padding of a row that ended early (rule 3a)."""
        pad, num_ids = self.settings.get("S.pad"), len(tokens)
        if pad is not None:
            kept = strip_pad(tokens, pad)
            return kept if kept == num_ids == num_states else kept - 1
        last = int(tokens[-1])
        if is_generated and (last in self._pads or strip_pad(tokens, last) < num_ids):
            raise InvalidInputError(
                f"the row ends with the id {last} that fills rows: S.pad = {last} if it is padding, S.lengths if not",
                field="tokens",
            )
        return num_states

    def _check_no_padding(self, ids: np.ndarray) -> None:
        """Refuse a row of a stack that ends or begins with one id repeated: padding without a mask."""
        for edge, inner in ((ids[-1], ids[-2:-1]), (ids[0], ids[1:2])):
            if len(inner) and inner[0] == edge:
                raise InvalidInputError(
                    f'the row has the id {int(edge)} twice at one end: S.mask, S.lengths or S.padding = "none" states '
                    "whether it is padding",
                    field="tokens",
                )

    def _crop(
        self, values: dict[str, Any], tokens: np.ndarray | None, texts: list[str] | None, span: Span, num_states: int
    ) -> None:
        begin, end = span
        if (begin, end) != (0, num_states):
            values["hidden_states"] = [layer[begin:end] for layer in values["hidden_states"]]
            if "attentions" in values:
                values["attentions"] = [layer[:, begin:end, begin:end] for layer in values["attentions"]]
            is_stated = any(place.name == "prompt_length" for place in self.plan.others)
            if values.get("prompt_length") is not None and not is_stated:
                values["prompt_length"] = max(values["prompt_length"] - begin, 0)
        if tokens is not None:
            values["tokens"] = tokens[begin : end + (len(tokens) == num_states + 1)]
        if texts is not None:
            wanted = end - begin
            values["tokens_decoded"] = (
                texts if len(texts) in (wanted, wanted + 1) else texts[begin : end + (len(texts) == num_states + 1)]
            )

    def _set_per_token(self, trace: FoundTrace, values: dict[str, Any], span: Span, num_states: int) -> None:
        """Set the optional fields of tokens, without padding."""
        done = {"hidden_states", "last_token", "attentions", "tokens", "tokens_decoded"}
        for name in dict.fromkeys(place.name for place in self.plan.others):
            if name in done or name == RECORDS or self.plan.layout.rule(name).kind != "array":
                continue
            if (found := self.arrays.array(name, trace, "ST")) is not None:
                array = found[0]
                is_full = len(array) >= num_states and span != (0, num_states)
                values[name] = array[span[0] : span[1] + len(array) - num_states] if is_full else array

    def _layer_ids(
        self, ids: tuple[int, ...] | None, record: TraceRecord, environment: Mapping[str, Any]
    ) -> tuple[int, ...] | None:
        stated = self.settings.get("L.ids")
        for _, column in self.columns.of("L.ids"):
            cell = column.cells(environment)[0]
            stated = read(cell.value, cell.axes, {}, "L.ids")[0].tolist()
        if stated is not None:
            ids = tuple(stated)
        size = self.settings.get("L.size")
        if ids is None or (size is None and all(k < 0 for k in ids)):
            return None  # counted from the end of an unknown number
        if any(k < 0 for k in ids):
            if size is None:
                raise InvalidInputError(
                    f"found the layers {list(ids)}; L.size gives the number of the model's layers", field="L.ids"
                )
            ids = tuple(k % size for k in ids)
        if len(ids) == record.num_layers + 1 and record.is_without_embeddings:
            ids = ids[1:]
        if len(ids) != record.num_layers:
            raise InvalidInputError(f"found {record.num_layers} layers, expected {list(ids)!s:.60}", field="L.ids")
        if ids != tuple(sorted(set(ids))):
            raise InvalidInputError(f"found the layers {list(ids)!s:.60}, expected them in their order", field="L.ids")
        return ids
