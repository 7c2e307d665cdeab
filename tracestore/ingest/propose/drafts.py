"""Drafts: layouts that the names and extents of a folder allow, and what is not proved of each."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tracestore.ingest.layout.fields import PROMPT_MASK
from tracestore.ingest.layout.language import Layout, parse_layout
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.propose.identities import Identity, Places
from tracestore.ingest.propose.leaves import Leaf, Observation, rows_next_to
from tracestore.ingest.propose.looking import texts_of
from tracestore.ingest.propose.meanings import MODULE, STATES, Meaning, find_labels, is_of_bits, meaning_of, opposites
from tracestore.ingest.propose.names import words_of
from tracestore.ingest.propose.orders import Axes, Frame, extents_of, fitting, states_axes, unusual
from tracestore.ingest.propose.proofs import ARRAYS, RANGES, TEXTS, Case, Line, left_over
from tracestore.store.format import schema
from tracestore.store.format.labels import CORRECT
from tracestore.store.vocabulary import (
    CLASSES,
    JUDGMENTS,
    SAYING,
    SCORES,
    direction_of,
    is_class_correct,
    score_of_word,
)

_MAX_DRAFTS = 48
_FIELDS = frozenset((*TEXTS, *ARRAYS, *RANGES, "question_id", "prompt_length"))
# Attributes in which libraries of tables describe their columns.
_HEADERS = ("@huggingface", "@pandas", "@content_defined_chunking")
# A field, its line, None for none, and the leaf of the line.
_Choice = tuple[str, Line | None, Meaning]
UNSHOWN = "prompt_length: no tokens show that it counts them"


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
    contradiction : str
        Why it is refused before it is tried, "" otherwise.
    """

    entries: dict[str, Any]
    unproved: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    cost: int = 0
    contradiction: str = ""

    @cached_property
    def layout(self) -> Layout:
        """The layout of the entries; UsageError if it is none."""
        return parse_layout(self.entries, "proposal")


