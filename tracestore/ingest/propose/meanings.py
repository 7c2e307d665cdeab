"""Fields of leaves: what the words of their names say, never their axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.values import label_value
from tracestore.ingest.layout.fields import FIELDS, rule_of
from tracestore.ingest.propose.leaves import ITEMS, Leaf, without_names
from tracestore.ingest.propose.names import phrases_in, words_of
from tracestore.store.format.labels import CORRECT, HALLUCINATION
from tracestore.store.vocabulary import COUNTED, NEEDLESS, SCORES, SYNONYMS, is_named_as_verdict

# Values that a field takes: kinds, and the least and the largest number of axes.
_TAKES: dict[str, tuple[str, int, int]] = {
    "hidden_states": ("fv", 1, 9),
    "last_token": ("fv", 1, 9),
    "attentions": ("f", 2, 9),
    "tokens": ("i", 0, 9),
    "tokens_decoded": ("s", 0, 3),
    "question_id": ("is", 0, 1),
    "sample": ("i", 0, 1),
    "prompt_length": ("i", 0, 1),
    "S.mask": ("ibf", 1, 4),
    "S.lengths": ("i", 0, 1),
    "S.offsets": ("i", 1, 1),
    "S.starts": ("i", 0, 1),
    "S.ends": ("i", 0, 1),
    "L.ids": ("i", 1, 1),
    **dict.fromkeys(("layer", "token", "step", "dim"), ("i", 0, 0)),
    "file": ("s", 0, 1),
    **dict.fromkeys(("question", "generated_answer", "generated_answer_clean", "generated_text"), ("s", 0, 1)),
}
_VAGUE = frozenset(("label", "labels", "y", "target", "targets", "score", "scores"))
# Words of what a detector says, which is no label (rule 22b).
_DETECTORS = frozenset(("p", "prob", "proba", "probability", "selfcheck", "detector", "predicted", "logit", "entropy"))
_CHOICES = frozenset(("choices", "options", "option", "prediction", "predictions", "gold", "pred", "choice"))
_POOLED = frozenset(("mean", "avg", "average", "pool", "pooled", "pooling", "cls", "max"))
# Words of arrays that are no states.
_NO_STATES = frozenset(
    (
        *("weight", "bias", "grad", "grads", "gradient", "gradients", "std", "var", "logits", "prob", "probs", "loss"),
        *(
            "norms",
            "distance",
            "similarity",
            "cosine",
            "coef",
            "sae",
            "latents",
            "key",
            "value",
            "query",
            "keys",
            "values",
        ),
    )
)
_PARTS = {
    **dict.fromkeys(("prompt", "question", "input", "inputs"), 0),
    **dict.fromkeys(("answer", "response", "gen", "generated", "completion", "output", "outputs"), 1),
}


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


@dataclass
class Meaning:
    """A leaf, and what its names say.

    Attributes
    ----------
    leaf : Leaf
    field : str
        A field, an axis that rows bind ("layer", "token", ...), "file", "verdict", or "" if no word says it.
    rank_of_word : int
        Words of the phrase that says it.
    part : int or None
        0: prompt, 1: answer.
    """

    leaf: Leaf
    field: str = ""
    rank_of_word: int = 0
    part: int | None = None
    verdict: Verdict | None = None
    reason: str = ""  # why no trace needs it

    @cached_property
    def words(self) -> frozenset[str]:
        """All words of path and files."""
        steps = [*self.leaf.path, self.leaf.files]
        return frozenset(word for step in steps for word in words_of(without_names(step)))

    @property
    def is_pooled(self) -> bool:
        """Return whether a word says that vectors are no tokens (rule 21)."""
        return bool(self.words & _POOLED)


@lru_cache(maxsize=1)
def _phrases() -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for field in _TAKES:
        names = [field.replace("_", " "), *SYNONYMS.get(field, ())] if "." not in field else SYNONYMS.get(field, ())
        if field in FIELDS and "." not in field:
            names = [*names, *{"tokens": ("sequences", "input ids"), "generated_answer": ("answer",)}.get(field, ())]
        for name in names:
            found.setdefault(words_of(name.replace(" ", "_")), []).append(field)
    return found


def meaning_of(leaf: Leaf, siblings: frozenset[str]) -> Meaning:
    """Return what the names of a leaf say.

    Parameters
    ----------
    leaf : Leaf
    siblings : frozenset of str
        Words of the keys beside it.
    """
    kind = number_kind(leaf)
    if leaf.rank and kind in "fibv" and (reason := _reason(leaf, siblings)):
        return Meaning(leaf, reason=reason)
    every = [word for step in (*leaf.path, leaf.files) for word in words_of(without_names(step))]
    part = next((_PARTS[word] for word in every if word in _PARTS), None)
    for steps, words in _names(leaf):
        verdict = _verdict(leaf, "_".join(words), words, kind, siblings)
        if verdict is not None:
            return Meaning(leaf, "verdict", verdict=verdict)
        field, size = _field(words, kind, leaf)
        if field in ("hidden_states", "last_token") and _NO_STATES & set(words):
            return Meaning(leaf)
        if field:
            return Meaning(leaf, field, size, part)
        if not steps:
            break
    names = bound_names(leaf)
    if kind in "fv" and not _NO_STATES & set(every) and ("dim" in names or (leaf.rank and "layer" in names)):
        return Meaning(leaf, "hidden_states", 1, part)
    return Meaning(leaf)


@lru_cache(maxsize=1)
def _needless() -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(name.split()) for name in NEEDLESS)


def _reason(leaf: Leaf, siblings: frozenset[str]) -> str:
    """Return why no trace needs an array, by the words of its keys, "" if nothing says so."""
    for step in leaf.path:
        phrase = phrases_in(words_of(without_names(step)), _needless())
        if phrase is None or (len(phrase) == 1 and leaf.rank < 2):
            continue
        if phrase != ("last", "hidden", "state") or "states" in siblings:
            return NEEDLESS[" ".join(phrase)]
    return ""


def _names(leaf: Leaf) -> list[tuple[bool, tuple[str, ...]]]:
    """Return the words of keys from the last one, while they only count something; then those of the file."""
    found: list[tuple[bool, tuple[str, ...]]] = []
    for step in reversed(leaf.path):
        if step == ITEMS or (step.isdecimal() and len(step) < 3):
            continue
        words = words_of(without_names(step))
        if not words:
            continue
        found.append((all(word in COUNTED for word in words), words))
        if not found[-1][0]:
            return found
    for piece in reversed(leaf.files.split("/")):
        words = words_of(without_names(piece.partition(".")[0] if "{" not in piece else piece.rpartition(".")[0]))
        if words:
            found.append((all(word in COUNTED for word in words), words))
    return [(True, words) for _, words in found[:-1]] + [(False, words) for _, words in found[-1:]]


def _field(words: tuple[str, ...], kind: str, leaf: Leaf) -> tuple[str, int]:
    """Return the field of the longest phrase that takes the values, and the number of its words."""
    best: tuple[str, int] = ("", 0)
    for phrase, fields in _phrases().items():
        size = len(phrase)
        single = size == 1 and len(phrase[0]) == 1
        if size < best[1] or (size == best[1] and best[0] and best[0] != "tokens_decoded"):
            continue
        if single and words != phrase:
            continue
        if not any(tuple(words[k : k + size]) == phrase for k in range(len(words) - size + 1)):
            continue
        for field in fields:
            kinds, least, most = _TAKES[field]
            least = 0 if "dim" in bound_names(leaf) and field == "hidden_states" else least
            if (
                kind in kinds or (kind == "i" and field == "hidden_states" and least == 0)
            ) and least <= leaf.rank <= most:
                best = (field, size)
                break
    return best


def bound_names(leaf: Leaf) -> frozenset[str]:
    """Return the names that the files and keys of a leaf bind."""
    return frozenset(name for spot in leaf.spots[:1] for name in spot.where if name != "F" and name[0] != "[")


def number_kind(leaf: Leaf) -> str:
    """Return the kind of values; cells of a table are numbers if all of them are."""
    values = leaf.values()
    if leaf.kind != "s" or leaf.rank or not values or not all(isinstance(value, str) for value in values):
        return leaf.kind
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return "s"
    return "i" if all(value.strip().lstrip("-").isdecimal() for value in values) and numbers else "f"


def _verdict(leaf: Leaf, name: str, words: Sequence[str], kind: str, siblings: frozenset[str]) -> Verdict | None:
    """Return what a key says as a label or score, None if it is none by its name."""
    last = words[-1]
    is_named = name in _VAGUE or name in SCORES or is_named_as_verdict(name) or last in _VAGUE
    if not is_named or leaf.rank > 1 or kind in ("v",):
        return None
    values = scalars(leaf)
    if all(isinstance(value, str) for value in values) and number_kind(leaf) == "s":
        return _word_verdict(values, name)
    is_doubtful = bool(set(words) & _DETECTORS)
    direction = SCORES.get(name)
    if name in ("score", "scores") or name in _VAGUE:
        direction = None
    is_label = _is_claim(name) or (direction is None and not set(words) & {"score", "scores"})
    if name == "correct":
        is_plain = all(isinstance(v, bool) or str(v).casefold() in ("true", "false") for v in values)
        if not is_plain and siblings & _CHOICES:
            direction = None
    if direction is None:
        ways = (CORRECT, HALLUCINATION) if "hallu" not in name else (HALLUCINATION, CORRECT)
        return Verdict(name.removesuffix("s"), ways, is_label, is_doubtful)
    return Verdict(name.removesuffix("_score") if name != "score" else name, (direction,), is_label, is_doubtful)


def _is_claim(name: str) -> bool:
    """Return whether a name reads as a label: is_correct, hallucinated, truthful."""
    words = name.split("_")
    return words[0] in ("is", "has") or words[-1] in (
        *("correct", "hallucinated", "hallucination", "truthful", "factual", "faithful", "hallu", "hallucinates"),
        *("wrong", "incorrect", "right", "flag", "label"),
    )


def _word_verdict(values: Sequence[Any], name: str) -> Verdict | None:
    """Return the meaning of a column of words: those that mean the same under every field prove it."""
    ways = []
    found: list[dict[str, float]] = []
    for value in values:
        try:
            pair = {way: label_value(value, "", way, {}) for way in (CORRECT, HALLUCINATION)}
        except InvalidInputError:
            return Verdict(name, (CORRECT, HALLUCINATION), is_label=True, is_doubtful=True)
        found.append(pair)
    is_absolute = any(p[CORRECT] == 1 - p[HALLUCINATION] for p in found if not math.isnan(p[CORRECT]))
    is_relative = any(p[CORRECT] == p[HALLUCINATION] for p in found if not math.isnan(p[CORRECT]))
    if is_absolute and not is_relative:
        ways = [CORRECT]
    elif name in SCORES and name not in _VAGUE:
        ways = [SCORES[name]]
    else:
        ways = [CORRECT, HALLUCINATION]
    return Verdict(name, tuple(ways), is_label=True)


def scalars(leaf: Leaf) -> list[Any]:
    """Return the numbers and texts that were seen at a leaf."""
    found: list[Any] = []
    for value in leaf.values():
        found += value if isinstance(value, list) else [value]
    return [value for value in found if value is not None]


def is_stated(name: str) -> bool:
    """Return whether a layout takes a line of a name."""
    return rule_of(name) is not None
