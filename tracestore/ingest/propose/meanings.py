"""Fields of leaves: what the words of their names say, never their axes, and what 0 and 1 of a label mean (rule 22)."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.values import label_value
from tracestore.ingest.layout.fields import PROMPT_MASK
from tracestore.ingest.propose.leaves import Leaf
from tracestore.ingest.propose.names import contains, without_names, words_of
from tracestore.store.format import schema
from tracestore.store.format.labels import CORRECT, HALLUCINATION
from tracestore.store.vocabulary import (
    COUNTED,
    FIELDS,
    NEEDLESS,
    SAYING,
    SCORES,
    SYNONYMS,
    direction_of,
    is_hallucination,
    is_named_as_verdict,
    score_of_word,
)

# Values that a field takes: kinds, and the least and the largest number of axes.
_TAKES: dict[str, tuple[str, int, int]] = {
    "hidden_states": ("fv", 1, 9),
    "last_token": ("fv", 1, 9),
    "attentions": ("f", 2, 9),
    "tokens": ("i", 0, 9),
    "tokens_decoded": ("s", 0, 3),
    "question_id": ("is", 0, 1),
    "S.mask": ("ibf", 1, 4),
    PROMPT_MASK: ("ib", 0, 2),
    "S.offsets": ("i", 1, 1),
    "L.ids": ("i", 1, 1),
    **{name: ("f" if field.dtype == "<f4" else "ib", 1, 9) for name, field in schema.PER_TOKEN_FIELDS.items()},
    **dict.fromkeys(("sample", "prompt_length", "S.lengths", "S.starts", "S.ends"), ("i", 0, 1)),
    **dict.fromkeys(("layer", "token", "step", "dim"), ("i", 0, 0)),
    **dict.fromkeys(("file", "question", "generated_answer", "generated_answer_clean", "generated_text"), ("s", 0, 1)),
}
STATES = ("hidden_states", "last_token")
# The field of a label and the beginning of that of a score, by what 1 or a high value means.
_FIELDS = {CORRECT: ("is_correct", "correctness"), HALLUCINATION: ("is_hallucinated", "hallucination")}
LABELS = tuple(label for label, _ in _FIELDS.values())
# Words that a name of a field does not hold; those of references also not in front of it.
_AGAINST = {
    **dict.fromkeys(STATES, "no states"),
    "attentions": "no attention",
    **dict.fromkeys(("generated_answer", "generated_answer_clean", "generated_text"), "references"),
}
OF_LABELS = "the meaning of labels"
_STATED = re.compile(r"\b([01]) ?[=:] ?([^\W\d_]+)")  # 1 = correct
_NEEDLESS = [tuple(name.split()) for name in NEEDLESS]
MODULE = ("self", "attn")  # of attention, whose output or weights an array may be
_PARTS = frozenset(("mlp", "q", "k", "v", "o", "qkv", "proj", "ln", "norm"))  # of the module, whose weights are others


@dataclass
class Meaning:
    """A leaf, and what its names say.

    Attributes
    ----------
    leaf : Leaf
    field : str
        A field, an axis that rows bind ("layer", "token", ...), "file", "verdict", or "" if no word says it.
    num_words : int
        Words of the phrase that says it.
    verdicts : tuple of str
        The fields that a label or score may be: two if no word gives the meaning of a high value.
    is_doubtful : bool
        Whether a label or score may be the output of a detector, or words without a meaning.
    missing : tuple of str
        Words without a meaning among words of judges, which may stand for no label.
    reason : str
        Why no trace needs the leaf.
    """

    leaf: Leaf
    field: str = ""
    num_words: int = 0
    verdicts: tuple[str, ...] = ()
    is_doubtful: bool = False
    missing: tuple[str, ...] = ()
    reason: str = ""

    @cached_property
    def words(self) -> frozenset[str]:
        """All words of path and files."""
        steps = [*self.leaf.path, self.leaf.files]
        return frozenset(word for step in steps for word in words_of(without_names(step)))

    @property
    def own_words(self) -> frozenset[str]:
        """The words of the keys below those that tell traces apart; without a key, of the file."""
        last = max((k for k, step in enumerate(self.leaf.path) if step == "[]" or "{" in step), default=-1)
        steps = self.leaf.path[last + 1 :] or self.leaf.path[-1:] or (self.leaf.files,)
        steps = steps if any(map(words_of, steps)) else (self.leaf.key,)
        return frozenset(word for step in steps for word in words_of(without_names(step)))

    @property
    def is_number_of_answer(self) -> bool:
        """Return whether a second id, next to a better one, may be the number of an answer."""
        is_id = self.field == "question_id" and self.leaf.number_kind == "i"
        return is_id and any(COUNTED.get(word) == "sample" for word in words_of(self.leaf.key))

    @property
    def order(self) -> tuple[int, int]:
        """The place of the name among those of its field: the more usual ones first."""
        names = (self.field.replace("_", " "), *SYNONYMS.get(self.field, ()))
        words = " ".join(words_of(self.leaf.key))
        return next((k for k, name in enumerate(names) if name.lower() == words), len(names)), len(self.leaf.path)


def meaning_of(leaf: Leaf, siblings: frozenset[str]) -> Meaning:
    """Return what the names of a leaf say.

    Parameters
    ----------
    leaf : Leaf
    siblings : frozenset of str
        Words of the keys next to it.
    """
    found = Meaning(leaf, reason=_reason(leaf, siblings))
    if leaf.key in schema.PER_TOKEN_FIELDS and _takes(leaf.key, leaf):
        found.field = leaf.key
    if found.reason or found.field:
        return found
    for words in _names(leaf, siblings):
        found.verdicts, found.is_doubtful = _verdicts(leaf, words, siblings)
        found.missing = _unknown_words(leaf) if found.verdicts else ()
        field, size = ("verdict", 0) if found.verdicts else _field(words, leaf, siblings)
        if not field:
            continue
        against = _AGAINST.get(field, "")
        is_text = against == "references"
        is_against = not SAYING.get(against, frozenset()).isdisjoint(found.own_words.union(words) if is_text else words)
        is_best_answer = is_text and not (SAYING["generated"] - {"answer"}).isdisjoint(words)  # of several
        if is_against and not is_best_answer:
            found.reason = "a reference answer" * is_text
        else:
            found.field, found.num_words = field, size
        return found
    # Without a word of a field, a leaf may be states by what binds them, or reference answers.
    is_layer = "dim" in leaf.bound or (leaf.rank and "layer" in leaf.bound)
    if leaf.number_kind in "fv" and is_layer and not SAYING["no states"] & found.words:
        found.field, found.num_words = "hidden_states", 1
    if leaf.kind == "s" and leaf.rank and not SAYING["references"].isdisjoint(found.own_words):
        found.reason = "a reference answer"
    return found


def _reason(leaf: Leaf, siblings: frozenset[str]) -> str:
    """Return why no trace needs a leaf, by the words of its keys, "" without a reason."""
    is_square = leaf.rank >= 2 and all(spot.dims[-1] == spot.dims[-2] for spot in leaf.spots)
    for k, step in enumerate(leaf.path, 1):
        words = words_of(without_names(step))
        phrase = max((phrase for phrase in _NEEDLESS if contains(words, phrase)), key=len, default=())
        is_said = leaf.rank >= 2 or k < len(leaf.path) or (len(phrase) > 1 and leaf.rank)
        is_part = phrase == ("last", "hidden", "state") and "states" not in siblings
        is_attention = phrase == MODULE and is_square and not _PARTS.intersection(words)
        if phrase and is_said and leaf.kind != "s" and not (is_part or is_attention):
            return NEEDLESS[" ".join(phrase)]
    return ""


def _names(leaf: Leaf, siblings: frozenset[str]) -> Iterator[tuple[str, ...]]:
    """Yield the words of keys from the last one, while they only count something or say nothing; then those of the file.

    A key `values` next to the number of a layer holds what the key above it names.
    """
    is_numbered = "layer" in siblings and not {"keys", "key", "queries", "query"} & siblings
    for step in reversed(leaf.path):
        if words := words_of(without_names(step)):
            yield words
            is_empty = words[1:] == () and words[0] in SAYING["nothing"]
            if not (COUNTED.keys() >= set(words) or is_empty or (is_numbered and words == ("values",))):
                return
    for piece in reversed(leaf.files.split("/")):
        if words := words_of(without_names(piece.partition(".")[0] if "{" not in piece else piece.rpartition(".")[0])):
            yield words


def _field(words: tuple[str, ...], leaf: Leaf, siblings: frozenset[str]) -> tuple[str, int]:
    """Return the field of the longest phrase that takes the values, and the number of its words."""
    best: tuple[str, int] = ("", 0)
    for phrase, fields in _phrases().items():
        size = len(phrase)
        is_known = size < best[1] or (size == best[1] and best[0] != "tokens_decoded")
        is_letter = size == 1 and len(phrase[0]) == 1 and words != phrase
        is_flag = words[0] == "is" and size < len(words)  # is_prompt holds no prompt
        if not is_known and not is_letter and not is_flag and contains(words, phrase):
            best = next(((field, size) for field in fields if _takes(field, leaf)), best)
    is_vague = best[0] == "generated_answer" and words in (("text",), ("content",))
    # Texts are questions next to no other ones where each ends with a question mark.
    asks = bool(leaf.scalars) and all(str(value).rstrip().endswith(("?", "？")) for value in leaf.scalars)
    is_question = is_vague and asks and siblings.isdisjoint(("question", *SYNONYMS["question"]))
    return ("question", best[1]) if is_question else best


def is_of_bits(leaf: Leaf) -> bool:
    """Return whether the name of a leaf says that its values are bits of bfloat16."""
    return not {"bf16", "bfloat16"}.isdisjoint(leaf.key.lower().split("_"))


def _takes(field: str, leaf: Leaf) -> bool:
    kinds, least, most = _TAKES[field]
    if field in STATES and ("dim" in leaf.bound or is_of_bits(leaf)):
        kinds, least = kinds + "i", 0 if "dim" in leaf.bound else least
    return leaf.number_kind in kinds and least <= leaf.rank <= most


@lru_cache(maxsize=1)
def _phrases() -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for field in _TAKES:
        # A column `token` holds tokens, not their positions.
        names = [] if "." in field or field == "token" or field in schema.PER_TOKEN_FIELDS else [field]
        names += [*SYNONYMS.get(field, ()), *(FIELDS[field].other_names if field in FIELDS else ())]
        for name in names:
            found.setdefault(words_of(name.replace(" ", "_")), []).append(field)
    return found


def _verdicts(leaf: Leaf, words: Sequence[str], siblings: frozenset[str]) -> tuple[tuple[str, ...], bool]:
    """Return the fields that a label or score of these words may be, none if it is none, and whether that is doubtful."""
    name = leaf.key.lower() if leaf.key.lower() in SCORES else "_".join(words)
    is_vague = name in SAYING["vague labels"]
    is_named = name in SCORES or is_named_as_verdict(name) or words[-1] in SAYING["vague labels"]
    if not is_named or leaf.rank > 1 or leaf.kind == "v":
        return (), False
    # A column `wrong` holds 1 for a wrong answer.
    direction = HALLUCINATION if score_of_word(name, None) == 0 else None if is_vague else direction_of(name)
    is_doubtful = bool(SAYING["detectors"].intersection(words))
    if leaf.number_kind == "s":
        is_label = True
        direction, is_doubtful = _of_words(leaf.scalars, direction)
    else:
        is_label = _is_claim(name.split("_")) or (direction is None and not _is_score(leaf, words, name))
        is_plain = all(str(value).casefold() in ("true", "false") for value in leaf.scalars)
        is_doubtful |= name == "correct" and not is_plain and bool(siblings & SAYING["choices"])
        is_doubtful |= bool(_unknown_words(leaf))
    ways = [direction] if direction else sorted(_FIELDS, reverse="hallu" in name)
    name = name.removesuffix("_score") if direction else name.removesuffix("s")
    fields = (_FIELDS[way] for way in ways)
    return tuple(label if is_label else f"{score}.{name}" for label, score in fields), is_doubtful


def _is_claim(words: Sequence[str]) -> bool:
    """Return whether a name reads as a label: is_correct, hallucinated, truthful, inaccurate."""
    is_word = words[-1] in SAYING["claims"] or is_hallucination(words[-1]) or score_of_word("_".join(words), None) == 0
    return is_word or words[0] in ("is", "has")


def _is_score(leaf: Leaf, words: Sequence[str], name: str) -> bool:
    """Return whether a word says that values are scores, or fractions under a name that no label has."""
    is_said = not {"score", "scores"}.isdisjoint(words)
    return is_said or (name not in SAYING["vague labels"] and may_be_score(leaf))


def _of_words(values: Sequence[Any], direction: str | None) -> tuple[str | None, bool]:
    """Return the meaning of a column of words, and whether it is doubtful: some mean the same under every field."""
    follows, others = _words_of_judges(values)
    if not follows:
        # Of two words without a meaning, both are asked.
        return (direction or (CORRECT if len(others) == 2 else None), bool(others))
    return (CORRECT if follows == {False} else direction), bool(others)


def find_labels(meanings: Sequence[Meaning]) -> None:
    """Give `label` the meaning that a map states; without a key named as a label, ask what the only leaf of 0 and 1 means."""
    _read_maps(meanings)
    unnamed = [m for m in meanings if not m.field and not m.reason and may_be_label(m.leaf)]
    if len(unnamed) == 1 and not any(m.verdicts for m in meanings):
        _ask_label(unnamed[0])


def _read_maps(meanings: Sequence[Meaning]) -> None:
    """Take settings such as {"label_map": {"0": "wrong", "1": "correct"}} for what `label` means, never for traces."""
    stated: set[str] = set()
    for meaning in meanings:
        pairs = _pairs(meaning.leaf)
        values = {number: score_of_word(text, None) for number, text in pairs}
        if values.keys() == {"0", "1"} and len(pairs) == 2:
            stated |= {label for label, one in zip(LABELS, (1, 0), strict=True) if values == {"0": 1 - one, "1": one}}
            meaning.field, meaning.verdicts, meaning.is_doubtful = "", (), False
            meaning.reason = OF_LABELS
    for meaning in meanings if len(stated) == 1 else ():
        if len(meaning.verdicts) == 2 and meaning.leaf.number_kind in "ib" and meaning.leaf.key in ("label", "labels"):
            meaning.verdicts = (*stated,)


def _pairs(leaf: Leaf) -> list[tuple[str, str]]:
    """Return the numbers of labels and what they mean: by the keys of a map, the order of two names, or in a text."""
    words = {*words_of(leaf.key)}
    if leaf.kind != "s" or words.isdisjoint(("label", "labels")) or leaf.items_at:
        return []
    is_of_settings = leaf.path[-1:] == (f"@{leaf.key}",) or not SAYING["settings"].isdisjoint(words_of(leaf.files))
    is_map = is_of_settings and not SAYING["maps of labels"].isdisjoint(words)
    if leaf.bound or leaf.rank:
        is_by_keys = leaf.bound == {"id"} and leaf.path[-1:] == ("{id}",)
        numbers = [str(spot.where["id"]) for spot in leaf.spots] if is_by_keys else "01" * (not leaf.bound)
        return list(zip(numbers, map(str, leaf.scalars), strict=False)) if is_map and len(leaf.scalars) == 2 else []
    return _STATED.findall(str(leaf.spots[0].value))


def _ask_label(found: Meaning) -> None:
    """Make a leaf of any name a label whose meaning is asked; words that mean the same under every field say it."""
    is_of_words = found.leaf.number_kind == "s" and _of_words(found.leaf.scalars, None)[0] == CORRECT
    found.field, found.is_doubtful = "verdict", True
    found.verdicts, found.missing = LABELS[: 1 if is_of_words else 2], _unknown_words(found.leaf)


def _unknown_words(leaf: Leaf) -> tuple[str, ...]:
    """Return up to two words next to words of judges in a column of texts, or numbers below zero next to 0 and 1."""
    numbers = {*map(str, leaf.scalars)} if leaf.number_kind == "i" else set()
    below = tuple(sorted(number for number in numbers if number.startswith("-")))
    known, others = (
        _words_of_judges(leaf.scalars) if leaf.number_kind == "s" else (numbers == {"0", "1", *below}, below)
    )
    return others if known and len(others) < 3 else ()


def opposites(found: Meaning) -> list[dict[str, bool]]:
    """Return what words that are not known may mean: one next to words of one side their opposite, of two either one."""
    known, others = _words_of_judges(found.leaf.scalars) if found.verdicts else (set(), ())
    if not known and len(others) == 2 and found.leaf.number_kind == "s":
        return [dict(zip(sorted(others), is_one, strict=True)) for is_one in ((False, True), (True, False))]
    sides = {score_of_word(str(value), CORRECT) for value in found.leaf.scalars} - {None}  # of the known words
    is_one = (0.0 in sides) == ("correct" in "".join(found.verdicts[:1]))
    return [{word: is_one} for word in found.missing if len(found.missing) == len(sides) == 1]


def _words_of_judges(values: Sequence[Any]) -> tuple[set[bool], tuple[str, ...]]:
    """Return whether words of judges follow the field, and the other words."""
    follows: set[bool] = set()
    others: dict[str, None] = {}
    for value in values:
        try:
            one, other = (label_value(value, "", way, {}) for way in (CORRECT, HALLUCINATION))
        except InvalidInputError:
            others[" ".join(str(value).split())] = None
            continue
        if not math.isnan(one):
            follows.add(one == other)
    return follows, tuple(others)


def may_be_label(leaf: Leaf) -> bool:
    """Return whether half of the values are 0, 1 or words of judges, or one of two texts is, under any name."""
    labels = [_label(value, LABELS[0]) in (0, 1) for value in leaf.scalars]
    is_of_two = leaf.number_kind == "s" and len(set(leaf.scalars)) == 2 and any(labels)
    return leaf.rank <= 1 and leaf.kind != "v" and (is_of_two or 2 * sum(labels) >= max(len(labels), 1))


def may_be_score(leaf: Leaf) -> bool:
    """Return whether the values are numbers that differ and are no counts, so that they may be a score of any name."""
    try:
        values = {float(value) for value in leaf.scalars if isinstance(value, float | str)}
    except ValueError:
        return False
    return leaf.rank <= 1 and len(values) > 1 and not all(value.is_integer() for value in values)


def contradictions(field: str, leaves: Sequence[Leaf]) -> Iterator[str]:
    """Yield how often the first leaf of a label contradicts one of the others, by the ids of their values."""
    values = [{str(spot.where.get("id", "")): spot.value for spot in leaf.spots} for leaf in leaves]
    for leaf, others in zip(leaves[1:], values[1:], strict=True):
        both = values[0].keys() & others.keys() - {""}
        labels = [{_label(values[0][name], field), _label(others[name], field)} for name in both]
        if count := sum(len(pair - {None}) > 1 for pair in labels):
            yield f"{field}: {leaf} contradicts {leaves[0]} for {count} of {len(both)} ids"


def _label(value: Any, field: str) -> float | None:
    """Return a value as a label of a field, None if it is none."""
    way = HALLUCINATION if "hallu" in field else CORRECT
    with suppress(InvalidInputError):
        label = label_value(value, "", way, {})
        return None if math.isnan(label) else label
    return None