class Drafter:
    """Make the drafts of an observation.

    Parameters
    ----------
    observation : Observation
    """

    def __init__(self, observation: Observation) -> None:
        leaves = [leaf for leaf in observation.leaves if not leaf.path or leaf.path[0] not in _HEADERS]
        siblings: dict[Any, set[str]] = {}
        for leaf in leaves:
            siblings.setdefault((leaf.files, leaf.path[:-1]), set()).update(words_of(leaf.key))
        self.meanings = [meaning_of(leaf, frozenset(siblings[leaf.files, leaf.path[:-1]])) for leaf in leaves]
        self._name_ranges()
        find_labels(self.meanings)
        self._extents = {m.leaf.place: extents_of(m, self.meanings) for m in self.meanings}
        self.places = Places(observation, self.meanings)

    def _name_ranges(self) -> None:
        """Give lists the field of first or last rows where their values are those next to lengths, under any name."""
        lengths = [meaning.leaf for meaning in self.meanings if meaning.field == "S.lengths" and meaning.leaf.rank]
        for meaning in self.meanings:
            if meaning.field in ("", *RANGES) and meaning.leaf.number_kind == "i" and meaning.leaf.rank == 1:
                found = (rows_next_to(one, meaning.leaf) for one in lengths)
                meaning.field = next(filter(None, found), meaning.field)

    def states(self) -> list[Meaning]:
        """Return the leaves that may be the states."""
        named = [m for m in self.meanings if m.field in STATES and not m.words & SAYING["pooled vectors"]]  # rule 21
        if not named:
            unnamed = [m for m in self.meanings if not m.field and not m.reason and m.leaf.kind == "f" and m.leaf.rank]
            unnamed = [m for m in unnamed if SAYING["no states"].isdisjoint(words_of(m.leaf.key))]
            named = sorted(unnamed, key=lambda m: -m.leaf.rank)[:2]
        return sorted(named, key=lambda m: (-m.num_words, -m.leaf.rank))[:4]

    def drafts(self) -> Iterator[Draft]:
        """Yield the drafts, the most usual first for each choice of states."""
        for states in self.states():
            for identity in self.places.identities(states.leaf):
                found: list[Draft] = []
                for axes in self._axes(states, identity):
                    found += itertools.islice(self._with_axes(states, identity, axes), _MAX_DRAFTS)
                found += [parts for draft in found if (parts := _in_parts(draft)) is not None]
                yield from sorted(found, key=lambda d: (d.cost, len(d.left_out), len(d.unproved)))

    def _axes(self, states: Meaning, identity: Identity) -> list[Axes]:
        """Return the orders of the axes of the states."""
        if axes := self._extents[states.leaf.place][0]:
            return [axes]
        leaf, letters = states.leaf, ["L"] if states.field == "last_token" else ["L", "S"]
        if identity.mode == "stack":
            letters = ["N", *letters, *["(N S)"] * any(m.field in RANGES for m in self.meanings)]
        is_generated = any({"sequences", "generated"} & m.words for m in self.meanings)
        is_ragged = any(None in spot.dims for spot in leaf.spots)
        has_passes = (is_ragged or is_generated) and leaf.rank >= 3
        if has_passes and any({"beam", "indices"} <= set(words_of(m.leaf.key)) for m in self.meanings):
            return []  # the rows of a pass are not those of the one before it
        found = states_axes(leaf, letters, has_passes=has_passes, bound=self.places.letters(leaf, identity))
        are_batches = "chunk" in identity.names.get((leaf.files, ()), {}).values()
        return [axes for axes in found if axes[:1] == ("N",) or not are_batches]

    def _with_axes(self, states: Meaning, identity: Identity, axes: Axes) -> Iterator[Draft]:
        """Yield the drafts of states with their axes: each choice of the other axes, and of the meaning of labels."""
        frame = Frame(self.places.with_ids(states.leaf, identity), axes, self.places.letters(states.leaf, identity))
        address = self.places.address(frame.leaf, identity, frame.leaf)
        if address is None:
            return
        name = "hidden_states" if frame.has_tokens else "last_token"
        fixed, doubts, extents = self._stated(states, name, identity, frame)
        spare = self._spare(identity, frame)
        of_states = [states, *(m for m in self.meanings if m.leaf in extents)]
        choices = [*self._fields(states, identity, frame), *self._verdicts(identity, frame)]
        for chosen in itertools.product(*choices):
            lines = {name: line for name, line, _ in chosen if line is not None}
            own = [*of_states, *(meaning for _, line, meaning in chosen if line is not None)]
            entries: dict[str, Any] = {name: Line(address, axes).text} | {n: line.text for n, line in lines.items()}
            entries |= {f"words.{word}": "missing" for meaning in own for word in meaning.missing} | fixed
            draft = Draft(entries, Case(self.places, states, identity, frame, lines, name).unproved() + doubts)
            if draft.unproved and spare is not None and "tokens" not in lines:
                entries["prompt_length"] = spare[0].text
                draft.unproved.append(UNSHOWN)
                own.append(spare[1])
            draft.left_out, draft.reasons, ignored = left_over(self.places, states, identity, own)
            draft.cost, draft.contradiction = unusual(axes), self._other_order(own, identity)
            if ignored:
                entries["ignore"] = ignored
            for one in _with_classes(draft, address, self.places.classes(frame.leaf)):
                yield from _with_opposites(one, own)

    def _stated(
        self, states: Meaning, name: str, identity: Identity, frame: Frame
    ) -> tuple[dict[str, Any], list[str], list[Leaf]]:
        """Return the entries for the shape and the dtype of states, what is not proved of them, and the extents."""
        entries: dict[str, Any] = {}
        doubts: list[str] = []
        axes, extents = self._extents[states.leaf.place]
        if extents:
            addresses = [self.places.address(one, identity, frame.leaf) for one in extents]
            entries[f"shape.{name}"] = addresses if axes else addresses[0]
        if axes:
            order = ", ".join(one.key for one in extents)
            doubts = [f"{name}: no word says that the axes lie in the order {order}"]
        if states.leaf.kind in "iv" and is_of_bits(states.leaf):
            entries[f"dtype.{name}"] = "bfloat16"
        return entries, doubts, extents

    def _other_order(self, used: list[Meaning], identity: Identity) -> str:
        """Return what says that the ids have another order than the rows that are joined in order."""
        ids = next((texts_of(m.leaf.scalars) for m in used if m.field == "question_id"), [])
        others = (m.leaf for m in self.meanings if m not in used and identity.mode != "ids")
        found = ((leaf, texts_of(leaf.scalars)) for leaf in others if leaf.kind in "si")
        same = (str(leaf) for leaf, texts in found if texts != ids and sorted(texts) == sorted(ids))
        return next((f"{leaf}: has the ids of question_id in another order" for leaf in same), "")

    def _fields(self, states: Meaning, identity: Identity, frame: Frame) -> list[list[_Choice]]:
        """Return the lines that each field but the labels may have."""
        found: dict[str, tuple[Meaning, list[Line]]] = {}
        meanings = [self._in_place(m, identity, frame) for m in self.meanings if m is not states]
        own = identity.id_leaf
        padded = {m.leaf.place: num for m in meanings if (num := self._num_padded(m, identity, frame)) is not None}
        # Lengths that leave out tokens come first, then leaves next to the states.
        for meaning in sorted(
            meanings,
            key=lambda m: (-padded.get(m.leaf.place, 0), m.leaf.files != states.leaf.files, -m.num_words, m.order),
        ):
            name, leaf = meaning.field, meaning.leaf
            if name in found or name not in _FIELDS or padded.get(leaf.place, 0) < 0:
                continue
            if name == "question_id" and (identity.mode == "ids" if own is None else leaf is not own):
                continue
            if lines := self._lines(meaning, name, identity, frame):
                found[name] = meaning, lines
        number = self.places.number_of_answer(found["question_id"][0].leaf) if "question_id" in found else None
        if number is not None and (lines := self._lines(number, "sample", identity, frame)):
            found["sample"] = number, lines
        has_tokens = "tokens" in found or ("tokens_decoded" in found and _is_prompt_of(found))
        found = {name: value for name, value in found.items() if not _is_superfluous(name, frame, has_tokens)}
        return [_choices(name, meaning, lines) for name, (meaning, lines) in found.items()]

    def _spare(self, identity: Identity, frame: Frame) -> tuple[Line, Meaning] | None:
        """Return a line of a length of prompts, which nothing but tokens proves."""
        meanings = [m for m in self.meanings if m.field == "prompt_length" and frame.has_tokens]
        found = ((line, m) for m in meanings for line in self._lines(m, "prompt_length", identity, frame))
        return next(found, None)

    def _num_padded(self, meaning: Meaning, identity: Identity, frame: Frame) -> int | None:
        """Return how many tokens lengths of single traces leave out at most, -1 if they count others; None without."""
        if meaning.field != "S.lengths" or not {"N", "(N S)"}.isdisjoint(frame.axes):
            return None
        if "S" not in frame.axes or frame.has_passes or not SAYING["generated"].isdisjoint(words_of(meaning.leaf.key)):
            return -1
        left = [size - length for length, size in self._lengths(meaning, identity, frame)]
        return max(left, default=-1) if min(left, default=-1) >= 0 else -1

    def _lengths(self, meaning: Meaning, identity: Identity, frame: Frame) -> list[tuple[int, int]]:
        """Return the lengths of single traces next to the sizes of S."""
        leaf = self.places.with_ids(meaning.leaf, identity)
        return [
            (int(spot.value[0] if leaf.rank else spot.value), sizes.get("S") or 0)
            for spot in leaf.spots
            if spot.value not in (None, [None]) and {1}.issuperset(spot.dims)
            for sizes in frame.matching(leaf, spot)
        ]

    def _in_place(self, meaning: Meaning, identity: Identity, frame: Frame) -> Meaning:
        """Return `ids` inside a trace as its tokens; the length of a context as that of rows, of a prompt, or none of both."""
        leaf = meaning.leaf
        if meaning.field == "question_id" and leaf.rank == 1 and leaf.number_kind == "i":
            is_inside = identity.mode == "ids" and leaf is not identity.id_leaf and "id" in leaf.bound
            return replace(meaning, field="tokens") if is_inside else meaning
        if meaning.field not in ("S.lengths", "prompt_length") or "context" not in words_of(leaf.key):
            return meaning
        if not {"N", "(N S)"}.isdisjoint(frame.axes):
            return replace(meaning, field="S.lengths")
        pairs = self._lengths(meaning, identity, frame)
        may_be = len({length for length, _ in pairs}) > 1 and all(0 < length < size for length, size in pairs)
        return replace(meaning, field="prompt_length" if may_be else "")

    def _verdicts(self, identity: Identity, frame: Frame) -> list[list[_Choice]]:
        """Return the lines that labels and scores may have, under each field that they may be."""
        explained: set[str] = set()
        choices: dict[frozenset[str], list[_Choice]] = {}
        # Those that a word explains come first: a label without such a word has to agree with them. Of several without
        # such a word each may be the one that is meant.
        for meaning in sorted(self.meanings, key=lambda m: len(m.verdicts)):
            fields = [name for name in meaning.verdicts if name not in explained]
            if fields and (lines := self._lines(meaning, "verdict", identity, frame)):
                explained.update(fields if len(meaning.verdicts) == 1 else ())
                choices.setdefault(frozenset(fields), []).extend(
                    (name, line, meaning) for name in fields for line in lines
                )
        return list(choices.values())

    def _lines(self, meaning: Meaning, name: str, identity: Identity, frame: Frame) -> list[Line]:
        """Return the lines of a leaf as a field, with every order of the axes that fits."""
        leaf = self.places.with_ids(meaning.leaf, identity)
        is_joined = self._is_joined(leaf, identity, frame, name)
        text = self.places.address(leaf, identity, frame.leaf) if is_joined else None
        if text is None:
            return []
        if name == "S.offsets":
            return [Line(text, ())]
        is_stacked = _is_stacked(leaf, identity) and name != "L.ids"
        if leaf.rank == 1 and name not in ARRAYS and is_stacked and "(N S)" in frame.axes:
            return [Line(text, ("N",))]
        bound = self.places.letters(leaf, identity)
        found: list[Axes] = []
        if name != "tokens" or "P" not in frame.axes:
            found = fitting(leaf, name, frame, is_stacked=is_stacked, bound=bound)
        if name in ("tokens", *schema.PER_TOKEN_FIELDS) and (not found or frame.has_passes):
            # Steps that names number may have an id more: the reading counts their tokens.
            found += fitting(leaf, "sequences", frame, is_stacked=is_stacked, bound=bound)
        if self.places.is_output(leaf):
            found = [axes for axes in found if self.places.is_output(leaf, axes)]
        return [Line(text, axes) for axes in found]

    def _is_joined(self, leaf: Leaf, identity: Identity, frame: Frame, name: str) -> bool:
        """Return whether a leaf says something of each trace: it binds what tells traces apart, or has an axis for it."""
        has_items = bool(leaf.items_at)
        if name == "L.ids" and not has_items:
            return True
        if identity.mode == "stack":
            return leaf.rank > 0 or has_items
        inner, is_same_file = self.places.binders(leaf), leaf.files == frame.leaf.files
        if is_same_file and self.places.binders(frame.leaf) <= inner:
            return True
        is_of_file = is_same_file and identity.mode == "ids" and not inner
        return not is_of_file and (has_items or bool(leaf.bound - AXIS_NAMES.keys()))


