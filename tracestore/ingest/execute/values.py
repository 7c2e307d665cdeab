"""Values of labels and scores: what each of them means, by stated rules."""

import math
from collections.abc import Mapping
from typing import Any

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.execute.plain import key_text
from tracestore.ingest.layout.fields import rule_of
from tracestore.store.format.labels import CORRECT, HALLUCINATION

# Words with a meaning of their own: 1 for a hallucinated answer.
_ABSOLUTE = {
    **dict.fromkeys(("hallucinated", "hallucination", "hallucinating", "incorrect", "wrong", "unfaithful"), 1.0),
    **dict.fromkeys(("correct", "right", "truthful", "faithful", "not hallucinated", "not_hallucinated"), 0.0),
}
# Words that follow the field.
_RELATIVE = {**dict.fromkeys(("yes", "true", "1", "1.0"), 1.0), **dict.fromkeys(("no", "false", "0", "0.0"), 0.0)}
_MISSING = ("", "nan", "none", "null", "na", "n/a", "-")


def typed_value(name: str, value: Any) -> Any:
    """Return a value as the type of its field; tables hold texts."""
    rule = rule_of(name)
    kind = None if rule is None else rule.kind
    if kind == "text" and not isinstance(value, str):
        return key_text(value)
    if kind == "number" and isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            raise InvalidInputError(f"found {value[:40]!r}, expected a number", field=name) from None
    if kind == "number" and isinstance(value, float) and value.is_integer() and name != "temperature":
        return int(value)
    return value


def label_value(value: Any, name: str, direction: str, words: Mapping[str, bool]) -> float:
    """Return a label in the direction of its field, NaN where it is missing (rule 22a).

    Parameters
    ----------
    value : Any
        0, 1, a bool, a word, or None.
    name : str
        The field.
    direction : str
        What 1 means.
    words : Mapping
        Further words, whose truth is that of the field.

    Raises
    ------
    InvalidInputError
        If the value is another one.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    if isinstance(value, bool | int | float):
        if value in (0, 1):
            return float(value)
        raise InvalidInputError(f"found {value}, expected 0, 1 or a known word", field=name)
    text = " ".join(str(value).split())
    if text in words:
        return float(words[text])
    word = text.casefold()
    if word in _MISSING:
        return math.nan
    if word in _RELATIVE:
        return _RELATIVE[word]
    if word in _ABSOLUTE:
        return _ABSOLUTE[word] if direction == HALLUCINATION else 1 - _ABSOLUTE[word]
    shown = escape_unprintable(text, 40)
    raise InvalidInputError(
        f'found {shown!r}, expected 0, 1 or a known word; words."{shown}" = true adds it', field=name
    )


def score_value(value: Any, name: str) -> float:
    """Return a named score as a number, NaN where it is missing."""
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float):
        return float(value)
    text = str(value).strip()
    if text.casefold() in _MISSING:
        return math.nan
    try:
        number = float(text)
    except ValueError:
        number = _RELATIVE.get(text.casefold(), math.nan)
        if math.isnan(number):
            raise InvalidInputError(f"found {escape_unprintable(text, 40)!r}, expected a number", field=name) from None
    return number


def check_agreement(scores: Mapping[str, float]) -> None:
    """Rule 14: `is_correct` and `is_hallucinated` agree wherever both have a value."""
    one, two = scores.get("is_correct", math.nan), scores.get("is_hallucinated", math.nan)
    if not math.isnan(one) and not math.isnan(two) and one == two:
        raise InvalidInputError(f"found is_correct {one:g} and is_hallucinated {two:g}, expected that they agree")


def direction_text(direction: str) -> str:
    """Return what 1 means in a word."""
    return "correct" if direction == CORRECT else "hallucinated"
