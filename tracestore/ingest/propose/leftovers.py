"""Leaves that no line of a draft takes: ignored for a reason, or left out."""

from collections.abc import Sequence

from tracestore.ingest.execute.accounts import looks_like_label
from tracestore.ingest.propose.identities import Identity, Places
from tracestore.ingest.propose.leaves import Leaf, Path_
from tracestore.ingest.propose.looking import texts_of
from tracestore.ingest.propose.meanings import Meaning, may_be_label, may_be_score
from tracestore.ingest.propose.names import words_of
from tracestore.store.vocabulary import SAYING


def left_over(
    places: Places, states: Meaning, identity: Identity, used: Sequence[Meaning]
) -> tuple[list[str], list[str], list[str]]:
    """Return what is left out, what is ignored for a reason, and the addresses to ignore."""
    taken = {meaning.leaf.place for meaning in used}
    files = {files for files, _ in taken}
    left_out = [f"{name}: {why}" for name, why in places.observation.unread.items()]
    ignored: dict[str, list[Meaning]] = {name: [] for name in places.observation.files if name not in files}
    for meaning in places.meanings:
        leaf = meaning.leaf
        if leaf.place in taken or _is_key(leaf, identity):
            continue
        if leaf.files not in files:
            ignored[leaf.files].append(meaning)
        else:
            prefix = _unclaimed(leaf, [path for files, path in taken if files == leaf.files])
            needs_line = _is_refused(leaf, prefix)
            address = places.address(Leaf(leaf.files, prefix, "", 0), identity, states.leaf)
            if needs_line and address is not None:
                ignored.setdefault(address, []).append(meaning)
            elif needs_line or _is_lost(meaning, identity, states):
                left_out.append(str(leaf))
    reasons = {address: _reason(address, meanings) for address, meanings in ignored.items()}
    left_out += [address for address, reason in reasons.items() if not reason]
    return left_out, [f"{address}: {reason}" for address, reason in reasons.items() if reason], list(ignored)


def _is_key(leaf: Leaf, identity: Identity) -> bool:
    """Return whether items bind a leaf."""
    for k in leaf.items_at:
        text = identity.items.get((leaf.files, leaf.path[: k + 1]), "")
        relative = "/".join(leaf.path[k + 1 :])
        if any(pair.strip().endswith(f"={relative}") for pair in text[1:-1].split(",")):
            return True
    return False


def _unclaimed(leaf: Leaf, paths: Sequence[Path_]) -> Path_:
    """Return the shortest beginning of a path that none of the others has."""
    beginnings = (leaf.path[:size] for size in range(1, len(leaf.path)))
    return next((b for b in beginnings if not any(path[: len(b)] == b for path in paths)), leaf.path)


def _is_refused(leaf: Leaf, prefix: Path_) -> bool:
    """Return whether the accounts refuse a leaf that no line names: an array, or what looks like a label."""
    return bool(leaf.rank and leaf.kind != "s") or (prefix == leaf.path and looks_like_label(prefix[-1]))


def _is_lost(meaning: Meaning, identity: Identity, states: Meaning) -> bool:
    """Return whether a leaf may say something of a trace: what _is_asked() finds, or which answer it is, unless the first."""
    leaf = meaning.leaf
    is_answer = leaf.key == "sample" and leaf.files == states.leaf.files and not leaf.rank
    return (is_answer and not {"0"}.issuperset(texts_of(leaf.scalars))) or _is_asked(meaning, identity, states)


def _is_asked(meaning: Meaning, identity: Identity, states: Meaning) -> bool:
    """Return whether a leaf that needs no line may say something of a trace, such as another id or a score."""
    leaf = meaning.leaf
    is_table = leaf.files != states.leaf.files and identity.mode == "stack" and not leaf.rank
    if is_table and SAYING["numbers of rows"].issuperset(words_of(leaf.key)) and leaf.is_counter:
        return False  # the number of each row repeats its place
    if meaning.field == "question_id":
        texts = [(spot.where.get("id"), texts_of([spot.value])) for spot in leaf.spots if not leaf.rank]
        is_other = any(name is not None and found not in ([], [name]) for name, found in texts)
        if is_other or not identity.ids.issuperset(texts_of(leaf.scalars)):
            return True
    may_be_verdict = may_be_label(leaf) or (leaf.files != states.leaf.files and may_be_score(leaf))
    return not meaning.reason and (leaf.rank > 0 or (may_be_verdict and (not meaning.field or bool(meaning.verdicts))))


def _reason(address: str, meanings: Sequence[Meaning]) -> str:
    """Return why nothing needs what an address names, "" without a reason."""
    reasons = {meaning.reason for meaning in meanings if meaning.leaf.rank and meaning.leaf.kind != "s"}
    if reasons and "" not in reasons:
        return min(reasons)
    words = words_of(address.rpartition("/")[2].partition(".")[0])
    is_plain = all(m.leaf.rank <= 1 and not m.verdicts and m.field != "question_id" for m in meanings)
    return "settings" if " : " not in address and is_plain and not SAYING["settings"].isdisjoint(words) else ""