def _in_parts(draft: Draft) -> Draft | None:
    """Return a draft that has the answers, too, where it has the prompts alone; None if it has no states of prompts."""
    for word in sorted(SAYING["generated"]):
        parts = {}
        for name, text in draft.entries.items():
            address, arrow, axes = str(text).partition(" -> ")
            other = address.replace("prompt", word)
            if other != address and other in draft.left_out:
                parts[name] = [text, other + arrow + axes]
        if "hidden_states" in parts:
            taken = {line.partition(" -> ")[0] for _, line in parts.values()}
            rest = [text for text in draft.left_out if text not in taken]
            ignored = [text for text in draft.entries["ignore"] if text not in taken]
            entries = draft.entries | parts | {"ignore": ignored}
            if not ignored:
                del entries["ignore"]
            doubts = [*draft.unproved, f"hidden_states: the {word} may not follow the prompt"]
            return replace(draft, entries=entries, unproved=doubts, left_out=rest)
    return None


def _with_opposites(draft: Draft, used: Sequence[Meaning]) -> Iterator[Draft]:
    """Yield a draft, also with what words mean that are not known; two without a known one need a meaning."""
    found = [words for meaning in used for words in opposites(meaning)]
    if all(len(words) == 1 for words in found):
        yield draft
    for words in found:
        doubt = f"{' and '.join(words)}: no known word, read as the opposite of the other{'s' * (len(words) == 1)}"
        lines = {f"words.{word}": is_one for word, is_one in words.items()}
        yield replace(draft, entries=draft.entries | lines, unproved=[*draft.unproved, doubt])


