"""Drafts: layouts that the names and extents of a folder allow, and what is not proved of each."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.accounts import looks_like_label
from tracestore.ingest.execute.values import label_value
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.propose.axes import Axes, Frame, fitting, states_axes, unusual
from tracestore.ingest.propose.leaves import Leaf, Observation
from tracestore.ingest.propose.meanings import Meaning, bound_names, meaning_of, scalars
from tracestore.ingest.propose.names import words_of
from tracestore.ingest.propose.places import Identity, Places
from tracestore.store.format.labels import CORRECT

_MAX_DRAFTS = 48
_SENTENCES = frozenset(
    ("sent", "sents", "sentence", "sentences", "step", "steps", "claim", "claims", "chunk", "chunks")
)
_SENTENCES |= frozenset(("sample", "samples", "gen", "gens", "k"))
_TEXTS = ("question", "generated_answer", "generated_answer_clean", "generated_text")
_VAGUE_TEXTS = frozenset(("text", "content", "output", "outputs", "input", "inputs"))
_ARRAYS = ("attentions", "tokens", "tokens_decoded", "S.mask", "L.ids")
_RANGES = ("S.offsets", "S.lengths", "S.starts", "S.ends")
_PROOFS_OF_N = ("question_id", *_TEXTS, "S.lengths", "S.offsets")
_SETTINGS = frozenset(
    (
        "config",
        "settings",
        "args",
        "metadata",
        "metrics",
        "index",
        "state",
        "info",
        "dataset",
        "manifest",
        "hparams",
        "params",
    )
)


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


@dataclass
class Choice:
    """The addresses that one leaf may have as a field."""

    meaning: Meaning
    name: str
    addresses: list[tuple[str, Axes]]


class Drafter:
    """Make the drafts of an observation.

    Parameters
    ----------
    observation : Observation
    """

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        siblings: dict[Any, set[str]] = {}
        for leaf in observation.leaves:
            siblings.setdefault((leaf.files, leaf.path[:-1]), set()).update(words_of(leaf.key))
        self.meanings = [
            meaning_of(leaf, frozenset(siblings[leaf.files, leaf.path[:-1]])) for leaf in observation.leaves
        ]
        self.places = Places(observation, self.meanings)

    def states(self) -> list[list[Meaning]]:
        """Return what may be the states: one leaf, or those of prompt and answer."""
        named = [m for m in self.meanings if m.field in ("hidden_states", "last_token") and not m.is_pooled]
        if not named:
            unnamed = [m for m in self.meanings if not m.field and not m.reason and m.leaf.kind == "f" and m.leaf.rank]
            named = sorted(unnamed, key=lambda m: -m.leaf.rank)[:2]
        named.sort(key=lambda m: (-m.rank_of_word, -m.leaf.rank))
        pairs = [
            [one, two]
            for one, two in itertools.permutations(named, 2)
            if (one.part, two.part) == (0, 1)
            and one.leaf.rank == two.leaf.rank
            and _other_words(one) == _other_words(two)
        ]
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
        if "N" in letters and any(m.field in _RANGES for m in self.meanings):
            letters.append("(N S)")
        if any(m.field in _TEXTS and m.leaf.rank == 1 and m.leaf.files == leaf.files for m in self.meanings):
            letters += ["K"] if identity.mode == "ids" else []
        bound = self._letters(leaf, identity)
        is_ragged = any(None in spot.dims for spot in leaf.spots)
        has_passes = is_ragged or any("sequences" in m.words or "generated" in m.words for m in self.meanings)
        return states_axes(leaf, letters, has_passes=has_passes and leaf.rank >= 3, bound=bound)

    def _letters(self, leaf: Leaf, identity: Identity) -> frozenset[str]:
        """Return the letters that names and items of a leaf bind."""
        address = self.places.address(leaf, identity, leaf) or ""
        found = {letter for name, letter in AXIS_NAMES.items() if f"{{{name}}}" in address or f"{name}=" in address}
        return frozenset(found | {letter for letter in "SKP" if f"[{letter}]" in address})

    # Other fields

    def _with_axes(self, states: Sequence[Meaning], identity: Identity, axes: Axes) -> Iterator[Draft]:
        frame = Frame(states[0].leaf, axes)
        choices, used = self._choices(states, identity, frame)
        verdicts = self._verdicts(identity, frame, used)
        lines = [[(choice.name, address) for address in choice.addresses] for choice in choices]
        meanings = [[(name, address) for name in names for address in addresses] for names, addresses, _ in verdicts]
        doubts = [m.verdict.name for _, _, m in verdicts if m.verdict is not None and m.verdict.is_doubtful]
        for chosen in itertools.product(*lines, *meanings):
            entries: dict[str, Any] = {}
            place = [self._line(m.leaf, identity, states[0].leaf, axes) for m in states]
            name = (
                "hidden_states"
                if "S" in [a[-1] for a in axes if a != "1"] or self._binds_tokens(states, identity) or "(N S)" in axes
                else "last_token"
            )
            if any(text is None for text in place):
                return
            entries[name] = place[0] if len(place) == 1 else place
            final = dict(chosen)
            for key, (text, found) in final.items():
                line = text + (f" -> {' '.join(found)}" if found else "")
                entries[key] = [entries[key], line] if key in entries and key in ("tokens",) else line
            for choice in choices:
                if choice.name == "tokens+":
                    entries["tokens"] = [entries["tokens"], entries.pop("tokens+")]
            self._add_class(entries, identity, states[0].leaf)
            draft = Draft(entries)
            draft.unproved += self._unproved(states, identity, frame, final, name)
            draft.unproved += [f"{doubt}: may be what a detector says, or words without a meaning" for doubt in doubts]
            self._add_ignored(draft, states, identity, {m.leaf.place for m in used})
            yield draft

    def _binds_tokens(self, states: Sequence[Meaning], identity: Identity) -> bool:
        return "S" in self._letters(states[0].leaf, identity)

    def _line(self, leaf: Leaf, identity: Identity, states: Leaf, axes: Axes) -> str | None:
        address = self.places.address(leaf, identity, states)
        return None if address is None else address + (f" -> {' '.join(axes)}" if axes else "")

    def _add_class(self, entries: dict[str, Any], identity: Identity, states: Leaf) -> None:
        """Add the class of the answer that a name binds."""
        if "{verdict}" in str(self.places.address(states, identity, states)):
            entries["is_correct"] = "={verdict}"

    def _choices(
        self, states: Sequence[Meaning], identity: Identity, frame: Frame
    ) -> tuple[list[Choice], list[Meaning]]:
        """Return the addresses of each field but the labels, and the leaves that have one."""
        choices: list[Choice] = []
        used = list(states)
        taken: set[str] = set()
        for meaning in sorted(self.meanings, key=lambda m: self._nearness(m, states)):
            name = meaning.field
            if meaning in used or name not in (*_TEXTS, *_ARRAYS, *_RANGES, "question_id", "sample", "prompt_length"):
                continue
            if name in taken and not (name == "tokens" and len(states) > 1 and "tokens+" not in taken):
                continue
            if name in ("sample",) or (name == "question_id" and not self._needs_id(meaning, identity)):
                continue
            addresses = self._addresses(meaning, name, identity, frame, states)
            if not addresses:
                continue
            if name in taken:
                name = "tokens+"
            taken.add(name)
            used.append(meaning)
            choices.append(Choice(meaning, name, addresses))
        names = {choice.name for choice in choices}
        if "tokens+" in names and [c.meaning.part for c in choices if c.name in ("tokens", "tokens+")] != [0, 1]:
            choices = [c for c in choices if c.name != "tokens+"]
        if len(states) > 1 and "tokens+" not in names:
            choices = [c for c in choices if c.name != "tokens"]
        if "prompt_length" in names and "tokens" not in names:  # rule 16
            choices = [c for c in choices if c.name != "prompt_length"]
        if "(N S)" not in frame.axes:
            drop = {"S.offsets", "S.starts", "S.ends"} | ({"S.lengths"} if "N" not in frame.axes else set())
            used = [m for m in used if m.field not in drop]
            choices = [c for c in choices if c.name not in drop]
        return choices, [m for m in used if m in states or any(c.meaning is m for c in choices)]

    def _nearness(self, meaning: Meaning, states: Sequence[Meaning]) -> tuple[int, int, int]:
        """Return the order in which leaves are taken for a field: those beside the states first."""
        leaf, own = meaning.leaf, states[0].leaf
        is_near = leaf.files == own.files
        return (meaning.part or 0 if len(states) > 1 else 0, 0 if is_near else 1, -meaning.rank_of_word)

    def _needs_id(self, meaning: Meaning, identity: Identity) -> bool:
        if identity.id_leaf is not None:
            return meaning.leaf is identity.id_leaf
        return identity.mode in ("stack", "rows")

    def _addresses(
        self, meaning: Meaning, name: str, identity: Identity, frame: Frame, states: Sequence[Meaning]
    ) -> list[tuple[str, Axes]]:
        leaf = meaning.leaf
        if not self._is_joined(leaf, identity, frame, name):
            return []
        text = self.places.address(leaf, identity, states[0].leaf)
        if text is None:
            return []
        if name == "S.offsets":
            return [(text, ())]
        if identity.mode == "rows" and leaf.rank == 1 and not leaf.items_at and name not in _ARRAYS:
            return [(text, ("N",))]  # a value for each row of the states
        bound = frozenset(self._letters(leaf, identity))
        is_stacked = self._is_stacked(leaf, identity) and name != "L.ids"
        kind = name if name in _ARRAYS else "scalar"
        found = fitting(leaf, kind, frame, is_stacked=is_stacked, bound=bound)
        if kind == "tokens" and ("P" in frame.axes or not found):
            found = fitting(leaf, "sequences", frame, is_stacked=is_stacked, bound=bound)
        if kind == "scalar" and is_stacked and "N" in " ".join(frame.axes) and leaf.rank == 1 and not found:
            found = [("N",)] if "(N S)" in frame.axes else []
        return [(text, axes) for axes in found]

    def _is_stacked(self, leaf: Leaf, identity: Identity) -> bool:
        """Return whether N is an axis of a leaf, not its items."""
        steps = [identity.items.get((leaf.files, leaf.path[: k + 1]), "[]") for k in leaf.items_at]
        return "[]" not in steps and identity.mode == "stack"

    def _is_joined(self, leaf: Leaf, identity: Identity, frame: Frame, name: str) -> bool:
        """Return whether a leaf says something of each trace: it binds what tells traces apart, or has an axis for it."""
        states = frame.leaf
        if name == "L.ids" and not leaf.items_at:
            return True
        if leaf.files == states.files:
            own = [p for p in self._binders(states) if p[1]]
            inner = [p for p in self._binders(leaf) if p[1]]
            if inner[: len(own)] == own or all(p in inner for p in own):
                return leaf.rank > 0 or identity.mode != "stack" or bool(leaf.items_at)
            if not inner and identity.mode == "ids" and own:
                return False
        if identity.mode == "stack":
            return leaf.rank > 0 or bool(leaf.items_at)
        if identity.mode == "rows":
            return leaf.rank == 1 or bool(leaf.items_at)
        return bool(leaf.items_at) or bool(bound_names(leaf) - set(AXIS_NAMES))

    def _binders(self, leaf: Leaf) -> list[tuple[str, tuple[str, ...]]]:
        """Return the places at which items and names of a leaf tell traces apart."""
        found = [(leaf.files, leaf.path[: k + 1]) for k in leaf.items_at]
        for k in range(1, len(leaf.path) + 1):
            family = self.observation.families.get((leaf.files, leaf.path[:k]))
            if family is not None and "{" in leaf.path[k - 1] and set(family.names) - set(AXIS_NAMES):
                found.append((leaf.files, leaf.path[:k]))
        return sorted(found, key=lambda p: len(p[1]))

    # Labels

    def _verdicts(
        self, identity: Identity, frame: Frame, used: list[Meaning]
    ) -> list[tuple[list[str], list[tuple[str, Axes]], Meaning]]:
        """Return the fields that labels and scores may be, with their addresses."""
        found = []
        names: set[str] = set()
        proof = self._proved_way()
        for meaning in self.meanings:
            verdict = meaning.verdict
            if verdict is None:
                continue
            addresses = self._addresses(meaning, "scalar", identity, frame, [Meaning(frame.leaf)])
            fields = [name for name in verdict.fields() if name not in names]
            if meaning.leaf.place in proof:
                fields = [f for f in fields if f == proof[meaning.leaf.place]]
            if not addresses or not fields:
                continue
            names.update(fields)
            used.append(meaning)
            found.append((fields, addresses, meaning))
        return found

    def _proved_way(self) -> dict[Any, str]:
        """Return the field of vague labels that words beside them or names of classes prove (rule 22)."""
        found: dict[Any, str] = {}
        for meaning in self.meanings:
            verdict = meaning.verdict
            if verdict is None or len(verdict.fields()) < 2 or not verdict.is_label:
                continue
            field = self._of_classes(meaning) or self._agreeing(meaning)
            if field is not None:
                found[meaning.leaf.place] = field
        return found

    def _of_classes(self, meaning: Meaning) -> str | None:
        """Return the field that the names of the classes of a column say, as the metadata of a data set has them."""
        leaf = meaning.leaf
        for other in self.meanings:
            if other.leaf.files != leaf.files or other.leaf.path != ("@huggingface",) or not leaf.path:
                continue
            with contextlib.suppress(ValueError, LookupError, TypeError, InvalidInputError):
                feature = json.loads(other.leaf.spots[0].value)["info"]["features"][leaf.path[-1]]
                ways = [label_value(name, "", CORRECT, {}) for name in feature["names"]]
                return {(0.0, 1.0): "is_correct", (1.0, 0.0): "is_hallucinated"}.get(tuple(ways))
        return None

    def _agreeing(self, meaning: Meaning) -> str | None:
        """Return the field under which a label agrees with a column of words in every row."""
        leaf = meaning.leaf
        for other in self.meanings:
            words = other.verdict
            is_beside = other.leaf.files == leaf.files and other.leaf.path[:-1] == leaf.path[:-1]
            if words is None or other is meaning or not is_beside or len(words.fields()) > 1 or other.leaf.kind != "s":
                continue
            values, texts = scalars(leaf), [str(text).casefold() for text in scalars(other.leaf)]
            if len(values) != len(texts) or len(set(texts)) < 2:
                continue
            is_right = [text in ("correct", "right", "truthful", "faithful", "not hallucinated") for text in texts]
            if all(float(v) == float(right) for v, right in zip(values, is_right, strict=True)):
                return "is_correct"
            if all(float(v) == float(not right) for v, right in zip(values, is_right, strict=True)):
                return "is_hallucinated"
        return None

    # Proofs

    def _unproved(
        self, states: Sequence[Meaning], identity: Identity, frame: Frame, final: dict[str, Any], name: str
    ) -> list[str]:
        """Return what rules 15 to 23 do not prove."""
        found = [*identity.doubts]
        leaf, axes = frame.leaf, frame.axes
        if identity.mode == "stack" and not {"N", "(N S)"} & set(axes) and len(self.observation.files[leaf.files]) > 1:
            found.append("the names of the files are no ids")
        words = {word for meaning in states for word in meaning.words}
        if not states[0].field:
            found.append("no word says that these are hidden states")
        if "L" in axes and not ({"attentions", "L.ids"} & set(final) or {"wise", "all"} & words):
            found.append("L: only the extent says which axis the layers are")
        said = "P" in axes or any(m.field == "tokens" and "sequences" in m.words for m in self.meanings)
        if "T" in final.get("tokens", ("", ()))[1] and not said:
            found.append("tokens: one id more than states (rule 3)")
        if "L" in axes and "attentions" in final and "L" not in final["attentions"][1]:
            found.append("L: the attention has no layers")
        if "N" in axes or "(N S)" in axes:
            if not any(key in final for key in _PROOFS_OF_N):
                found.append("N: no ids, questions, answers or lengths say how many traces there are")
            if "S" in axes and not {"S.mask", "S.lengths"} & set(final) and None not in frame.num_tokens:
                found.append("S: nothing says whether tokens are padding")
        if name == "last_token":
            if states[0].field != "last_token":
                found.append("no word says that the vectors are those of the last token")
        elif not self._proves_tokens(identity, frame, final, words):
            found.append("S: no tokens, mask or lengths say which axis the tokens are")
        found += self._doubtful_texts(final, frame)
        if len(states) > 1:
            found.append("the states of prompt and answer may be no parts of one text")
        if identity.mode == "rows" and any("[]" in text for text, _ in final.values()):
            found += self._order_of_rows(final, leaf)
        return found

    def _doubtful_texts(self, final: dict[str, Any], frame: Frame) -> list[str]:
        """Return the texts that may be others, and a length of the prompt that may count padding."""
        found = []
        for name in _TEXTS:
            same = [m for m in self.meanings if m.field == name and m.leaf.kind == "s"]
            keys = {"_".join(words_of(m.leaf.key)) for m in same} - {name}
            if name in final and len(same) > 1 and len(keys) == len(same):
                found.append(f"{name}: several texts may be it: {', '.join(sorted(keys))}")
            elif name in final and keys & _VAGUE_TEXTS:
                found.append(f"{name}: a text of this name may be another one: {', '.join(sorted(keys))}")
        if "prompt_length" in final and {"S.mask", "S.lengths"} & set(final):
            found.append("prompt_length: it may count padding")
        return found

    def _order_of_rows(self, final: dict[str, Any], leaf: Leaf) -> list[str]:
        own = leaf.files
        other = sorted(key for key, (text, _) in final.items() if not text.startswith(own))
        return [f"{', '.join(other)}: joined in order"] if other else []

    def _proves_tokens(self, identity: Identity, frame: Frame, final: dict[str, Any], words: set[str]) -> bool:
        """Rule 16: S is proved by tokens, a mask, lengths, or as the one axis that varies."""
        axes = frame.axes
        if {"tokens", "tokens_decoded", "S.mask", "attentions"} & set(final) and "(N S)" not in axes:
            return True
        if "(N S)" in axes:
            return bool(set(_RANGES) & set(final))
        if "S.lengths" in final and "N" in axes:
            return True
        if "P" in axes:
            return False
        if "S" not in axes:
            address = self.places.address(frame.leaf, identity, frame.leaf) or ""
            return "[S]" not in address and "[P]" not in address  # names bind tokens
        varies = len({size for size in frame.num_tokens if size is not None}) > 1
        return identity.mode == "ids" and varies and not words & _SENTENCES and self._is_short(frame)

    def _is_short(self, frame: Frame) -> bool:
        """Return whether there are at most as many tokens as characters of the texts of a trace."""
        for meaning in self.meanings:
            if meaning.field not in _TEXTS or meaning.leaf.rank or meaning.leaf.files != frame.leaf.files:
                continue
            for spot in meaning.leaf.spots:
                others = sum(
                    len(str(o.value))
                    for m in self.meanings
                    if m.field in _TEXTS and not m.leaf.rank
                    for o in m.leaf.spots
                    if o.where == spot.where and o.value is not None
                )
                if any((sizes.get("S") or 0) > max(others, 1) for sizes in frame.beside(meaning.leaf, spot)):
                    return False
        return True

    # What is left over

    def _add_ignored(self, draft: Draft, states: Sequence[Meaning], identity: Identity, used: set[Any]) -> None:
        """Ignore what no field takes; what nothing explains is left out."""
        ignored: dict[str, list[Meaning]] = {}
        for meaning in self.meanings:
            leaf = meaning.leaf
            if leaf.place in used or self._is_key(leaf, identity):
                continue
            paths = [path for files, path in used if files == leaf.files]
            if not paths:
                ignored.setdefault(leaf.files, []).append(meaning)
                continue
            size = (
                next(k for k in range(1, len(leaf.path) + 2) if not any(p[:k] == leaf.path[:k] for p in paths))
                if leaf.path not in paths
                else len(leaf.path)
            )
            prefix = leaf.path[: min(size, len(leaf.path))]
            holds_array = leaf.rank > 0 and leaf.kind in "fibv"
            is_own = looks_like_label(prefix[-1]) if prefix else False
            if not holds_array and not (is_own and len(prefix) == len(leaf.path)):
                if leaf.rank and not meaning.reason:
                    draft.left_out.append(str(leaf))
                continue
            address = self.places.address(Leaf(leaf.files, prefix, "", 0), identity, states[0].leaf)
            if address is None:
                draft.left_out.append(str(leaf))
                continue
            ignored.setdefault(address, []).append(meaning)
        lines = []
        for address, meanings in ignored.items():
            lines.append(address)
            reason = self._reason(address, meanings)
            (draft.reasons if reason else draft.left_out).append(f"{address}{f': {reason}' if reason else ''}")
        claimed = {files for files, _ in used}
        for files in self.observation.files:
            if files not in claimed and files not in ignored:
                lines.append(files)
                draft.left_out.append(files)
        draft.left_out += [f"{name}: {why}" for name, why in self.observation.unread.items()]
        if lines:
            draft.entries["ignore"] = list(dict.fromkeys(lines))

    def _is_key(self, leaf: Leaf, identity: Identity) -> bool:
        """Return whether items bind a leaf."""
        for k in leaf.items_at:
            text = identity.items.get((leaf.files, leaf.path[: k + 1]), "")
            relative = "/".join(leaf.path[k + 1 :])
            if any(pair.strip().endswith(f"={relative}") for pair in text[1:-1].split(",")):
                return True
        return False

    def _reason(self, address: str, meanings: Sequence[Meaning]) -> str:
        """Return why nothing needs what an address names, "" if nothing says so."""
        reasons = {meaning.reason for meaning in meanings if meaning.leaf.rank and meaning.leaf.kind in "fibv"}
        if reasons and "" not in reasons:
            return sorted(reasons)[0]
        is_file = " : " not in address
        words = set(words_of(address.rpartition("/")[2].partition(".")[0]))
        is_plain = all(m.leaf.rank <= 1 and m.verdict is None and m.field != "question_id" for m in meanings)
        return "settings" if is_file and is_plain and words & _SETTINGS else ""


def _other_words(meaning: Meaning) -> frozenset[str]:
    parts = {"prompt", "question", "input", "answer", "response", "gen", "generated", "completion", "output"}
    return frozenset(words_of(meaning.leaf.key)) - parts
