"""Drafts: layouts that the names and extents of a folder allow, and what is not proved of each."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.propose.identities import Identity, Places
from tracestore.ingest.propose.leaves import Leaf, Observation
from tracestore.ingest.propose.leftovers import Leftovers
from tracestore.ingest.propose.meanings import PARTS, Meaning, meaning_of
from tracestore.ingest.propose.names import words_of
from tracestore.ingest.propose.orders import Axes, Frame, fitting, states_axes, unusual
from tracestore.ingest.propose.proofs import ARRAYS, RANGES, TEXTS, Line, Proofs
from tracestore.ingest.propose.verdicts import Verdict, may_be_label, proved_fields
from tracestore.store.format.labels import CORRECT, HALLUCINATION

_MAX_DRAFTS = 48
_FIELDS = frozenset((*TEXTS, *ARRAYS, *RANGES, "question_id", "prompt_length"))
# Attributes in which libraries of tables describe their columns.
_HEADERS = ("@huggingface", "@pandas")
_Choice = tuple[str, Line]


@dataclass
class Draft:
    """A layout that fits, before it was tried.

    Attributes
    ----------
    entries : dict
        The entries of the layout.
    unproved : list of str
        What no proof supports.
    left_out : list of str
        Arrays, files and keys that nothing explains.
    reasons : list of str
        What is ignored, and why.
    cost : int
        How unusual the axes are.
    """

    entries: dict[str, Any]
    unproved: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    cost: int = 0


class Drafter:
    """Make the drafts of an observation.

    Parameters
    ----------
    observation : Observation
    """

    def __init__(self, observation: Observation) -> None:
        leaves = [leaf for leaf in observation.leaves if leaf.path[:1] not in {(name,) for name in _HEADERS}]
        siblings: dict[Any, set[str]] = {}
        for leaf in leaves:
            siblings.setdefault((leaf.files, leaf.path[:-1]), set()).update(words_of(leaf.key))
        self.meanings = [meaning_of(leaf, frozenset(siblings[leaf.files, leaf.path[:-1]])) for leaf in leaves]
        self._name_labels()
        self.places = Places(observation, self.meanings)
        self._proofs = Proofs(observation, self.meanings, self.places)
        self._leftovers = Leftovers(observation, self.meanings, self.places)
        verdicts = {m.leaf: m.verdict for m in self.meanings if m.verdict is not None}
        classes = {
            (leaf.files, leaf.path[3]): leaf.scalars
            for leaf in observation.leaves
            if leaf.path[:3] == ("@huggingface", "info", "features") and leaf.path[4:] == ("names",)
        }
        self._proved_fields = proved_fields(verdicts, classes)

    def _name_labels(self) -> None:
        """Take the only column of 0 and 1 next to others for a label, if no other key is named as one: its meaning is asked."""
        if any(meaning.verdict is not None for meaning in self.meanings):
            return
        found = [m for m in self.meanings if not m.field and not m.reason and m.leaf.rank < 2 and may_be_label(m.leaf)]
        if len(found) == 1:
            found[0].field, found[0].verdict = (
                "verdict",
                Verdict(found[0].leaf.key, (CORRECT, HALLUCINATION), True, True),
            )

    def states(self) -> list[list[Meaning]]:
        """Return what may be the states: one leaf, or those of prompt and answer."""
        named = [m for m in self.meanings if m.field in ("hidden_states", "last_token") and not m.is_pooled]
        if not named:
            unnamed = [m for m in self.meanings if not m.field and not m.reason and m.leaf.kind == "f" and m.leaf.rank]
            named = sorted(unnamed, key=lambda m: -m.leaf.rank)[:2]
        named.sort(key=lambda m: (-m.rank_of_word, -m.leaf.rank))
        pairs = [[one, two] for one, two in itertools.permutations(named, 2) if _is_pair(one, two)]
        return [*pairs, *([m] for m in named)][:4]

    def drafts(self) -> Iterator[Draft]:
        """Yield the drafts, the most usual first for each choice of states."""
        for states in self.states():
            for identity in self.places.identities(states[0].leaf):
                found: list[Draft] = []
                for axes in self._axes(states, identity):
                    for draft in itertools.islice(self._with_axes(states, identity, axes), _MAX_DRAFTS):
                        draft.cost = unusual(axes)
                        found.append(draft)
                yield from sorted(found, key=lambda d: (d.cost, len(d.left_out), len(d.unproved)))

    # Axes of the states

    def _axes(self, states: Sequence[Meaning], identity: Identity) -> list[Axes]:
        leaf = states[0].leaf
        letters = [x for x in identity.letters if x != "S" or states[0].field != "last_token"]
        if "N" in letters and any(m.field in RANGES for m in self.meanings):
            letters.append("(N S)")
        texts = [m for m in self.meanings if m.field in TEXTS and m.leaf.rank == 1 and m.leaf.files == leaf.files]
        if texts and identity.mode == "ids":
            letters.append("K")
        is_generated = any({"sequences", "generated"} & m.words for m in self.meanings)
        is_ragged = any(None in spot.dims for spot in leaf.spots)
        has_passes = (is_ragged or is_generated) and leaf.rank >= 3
        return states_axes(leaf, letters, has_passes=has_passes, bound=self.places.letters(leaf, identity))

    # Lines

    def _with_axes(self, states: Sequence[Meaning], identity: Identity, axes: Axes) -> Iterator[Draft]:
        """Yield the drafts of states with their axes: each choice of the other axes, and of the meaning of labels."""
        frame = Frame(states[0].leaf, axes)
        own = [self.places.address(m.leaf, identity, frame.leaf) for m in states]
        if None in own:
            return
        bound = self.places.letters(frame.leaf, identity)
        has_tokens = bool({"S", "(N S)"} & {*axes, *bound})
        name = "hidden_states" if has_tokens else "last_token"
        used = list(states)
        choices = [*self._fields(states, identity, frame, used), *self._verdicts(identity, frame, used)]
        for chosen in itertools.product(*choices):
            lines = dict(chosen)
            entries: dict[str, Any] = {name: [line.text for line in (Line(str(a), axes) for a in own)]}
            entries |= {key: line.text for key, line in lines.items()}
            if len(own) == 1:
                entries[name] = entries[name][0]
            if "tokens+" in entries:
                entries["tokens"] = [entries["tokens"], entries.pop("tokens+")]
            if "{verdict}" in str(own[0]):
                entries["is_correct"] = "={verdict}"
            draft = Draft(entries, self._proofs.unproved(states, identity, frame, lines, name))
            draft.left_out, draft.reasons, ignored = self._leftovers.of(states, identity, used)
            if ignored:
                entries["ignore"] = ignored
            yield draft

    def _fields(
        self, states: Sequence[Meaning], identity: Identity, frame: Frame, used: list[Meaning]
    ) -> list[list[_Choice]]:
        """Return the lines that each field but the labels may have; add the leaves that have one to `used`."""
        found: dict[str, tuple[Meaning, list[Line]]] = {}
        for meaning in sorted(self.meanings, key=lambda m: _nearness(m, states)):
            name = _field(meaning, identity)
            if name in found and name == "tokens" and len(states) > 1:
                name = "tokens+"
            if meaning in states or name in found or name not in {*_FIELDS, "tokens+"}:
                continue
            if name == "question_id" and not self._needs_id(meaning, identity):
                continue
            if lines := self._lines(meaning, name.rstrip("+"), identity, frame):
                found[name] = meaning, lines
        has_tokens = bool({"S", "(N S)"} & {*frame.axes, *self.places.letters(frame.leaf, identity)})
        for name in _superfluous({n: m for n, (m, _) in found.items()}, states, frame, has_tokens=has_tokens):
            found.pop(name, None)
        used += [meaning for meaning, _ in found.values()]
        return [[(name, line) for line in lines] for name, (_, lines) in found.items()]

    def _verdicts(self, identity: Identity, frame: Frame, used: list[Meaning]) -> list[list[_Choice]]:
        """Return the lines that labels and scores may have, under each field that they may be."""
        found = []
        names: set[str] = set()
        for meaning in self.meanings:
            if meaning.verdict is None:
                continue
            proved = self._proved_fields.get(meaning.leaf.place)
            fields = [n for n in meaning.verdict.fields() if n not in names and proved in (None, n)]
            lines = self._lines(meaning, "scalar", identity, frame)
            if lines and fields:
                names.update(fields)
                used.append(meaning)
                found.append([(name, line) for name in fields for line in lines])
        return found

    def _needs_id(self, meaning: Meaning, identity: Identity) -> bool:
        if identity.id_leaf is not None:
            return meaning.leaf is identity.id_leaf
        return identity.mode in ("stack", "rows")

    def _lines(self, meaning: Meaning, name: str, identity: Identity, frame: Frame) -> list[Line]:
        """Return the lines of a leaf as a field, with every order of the axes that fits."""
        leaf = meaning.leaf
        text = self.places.address(leaf, identity, frame.leaf) if self._is_joined(leaf, identity, frame, name) else None
        if text is None:
            return []
        if name == "S.offsets":
            return [Line(text, ())]
        is_column = leaf.rank == 1 and name not in ARRAYS
        if is_column and identity.mode == "rows" and not leaf.items_at:
            return [Line(text, ("N",))]  # a value for each row of the states
        is_stacked = self._is_stacked(leaf, identity) and name != "L.ids"
        if is_column and is_stacked and "(N S)" in frame.axes:
            return [Line(text, ("N",))]
        bound = self.places.letters(leaf, identity)
        return [Line(text, axes) for axes in self._orders(leaf, name, frame, is_stacked=is_stacked, bound=bound)]

    def _orders(self, leaf: Leaf, name: str, frame: Frame, *, is_stacked: bool, bound: frozenset[str]) -> list[Axes]:
        """Return every order of the axes of a leaf as a field."""
        found: list[Axes] = []
        for kind in ("tokens", "sequences") if name == "tokens" else (name if name in ARRAYS else "scalar",):
            is_axis = kind == "tokens" and "P" in frame.axes
            # Steps that names number may have an id more: the reading counts their tokens.
            if (not found and not is_axis) or (kind == "sequences" and frame.has_passes):
                found += fitting(leaf, kind, frame, is_stacked=is_stacked, bound=bound)
        if self.places.is_output(leaf):
            found = [axes for axes in found if self.places.is_output(leaf, axes)]
        return found

    def _is_stacked(self, leaf: Leaf, identity: Identity) -> bool:
        """Return whether N is an axis of a leaf, not its items."""
        steps = [identity.items.get((leaf.files, leaf.path[: k + 1]), "[]") for k in leaf.items_at]
        return "[]" not in steps and identity.mode == "stack"

    def _is_joined(self, leaf: Leaf, identity: Identity, frame: Frame, name: str) -> bool:
        """Return whether a leaf says something of each trace: it binds what tells traces apart, or has an axis for it."""
        if name == "L.ids" and not leaf.items_at:
            return True
        own, inner = self.places.binders(frame.leaf), self.places.binders(leaf)
        if leaf.files == frame.leaf.files:
            if set(own) <= set(inner):
                return leaf.rank > 0 or identity.mode != "stack" or bool(leaf.items_at)
            if identity.mode == "ids" and not inner:
                return False
        if identity.mode == "stack":
            return leaf.rank > 0 or bool(leaf.items_at)
        if identity.mode == "rows":
            return leaf.rank == 1 or bool(leaf.items_at)
        return bool(leaf.items_at) or bool(leaf.bound - set(AXIS_NAMES))


def _is_pair(one: Meaning, two: Meaning) -> bool:
    """Return whether two leaves may be the states of prompt and answer."""
    words = [frozenset(words_of(meaning.leaf.key)) - PARTS.keys() for meaning in (one, two)]
    return (one.part, two.part) == (0, 1) and one.leaf.rank == two.leaf.rank and words[0] == words[1]


def _field(meaning: Meaning, identity: Identity) -> str:
    """Return the field of a leaf: several integer ids of one trace are those of its tokens."""
    is_list = meaning.field == "question_id" and meaning.leaf.rank == 1 and meaning.leaf.kind == "i"
    return "tokens" if is_list and identity.mode == "ids" else meaning.field


def _nearness(meaning: Meaning, states: Sequence[Meaning]) -> tuple[int, int, int]:
    """Return the order in which leaves are taken for a field: those next to the states first."""
    is_far = meaning.leaf.files != states[0].leaf.files
    return (meaning.part or 0 if len(states) > 1 else 0, int(is_far), -meaning.rank_of_word)


def _superfluous(found: dict[str, Meaning], states: Sequence[Meaning], frame: Frame, *, has_tokens: bool) -> set[str]:
    """Return the fields that say nothing in addition to the others."""
    drop: set[str] = set()
    is_pair = "tokens+" in found and (found["tokens"].part, found["tokens+"].part) == (0, 1)
    if len(states) > 1 and not is_pair:
        drop |= {"tokens", "tokens+"}
    if "tokens" not in found:  # rule 16
        drop.add("prompt_length")
    if not has_tokens:
        drop |= {*RANGES, "S.mask"}
    if "(N S)" not in frame.axes:
        drop |= {"S.offsets", "S.starts", "S.ends"}
        if "N" not in frame.axes:
            drop.add("S.lengths")
    return drop