def _with_classes(draft: Draft, address: str, classes: Sequence[str]) -> Iterator[Draft]:
    """Yield a draft with each meaning that the classes in the names of its states may have; the draft itself without such names."""
    if not classes or "{verdict}" not in address:
        yield draft
        return
    beside = re.sub(r".*?([^/{}]*)\{verdict\}([^/{}]*).*", r"\1_\2", address)
    way = direction_of("_".join(words_of(beside)))
    are_correct = {word: is_class_correct(word) for word in classes}
    is_said = None not in are_correct.values()
    fields = [name for name in JUDGMENTS if name not in draft.entries and (is_said or way in (None, SCORES[name]))]
    fields = fields[:1] if is_said else fields
    is_open = not is_said and (way is None or any(word.isdecimal() for word in classes))
    doubts = [f"{' or '.join(classes)} in the names: no word gives their meaning"] * is_open
    if not is_said and not draft.entries.keys().isdisjoint(JUDGMENTS):  # folders may say something else
        plain = {name: _without_class(value) for name, value in draft.entries.items()}
        yield replace(draft, entries=plain, unproved=[*draft.unproved, "the class in the names is not read"])
    for name in fields:
        entries: dict[str, Any] = draft.entries | {name: "={verdict}"}
        for word, is_correct in are_correct.items():
            if score_of_word(word, CORRECT) is None and not word.isdecimal():
                entries[f"words.{word}"] = (
                    is_correct == (name == "is_correct") if is_said else CLASSES.get(word.lower())
                )
        yield replace(draft, entries=entries, unproved=[*draft.unproved, *doubts])


