"""Traces of one source as records: the values of all places that belong together."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.execute import arrays
from tracestore.ingest.execute.axes import LayerIds, LayerOrder
from tracestore.ingest.execute.row_padding import Padding
from tracestore.ingest.execute.table_accounts import KeptValues
from tracestore.ingest.execute.traces import TraceCells
from tracestore.ingest.execute.values import group_text, id_text, key_text, number_of, typed_value, verdict_value
from tracestore.ingest.layout.fields import KEY, score_of
from tracestore.ingest.layout.places import DERIVED, RECORDS, Plan
from tracestore.ingest.readers.tree import Group
from tracestore.store.format.schema import ANSWER_FIELDS
from tracestore.store.vocabulary import is_other_value
from tracestore.store.write.field_values import check_agreement, field_error
from tracestore.store.write.record import TraceRecord, record_from_dict

_OF_NAMES = ("id", "sample")
_OF_KEY = (*DERIVED, "global_example_id")  # fields that give the key of a trace


@dataclass
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
    stated : collection of str
        Of the fields of a built-in layout, those that the user names.
    """

    plan: Plan
    source_name: str
    need_attention: bool | None
    _: KW_ONLY
    has_scores_file: bool
    is_of_schema: bool
    stated: Collection[str] = ()

    def __post_init__(self) -> None:
        self.settings, self._states = self.plan.layout.settings, self.plan.layout.states
        self._words = None if self.is_of_schema else self.plan.layout.words
        self.layers = LayerOrder(self.plan.layout, is_of_schema=self.is_of_schema)
        is_flat = any("NS" in place.axes for place in self.plan.states)
        self._may_be_padded = not (is_flat or self._states == "last_token" or self.settings.get("S.padding") == "none")
        self._has_no_padding = self.settings.get("S.padding") in (None, "none")

    def set_id(self, values: dict[str, Any], bound: Mapping[str, Any], made: Any = None) -> None:
        """Set question_id to what its field or a template says, else to the id that the trace binds, as text."""
        if (given := values.get("question_id")) is not None:
            values["question_id"] = id_text(given)
        elif "question_id" in self.plan.layout.addresses:
            zeros = next((name for name, value in bound.items() if re.fullmatch(r"0\d+", str(value))), None)
            way = f": {zeros} is {bound[zeros]}, and {{{zeros}:d}} a number without zeros in front" if zeros else ""
            raise InvalidInputError(f"the trace has no id where the layout says{way}", field="question_id")
        elif (own := made or bound.get("id")) is not None and values.get("global_example_id") is None:
            values["question_id"] = key_text(own)

    def set_sample(self, values: dict[str, Any], bound: Any) -> None:
        """Set the number of the answer to what its field says, else to what the trace binds."""
        if (sample := values.get("sample", bound)) is not None:
            text = key_text(sample)
            if not text.isdecimal():
                raise InvalidInputError(f"found {text[:40]!r}, expected the number of an answer", field="sample")
            values["sample"] = int(text)
            if values["sample"] and not values.keys() & {"question_id", "global_example_id"}:
                text = f"answer {text} of a question without an id: a line for question_id gives one, [K] counts items"
                raise InvalidInputError(text, field="sample")

    def record(self, values: dict[str, Any], position: int, *, is_row: bool) -> TraceRecord:
        """Return the record of checked values; rules 6a, 6b, 17c and 24. `is_row`: they may be padded as rows of a stack."""
        states, is_last = values[self._states], self._states == "last_token"
        scores = values.pop("scores", None) if self.has_scores_file else None
        record = record_from_dict(
            values, source_name=self.source_name, position=position, need_attention=self.need_attention
        )
        record.dropped = []
        record.extras |= {} if scores is None else {"scores": scores}
        for name in record.scores.keys() - self.plan.scores if record.scores else ():
            raise InvalidInputError(
                f"a high {name!s:.60} may mean a correct or a hallucinated answer; --score-column {name!s:.60} "
                "--score-direction correct or hallucination states it",
                field="scores",
            )
        if record.group:
            record.group = group_text(record.group)
        if self._has_no_padding:  # the record has compared the shapes
            arrays.check_zero_tokens([layer.reshape(1, -1) for layer in states] if is_last else states, self._states)
        if "generated_mask" in record.optional and self._words is not None:
            arrays.check_generated(record.optional["generated_mask"], record.prompt_length)
        if is_row and not is_last and self._words is not None and self.settings.get("S.padding") != "none":
            arrays.check_ends(states, self._states)
        if record.attention is not None:
            first, *others = record.attention
            # Another program fills all layers alike: the first and the last are compared; two tokens may agree by chance.
            for layer in (first, *(layer[:1] for layer in others[-1:] if record.num_tokens > 2)):
                arrays.check_attention_values(layer)
            if self._may_be_padded:
                arrays.check_masked_tokens(first)
        if self.settings.get("D.size") not in (None, record.hidden_dim):
            raise InvalidInputError(f"found D {record.hidden_dim}, expected {self.settings['D.size']}", field="D.size")
        return record

    def set_layers(self, record: TraceRecord, ids: LayerIds, stated: Sequence[int] | None) -> None:
        """Set the numbers of the layers, which are unknown where they count from the end; `stated` are those of the file."""
        stated = self.settings.get("L.ids") if stated is None else stated
        _check_num_layers(record, len(stated) if stated is not None else None if ids else self.settings.get("L.size"))
        if ids is None or ids[0] < 0:
            return
        ids = ids[1:] if len(ids) == record.num_layers + 1 and record.is_without_embeddings else ids
        if len(ids) != record.num_layers:
            raise InvalidInputError(f"found {record.num_layers} layers, expected {list(ids)!s:.60}", field="L")
        record.layer_ids = ids

    def set_scores(self, record: TraceRecord, given: Iterable[tuple[str, Any, bool]]) -> None:
        """Set labels and scores of fields; those of tables are stored when the accounts of the run close."""
        found: dict[str, float] = dict(record.scores)
        for name, value, is_of_table in given:
            if self.has_scores_file and not is_of_table:
                record.extras |= {} if value is None else {score_of(name): value}
                continue
            if self._words is None and name not in self.stated and is_other_value(score_of(name), value):
                record.extras[score_of(name)] = value
                continue
            direction = self.plan.layout.rule(name).direction or ""
            found[name] = number = verdict_value(value, name, direction, self._words)
            if math.isnan(number):
                continue
            if is_of_table:
                record.deferred_scores[name] = number
            elif name == "label" and record.label in (None, number):
                record.label = number
            elif name == "label":
                raise InvalidInputError(f"found {record.label:g} and {number:g}, expected one label", field="label")
            elif record.scores.setdefault(score_of(name), number) != number:
                raise field_error(score_of(name), f"{number:g}", f"{record.scores[score_of(name)]:g} as in scores")
        check_agreement(found)


