"""Leaves that no line of a draft takes: ignored for a reason, or left out."""

from collections.abc import Sequence

from tracestore.ingest.execute.accounts import looks_like_label
from tracestore.ingest.propose.identities import Identity, Places
from tracestore.ingest.propose.leaves import Leaf, Observation, Path_
from tracestore.ingest.propose.looking import texts_of
from tracestore.ingest.propose.meanings import Meaning
from tracestore.ingest.propose.names import words_of
from tracestore.ingest.propose.verdicts import may_be_label, may_be_score
from tracestore.store.vocabulary import SAYING


class Leftovers:
    """The leaves that drafts do not take.

    Parameters
    ----------
    observation : Observation
    meanings : list of Meaning
    places : Places
    """

    def __init__(self, observation: Observation, meanings: list[Meaning], places: Places) -> None:
        self._observation, self._meanings, self._places = observation, meanings, places

    def of(
        self, states: Sequence[Meaning], identity: Identity, used: Sequence[Meaning]
    ) -> tuple[list[str], list[str], list[str]]:
        """Return what is left out, what is ignored for a reason, and the addresses to ignore."""
        taken = {meaning.leaf.place for meaning in used}
        left_out = [f"{name}: {why}" for name, why in self._observation.unread.items()]
        ignored: dict[str, list[Meaning]] = {
            files: [] for files in self._observation.files if files not in {files for files, _ in taken}
        }
        for meaning in self._meanings:
            leaf = meaning.leaf
            if leaf.place in taken or self._is_key(leaf, identity):
                continue
            if leaf.files in ignored:
                ignored[leaf.files].append(meaning)
                continue
            prefix = _unclaimed(leaf, [path for files, path in taken if files == leaf.files])
            needs_line = _is_refused(leaf, prefix)
            address = self._places.address(Leaf(leaf.files, prefix, "", 0), identity, states[0].leaf)
            if needs_line and address is not None:
                ignored.setdefault(address, []).append(meaning)
            elif needs_line or _is_asked(meaning, identity, states):
                left_out.append(str(leaf))
        reasons = {address: _reason(address, meanings) for address, meanings in ignored.items()}
        left_out += [address for address, reason in reasons.items() if not reason]
        return left_out, [f"{address}: {reason}" for address, reason in reasons.items() if reason], list(ignored)

    def _is_key(self, leaf: Leaf, identity: Identity) -> bool:
        """Return whether items bind a leaf."""
        for k in leaf.items_at:
            text = identity.items.get((leaf.files, leaf.path[: k + 1]), "")
            relative = "/".join(leaf.path[k + 1 :])
            if any(pair.strip().endswith(f"={relative}") for pair in text[1:-1].split(",")):
                return True
        return False


def _is_refused(leaf: Leaf, prefix: Path_) -> bool:
    """Return whether the accounts refuse a leaf that no line names: an array, or what looks like a label."""
    return bool(leaf.rank and leaf.kind != "s") or (prefix == leaf.path and looks_like_label(prefix[-1]))


def _is_asked(meaning: Meaning, identity: Identity, states: Sequence[Meaning]) -> bool:
    """Return whether a leaf that needs no line may say something of a trace, such as another id or a score."""
    if meaning.field == "question_id":
        spots = meaning.leaf.spots if meaning.leaf.rank == 0 else ()
        texts = [(spot.where.get("id"), texts_of([spot.value])) for spot in spots]
        is_other = any(name is not None and found not in ([], [name]) for name, found in texts)
        if is_other or not identity.ids.issuperset(texts_of(meaning.leaf.scalars)):
            return True
    is_table = all(meaning.leaf.files != state.leaf.files for state in states)
    is_verdict = not meaning.field and (may_be_label(meaning.leaf) or (is_table and may_be_score(meaning.leaf)))
    return not meaning.reason and (meaning.leaf.rank > 0 or is_verdict)


def _unclaimed(leaf: Leaf, paths: Sequence[Path_]) -> Path_:
    """Return the shortest beginning of a path that none of the others has."""
    for size in range(1, len(leaf.path)):
        if not any(path[:size] == leaf.path[:size] for path in paths):
            return leaf.path[:size]
    return leaf.path


def _reason(address: str, meanings: Sequence[Meaning]) -> str:
    """Return why nothing needs what an address names, "" without a reason."""
    reasons = {meaning.reason for meaning in meanings if meaning.leaf.rank and meaning.leaf.kind != "s"}
    if reasons and "" not in reasons:
        return min(reasons)
    words = set(words_of(address.rpartition("/")[2].partition(".")[0]))
    is_plain = all(m.leaf.rank <= 1 and m.verdict is None and m.field != "question_id" for m in meanings)
    return "settings" if " : " not in address and is_plain and words & SAYING["settings"] else ""
