"""Traces of one source as records: the values of all places that belong together."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.arrays import ArrayReader, check_attention_values
from tracestore.ingest.execute.axes import MISSING, layer_ids_of, read
from tracestore.ingest.execute.found import Columns, FoundTrace, identity_of
from tracestore.ingest.execute.join import Column
from tracestore.ingest.execute.row_padding import PadAccount, PromptAccount, check_border, check_ends
from tracestore.ingest.execute.tokens import (
    Span,
    check_left_out,
    check_new_tokens,
    check_prompt,
    check_zero_tokens,
    of_span,
    span_of_fill,
    span_of_length,
    span_of_mask,
    tokens_of_columns,
)
from tracestore.ingest.execute.values import (
    check_agreement,
    check_spans,
    id_text,
    key_text,
    typed_value,
    verdict_value,
)
from tracestore.ingest.layout.fields import KEY, score_of
from tracestore.ingest.layout.places import DERIVED, RECORDS, Place, Plan
from tracestore.ingest.tree import Group
from tracestore.store.format.schema import ANSWER_FIELDS
from tracestore.store.write.record import TraceRecord, record_from_dict

_OF_KEY = (*DERIVED, "global_example_id")  # fields that give the key of a trace
# Fields that may serve several traces (rule 12a).
_SHARED = frozenset(("question", "question_id", "group", RECORDS))


class RecordMaker:
    """Make records of the values of traces, by what the layout states for all of them.

    Parameters
    ----------
    plan : Plan
    source_name : str
    need_attention : bool or None
        As for `record_from_dict`.
    has_scores_file : bool
        Whether a scores file replaces the labels and scores of the source, which then are extras.
    is_of_schema : bool
        Whether the keys are those of the schema: labels and scores have the values that `create` takes.
    """

    def __init__(
        self, plan: Plan, source_name: str, need_attention: bool | None, *, has_scores_file: bool, is_of_schema: bool
    ) -> None:
        self._has_scores_file = has_scores_file
        self.plan, self.settings, self.need_attention = plan, plan.layout.settings, need_attention
        self._source, self._states = source_name, plan.layout.states
        words = {n.partition(".")[2]: v for n, v in self.settings.items() if n.startswith("words.")}
        self._words = None if is_of_schema else words
        self._has_no_padding = self.settings.get("S.padding") in (None, "none")

    def set_id(self, values: dict[str, Any], bound: Any) -> None:
        """Set question_id to what its field says, else to what the trace binds, as text."""
        if (given := values.get("question_id")) is not None:
            values["question_id"] = id_text(given)
        elif "question_id" in self.plan.layout.addresses:
            raise InvalidInputError("the trace has no id where the layout says", field="question_id")
        elif bound is not None and values.get("global_example_id") is None:
            values["question_id"] = key_text(bound)

    def set_sample(self, values: dict[str, Any], bound: Any) -> None:
        """Set the number of the answer to what its field says, else to what the trace binds."""
        if (sample := values.get("sample", bound)) is not None:
            text = key_text(sample)
            if not text.isdecimal():
                raise InvalidInputError(f"found {text[:40]!r}, expected the number of an answer", field="sample")
            values["sample"] = int(text)

    def record(self, values: dict[str, Any], position: int, *, is_row: bool) -> TraceRecord:
        """Return the record of checked values; rules 6a, 17c and 24. `is_row`: they may be padded as rows of a stack."""
        states, need = values[self._states], self.need_attention
        is_last = self._states == "last_token"
        if is_last or (need is None and "attentions" not in values):
            need = False
        record = record_from_dict(values, source_name=self._source, position=position, need_attention=need)
        record.dropped = []
        if self._has_no_padding:  # the record has compared the shapes
            check_zero_tokens([layer.reshape(1, -1) for layer in states] if is_last else states, self._states)
        if is_row and not is_last and self._words is not None and self.settings.get("S.padding") != "none":
            check_ends(states, self._states)
        if record.attention is not None:
            check_attention_values(record.attention[0])
        if not is_last:
            check_prompt(record.prompt_length, record.num_tokens)
        if self.settings.get("D.size") not in (None, record.hidden_dim):
            raise InvalidInputError(f"found D {record.hidden_dim}, expected {self.settings['D.size']}", field="D.size")
        return record

    def set_layers(self, record: TraceRecord, ids: tuple[int, ...] | None, stated: Sequence[int] | None) -> None:
        """Set the numbers of the layers: those that names bind, or that the layout or the file states instead."""
        stated, size = self.settings.get("L.ids") if stated is None else stated, self.settings.get("L.size")
        if ids is not None or stated is not None or size is not None:
            what, is_without = "layer_ids" if self._words is None else "L.ids", record.is_without_embeddings
            record.layer_ids = layer_ids_of(
                ids, stated, size, record.num_layers, what, is_without_embeddings=is_without
            )

    def set_scores(self, record: TraceRecord, given: Iterable[tuple[str, Any, bool]]) -> None:
        """Set labels and scores of fields; those of tables are stored when the accounts of the run close."""
        found: dict[str, float] = {}
        for name, value, is_of_table in given:
            if self._has_scores_file and not is_of_table:
                record.extras |= {score_of(name): value} if isinstance(value, str | int | float) else {}
                continue
            direction = self.plan.layout.rule(name).direction or ""
            found[name] = number = verdict_value(value, name, direction, self._words)
            if math.isnan(number):
                continue
            if is_of_table:
                record.deferred_scores[name] = number
            elif name == "label":
                record.label = number
            else:
                record.scores[score_of(name)] = number
        check_agreement(found)


class TraceBuilder:
    """Build the records of a source whose fields are joined.

    Parameters
    ----------
    columns : Columns
        What the source and the tables hold.
    maker : RecordMaker
    """

    def __init__(self, columns: Columns, maker: RecordMaker) -> None:
        self.columns, self._maker, self._need_attention = columns, maker, maker.need_attention
        self.plan, self.settings, self.arrays = columns.plan, maker.settings, ArrayReader(columns)
        layout = self.plan.layout
        names = [n for n in dict.fromkeys(p.name for p in self.plan.others) if n not in (RECORDS, *_OF_KEY)]
        self._keys = [n for n in names if n.startswith(KEY)]
        kinds = ("text", "id", "number", "json")
        self._scalars = [n for n in names if layout.rule(n).kind in kinds and n not in self._keys]
        self._scores = [n for n in names if layout.rule(n).kind == "score"]
        self._made_scores = [n for n in layout.templates if n != "id" and layout.rule(n).kind == "score"]
        self.prompts, self.pads = PromptAccount(self.plan), PadAccount(layout)

    def record(self, trace: FoundTrace, position: int) -> TraceRecord:
        """Return the record of a trace."""
        layout, environment = self.plan.layout, trace.environment
        values: dict[str, Any] = {name: pattern.fill(environment) for name, pattern in layout.templates.items()}
        labels = {name: values.pop(name) for name in self._made_scores}
        self._set_scalars(trace, environment, self._keys)
        self._set_scalars(trace, values, _OF_KEY)
        self._set_key(trace, values)
        self._set_scalars(trace, values, self._scalars)
        check_spans(values.get("spans"), [values[n] for n in ANSWER_FIELDS if n in values])
        record = self._with_arrays(trace, values, position)
        self._maker.set_scores(record, self._found_scores(trace, labels))
        for _, column in self.columns.of(RECORDS):
            for cell in column.cells(environment):
                if isinstance(cell.value, Group):
                    record.extras |= {k: v for k, v in cell.value.items() if k not in record.extras}
        return record

    def _set_key(self, trace: FoundTrace, values: dict[str, Any]) -> None:
        """Set question_id and sample of a trace from what it binds, unless fields say them."""
        environment = trace.environment
        self._maker.set_id(values, values.pop("id", None) or environment.get("id"))
        if (question_id := values.get("question_id")) is not None:
            environment.setdefault("id", question_id)
            if "sample" in self.settings:
                values["sample"] = self.columns.number_of_answer(trace, question_id)
        self._maker.set_sample(values, environment.get("sample", environment.get("K")))
        if "sample" in values:
            environment.setdefault("sample", values["sample"])

    def _set_scalars(self, trace: FoundTrace, values: dict[str, Any], names: Iterable[str]) -> None:
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
                trace.environment.setdefault(name.removeprefix(KEY), key_text(values[name]))

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
        times = column.use(trace.environment, identity_of(trace, self.settings), value)
        shared = place.rule.kind in ("score", "text") and place.name not in _SHARED
        if times > 1 and shared and f"share.{place.name}" not in self.settings:
            raise InvalidInputError(
                f"one row of {place.address} serves several traces; the field needs what tells them apart, or "
                f'share.{place.name} = ["sample"], or duplicates = "drop" if they are copies of one trace',
                field=place.name,
            )
        return value

    def _found_scores(self, trace: FoundTrace, made: dict[str, str]) -> Iterator[tuple[str, Any, bool]]:
        """Yield the labels and scores of a trace, with whether a table has them; `made` are those of templates."""
        for name in dict.fromkeys((*self._scores, *made)):
            for place, column in self.columns.of(name):
                if (value := self._scalar(trace, place, column)) is not MISSING:
                    yield name, value, place in self.columns.tables
            if name in made:
                yield name, made[name], False

    def _with_arrays(self, trace: FoundTrace, values: dict[str, Any], position: int) -> TraceRecord:
        what = self.plan.layout.states
        is_last = what == "last_token"
        layers, sizes, ids = self.arrays.states(trace, "D" if is_last else "SD")
        values[what] = np.stack(layers) if is_last else layers
        if not is_last:
            self._set_sequence(trace, values, sizes, ids)
        values = {name: value for name, value in values.items() if value is not None}
        record = self._maker.record(values, position, is_row=trace.is_row and len(sizes) == 1)
        self._maker.set_layers(record, ids, self._stated_layers(trace.environment))
        record.is_head_mean = "attentions" in values and self.arrays.is_head_mean()
        return record

    def _set_sequence(
        self, trace: FoundTrace, values: dict[str, Any], sizes: list[int], ids: tuple[int, ...] | None
    ) -> None:
        """Set attention, ids, texts and values of the tokens of all parts and passes, without padding."""
        num_states = len(values["hidden_states"][0])
        has_passes = len(sizes) > 1 and len(trace.cells) == 1
        length = None if "NS" in trace.fixed else self._known("S.lengths", self._length(trace))
        tokens = self.arrays.tokens(trace, num_states, length, has_passes=has_passes)
        texts = self.arrays.texts(trace)
        is_needed = self._need_attention is not False
        attention = self.arrays.attention(trace, sizes, ids, is_needed=is_needed)
        if is_needed:
            values["attentions"] = attention
        self._set_prompt_length(trace, values, sizes)
        padded = None if tokens is None or len(tokens) < num_states else tokens
        span = self._span(trace, values["hidden_states"], padded, length, sizes)
        if has_passes and tokens is None and not self.settings.get("P.new"):
            check_new_tokens(sizes, self.plan.layout.states)
        self._crop(values, tokens, texts, span, num_states)
        self._set_per_token(trace, values, span, num_states)

    def _set_prompt_length(self, trace: FoundTrace, values: dict[str, Any], sizes: list[int]) -> None:
        """Rule 5b: the first pass is the prompt, if no later one has two tokens; so is the first of two parts.

        A stated length that is more than the first pass belongs to a prompt of which a part was cached.
        """
        stated = values.get("prompt_length")
        if stated is not None and len(sizes) > 1 and len(trace.cells) == 1 and stated > sizes[0]:
            raise InvalidInputError(
                f"found {stated}, and a first pass of {sizes[0]} tokens: part of the prompt was cached, so that its "
                "tokens have no states",
                field="prompt_length",
            )
        if stated is not None or len(sizes) < 2:
            return
        if len(trace.cells) > 1:
            first = len(list(self.arrays.passes(trace.cells[0], trace.fixed)))
            values["prompt_length"] = sum(sizes[:first])
        elif sizes[0] > 1 and all(size == 1 for size in sizes[1:]):
            values["prompt_length"] = sizes[0]

    def _span(
        self,
        trace: FoundTrace,
        layers: Sequence[np.ndarray],
        tokens: np.ndarray | None,
        length: int | None,
        sizes: list[int],
    ) -> Span:
        """Return the tokens that are no padding; `length` is that of S.lengths."""
        num_states, settings = len(layers[0]), self.settings
        ids = None if tokens is None else tokens[:num_states]
        fill = settings.get("S.padding")
        mask = self._known("S.mask", self.arrays.array("S.mask", trace, "S"))
        is_stated = mask is not None or length is not None
        # An id that masks and lengths leave out may be inside a row, too: it also ends turns.
        is_shown = fill not in (None, "none") and not (is_stated and ids is not None and isinstance(fill, int))
        filled = span_of_fill(fill, layers, ids) if is_shown else None
        if mask is not None:
            begin, end = self._span_of_mask(mask[0], tokens, layers, sizes, lambda: self.arrays.has_full_mask(trace))
        elif length is not None:
            begin, end = span_of_length(length, num_states, settings.get("S.side"), ids, layers)
            if ids is not None:
                check_left_out(ids, (begin, end), self.pads.left_out, layers, "S.lengths", lambda: True)
        else:
            begin, end = filled or (0, num_states)
        if trace.is_row and ids is not None:
            is_end_known = len(sizes) > 1 or "S.pad" in settings
            self.pads.add_row(ids, (begin, end), is_stated=is_stated or fill is not None, is_end_known=is_end_known)
        if filled not in (None, (begin, end)):
            raise InvalidInputError(f"found the tokens {filled}, expected {(begin, end)} as masked", field="S.padding")
        if tokens is not None:
            end = min(end, self._end_of_row(trace, tokens, num_states, sizes))
        if trace.is_row and fill != "none" and len(sizes) == 1:
            check_border(layers, (begin, end), self.plan.layout.states)
        return begin, end

    def _end_of_row(self, trace: FoundTrace, tokens: np.ndarray, num_states: int, sizes: list[int]) -> int:
        """Return the number of states before the padding behind an early end."""
        num_prompt = sizes[0] if len(sizes) > 1 and len(trace.cells) == 1 else None
        is_of_array = not trace.fixed.keys().isdisjoint("NK")
        may_be_padded = trace.is_row and (num_prompt is not None or (is_of_array and len(tokens) > num_states))
        return self.pads.end_of_row(tokens, num_states, num_prompt, may_be_padded=may_be_padded)

    def _known(self, name: str, value: Any) -> Any:
        """Return what is known of an axis; InvalidInputError if the layout states it and the trace has none."""
        if value is None and name in self.plan.layout.addresses:
            raise InvalidInputError("the trace has no value where the layout says", field=name)
        return value

    def _span_of_mask(
        self,
        flags: np.ndarray,
        tokens: np.ndarray | None,
        layers: Sequence[np.ndarray],
        sizes: list[int],
        has_full_row: Callable[[], bool],
    ) -> Span:
        """Return the tokens of a mask, which is as long as the states, the ids or the first pass (rule 2)."""
        num_states = len(layers[0])
        if len(flags) not in (num_states, sizes[0], 0 if tokens is None else len(tokens)):
            raise InvalidInputError(f"found {len(flags)} values, expected {num_states} as tokens", field="S.mask")
        begin, end = span_of_mask(flags)
        if len(flags) < num_states:
            if end < len(flags):
                raise InvalidInputError("the first pass is padded behind its tokens", field="S.mask")
            end = num_states
        ids = None if tokens is None else tokens[: max(len(flags), num_states)]
        check_left_out(ids, (begin, end), self.pads.left_out, layers, "S.mask", has_full_row)
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

    def _crop(
        self, values: dict[str, Any], tokens: np.ndarray | None, texts: list[str] | None, span: Span, num_states: int
    ) -> None:
        begin, end = span
        if (begin, end) != (0, num_states):
            values["hidden_states"] = [layer[begin:end] for layer in values["hidden_states"]]
            if values.get("attentions") is not None:
                values["attentions"] = [layer[:, begin:end, begin:end] for layer in values["attentions"]]
            is_stated = any(place.name == "prompt_length" for place in self.plan.others)
            if values.get("prompt_length") is not None and not is_stated:
                values["prompt_length"] = max(values["prompt_length"] - begin, 0)
            elif values.get("prompt_length") is not None and self.settings.get("S.prompt") == "columns":
                values["prompt_length"] = tokens_of_columns(values["prompt_length"], span)
        self.prompts.add(values.get("prompt_length"), begin)
        for name, found in (("tokens", tokens), ("tokens_decoded", texts)):
            if found is not None:
                values[name] = of_span(found, span, num_states)

    def _set_per_token(self, trace: FoundTrace, values: dict[str, Any], span: Span, num_states: int) -> None:
        """Set the optional fields of tokens, without padding."""
        done = {"hidden_states", "last_token", "attentions", "tokens", "tokens_decoded"}
        for name in dict.fromkeys(place.name for place in self.plan.others):
            if name in done or name == RECORDS or self.plan.layout.rule(name).kind != "array":
                continue
            if (found := self.arrays.array(name, trace, "ST")) is not None:
                values[name] = of_span(found[0], span, num_states)

    def _stated_layers(self, environment: Mapping[str, Any]) -> list[int] | None:
        """Return the numbers of the layers that a value states, None without."""
        for _, column in self.columns.of("L.ids"):
            cell = column.cells(environment)[0]
            found: list[int] = read(cell.value, cell.axes, {}, "L.ids")[0].tolist()
            return found
        return None
