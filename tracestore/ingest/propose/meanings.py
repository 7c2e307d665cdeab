"""Fields of leaves: what the words of their names say, never their axes."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tracestore.ingest.propose.leaves import ITEMS, Leaf, without_names
from tracestore.ingest.propose.names import phrases_in, words_of
from tracestore.ingest.propose.verdicts import Verdict, verdict_of
from tracestore.store.vocabulary import COUNTED, FIELDS, NEEDLESS, SAYING, SYNONYMS

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
PARTS = {word: k for k, part in enumerate(("of the prompt", "of the answer")) for word in SAYING[part]}


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
        return bool(self.words & SAYING["pooled vectors"])


@lru_cache(maxsize=1)
def _phrases() -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for field in _TAKES:
        # A column `token` holds tokens, not their positions.
        names = [] if "." in field or field == "token" else [field]
        names += [*SYNONYMS.get(field, ()), *(FIELDS[field].other_names if field in FIELDS else ())]
        for name in names:
            found.setdefault(words_of(name.replace(" ", "_")), []).append(field)
    return found


def meaning_of(leaf: Leaf, siblings: frozenset[str]) -> Meaning:
    """Return what the names of a leaf say.

    Parameters
    ----------
    leaf : Leaf
    siblings : frozenset of str
        Words of the keys next to it.
    """
    kind = leaf.number_kind
    if reason := _reason(leaf, siblings):
        return Meaning(leaf, reason=reason)
    every = [word for step in (*leaf.path, leaf.files) for word in words_of(without_names(step))]
    part = next((PARTS[word] for word in every if word in PARTS), None)
    for steps, words in _names(leaf):
        verdict = verdict_of(leaf, words, siblings)
        if verdict is not None:
            return Meaning(leaf, "verdict", verdict=verdict)
        field, size = _field(words, kind, leaf)
        if field in ("hidden_states", "last_token") and SAYING["no states"] & set(words):
            return Meaning(leaf)
        if field:
            return Meaning(leaf, field, size, part)
        if not steps:
            break
    names = leaf.bound
    if kind in "fv" and not SAYING["no states"] & set(every) and ("dim" in names or (leaf.rank and "layer" in names)):
        return Meaning(leaf, "hidden_states", 1, part)
    return Meaning(leaf)


@lru_cache(maxsize=1)
def _needless() -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(name.split()) for name in NEEDLESS)


def _reason(leaf: Leaf, siblings: frozenset[str]) -> str:
    """Return why no trace needs a leaf, by the words of its keys, "" without a reason."""
    for k, step in enumerate(leaf.path, 1):
        phrase = phrases_in(words_of(without_names(step)), _needless())
        is_said = leaf.rank >= 2 or k < len(leaf.path) or (phrase and len(phrase) > 1 and leaf.rank)
        if phrase is None or not is_said or leaf.kind == "s":
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
            least = 0 if "dim" in leaf.bound and field == "hidden_states" else least
            if (
                kind in kinds or (kind == "i" and field == "hidden_states" and least == 0)
            ) and least <= leaf.rank <= most:
                best = (field, size)
                break
    return best
