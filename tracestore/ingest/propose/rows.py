"""Rows: the scalars of items by their fields, and which of them may be the id."""

from tracestore.ingest.propose.leaves import ITEMS, Leaf, Observation, Path_
from tracestore.ingest.propose.looking import texts_of
from tracestore.ingest.propose.meanings import Meaning
from tracestore.ingest.propose.names import words_of
from tracestore.store.vocabulary import COUNTED, SAYING, SYNONYMS


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
