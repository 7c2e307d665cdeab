"""The fields that a layout may state, with the axes that their values have unless the line states others."""

from typing import Literal, NamedTuple

from tracestore.ingest.layout.patterns import NUMBER_NAMES
from tracestore.store import vocabulary
from tracestore.store.format.labels import CORRECT, HALLUCINATION

Kind = Literal["array", "texts", "text", "id", "number", "json", "score", "known"]


class FieldRule(NamedTuple):
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
# Scores whose values are 0, 1, missing or words.
LABELS = ("label", *vocabulary.JUDGMENTS)
MASKS = ("S.mask", "S.padding_mask")  # 1 is a token; 1 is padding
PROMPT_MASK = "S.prompt_mask"  # 1 is a token of the prompt
_KNOWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*MASKS, PROMPT_MASK), ("S",)),
    "S.lengths": (),
    "S.offsets": ("N",),
    "S.starts": (),
    "S.ends": (),
    "S.owner": ("N",),
    "L.ids": ("L",),
    "P.rows": ("P",),
    **{f"shape.{name}": () for name in STATES},
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
    "S.prompt": ("tokens", "columns"),
    "T.skip": (int,),
    "duplicates": ("keep", "drop"),
}
# Prefix of the fields that bind a name by their value: later lines join by it.
KEY = "key."
# Prefix of the entries that keep rows and traces by the value of a name.
KEEP = "keep."
# The meaning of a word that is no label.
MISSING_WORD = "missing"
# Prefixes of settings with the name of a field or a word behind them, and the type of their value.
SETTINGS_OF: dict[str, tuple[type, ...]] = {
    "words": (bool, str),
    "share": (list,),
    "scale": (float, int),
    "dtype": (str,),
    "keep": (str, int, list),
}
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")


# Fields of the vocabulary that a layout states in another way, or leaves to the extras.
_OTHER = frozenset(("edges", "layer_ids", "attention_mask", "lengths", "labels"))


def _rule(field: vocabulary.Field) -> FieldRule:
    """Return the rule of a field of the vocabulary. Its T ids are S tokens unless the line states more."""
    axes = tuple("S" if axis == "T" else axis for axis in field.shape.split() if axis.isalpha())
    if field.name in vocabulary.VERDICTS and field.name != "scores":
        return FieldRule("score", direction=field.direction or HALLUCINATION)
    if axes:
        return FieldRule("texts" if field.kind == vocabulary.TEXT else "array", axes)
    if field.kind == vocabulary.OBJECT or field.shape:
        return FieldRule("id" if field.stored.startswith("key") else "json")
    return FieldRule("text" if field.kind == vocabulary.TEXT else "number")


FIELDS = {
    field.name: _rule(field)
    for field in vocabulary.FIELDS.values()
    if field.meaning and field.name not in _OTHER and (field.kind != vocabulary.SCORE or field.name in LABELS)
}
FIELDS |= {name: FieldRule("known", axes) for name, axes in _KNOWN.items()}
# Keys that `records` takes for the field of their name.
RECORD_FIELDS = tuple(
    n for n, rule in FIELDS.items() if rule.kind not in ("score", "known") and n not in ("sample", "scores")
)
# Lines of the scores whose names have a meaning, by these names.
SCORE_LINES = {
    name: name if name in LABELS else f"{'correctness' if way == CORRECT else 'hallucination'}.{name}"
    for name, way in vocabulary.SCORES.items()
}


def rule_of(name: str) -> FieldRule | None:
    """Return the rule of a field, None if there is no such field."""
    head, _, tail = name.partition(".")
    if tail and head in ("correctness", "hallucination"):
        return FieldRule("score", direction=CORRECT if head == "correctness" else HALLUCINATION)
    if tail.isidentifier() and f"{head}." == KEY and tail not in {*NUMBER_NAMES, "id", "file"}:
        return FieldRule("id")
    return FIELDS.get(name)


def score_of(name: str) -> str:
    """Return the name under which a store holds the scores of a field."""
    return name.partition(".")[2] or name
