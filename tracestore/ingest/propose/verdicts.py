"""Labels and scores: the meaning of 0 and 1 by the words of a key and of its values (rule 22)."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.values import label_value
from tracestore.ingest.propose.leaves import Leaf
from tracestore.store.format.labels import CORRECT, HALLUCINATION
from tracestore.store.vocabulary import SAYING, SCORES, is_named_as_verdict


@dataclass(frozen=True)
class Verdict:
    """A label or score: the field, and what it says."""

    name: str
    directions: tuple[str, ...]  # of a high value, more than one if no word says it
    is_label: bool
    is_doubtful: bool = False

    def fields(self) -> list[str]:
        """Return the fields that it may be."""
        if self.is_label:
            return ["is_correct" if way == CORRECT else "is_hallucinated" for way in self.directions]
        return [f"{'correctness' if way == CORRECT else 'hallucination'}.{self.name}" for way in self.directions]


def verdict_of(leaf: Leaf, words: Sequence[str], siblings: frozenset[str]) -> Verdict | None:
    """Return what a key says as a label or score, None if it is none by its name.

    Parameters
    ----------
    leaf : Leaf
    words : sequence of str
        The words of its key.
    siblings : frozenset of str
        Words of the keys next to it.
    """
    name = leaf.key.lower() if leaf.key.lower() in SCORES else "_".join(words)
    is_named = name in SCORES or is_named_as_verdict(name) or words[-1] in SAYING["vague labels"]
    if not is_named or leaf.rank > 1 or leaf.kind == "v":
        return None
    values = leaf.scalars
    if all(isinstance(value, str) for value in values) and leaf.number_kind == "s":
        return _of_words(values, name)
    is_doubtful = bool(set(words) & SAYING["detectors"])
    direction = None if name in SAYING["vague labels"] else SCORES.get(name)
    is_label = _is_claim(name) or (direction is None and not set(words) & {"score", "scores"})
    if name == "correct":
        is_plain = all(isinstance(v, bool) or str(v).casefold() in ("true", "false") for v in values)
        if not is_plain and siblings & SAYING["choices"]:
            direction = None
    if direction is None:
        ways = (CORRECT, HALLUCINATION) if "hallu" not in name else (HALLUCINATION, CORRECT)
        return Verdict(name.removesuffix("s"), ways, is_label, is_doubtful)
    return Verdict(name.removesuffix("_score"), (direction,), is_label, is_doubtful)


def _is_claim(name: str) -> bool:
    """Return whether a name reads as a label: is_correct, hallucinated, truthful."""
    words = name.split("_")
    return words[0] in ("is", "has") or words[-1] in SAYING["claims"]


def _of_words(values: Sequence[Any], name: str) -> Verdict:
    """Return the meaning of a column of words: those that mean the same under every field prove it."""
    follows: set[bool] = set()  # whether words follow the field
    for value in values:
        try:
            one, other = (label_value(value, "", way, {}) for way in (CORRECT, HALLUCINATION))
        except InvalidInputError:
            return Verdict(name, (CORRECT, HALLUCINATION), is_label=True, is_doubtful=True)
        if not math.isnan(one):
            follows.add(one == other)
    if follows == {False}:
        return Verdict(name, (CORRECT,), is_label=True)
    known = (SCORES[name],) if name in SCORES and name not in SAYING["vague labels"] else (CORRECT, HALLUCINATION)
    return Verdict(name, known, is_label=True)


def proved_fields(verdicts: Mapping[Leaf, Verdict], classes: Mapping[tuple[str, str], Sequence[str]]) -> dict[Any, str]:
    """Return the field of vague labels, by their places, that names of classes or words next to them prove (rule 22).

    Parameters
    ----------
    verdicts : Mapping
        Labels and scores by their leaves.
    classes : Mapping
        Names of classes by files and column.
    """
    found: dict[Any, str] = {}
    for leaf, verdict in verdicts.items():
        if len(verdict.directions) < 2 or not verdict.is_label:
            continue
        beside = [other for other in verdicts if other.files == leaf.files and other.path[:-1] == leaf.path[:-1]]
        words = [other for other in beside if other.kind == "s" and len(verdicts[other].directions) == 1]
        fields = [_of_classes(classes.get((leaf.files, leaf.key), ())), *(_agreeing(leaf, other) for other in words)]
        if field := next(filter(None, fields), None):
            found[leaf.place] = field
    return found


def _of_classes(names: Sequence[str]) -> str | None:
    """Return the field that the names of two classes say."""
    with suppress(InvalidInputError):
        ways = [label_value(name, "", CORRECT, {}) for name in names]
        return "is_correct" if ways == [0, 1] else "is_hallucinated" if ways == [1, 0] else None
    return None


def may_be_label(leaf: Leaf) -> bool:
    """Return whether half of the values are 0, 1 or words of judges, so that a column without such a name may be a label."""
    values = leaf.scalars
    return leaf.rank <= 1 and leaf.kind != "v" and 2 * sum(map(_is_verdict, values)) >= max(len(values), 1)


def may_be_score(leaf: Leaf) -> bool:
    """Return whether the values are numbers that differ and are no counts, so that they may be a score of any name."""
    try:
        values = {float(value) for value in leaf.scalars if isinstance(value, float | str)}
    except ValueError:
        return False
    return leaf.rank <= 1 and len(values) > 1 and not all(value.is_integer() for value in values)


def _is_verdict(value: Any) -> bool:
    try:
        return not math.isnan(label_value(value, "", CORRECT, {}))
    except InvalidInputError:
        return False


def _agreeing(leaf: Leaf, other: Leaf) -> str | None:
    """Return the field under which a label agrees with a column of words in every row that was seen.

    The accounts compare all rows: both columns are fields.
    """
    values, texts = leaf.scalars, other.scalars
    if len(values) != len(texts) or len(set(texts)) < 2:
        return None
    with suppress(ValueError, InvalidInputError):
        for field, way in (("is_hallucinated", HALLUCINATION), ("is_correct", CORRECT)):
            if [float(v) for v in values] == [label_value(text, "", way, {}) for text in texts]:
                return field
    return None
