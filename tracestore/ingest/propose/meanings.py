"""Fields of leaves: what the words of their names say, never their axes; and the scalars of records by their fields."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tracestore.ingest.propose.leaves import ITEMS, Leaf, Observation, Path_, without_names
from tracestore.ingest.propose.looking import texts_of
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
    for steps, words in _names(leaf, siblings):
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


def _names(leaf: Leaf, siblings: frozenset[str]) -> list[tuple[bool, tuple[str, ...]]]:
    """Return the words of keys from the last one, while they only count something; then those of the file.

    A key `values` next to the number of a layer holds what the key above it names.
    """
    is_numbered = "layer" in siblings and not {"keys", "key", "queries", "query"} & siblings
    found: list[tuple[bool, tuple[str, ...]]] = []
    for step in reversed(leaf.path):
        if step == ITEMS or (step.isdecimal() and len(step) < 3):
            continue
        words = words_of(without_names(step))
        if not words:
            continue
        found.append((all(word in COUNTED for word in words) or (is_numbered and words == ("values",)), words))
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


class Rows:
    """The scalars of records.

    Parameters
    ----------
    observation : Observation
    meanings : list of Meaning
    """

    def __init__(self, observation: Observation, meanings: list[Meaning]) -> None:
        self.observation, self.meanings = observation, meanings

    def of(self, files: str, prefix: Path_) -> dict[str, Meaning]:
        """Return the scalars of the items of a prefix by their field, the best of each."""
        found: dict[str, Meaning] = {}
        for meaning in self.meanings:
            leaf = meaning.leaf
            rest = leaf.path[len(prefix) :]
            is_inner = leaf.files == files and leaf.path[: len(prefix)] == prefix and 0 < len(rest) <= 2
            if (
                not is_inner
                or leaf.rank
                or ITEMS in rest
                or any("{" in step for step in rest)
                or rest[0].startswith("@")
            ):
                continue
            if meaning.field in found and order_of(meaning) >= order_of(found[meaning.field]):
                meaning = Meaning(leaf, _second(meaning))
            elif meaning.field in found and (second := _second(found[meaning.field])):
                found.setdefault(second, found[meaning.field])
            if meaning.field:
                found[meaning.field] = meaning
        if "question_id" not in found:
            self._add_unnamed(found, files, prefix)
        elif "sample" in found:
            ids = texts_of(found["question_id"].leaf.scalars)
            if len(set(ids)) == len(ids):
                del found["sample"]  # ids that do not repeat need no number of an answer
        return found

    def _add_unnamed(self, found: dict[str, Meaning], files: str, prefix: Path_) -> None:
        """Take the first text of a tuple for its id."""
        for meaning in self.meanings:
            leaf = meaning.leaf
            if leaf.files == files and leaf.path == (*prefix, "0") and not leaf.rank and leaf.kind in "si":
                found["question_id"] = meaning

    def other_ids(self, leaf: Leaf, prefix: Path_) -> list[str]:
        """Return a doubt where several keys of a record may be its id."""
        row = self.of(leaf.files, prefix)
        keys = {
            m.leaf.key
            for m in self.meanings
            if m.field == "question_id" and m.leaf.files == leaf.files and m.leaf.rank == 0
            and m.leaf.path[: len(prefix)] == prefix and ITEMS not in m.leaf.path[len(prefix) :]
            and m.leaf is not leaf and ("sample" not in row or m.leaf is not row["sample"].leaf)
        }  # fmt: skip
        return [f"{leaf.key}: the id may be {', '.join(sorted(keys))}"] if keys else []

    def doubts_of_key(self, leaf: Leaf) -> list[str]:
        """Rule 20: integers are ids only if no word says otherwise and no file repeats them."""
        if leaf.number_kind != "i":
            return []
        is_index = bool({"idx", "index", "indices", "n"} & set(words_of(leaf.key)))
        words = {word for name in self.observation.files[leaf.files] for word in words_of(name)}
        if words & SAYING["parts of a run"] or (is_index and len(self.observation.files[leaf.files]) > 1):
            return [f"{leaf.key}: integers next to names of parts may be ids of each part"]
        return []


def order_of(meaning: Meaning) -> tuple[int, int]:
    """Return the place of a name among those of its field: the more usual ones first."""
    names = (meaning.field.replace("_", " "), *SYNONYMS.get(meaning.field, ()))
    words = " ".join(words_of(meaning.leaf.key))
    at = next((k for k, name in enumerate(names) if name.lower() == words), len(names))
    return at, len(meaning.leaf.path)


def _second(meaning: Meaning) -> str:
    """Return the field of a second id next to a better one: the number of an answer."""
    if meaning.field != "question_id" or meaning.leaf.number_kind != "i":
        return ""
    return "sample" if any(COUNTED.get(word) == "sample" for word in words_of(meaning.leaf.key)) else ""
