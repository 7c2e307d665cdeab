"""What a trace holds beside its arrays, for telling two traces of one key apart."""

from typing import Any

from tracestore.store.format import schema
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.pack import PackedTrace

TextFields = dict[str, Any]

_STRINGS = schema.TEXT_FIELDS


def packed_texts(trace: PackedTrace) -> TextFields:
    record = trace.record
    return {
        **record.strings,
        "tokens": None if record.tokens is None else record.tokens.tolist(),
        "tokens_decoded": None if record.tokens_decoded is None else list(record.tokens_decoded),
        "prompt_length": record.prompt_length,
        "extras": trace.extras,
    }


def stored_texts(segment: SegmentReader, row: int) -> TextFields:
    length = segment.scalar("prompt_length", row)
    return {
        **{name: segment.string(name, row) for name in _STRINGS},
        "tokens": segment.tokens(row).tolist(),
        "tokens_decoded": segment.tokens_decoded(row),
        "prompt_length": None if length < 0 else length,
        "extras": segment.string("extras", row),
    }


def first_difference(one: TextFields, other: TextFields) -> str | None:
    """The first field that both have and that differs. What only one has is no difference:
    files of several families add up to one trace."""

    def is_there(value: Any) -> bool:
        return value is not None and value != "" and value != []

    for name in one.keys() & other.keys():
        if is_there(one[name]) and is_there(other[name]) and one[name] != other[name]:
            return name
    return None
