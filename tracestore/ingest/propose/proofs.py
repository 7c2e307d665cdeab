"""Proofs: what of a draft rules 15 to 23 do not support, in words, and which leaves no line of it takes."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tracestore.ingest.execute.accounts import looks_like_label
from tracestore.ingest.layout.fields import PROMPT_MASK
from tracestore.ingest.propose.identities import Identity, Places
from tracestore.ingest.propose.leaves import NUMBERS, Leaf, Path_
from tracestore.ingest.propose.looking import texts_of
from tracestore.ingest.propose.meanings import OF_LABELS, Meaning, contradictions, may_be_label, may_be_score
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
PADDED_PROMPTS = "prompt_length: it may count padding"
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
        axes = [*self._of_layers_and_words(), *self._of_axes()]
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

    def _of_layers_and_words(self) -> Iterator[str]:
        """Yield what is not proved of L, and what words leave open: whose state an id is of, and whether weights are of heads.

        Rule 18: L is proved by numbers of layers, or attention of as many.
        """
        attention = self.lines["attentions"].axes if self._has("attentions") else None
        is_open = "L" in self.frame.axes and not self._are_all_layers
        if is_open and attention is not None and "L" not in attention:
            yield "L: the attention has no layers"
        elif is_open and not (
            self._has("attentions", "L.ids") or self.places.is_output(self.frame.leaf, self.frame.axes)
        ):
            yield "L: the extent alone gives the axis of the layers"
        if self._may_be_moved():
            yield "tokens: a state may belong to the token before the one that it generated"
        if attention is not None and attention[-3:-2] == ("L",) and not SAYING["averaged"] & self._words("attentions"):
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
        is_of_layers_and_words = is_turned and len(self.frame.num_tokens) == 1 and None not in self.frame.num_tokens
        texts = () if is_of_layers_and_words else ("tokens", "tokens_decoded")
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
        for leaf in (leaf for leaf in texts if leaf.files == self.frame.leaf.files):
            for spot in leaf.spots:
                same = [one.value for other in texts for one in other.spots if one.where == spot.where]
                most = max(sum(len(str(value)) for value in same if value is not None), 1)
                if any((sizes.get("S") or 0) > most for sizes in self.frame.matching(leaf, spot)):
                    return False
        return True

    def _texts(self, name: str) -> list[Meaning]:
        """Return the texts that may be a field; an attribute of a whole file is none."""
        found = [m for m in self.places.meanings if m.field == name and m.leaf.kind == "s"]
        return [m for m in found if m.leaf.bound or not m.leaf.path or m.leaf.path[0][:1] != "@"]

    def _of_values(self) -> Iterator[str]:
        """Yield the texts, lengths, labels and scores that may be others."""
        for name in TEXTS:
            same = self._texts(name)
            keys = {"_".join(words_of(m.leaf.key)) for m in same} - {name}
            is_one_of_several = len(same) > 1 and len(keys) == len(same) and not self._is_of_model(name, same)
            if self._has(name) and (keys & SAYING["vague texts"] or is_one_of_several):
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
        doubtful = [m.leaf for m in self.places.meanings if m.is_doubtful]
        yield from (f"{leaf}: may be what a detector says, or words without a meaning" for leaf in doubtful)

    def _is_of_model(self, name: str, texts: Sequence[Meaning]) -> bool:
        """Return whether one of several texts says that it is the model's, and the others are those of a data set.

        Next to `answer`, a `response` or `completion` may be that of the data set. Words of judges are no text.
        """
        own = self._words(name) if self._has(name) else set()
        others = {"_".join(words_of(m.leaf.key)) for m in texts if {*words_of(m.leaf.key)} != own}
        said = own & SAYING["texts of models"] - ({"response", "completion"} if "answer" in others else set())
        is_label = any(may_be_label(m.leaf) for m in texts)
        return bool(said) and own - said <= {"answer"} and others <= SAYING["texts of data sets"] and not is_label

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
            PADDED_PROMPTS: self._has("S.mask", *["S.lengths"] * self._is_stacked),
            "prompt_length: the length of a context may be that of a window or of a document": "context" in words,
            OF_TEXT: "question" in words or any([int(value) for value in values] in counts for values in lengths),
            "prompt_length: it may be the number of the prompt, or of prompts": words <= {"n", "num", "prompt"},
            "prompt_length: it may be a place in the text of the answer": "start" in words,
        }
        yield from (text for text, is_open in doubts.items() if is_open)


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
    items = ((k, identity.items.get((leaf.files, leaf.path[: k + 1]), "")[1:-1]) for k in leaf.items_at)
    pairs = ((k, pair.strip()) for k, text in items for pair in text.split(","))
    return any(pair.endswith(f"={'/'.join(leaf.path[k + 1 :])}") for k, pair in pairs)


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
    if {m.reason for m in meanings} == {OF_LABELS}:
        return OF_LABELS
    reasons = {meaning.reason for meaning in meanings if meaning.leaf.rank and meaning.leaf.kind != "s"}
    if reasons and "" not in reasons:
        return min(reasons)
    words = words_of(address.rpartition("/")[2].partition(".")[0])
    ids = [m.leaf for m in meanings if m.field == "question_id"]
    is_plain = all(m.leaf.rank <= 1 and not m.verdicts for m in meanings)
    is_plain &= all(one.key == "n" and one.path == ("n",) for one in ids)  # a number of traces
    is_named = not SAYING["settings"].isdisjoint(words) or any(m.reason == OF_LABELS for m in meanings)
    return "settings" if " : " not in address and is_plain and is_named else ""