def check_spans(values: Mapping[str, Any]) -> None:
    """Rule 14: a span of the answer with a text equals its slice."""
    spans, answers = values.get("spans"), [values[name] for name in ANSWER_FIELDS if name in values]
    for span in spans if isinstance(spans, list) and answers else ():
        text = span.get("text") if isinstance(span, dict) else None
        if isinstance(text, str):
            slices = [answer[span.get("start") : span.get("end")] for answer in answers]
            if text not in slices:
                found, expected = (escape_unprintable(part, 40) for part in (slices[0], text))
                raise field_error("spans", f"{found!r} in the answer", f"{expected!r} of the span")


def _check_num_layers(record: TraceRecord, expected: int | None) -> None:
    """Refuse another number of layers than the layout states, also that without the embeddings, which have no attention."""
    found = record.num_layers
    if record.is_without_embeddings and expected == found + 1:
        raise InvalidInputError(
            f"states of {expected} layers and attention of {found}: the first layer, the embeddings, would be left "
            "out; ignore the attention to keep it, or state the layers without it",
            field="L",
        )
    if expected not in (None, found):
        raise InvalidInputError(f"found {found} layers, expected {expected} as stated", field="L")


class TraceBuilder:
    """Build the records of a source whose fields are joined.

    Parameters
    ----------
    maker : RecordMaker
    kept : KeptValues
    """

    def __init__(self, maker: RecordMaker, kept: KeptValues) -> None:
        self._maker, self.plan, self._settings, self._kept = maker, maker.plan, maker.settings, kept
        layout = self.plan.layout
        names = [n for n in dict.fromkeys(p.name for p in self.plan.others) if n not in (RECORDS, *_OF_KEY)]
        kinds = {n: KEY if n.startswith(KEY) else layout.rule(n).kind for n in names}

        def of_kind(*wanted: str) -> list[str]:
            return [n for kind in wanted for n in names if kinds[n] == kind]

        self._scores = of_kind("score")
        # Keys that are joined by the id or the number of the answer, which lines give, follow these.
        own, plan = {"id", "sample"} - self.plan.names, self.plan
        self._later_keys = [n for n in of_kind(KEY) if any(own & {*plan.keys[p]} for p in plan.others if p.name == n)]
        self._keys = [n for n in of_kind(KEY) if n not in self._later_keys]
        self._scalars = of_kind("text", "id", "number", "json")
        self._per_token = [n for n in of_kind("texts", "array") if n not in ("attentions", "tokens")]
        made = {n: layout.rule(n).kind for n in layout.templates if n not in (*_OF_NAMES, *layout.addresses)}
        self._made_scores = [n for n, kind in made.items() if kind == "score"]
        self._made_numbers = [n for n, kind in made.items() if kind == "number"]
        # Fields of tokens with the value of a first token in front.
        self._in_front = (layout.templates.keys() & layout.addresses.keys()) - {"prompt_length"}
        self.padding = Padding(self.plan)

    def record(self, trace: TraceCells, position: int) -> TraceRecord | None:
        """Return the record of a trace, None for one that is left out."""
        environment, what = trace.environment, self.plan.layout.states
        made = ((n, p) for n, p in self.plan.layout.templates.items() if n not in self.plan.layout.addresses)
        values: dict[str, Any] = {name: pattern.fill(environment) for name, pattern in made}
        values |= {name: number_of(values[name], name) for name in self._made_numbers}
        labels = {name: values.pop(name) for name in self._made_scores}
        self._set_scalars(trace, environment, self._keys)
        self._set_scalars(trace, values, _OF_KEY)
        self._set_key(trace, values)
        self._set_scalars(trace, environment, self._later_keys)
        if not self._kept.has_trace(environment):
            trace.columns.leave_out(environment, trace.made_id)
            return None
        self._set_scalars(trace, values, self._scalars)
        if "spans" in values:
            check_spans(values)
        is_last = what == "last_token"
        values[what], sizes, ids = arrays.read_states(trace, "D" if is_last else "SD")
        own = None if is_last else self._set_sequence(trace, values, sizes)
        of_file = trace.array("L.ids", "L")
        stated = None if of_file is None else of_file[0].tolist()
        ids = self._maker.layers.sort(values, {what: ids, "attentions": own}, stated)
        values[what] = np.stack(values[what]) if is_last else values[what]
        values = {name: value for name, value in values.items() if value is not None}
        record = self._maker.record(values, position, is_row=trace.is_row and len(sizes) == 1)
        self._maker.set_layers(record, ids, stated)
        if "attentions" in values:
            place = next(trace.columns.of("attentions")).place
            record.is_head_mean = not {"head", "H"} & {*place.address.bound, *place.axes}
        self._maker.set_scores(record, self._found_scores(trace, labels))
        for cell in trace.items_of(RECORDS):
            if isinstance(cell.value, Group):
                record.extras |= {k: v for k, v in cell.value.items() if k not in record.extras}
        return record

    def _set_key(self, trace: TraceCells, values: dict[str, Any]) -> None:
        """Set question_id and sample of a trace from what it binds, unless fields say them."""
        environment = trace.environment
        self._maker.set_id(values, environment, values.pop("id", None))
        if "K" in environment and not values.keys() & {"question_id", "global_example_id"}:
            place = [environment[name] for name in self.plan.names_in_file] or [0]
            values["question_id"] = ":".join(map(key_text, (self._maker.source_name, *place)))
        if (question_id := values.get("question_id")) is not None:
            environment.setdefault("id", question_id)
            trace.made_id = question_id if environment["id"] != question_id else None
            if "sample" in self._settings:
                values["sample"] = trace.number_of_answer(question_id)
        self._maker.set_sample(values, environment.get("sample", environment.get("K")))
        if "sample" in values:
            environment.setdefault("sample", values["sample"])

    def _set_scalars(self, trace: TraceCells, values: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            for column in trace.columns.of(name):
                value = trace.scalar(column)
                if value is None or (value := typed_value(name, value)) is None:
                    continue
                if name in values and values[name] != value:
                    raise field_error(name, f"{str(values[name])[:40]!r} and {str(value)[:40]!r}", "one value")
                values[name] = value
                added = self.plan.layout.templates.get(name)
                if added is not None and type(values[name]) is int and values[name] >= 0:
                    values[name] += number_of(added.fill(trace.environment), name)
            if name in values and name not in ("question_id", "sample"):
                trace.environment.setdefault(name.removeprefix(KEY), key_text(values[name]))

    def _found_scores(self, trace: TraceCells, made: dict[str, str]) -> Iterator[tuple[str, Any, bool]]:
        """Yield the labels and scores of a trace, with whether a table has them; `made` are those of templates."""
        for name in dict.fromkeys((*self._scores, *made)):
            for column in trace.columns.of(name):
                if (value := trace.scalar(column)) is not None:
                    yield name, value, column.place in trace.columns.tables
            if name in made:
                yield name, made[name], False

    def _set_sequence(self, trace: TraceCells, values: dict[str, Any], sizes: list[int]) -> LayerIds:
        """Set attention and what each token has, without padding; return the layers that names of attention bind."""
        layers = values["hidden_states"]
        num_states, has_passes = len(layers[0]), len(sizes) > 1 and len(trace.cells) == 1
        length = None if "NS" in trace.fixed else self._length(trace)
        skipped = arrays.num_skipped(self._settings, "T")
        arrays.leave_out_skipped(values, skipped)
        stated = trace.prompt_length = values.get("prompt_length")
        tokens = arrays.read_tokens(trace, num_states, length, has_passes=has_passes)
        num_prompt_ids = trace.num_first_values
        attention, own = arrays.read_attention(trace, num_states, is_needed=self._maker.need_attention is not False)
        values |= {"prompt_length": 0} if self.plan.is_of_answer else {}
        self._set_prompt_length(trace, values, sizes)
        padded = None if tokens is None or len(tokens) < num_states else tokens
        begin, end = span = self.padding.span(trace, layers, padded, length, sizes)
        if self.padding.num_masked is not None and length not in (None, end - begin, self.padding.num_masked):
            raise InvalidInputError(f"found {length}, expected {end - begin} as the mask says", field="S.lengths")
        if begin and (self._in_front or skipped):
            text = f"found {begin} tokens of padding in front of the token that = gives, or T.skip leaves out"
            raise InvalidInputError(text, field=min(self._in_front, default="tokens"))
        if has_passes and tokens is None and not self._settings.get("P.new"):
            arrays.check_new_tokens(sizes, self.plan.layout.states)
        if span != (0, num_states):
            values["hidden_states"] = [layer[begin:end] for layer in layers]
            attention = attention and [layer[:, begin:end, begin:end] for layer in attention]
        values["attentions"] = attention
        if (prompt := values.get("prompt_length")) is not None:
            prompt = self.padding.prompt_of(prompt, span, num_states, is_stated=stated is not None)
            values["prompt_length"] = prompt
        arrays.set_marked_prompt(trace, values, span, num_states, tokens)
        self._check_prompt(trace, values, self.plan.layout.states, trace.num_first, begin)
        if tokens is not None:
            self._check_prompt(trace, values, "tokens", num_prompt_ids, 0 if padded is None else begin)
            values["tokens"] = arrays.of_span(tokens, span, num_states)
        self._set_values(trace, values, span, num_states)
        return own

    def _set_values(self, trace: TraceCells, values: dict[str, Any], span: tuple[int, int], num_states: int) -> None:
        """Set texts and values of the tokens, without padding."""
        if span[0] and "answer_span" in values and self._settings.get("S.prompt") != "tokens":
            text = f'found {span[0]} tokens of padding in front: S.prompt = "tokens" says that it counts none of them'
            raise InvalidInputError(text, field="answer_span")
        for name in self._per_token:
            if (found := trace.array(name, "ST")) is not None:
                of_tokens = found[0][arrays.num_skipped(self._settings, found[1]) :]
                num_before = span[0] if len(of_tokens) >= num_states else 0
                self._check_prompt(trace, values, name, trace.num_first_values, num_before)
                values[name] = arrays.of_span(of_tokens, span, num_states)
        if (texts := values.get("tokens_decoded")) is not None:
            if texts.dtype != object:
                raise InvalidInputError("found other values than texts", field="tokens_decoded")
            values["tokens_decoded"] = texts.tolist()

    def _check_prompt(
        self, trace: TraceCells, values: Mapping[str, Any], name: str, num_first: int, num_padding: int
    ) -> None:
        """Refuse another length of the prompt than the first of two parts of a field has, without its padding."""
        length = trace.prompt_length if self.plan.is_of_answer else values.get("prompt_length")
        expected = num_first - (0 if self.plan.is_of_answer else num_padding)
        if num_first and length not in (None, expected):
            raise field_error("prompt_length", length, f"{expected} as in the first part of {name}")

    def _length(self, trace: TraceCells) -> int | None:
        """Return the length that a line for S.lengths gives, None without one."""
        found: dict[str, Any] = {}
        self._set_scalars(trace, found, ["S.lengths"])
        if (value := trace.known("S.lengths", found.get("S.lengths"))) is None:
            return None
        if not (text := key_text(value)).isdecimal():
            raise InvalidInputError(f"found {text[:40]!r}, expected the number of tokens", field="S.lengths")
        return int(text)

    def _set_prompt_length(self, trace: TraceCells, values: dict[str, Any], sizes: list[int]) -> None:
        """Rule 5b: the first pass is the prompt, if no later one has two tokens; so is the first of two parts.

        A stated length that is more than the first pass belongs to a prompt of which a part was cached.
        """
        stated = values.get("prompt_length")
        if len(sizes) > 1 and len(trace.cells) == 1:
            if stated is not None and stated > sizes[0]:
                raise InvalidInputError(
                    f"found {stated}, and a first pass of {sizes[0]} tokens: part of the prompt was cached, so that its "
                    "tokens have no states",
                    field="prompt_length",
                )
            trace.num_first = sizes[0] if sizes[0] > 1 and all(size == 1 for size in sizes[1:]) else 0
        if stated is None and len(sizes) > 1 and (trace.num_first or len(trace.cells) > 1):
            values["prompt_length"] = trace.prompt_length = trace.num_first