def _without_class(value: Any) -> Any:
    """Return the value of an entry with a plain name in the place of the class."""
    if isinstance(value, list):
        return [_without_class(item) for item in value]
    return value.replace("{verdict}", "{kind}") if isinstance(value, str) else value


def _choices(name: str, meaning: Meaning, lines: Sequence[Line]) -> list[_Choice]:
    """Return the lines of a field; none is a choice for what may be another output than weights of attention."""
    found: list[_Choice] = [(name, line, meaning) for line in lines]
    return [*found, (name, None, meaning)] if name == "attentions" and meaning.words.issuperset(MODULE) else found


def _is_stacked(leaf: Leaf, identity: Identity) -> bool:
    """Return whether N is an axis of a leaf, not its items."""
    steps = [identity.items.get((leaf.files, leaf.path[: k + 1]), "[]") for k in leaf.items_at]
    return not any(step == "[]" or "N=" in step for step in steps) and identity.mode == "stack"


def _is_prompt_of(found: Mapping[str, tuple[Meaning, list[Line]]]) -> bool:
    """Return whether each value of prompt_length is below the largest number of texts of tokens."""
    sizes = {size for spot in found["tokens_decoded"][0].leaf.spots for size in spot.dims}
    lengths = found["prompt_length"][0].leaf.scalars if "prompt_length" in found else []
    most = max((size for size in sizes if size is not None), default=0)
    return None in sizes or all(0 < int(length) < most for length in lengths)


def _is_superfluous(name: str, frame: Frame, has_tokens: bool) -> bool:
    """Return whether a field says nothing in addition to the others."""
    if name in ("prompt_length", PROMPT_MASK):
        return not has_tokens  # rule 16
    if name in RANGES and name != "S.lengths":
        return "(N S)" not in frame.axes
    return name in ("S.mask", "S.lengths", *schema.PER_TOKEN_FIELDS) and not frame.has_tokens
