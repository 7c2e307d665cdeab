"""The fields that a layout may state, with the axes that their values have unless the line states others."""

from dataclasses import dataclass
from typing import Literal

from tracestore.store.format import schema
from tracestore.store.format.labels import CORRECT, HALLUCINATION

Kind = Literal["array", "texts", "text", "id", "number", "json", "score", "known"]


@dataclass(frozen=True)
class FieldRule:
    """The kind of a field and the axes of its values.

    Attributes
    ----------
    kind : str
        "array": numbers on axes; "texts": one per token; "text", "id", "number", "json": one value per trace;
        "score": a label or score; "known": what is known of an axis.
    axes : tuple of str
        Axes of a value by default.
    direction : str, optional
        What a high score means.
    """

    kind: Kind
    axes: tuple[str, ...] = ()
    direction: str | None = None


STATES = ("hidden_states", "last_token")
_KNOWN: dict[str, tuple[str, ...]] = {
    "S.mask": ("S",),
    "S.lengths": (),
    "S.offsets": ("N",),
    "S.starts": (),
    "S.ends": (),
    "S.owner": ("N",),
    "L.ids": ("L",),
}
# Entries that state a value instead of an address, and the values that they take.
SETTINGS: dict[str, tuple[type, ...] | tuple[str, ...]] = {
    "S.side": ("left", "right"),
    "S.pad": (int, list),
    "S.padding": ("none", "zeros", "nan"),
    "L.size": (int,),
    "L.what": (str,),
    "D.size": (int,),
    "P.repeats": (bool,),
    "P.new": (bool,),
    "duplicates": ("keep",),
}
# Prefixes of settings with the name of a field or a word behind them, and the type of their value.
SETTINGS_OF: dict[str, tuple[type, ...]] = {"words": (bool,), "share": (list,), "scale": (float, int), "dtype": (str,)}
DTYPES = ("bfloat16", "float16", "float32", "float64")


def _optional_rule(field: schema.OptionalField) -> FieldRule:
    if field.shape == schema.PER_TOKEN:
        return FieldRule("array", ("S",))
    if field.shape == schema.TOP_K:
        return FieldRule("array", ("S", "K"))
    return FieldRule("json" if field.shape == schema.JSON else "number")


FIELDS: dict[str, FieldRule] = {
    "hidden_states": FieldRule("array", ("L", "S", "D")),
    "last_token": FieldRule("array", ("L", "D")),
    "attentions": FieldRule("array", ("L", "H", "S", "S")),
    "tokens": FieldRule("array", ("S",)),
    "tokens_decoded": FieldRule("texts", ("S",)),
    "question_id": FieldRule("id"),
    "global_example_id": FieldRule("id"),
    "group": FieldRule("text"),
    "sample": FieldRule("number"),
    "prompt_length": FieldRule("number"),
    **{name: FieldRule("text") for name in schema.TEXT_FIELDS},
    **{name: _optional_rule(field) for name, field in schema.OPTIONAL_FIELDS.items()},
    "label": FieldRule("score", direction=HALLUCINATION),
    "is_correct": FieldRule("score", direction=CORRECT),
    "is_hallucinated": FieldRule("score", direction=HALLUCINATION),
    **{name: FieldRule("known", axes) for name, axes in _KNOWN.items()},
}
# Keys that `records` takes for the field of their name.
RECORD_FIELDS = tuple(n for n, rule in FIELDS.items() if rule.kind not in ("score", "known") and n != "sample")


def rule_of(name: str) -> FieldRule | None:
    """Return the rule of a field, None if there is no such field."""
    head, _, tail = name.partition(".")
    if tail and head in ("correctness", "hallucination"):
        return FieldRule("score", direction=CORRECT if head == "correctness" else HALLUCINATION)
    return FIELDS.get(name)


def score_of(name: str) -> str:
    """Return the name under which a store holds the scores of a field."""
    return name.partition(".")[2] or name
