"""Proofs: what of a draft rules 15 to 23 do not support, in words."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tracestore.ingest.layout.fields import PROMPT_MASK
from tracestore.ingest.propose.identities import Identity, Places
from tracestore.ingest.propose.leaves import NUMBERS, Leaf, Spot
from tracestore.ingest.propose.meanings import Meaning, contradictions
from tracestore.ingest.propose.names import NUMBERS_OF_NAMES, without_names, words_of
from tracestore.ingest.propose.orders import Axes, Frame
from tracestore.store.format import schema
from tracestore.store.vocabulary import COUNTED, SAYING, score_of_word

TEXTS = ("question", "generated_answer", "generated_answer_clean", "generated_text")
ARRAYS = ("attentions", "tokens", "tokens_decoded", "S.mask", PROMPT_MASK, "L.ids", *schema.PER_TOKEN_FIELDS)
RANGES = ("S.offsets", "S.lengths", "S.starts", "S.ends")
PROOFS_OF_S = frozenset(("tokens", "tokens_decoded", "attentions", "S.mask", *RANGES))
_ANSWERS = frozenset(("generated_answer", "generated_answer_clean"))
# Names of the states of all layers: no heads, parts of a layer or kinds of embeddings have them.
_ALL_LAYERS = frozenset(
    ("hidden", "states", "hidden_states", "all_hidden_states", "layer_hidden_states", "decoder_hidden_states")
)
# What a mask proves whose rows differ and leave whole rows of attention.
NUMBER_OF_TRACES = "N: no ids, questions, answers or lengths give the number of traces"
OF_TEXT = "prompt_length: it may count characters or words, or the tokens of the question alone"
TEXT_COUNTS: tuple[Callable[[str], int], ...] = (len, lambda text: len(text.split()))
_GENERATION = re.compile(r"gen(eration)?[_\-.=]?\{sample\}", re.IGNORECASE)
_PIECES = re.compile(" : |/")
_GENERATED = SAYING["generated"] | SAYING["generated ids"]
# What masks and lengths prove of stacks, and of single traces that look padded.
PADDING = "S: nothing tells tokens from padding"
# What passes of generation prove: one of several tokens, then of one token each, as many as the answer has.
PASSES = "S: nothing tells passes of generation from parts of a text"


class Line(NamedTuple):
    """A line of a layout: the address of a field, and the axes of its values."""

    address: str
    axes: Axes

    @property
    def text(self) -> str:
        """The line in the language of layouts."""
        return self.address + (f" -> {' '.join(self.axes)}" if self.axes else "")


@dataclass(frozen=True)
class Case:
    """A draft, and what was observed: the proofs of its ids, axes and labels.

    Parameters
    ----------
    places : Places
    states : Meaning
    identity : Identity
    frame : Frame
    lines : Mapping
        The lines of the other fields.
    name : str
        The field of the states.
    """

    places: Places
    states: Meaning
    identity: Identity
    frame: Frame
    lines: Mapping[str, Line]
    name: str

    def unproved(self) -> list[str]:
        """Return what is not proved."""
        known = (NUMBERS, NUMBERS_OF_NAMES) if self._are_all_layers else ()
        doubts = [doubt for doubt in self.identity.doubts if doubt not in known]
        axes = [*self._of_layers(), *self._of_words(), *self._of_axes()]
        return [*doubts, *self._of_files(), *self._of_names(), *axes, *self._of_values()]

    def _has(self, *names: str) -> bool:
        return any(name in self.lines for name in names)

    def _words(self, name: str) -> set[str]:
        """Return the words of the last key of the address of a field."""
        return set(words_of(self.lines[name].address.rpartition(" : ")[2].rpartition("/")[2]))

    @cached_property
    def _address(self) -> str:
        """The address of the states."""
        return self.places.address(self.frame.leaf, self.identity, self.frame.leaf) or ""

    @cached_property
    def _others(self) -> list[str]:
        """The fields of other files."""
        files = self.frame.leaf.files
        return sorted(name for name, line in self.lines.items() if not line.address.startswith(files))

    @property
    def _is_stacked(self) -> bool:
        return not {"N", "(N S)"}.isdisjoint(self.frame.axes)

    @cached_property
    def _is_one_text(self) -> bool:
        """Return whether each trace has one row of tokens, one length or one answer, and no list of texts."""
        is_one = self._has("tokens", "tokens_decoded", "S.mask", *(RANGES if self._is_stacked else ()))
        if self.identity.mode == "stack":
            return is_one or (self._has(*_ANSWERS) and self._has("question_id"))
        is_one |= self.identity.mode == "ids" and self._has(*_ANSWERS)
        has_lists = self.identity.mode == "ids" and any(m.field in TEXTS and m.leaf.rank for m in self.places.meanings)
        return is_one and not has_lists

    @cached_property
    def _are_all_layers(self) -> bool:
        """Return whether an axis next to the tokens of states, or numbers of keys, can be none but those of the layers.

        The states have the name that transformers gives to those of all layers, and each trace has an id or a text of
        its own, and one row of tokens, one length or one answer: several answers to a question would have several. A
        batch of last layers has no such row, and `last_hidden_state` is another name.
        """
        name = "_".join(word for word in words_of(self.states.leaf.key) if COUNTED.get(word) != "chunk")
        has_ids = self.identity.mode == "ids" or self._has("question_id", *TEXTS) or "(N S)" in self.frame.axes
        has_samples = any(text in self._address for text in ("{sample}", "sample=", "[K]"))
        words = self.states.words - (SAYING["answers"] if has_samples else set())
        words -= self.places.words_of_traces(self.frame.leaf, self.identity)
        name += "s" * (name == "hidden_state" and "layer" in self.frame.leaf.bound)
        # Answers have different numbers of tokens; arrays that a number in their name tells apart have one in each trace.
        is_named = bool(words_of(without_names((self.frame.leaf.files, *self.frame.leaf.path)[-1])))
        is_numbered = is_named and "layer" in self.frame.leaf.bound and len(self.frame.num_tokens - {None}) > 1
        return name in _ALL_LAYERS and has_ids and (self._is_one_text or is_numbered) and not words & SAYING["several"]

    def _of_files(self) -> Iterator[str]:
        """Yield what the names of files leave open: the id of a trace, a row that is its own, the class of answers."""
        files = self.frame.leaf.files
        if self.identity.mode == "stack" and not self._is_stacked:
            if len(self.places.observation.files[files]) > 1:
                yield "the names of the files are no ids"
            elif any(" : []" in self.lines[name].address for name in self._others):
                yield f"{', '.join(self._others)}: nothing but the number 1 joins a row to the file"
        says_class = any(score_of_word(word, None) is not None for word in words_of(without_names(files)))
        if says_class and "{verdict}" not in files and not self._has("is_correct", "is_hallucinated"):
            yield "a name may say the class of the answers"
        if self.identity.mode == "rows" and self._others:
            yield f"{', '.join(self._others)}: joined in order"
        # Answers have a text each, steps of generation one token.
        has_answers = any("{sample}" in self.lines[name].address for name in _ANSWERS & self.lines.keys())
        if _GENERATION.search(self._address) and (not has_answers or 1 in self.frame.num_tokens):
            yield "sample: the numbers may be those of steps or parts of a text"

    def _of_names(self) -> Iterator[str]:
        """Yield what the words of the states leave open (rule 21)."""
        if not self.states.field:
            yield "no word says that these are hidden states"
            return
        if self.name == "last_token" and self.states.field != "last_token":
            yield "no word says that the vectors are those of the last token"
        own = self.frame.leaf
        leaves = [leaf for leaf in self.places.observation.leaves if (leaf.files, leaf.rank) == (own.files, own.rank)]
        halves = [{"residual", "hidden"} & set(words_of(leaf.key)) for leaf in leaves]
        if {"residual"} in halves and {"hidden"} in halves:
            yield "a residual next to hidden states: of two halves, as layers of vLLM return, the sum is the state"

    def _of_layers(self) -> Iterator[str]:
        """Rule 18: L is proved by numbers of layers, or attention of as many."""
        if "L" not in self.frame.axes or self._are_all_layers:
            return
        if self._has("attentions") and "L" not in self.lines["attentions"].axes:
            yield "L: the attention has no layers"
        elif not (self._has("attentions", "L.ids") or self.places.is_output(self.frame.leaf, self.frame.axes)):
            yield "L: the extent alone gives the axis of the layers"

    def _of_words(self) -> Iterator[str]:
        """Yield what words leave open: whose state an id is of, and whether weights are those of heads."""
        if self._may_be_moved():
            yield "tokens: a state may belong to the token before the one that it generated"
        are_heads = self._has("attentions") and self.lines["attentions"].axes[-3:-2] == ("L",)
        if are_heads and not SAYING["averaged"] & self._words("attentions"):
            yield "attentions: no word says that heads are averaged: L may be the heads of one layer"

    def _may_be_moved(self) -> bool:
        """Return whether ids may be one behind their states: those of passes of one token, or under names of answers."""
        ids = [self.lines[name] for name in ("tokens", "tokens_decoded") if name in self.lines]
        axes = self.frame.axes
        if self.frame.has_passes:
            is_one = "P" not in axes and self.frame.num_tokens <= {1, None}
            return is_one and any("T" not in line.axes for line in ids)
        shared = _PIECES.split(self._address)
        paths = [_PIECES.split(line.address) for line in ids]
        names = [set(words_of(without_names(p))) for path in paths for p in path if p not in shared or p == path[-1]]
        # A list of tokens, each of layers or batches, has arrays (1, D), as generate() returns them.
        are_passes = bool(ids) and {"S", "D"} <= set(axes) and axes.index("D") > axes.index("S") + 2
        return are_passes or any(words & _GENERATED and not words & {"input", "prompt"} for words in names)

    def _of_axes(self) -> Iterator[str]:
        """Yield what is not proved of N, S and T.

        N is proved by ids, texts or lengths (rule 15); S by tokens, a mask, lengths, or as the one axis that varies (rule
        16), and in a stack by a mask or lengths (rule 17); T by passes (rule 3).
        """
        if set("".join(self.frame.axes).partition("D")[2]) - {"1"} and not self._has("L.ids"):
            yield "D: an axis behind it may be the columns of reduced states"
        if self._is_stacked:
            if not self._has("question_id", *TEXTS, "S.lengths", "S.offsets"):
                yield NUMBER_OF_TRACES
            if "S" in self.frame.axes and not self._has("S.mask", "S.lengths") and None not in self.frame.num_tokens:
                yield PADDING
        if self._has("tokens") and "T" in self.lines["tokens"].axes and not self.frame.has_passes:
            yield "tokens: one id more than states: -> T says that the last token has none, with T.skip = 1 the first one"
        if self.name == "hidden_states" and not self._proves_tokens():
            are_steps = "step" in self.frame.leaf.bound and self.identity.mode == "ids" and self._is_one_text
            are_passes = are_steps or (self._are_all_layers and self.frame.has_passes)
            yield PASSES if are_passes else "S: no tokens, mask or lengths give the axis of the tokens"

    def _proves_tokens(self) -> bool:
        axes = self.frame.axes
        if "(N S)" in axes:
            return self._has(*RANGES)
        # States (L, S, D) of an answer have as many layers as its text has tokens, if all texts have one length.
        is_turned = [axis for axis in axes if axis in "LS"] == ["S", "L"] and not self._has("L.ids")
        is_of_layers = is_turned and len(self.frame.num_tokens) == 1 and None not in self.frame.num_tokens
        texts = () if is_of_layers else ("tokens", "tokens_decoded")
        if self._has("S.mask", "attentions", *texts) or (self._has("S.lengths") and "N" in axes):
            return True
        if "P" in axes:
            return False
        if "S" not in axes:
            return "[S]" not in self._address and "[P]" not in self._address  # names bind tokens
        sizes = self.frame.num_tokens
        varies = self.identity.mode == "ids" and len(sizes - {None}) > 1
        varies |= self.identity.mode == "stack" and self._has("question_id") and None in sizes
        return varies and not self.states.words & SAYING["parts of a text"] and self._is_short()

    def _is_short(self) -> bool:
        """Return whether there are at most as many tokens as characters of the texts of a trace."""
        texts = [m.leaf for m in self.places.meanings if m.field in TEXTS and not m.leaf.rank]
        own = [(leaf, spot) for leaf in texts for spot in leaf.spots if leaf.files == self.frame.leaf.files]
        return not any(
            (sizes.get("S") or 0) > _num_characters(texts, spot)
            for leaf, spot in own
            for sizes in self.frame.matching(leaf, spot)
        )

    def _texts(self, name: str) -> list[Meaning]:
        """Return the texts that may be a field; an attribute of a whole file is none."""
        found = [m for m in self.places.meanings if m.field == name and m.leaf.kind == "s"]
        return [m for m in found if m.leaf.bound or not m.leaf.path or m.leaf.path[0][:1] != "@"]

    def _of_values(self) -> Iterator[str]:
        """Yield the texts, lengths, labels and scores that may be others."""
        for name in TEXTS:
            same = self._texts(name)
            keys = {"_".join(words_of(m.leaf.key)) for m in same} - {name}
            if self._has(name) and (keys & SAYING["vague texts"] or (len(same) > 1 and len(keys) == len(same))):
                yield f"{name}: another text may be meant: {', '.join(sorted(keys))}"
        if self._has("tokens") and self._words("tokens") == {"ids"}:
            yield "tokens: ids may be other ones than those of tokens"
        if self._has("prompt_length"):
            yield from self._of_prompts()
        yield from self._of_numbers()
        scores = sorted(name for name in self.lines if name.startswith(("correctness.", "hallucination.")))
        if len(scores) > 1:
            yield f"{', '.join(scores)}: no word tells which score counts"
        for name in self.lines:
            same = [m for m in self.places.meanings if m.verdicts == (name,)]
            yield from contradictions(name, [self.places.with_ids(m.leaf, self.identity) for m in same])
        doubtful = [m.leaf.key for m in self.places.meanings if m.is_doubtful]
        yield from (f"{key}: may be what a detector says, or words without a meaning" for key in doubtful)

    def _of_numbers(self) -> Iterator[str]:
        """Yield the numbers of answers that differ in all rows, as ids do."""
        line = self.lines["sample"].address if self._has("sample") else None
        for leaf in (m.leaf for m in self.places.meanings if m.field == "question_id"):
            address = self.places.address(leaf, self.identity, self.frame.leaf) or ""
            is_number = address == line or f"sample={leaf.key}]" in address
            if is_number and len(set(leaf.scalars)) == len(leaf.scalars):
                yield f"{leaf}: may be the id"

    def _of_prompts(self) -> Iterator[str]:
        """Yield what else a prompt_length may count; the name may say the question, or its values those of texts."""
        words = self._words("prompt_length")
        lengths = [m.leaf.scalars for m in self.places.meanings if m.field == "prompt_length"]
        texts = [m.leaf.scalars for m in self.places.meanings if m.field == "question"]
        counts = [[count(str(text)) for text in values] for values in texts for count in TEXT_COUNTS]
        doubts = {
            # The reading compares the lengths of prompts and of single traces.
            "prompt_length: it may count padding": self._has("S.mask", *["S.lengths"] * self._is_stacked),
            "prompt_length: the length of a context may be that of a window or of a document": "context" in words,
            OF_TEXT: "question" in words or any([int(value) for value in values] in counts for values in lengths),
            "prompt_length: it may be the number of the prompt, or of prompts": words <= {"n", "num", "prompt"},
            "prompt_length: it may be a place in the text of the answer": "start" in words,
        }
        yield from (text for text, is_open in doubts.items() if is_open)


def _num_characters(texts: list[Leaf], spot: Spot) -> int:
    """Return how many characters the texts of a trace have."""
    same = [other for leaf in texts for other in leaf.spots if other.where == spot.where and other.value is not None]
    return max(sum(len(str(one.value)) for one in same), 1)
