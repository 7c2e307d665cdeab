"""Proofs: what of a draft rules 15 to 23 do not support, in words."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tracestore.ingest.propose.identities import Identity, Places
from tracestore.ingest.propose.leaves import NUMBERS, Observation, without_names
from tracestore.ingest.propose.meanings import Meaning
from tracestore.ingest.propose.names import words_of
from tracestore.ingest.propose.orders import Axes, Frame
from tracestore.store.vocabulary import COUNTED, SAYING, score_of_word

TEXTS = ("question", "generated_answer", "generated_answer_clean", "generated_text")
ARRAYS = ("attentions", "tokens", "tokens_decoded", "S.mask", "L.ids")
RANGES = ("S.offsets", "S.lengths", "S.starts", "S.ends")
PROOFS_OF_S = frozenset(("tokens", "tokens_decoded", "attentions", "S.mask", *RANGES))
_PROOFS_OF_N = frozenset(("question_id", *TEXTS, "S.lengths", "S.offsets"))
_ANSWERS = frozenset(("generated_answer", "generated_answer_clean"))
_LENGTHS = frozenset((*RANGES, "S.mask"))
# Names of the states of all layers: no heads, parts of a layer or kinds of embeddings have them.
_ALL_LAYERS = frozenset(
    ("hidden", "hidden_states", "all_hidden_states", "layer_hidden_states", "decoder_hidden_states")
)
# What a mask proves whose rows differ and leave whole rows of attention.
NUMBER_OF_TRACES = "N: no ids, questions, answers or lengths give the number of traces"
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


class Proofs:
    """The proofs that an observation has for drafts.

    Parameters
    ----------
    observation : Observation
    meanings : list of Meaning
    places : Places
    """

    def __init__(self, observation: Observation, meanings: list[Meaning], places: Places) -> None:
        self._observation, self._meanings, self._places = observation, meanings, places

    def unproved(
        self, states: Sequence[Meaning], identity: Identity, frame: Frame, lines: Mapping[str, Line], name: str
    ) -> list[str]:
        """Return what is not proved.

        Parameters
        ----------
        states : sequence of Meaning
        identity : Identity
        frame : Frame
        lines : Mapping
            The lines of the other fields.
        name : str
            The field of the states.
        """
        are_all_layers = self._are_all_layers(states, identity, frame, lines)
        found = [doubt for doubt in identity.doubts if doubt != NUMBERS or not are_all_layers]
        others = sorted(name for name, line in lines.items() if not line.address.startswith(frame.leaf.files))
        found += self._of_files(identity, frame, lines, others)
        if not states[0].field:
            found.append("no word says that these are hidden states")
        if len(states) > 1:
            found.append("the states of prompt and answer may be no parts of one text")
        if not are_all_layers:
            found += self._of_layers(states, frame, lines)
        found += self._of_traces(frame, lines)
        if name == "hidden_states" and not self._proves_tokens(states, identity, frame, lines):
            found.append(self._of_tokens(identity, frame, lines, are_all_layers=are_all_layers))
        if name == "last_token" and states[0].field != "last_token":
            found.append("no word says that the vectors are those of the last token")
        found += self._of_texts(lines)
        if identity.mode == "rows" and others:
            found.append(f"{', '.join(others)}: joined in order")
        scores = sorted(k for k in lines if k.startswith(("correctness.", "hallucination.")))
        if len(scores) > 1:
            found.append(f"{', '.join(scores)}: no word tells which score counts")
        for meaning in self._meanings:
            if meaning.verdict is not None and meaning.verdict.is_doubtful:
                found.append(f"{meaning.leaf.key}: may be what a detector says, or words without a meaning")
        return found

    def _of_tokens(self, identity: Identity, frame: Frame, lines: Mapping[str, Line], *, are_all_layers: bool) -> str:
        """Return what is not proved of S: passes, or any axis."""
        are_steps = "step" in frame.leaf.bound and identity.mode == "ids" and self._is_one_text(identity, lines)
        return (
            PASSES
            if are_steps or (are_all_layers and frame.has_passes)
            else "S: no tokens, mask or lengths give the axis of the tokens"
        )

    def _of_files(
        self, identity: Identity, frame: Frame, lines: Mapping[str, Line], others: Sequence[str]
    ) -> list[str]:
        """Return what the names of files leave open: the id of a trace, a row that is its own, the class of answers."""
        found = []
        if identity.mode == "stack" and not {"N", "(N S)"} & set(frame.axes):
            if len(self._observation.files[frame.leaf.files]) > 1:
                found.append("the names of the files are no ids")
            elif any(" : []" in lines[name].address for name in others):
                found.append(f"{', '.join(others)}: nothing but the number 1 joins a row to the file")
        says_class = any(score_of_word(word, None) is not None for word in words_of(without_names(frame.leaf.files)))
        if says_class and not {"is_correct", "is_hallucinated"} & lines.keys():
            found.append("a name may say the class of the answers")
        return found

    def _of_layers(self, states: Sequence[Meaning], frame: Frame, lines: Mapping[str, Line]) -> list[str]:
        """Rule 18: L is proved by numbers of layers, or attention of as many."""
        if "L" not in frame.axes:
            return []
        if "attentions" in lines and "L" not in lines["attentions"].axes:
            return ["L: the attention has no layers"]
        words = {word for meaning in states for word in meaning.words}
        if {"attentions", "L.ids"} & lines.keys() or {"layer", "wise"} <= words or {"all", "layers"} <= words:
            return []
        if self._places.is_output(frame.leaf, frame.axes):
            return []
        return ["L: the extent alone gives the axis of the layers"]

    def _are_all_layers(
        self, states: Sequence[Meaning], identity: Identity, frame: Frame, lines: Mapping[str, Line]
    ) -> bool:
        """Return whether an axis next to the tokens of states, or numbers of keys, can be none but those of the layers.

        The states have the name that transformers gives to those of all layers, and each trace has an id or a text of
        its own, and one row of tokens, one length or one answer: several answers to a question would have several. A
        batch of last layers has no such row, and `last_hidden_state` is another name.
        """
        names = [[w for w in words_of(m.leaf.key) if COUNTED.get(w) != "chunk"] for m in states]
        is_named = all("_".join(name) in _ALL_LAYERS for name in names)
        has_ids = identity.mode == "ids" or bool({"question_id", *TEXTS} & lines.keys()) or "(N S)" in frame.axes
        address = self._places.address(frame.leaf, identity, frame.leaf) or ""
        has_samples = "{sample}" in address or "sample=" in address or "[K]" in address
        words = {word for meaning in states for word in meaning.words} - (SAYING["answers"] if has_samples else set())
        words -= self._places.words_of_traces(frame.leaf, identity)
        return is_named and has_ids and self._is_one_text(identity, lines) and not words & SAYING["several"]

    def _is_one_text(self, identity: Identity, lines: Mapping[str, Line]) -> bool:
        """Return whether each trace has one row of tokens, one length or one answer, and no list of texts."""
        is_one = bool({"tokens", "tokens_decoded", *_LENGTHS} & lines.keys())
        if identity.mode == "stack":
            return is_one or bool(_ANSWERS & lines.keys() and "question_id" in lines)
        has_lists = any(m.field in TEXTS and m.leaf.rank and identity.mode == "ids" for m in self._meanings)
        return (is_one or (identity.mode == "ids" and bool(_ANSWERS & lines.keys()))) and not has_lists

    def _of_traces(self, frame: Frame, lines: Mapping[str, Line]) -> list[str]:
        """Return what is not proved of N and T. N is proved by ids, texts or lengths; the tokens of a stack by a mask or lengths. Rule 3: T."""
        found = []
        if {"N", "(N S)"} & set(frame.axes):
            if not _PROOFS_OF_N & lines.keys():
                found.append(NUMBER_OF_TRACES)
            if "S" in frame.axes and not {"S.mask", "S.lengths"} & lines.keys() and None not in frame.num_tokens:
                found.append("S: nothing tells tokens from padding")
        is_said = frame.has_passes or any(m.field == "tokens" and "sequences" in m.words for m in self._meanings)
        if "tokens" in lines and "T" in lines["tokens"].axes and not is_said:
            found.append("tokens: one id more than states")
        return found

    def _of_texts(self, lines: Mapping[str, Line]) -> list[str]:
        """Return the texts that may be others, and a length of the prompt that may count padding."""
        found = []
        for name in TEXTS:
            same = [m for m in self._meanings if m.field == name and m.leaf.kind == "s"]
            keys = {"_".join(words_of(m.leaf.key)) for m in same} - {name}
            if name in lines and (keys & SAYING["vague texts"] or (len(same) > 1 and len(keys) == len(same))):
                found.append(f"{name}: another text may be meant: {', '.join(sorted(keys))}")
        if "prompt_length" in lines and {"S.mask", "S.lengths"} & lines.keys():
            found.append("prompt_length: it may count padding")
        return found

    def _proves_tokens(
        self, states: Sequence[Meaning], identity: Identity, frame: Frame, lines: Mapping[str, Line]
    ) -> bool:
        """Rule 16: S is proved by tokens, a mask, lengths, or as the one axis that varies."""
        axes = frame.axes
        if "(N S)" in axes:
            return bool(set(RANGES) & lines.keys())
        if {"tokens", "tokens_decoded", "S.mask", "attentions"} & lines.keys() or (
            "S.lengths" in lines and "N" in axes
        ):
            return True
        if "P" in axes:
            return False
        if "S" not in axes:
            address = self._places.address(frame.leaf, identity, frame.leaf) or ""
            return "[S]" not in address and "[P]" not in address  # names bind tokens
        words = {word for meaning in states for word in meaning.words}
        is_list = identity.mode == "stack" and "question_id" in lines and None in frame.num_tokens
        varies = is_list or (identity.mode == "ids" and len(frame.num_tokens - {None}) > 1)
        return varies and not words & SAYING["parts of a text"] and self._is_short(frame)

    def _is_short(self, frame: Frame) -> bool:
        """Return whether there are at most as many tokens as characters of the texts of a trace."""
        texts = [m.leaf for m in self._meanings if m.field in TEXTS and not m.leaf.rank]
        for leaf in texts:
            for spot in leaf.spots if leaf.files == frame.leaf.files else ():
                same = [o for other in texts for o in other.spots if o.where == spot.where and o.value is not None]
                most = max(sum(len(str(one.value)) for one in same), 1)
                if any((sizes.get("S") or 0) > most for sizes in frame.matching(leaf, spot)):
                    return False
        return True
