"""The fields of a trace: one table for the dicts that `tracestore.create` and `tracestore convert` take.

One module of over 400 lines: the tables of names, which have to agree, are read together.

`store.write.record` checks a trace by it, readers of files name what they find by it, docs/fields.md lists it.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from tracestore.errors import InvalidInputError
from tracestore.store.format import schema
from tracestore.store.format.labels import CORRECT, HALLUCINATION

# Kinds of values.
FLOATS, INTEGERS, NUMBERS, TEXT = "floats", "integers", "numbers", "text"
LABEL, SCORE, OBJECT = "label", "score", "object"


class Field(NamedTuple):
    """A field of a trace.

    Attributes
    ----------
    name : str
        Its key in a dict.
    kind : str
        FLOATS, INTEGERS or NUMBERS of any dtype that the store holds or rounds; TEXT; LABEL: 0, 1 or a word; SCORE: a
        finite number or a word of a judge; OBJECT: anything else, which `meaning` describes.
    shape : str
        Axes by letter, separated by blanks; "" for one value. L layers, S tokens with hidden states, T token ids (S or
        S + 1), D hidden size, H heads, K most likely tokens, N traces of a file.
    meaning : str
    stored : str
        What it becomes in the store.
    required : str
        When a trace must have it; "" if never.
    other_names : tuple of str
        Keys that stand for it, the first one before the next, where no key has its name.
    direction : str
        What a high score means.
    """

    name: str
    kind: str
    shape: str = ""
    meaning: str = ""
    stored: str = "extras"
    required: str = ""
    other_names: tuple[str, ...] = ()
    direction: str = ""

    @property
    def of_layer(self) -> tuple[int, str]:
        """The number and the names of the axes of one layer of an array whose first axis is L."""
        axes = self.shape.split()[1:]
        return len(axes), f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"

    @property
    def is_claim(self) -> bool:
        """Return whether its score is 0 or 1: the name reads as a claim, such as is_correct."""
        return self.kind == SCORE and self.name.startswith(("is_", "has_"))


# The meaning of a high score by its name. The first ones have precedence where a table has several.
PRIMARY_SCORES = {
    **dict.fromkeys(("bleurt_score", "score", "correctness", "is_correct", "correct"), CORRECT),
    **dict.fromkeys(("hallucination_score", "p_hallucination", "hallucination", "is_hallucination"), HALLUCINATION),
}
_HALLUCINATION = (
    *("hallucinated", "is_hallucinated", "has_hallucination", "hallu", "is_hallu", "hallu_score", "hallucinates"),
    *("hallucination_label", "hallu_label", "hallucination_flag", "is_hallucinating"),
    *("is_wrong", "is_incorrect", "is_unfaithful"),
)
_CORRECT = (
    *("accuracy", "acc", "exact_match", "em", "f1", "f1_score", "bleurt", "bleu", "bleu_score"),
    *("rouge", "rouge_1", "rouge1", "rouge_2", "rouge2", "rouge_l", "rougel", "rouge_lsum"),
    *("rouge_score", "rouge_l_score", "meteor", "bert_score", "bertscore"),
    *("truthful", "is_truthful", "truthfulness", "factual", "faithful", "faithfulness"),
    *("automatic_correctness", "auto_correctness", "answer_correctness", "correctness_score"),
    *("is_right", "is_accurate"),
    *("answer_correct", "model_correct", "llm_correct", "judge_correct", "is_factual", "is_faithful"),
    *("factuality", "factuality_score", "faithfulness_score", "truthfulness_score", "em_score", "exact_match_score"),
    *("rougel_score", "rougel_fmeasure", "rougel_f1", "rouge_l_f1", "meteor_score", "bertscore_f1", "bert_score_f1"),
    *("is_supported", "correct_prediction"),
)
JUDGMENTS = ("is_correct", "is_hallucinated")
SCORES = (
    dict.fromkeys(JUDGMENTS, "")
    | PRIMARY_SCORES
    | dict.fromkeys(_HALLUCINATION, HALLUCINATION)
    | dict.fromkeys(_CORRECT, CORRECT)
)
_PRECEDENCE = {name: k for k, name in enumerate(SCORES)}
# Words of names for a hallucination, and those that may be next to one: others, as in no_halluc, may say the opposite.
_OF_HALLUCINATION = re.compile(r"hall?uc(in?|inat(e[sd]?|ing|ions?|ory)?)?|hall?u|hal")
_BESIDE_HALLUCINATION = frozenset(
    ("is", "has", "contains", "label", "labels", "flag", "y", "score", "p", "prob", "gold", "human", "any")
)

_STATES = (
    Field("hidden_states", FLOATS, "L S D", "hidden states; L + 1 with the embeddings in front", "array", "or last_token"),
    Field("last_token", FLOATS, "L D", "hidden states of the last token", "array", "or hidden_states"),
    Field("attentions", FLOATS, "L H S S", "attention; L S S if averaged over heads", "array", "in all traces or none"),
    Field("edges", OBJECT, "L", "pairs of nodes (2, E), source and target, and weights (E,)", "arrays instead of attention"),
    Field("layer_ids", INTEGERS, "L", "the layers of the model that were kept", "provenance"),
    Field("tokens", INTEGERS, "T", "token ids", "array", other_names=("sequences", "input_ids")),
    Field("tokens_decoded", TEXT, "T", "texts of the tokens", "array"),
    Field("attention_mask", INTEGERS, "T", "0: padding, at the ends", "padding is removed"),
    Field("lengths", INTEGERS, "", "number of tokens before the padding", "padding is removed"),
)  # fmt: skip
_VALUES = (
    Field("question_id", OBJECT, "", "text or integer", "key of the trace"),
    Field("global_example_id", OBJECT, "", "text or integer", "key of a trace without question_id; extras"),
    Field("sample", INTEGERS, "", "number of the answer to its question, from 0", "key of the trace"),
    Field("question", TEXT, "", "the question", "text"),
    Field("generated_answer_clean", TEXT, "", "the answer, without what follows it", "text"),
    Field("generated_answer", TEXT, "", "the answer", "text", other_names=("answer",)),
    Field("generated_text", TEXT, "", "what the model generated", "text"),
    Field("prompt_length", INTEGERS, "", "number of tokens of the prompt, 0 to T", "number"),
)  # fmt: skip
_OPTIONAL = tuple(
    Field(
        name,
        OBJECT if field.shape == schema.JSON else NUMBERS if field.dtype == "<f4" else INTEGERS,
        {schema.PER_TOKEN: "T", schema.TOP_K: "T K"}.get(field.shape, str(len(field.parts) or "")),
        field.doc,
        "optional field",
    )
    for name, field in schema.OPTIONAL_FIELDS.items()
)
_LABELS = (
    Field("label", LABEL, "", "1: hallucinated, 0: correct", "label", other_names=("y",)),
    Field("labels", OBJECT, "", "spans in the form of RAGTruth, with label_type; 0 or 1 counts as label", "spans or label"),
    Field("scores", OBJECT, "", "dict of numbers by name", "named scores"),
    Field("group", TEXT, "", "traces of one group belong to the same split", "group"),
    *(Field(name, SCORE, "", f"high: {way}", "named score", direction=way) for name, way in SCORES.items()),
)  # fmt: skip
# Further keys of older files, which an export returns.
_OLDER = tuple(
    Field(name, OBJECT)
    for name in [
        "num_layers",
        "example_id",
        "batch_number",
        "cutoff_method",
        "tokens_before_cutoff",
        "tokens_after_cutoff",
    ]
)
FIELDS = {field.name: field for field in (*_STATES, *_VALUES, *_OPTIONAL, *_LABELS, *_OLDER)}
# Keys of a file of several traces. A trace has none of them.
FILE_FIELDS = {
    field.name: field
    for field in (
        Field("sequences", FLOATS, "N L D", "last token of every layer", "last_token"),
        Field("graphs", OBJECT, "N L", "PyG Data with x, edge_index, edge_attr", "hidden_states and edges"),
        Field("labels", LABEL, "N", "1: hallucinated, 0: correct", "label"),
        Field("question_ids", OBJECT, "N", "texts or integers", "question_id"),
    )
}

# Fields that stay extras, so that an export returns them.
KEPT = frozenset(field.name for field in FIELDS.values() if "extras" in field.stored)
_ANSWERS = frozenset(schema.ANSWER_FIELDS)
# Fields with the verdict of a judge: labels and scores. Next to a scores file they are extras.
VERDICTS = frozenset(field.name for field in _LABELS) - {"group"}
_OTHER_NAMES = [(field.name, key) for field in FIELDS.values() for key in field.other_names]
_OF_SEVERAL = FILE_FIELDS.keys() - FIELDS.keys() - {key for _, key in _OTHER_NAMES}
# Parts of names of labels and scores.
_VERDICT_NAME = re.compile(
    r"label|score|correct|wrong|hallu|verdict|judg|truthful|factual|faithful|accura|reward|grade|rating"
)
# Names that hold such a part and mean something else.
_NO_VERDICT = re.compile(r"answers?$|tokens?$|num_|count|threshold|model$|name$|version")
_QUESTION_ID = re.compile(
    r"((question|q|trace|example|item|prompt|orig(inal)?|doc(ument)?|record|instance|problem|query|request)_?)?"
    r"(ids?|qids?|u?uid|guid)|(question|q|example|prompt)_?(idx|index|number|no)",
    re.IGNORECASE,
)

# Texts that are no numbers have a letter; these words stand for numbers, and for none.
_TEXT = re.compile(r"[^\W\d_]")
_NUMBER_TEXT = re.compile(r"\s*([-+]?(inf(inity)?|[\d.]+e[-+]?\d+)|nan|none|null|n/?a|missing)\s*", re.IGNORECASE)

# Words of judges: whether the answer is correct; and those whose meaning is that of the name.
WORDS = {
    **dict.fromkeys(("correct", "right", "accurate", "truthful", "factual", "faithful", "supported", "grounded"), True),
    **dict.fromkeys(
        ("incorrect", "wrong", "inaccurate", "untruthful", "unfaithful", "unsupported", "ungrounded"), False
    ),
    **dict.fromkeys(("hallucination", "hallucinated", "hallucinating", "hallu", "halluc"), False),
    **dict.fromkeys(("not hallucinated", "not_hallucinated"), True),
}
# Words of folders of which each has a class; the other words of a name, as in yes_hallucination, give their meaning.
CLASSES = {**dict.fromkeys(("yes", "true", "1", "pos", "positive"), True)}
CLASSES |= dict.fromkeys(("no", "false", "0", "neg", "negative"), False)
_YES_OR_NO = {**dict.fromkeys(("yes", "true", "y", "t"), 1.0), **dict.fromkeys(("no", "false", "n", "f"), 0.0)}


def score_of_word(text: str, direction: str | None) -> float | None:
    """Return 1 or 0 for a word of a judge, in the direction of its column; None for other texts.

    Examples
    --------
    >>> score_of_word("INCORRECT", "correct"), score_of_word("incorrect", "hallucination")
    (0.0, 1.0)
    """
    word = text.strip().strip(".!").lower()
    if word in WORDS:
        return float(WORDS[word] == (direction != HALLUCINATION))
    return None if direction is None else _YES_OR_NO.get(word)


def direction_of(name: str) -> str | None:
    """Return what a high value under a name means, in lower case with underscores; None if no word says it.

    Examples
    --------
    >>> direction_of("is_correct"), direction_of("halluc_label"), direction_of("no_halluc")
    ('correct', 'hallucination', None)
    """
    others = [word for word in name.split("_") if not is_hallucination(word)]
    is_said = len(others) == name.count("_") and _BESIDE_HALLUCINATION.issuperset(others)
    return SCORES.get(name, HALLUCINATION if is_said else None)


def by_precedence(names: Iterable[str]) -> list[str]:
    """Return names of scores of a trace; the first one becomes the default score of a new store.

    Examples
    --------
    >>> by_precedence(["em", "score", "is_correct"])
    ['is_correct', 'score', 'em']
    """
    return sorted(names, key=lambda name: _PRECEDENCE.get(name, len(_PRECEDENCE)))


def is_class_correct(name: str) -> bool | None:
    """Return whether the answers of a class of this name are correct; None if no word says it.

    Examples
    --------
    >>> is_class_correct("grounded"), is_class_correct("non-hallucinated"), is_class_correct("Hal")
    (True, True, False)
    """
    word = re.sub(r"[\W_]+", "_", name.lower())
    bare = re.sub("^(not|non|no|un)_?(?=hal)", "", word)
    return bare != word if is_hallucination(bare) else WORDS.get(word)


def is_hallucination(word: str) -> bool:
    """Return whether a word of a name, in lower case, stands for a hallucination: halluc, hallucinates, hal."""
    return _OF_HALLUCINATION.fullmatch(word) is not None


def split_fields(trace: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a dict by name, without those that are None, and its other keys.

    Raises
    ------
    InvalidInputError
        If a key is no text, or looks like a label or score and is no field.
    """
    names, keys, other_names, suspects = _plan(tuple(trace))
    fields = {name: value for name in names if (value := trace[name]) is not None}
    others = {key: trace[key] for key in keys}
    for name, key in other_names:
        # `answer` next to another key of an answer may be that of a data set.
        is_taken = name in fields or (name in _ANSWERS and not _ANSWERS.isdisjoint(fields))
        if others[key] is not None and not is_taken and (name not in VERDICTS or is_verdict(others[key])):
            fields[name] = others.pop(key)
    for key in suspects:
        if is_verdict(trace[key]):
            raise InvalidInputError(_advice(key, trace[key]), field=key)
    return fields, others


@lru_cache(maxsize=1 << 10)
def _plan(keys: tuple[Any, ...]) -> tuple[list[str], list[str], list[tuple[str, str]], list[str]]:
    """Return the fields of dicts with the same keys, their other keys, other names of fields, and keys named as labels."""
    for key in keys:
        if not isinstance(key, str):
            raise InvalidInputError(f"found a key of type {type(key).__name__}, expected str")
        if key in _OF_SEVERAL:
            found = f"found {key}, which a file of several traces has, expected {FILE_FIELDS[key].stored} of one trace"
            raise InvalidInputError(found, field=key)
    others = [key for key in keys if key not in FIELDS or key in KEPT]
    other_names = [pair for pair in _OTHER_NAMES if pair[1] in others and pair[0] in FIELDS]
    suspects = [key for key in others if key not in FIELDS and is_named_as_verdict(key)]
    return [key for key in keys if key in FIELDS], others, other_names, suspects


def is_named_as_verdict(key: str) -> bool:
    """Return whether a key that is no field looks like a label or score by its name."""
    name = key.lower()
    is_said = _VERDICT_NAME.search(name) is not None and _NO_VERDICT.search(name) is None
    return is_said or (name not in SCORES and direction_of(name) is not None)


def is_question_id(key: str) -> bool:
    """Return whether a key is the id of a question, and not the number of a row or of an answer."""
    return _QUESTION_ID.fullmatch(key) is not None


def is_verdict(value: Any) -> bool:
    """Return whether a value may be a label or score: a number, a word of a judge, or a list of labels 0 and 1."""
    if isinstance(value, str):
        return score_of_word(value, CORRECT) is not None
    if getattr(value, "ndim", None) is not None:
        try:
            value = value.tolist()
        except RuntimeError:  # a sparse tensor of torch, or one without values
            return False
    if isinstance(value, list | tuple):
        return bool(value) and all(type(item) in (int, bool) and item in (-1, 0, 1) for item in value)
    return isinstance(value, int | float)


def is_other_value(name: str, value: Any) -> bool:
    """Return whether a value under the name of a score is one of a data set, such as the text of a correct answer."""
    field = FIELDS.get(name)
    is_text = isinstance(value, str) and _TEXT.search(value) is not None and _NUMBER_TEXT.fullmatch(value) is None
    is_other = is_text or isinstance(value, list | tuple | Mapping) or getattr(value, "ndim", 0) > 0
    may_be_other = field is not None and field.kind == SCORE and not field.is_claim and "score" not in name
    return is_other and may_be_other and not is_verdict(value)


def _advice(key: str, value: Any) -> str:
    name = key.lower()
    if isinstance(value, list | tuple) or getattr(value, "ndim", None):
        field = "token_label, with a value per token"
    elif "hallu" in name or "wrong" in name or "incorrect" in name:
        field = "label (1: hallucinated) or is_hallucinated"
    elif "score" in name or "reward" in name or "rating" in name:
        field = "score, or scores with a number by name"
    else:
        field = "label (1: hallucinated), is_correct or is_hallucinated"
    return f"found a key that looks like a label or score and is no field, expected {field}"


# Names that files of other tools have for fields, as words, without those that FIELDS has. A name may hold further words:
# the longest one that it contains counts. They choose fields, never axes or the meaning of a label.
_SYNONYMS = """
hidden_states: hidden, hidden state, hiddens, hs, states, activation, activations, acts, representation,
  representations, reps, residual, residual stream, resid, resid post, hook resid post, embedding, embeddings, emb,
  embs, vector, vectors, layer outputs, layer output, last hidden state, X, hidden layer, hidden layers, decoder
  hidden states, features, internal states, h, repr
last_token: last token hidden, last token hidden states, last token hidden state, last token states, final token, eos
  token, last tok, last token embedding, last token vector, last token activations, final token hidden states, eos
  token hidden states, last token state
attentions: attention, attn, attns, att, attention weights, attn weights, attention maps, attention map, attention
  probs, attn probs, decoder attentions, attention matrix
tokens: token ids, tok, toks, token, ids of tokens, token id, tok id, tok ids, prompt ids, answer ids, response ids, output
  ids, prompt token ids, generated ids, output token ids, generated token ids, sequence
tokens_decoded: tokens, str tokens, token strs, token texts, token strings, words, token, tok, toks
question_id: qid, id, ids, uid, uuid, example id, example ids, sample id, doc id, prompt id, row id, request id, trace
  id, conversation id, custom id, question ids, qids, idx, index, indices, question idx, example idx, prompt idx, q
  indices, sample idx, instance id, instance ids, item id, data id, record id, sample ids, doc ids, numéro, n,
  example, item, key, doc
sample: sample idx, sample id, sample index, sample number, sample no, answer idx, answer no, generation idx, generation no,
  generation, k
question: prompt, query, instruction, statement, statements, questions, prompts, input text, q
generated_answer: response, completion, prediction, generation, output, output text, reply, model answer, answers,
  responses, generated, completions, model output, pred, text, content, predicted answer
prompt_length: prompt len, prompt lens, prompt lengths, prompt tokens, num prompt tokens, n prompt tokens, n prompt, prompt n,
  num prompt, input length, input len, input lens, input lengths, question length, question len, question lens, context len,
  answer start, ans start
S.mask: attention mask, mask, attn mask, padding mask
S.prompt_mask: prompt mask, is prompt
S.lengths: length, lengths, seq lens, seq len, seq lengths, seqlens, num tokens, lens, n tokens,
  token count, token counts, total tokens, valid tokens, num valid tokens, sequence length, sequence lengths, sequence len,
  seq length, valid length
S.offsets: offsets, cu seqlens, cu lens, offset, indptr, ptr, row splits
S.starts: start, starts, begin, row start, offset, offsets, ptr
S.ends: end, ends, stop, row end
L.ids: layers, layer ids, layer indices, layer numbers, target layer ids, layer idx
layer: layer idx, layer id, layer index, layer number, layer num
token: position, pos, token pos, token idx, tok idx, token index, token position
step: step, step idx, gen step
dim: dim, dimension
file: path, file, filename, file name, filepath, file path, hidden states path, npy, npz, pt, stem
"""
# Arrays of known tools that no trace needs, by the reason that an inspection prints.
_NEEDLESS = """
values of the vocabulary: logits, scores, lm head, log probs, logprobs
a cache: past key values, kv cache, past, cache
input of a model: loss mask, position ids, token type ids, special tokens mask
a part of hidden_states: last hidden state
states of an encoder: encoder hidden states, encoder attentions, cross attentions, encoder last hidden state
other activations: mlp, self attn, head wise, q proj, k proj, v proj, ln, norm
"""
# Words of names and keys by what the number behind them counts.
_COUNTED = """
layer: layer, layers, block, blocks, l, h
step: step, steps, pass
token: token, tok, position, pos
head: head, heads
dim: dim, d
chunk: batch, chunk, shard, part
rank: rank, gpu, proc, process, worker
sample: response, generation, answer, sample
"""
# Words of names, and what a proposal takes from them; no word names the axis of an array.
_SAYING = """
pooled vectors: mean, avg, average, pool, pooled, pooling, cls, max
no states: weight, bias, grad, grads, gradient, gradients, std, var, logits, prob, probs, loss, norms, distance,
  similarity, cosine, coef, sae, latents, scale, key, value, query, keys, values
no attention: rollout, flow, max, min, entropy, std, var, grad, grads, gradient, gradients, ratio, lookback
averaged: mean, avg, average, averaged, attentions
generated: generated, generation, gen, new, answer, response, completion
generated ids: output, outputs, sequence, sequences, next, predicted, sampled, target, targets, shifted, continuation
vague labels: label, labels, y, target, targets, score, scores
maps of labels: map, mapping, name, names, id, meaning, meanings, class, classes
detectors: p, prob, proba, probability, selfcheck, detector, predicted, logit, entropy
choices: choices, options, option, prediction, predictions, gold, pred, choice
claims: correct, hallucinated, hallucination, truthful, factual, faithful, hallu, hallucinates, wrong, incorrect, right,
  flag, label
references: gold, golden, reference, references, ground, truth, possible, correct, incorrect, acceptable, expected
texts of models: generated, generation, model, prediction, predicted, response, completion
texts of data sets: answer, right_answer, best_answer
vague texts: text, content, output, outputs, input, inputs
parts of a text: sent, sents, sentence, sentences, step, steps, claim, claims, chunk, chunks, sample, samples, gen, gens, k
several: samples, sampled, beams, beam, generations, candidates, responses, answers, seeds, seed, heads, head, models,
  checkpoints, runs, last
answers: samples, generations, responses, answers, outputs, completions, candidates, sampled, choices
tokens: tokens, steps, token, features, positions
parts of a run: rank, gpu, proc, process, worker, part, shard, batch, chunk, split
numbers of rows: row, index, idx, slot, position, pos
settings: config, settings, args, metadata, metrics, index, state, info, dataset, manifest, hparams, params,
  layout
traces: sample, question, example, doc, prompt, trace, item, row, ep, episode, request, answer, response
nothing: a, c, e, f, i, j, m, r, s, t, arr, array, data, dataset, tensor, default
plain: model, transformer, data, results, result, meta, metadata, info, file
"""


def _table(text: str) -> dict[str, tuple[str, ...]]:
    """Return the names behind each word of a table; a line that is indented continues the one before it."""
    lines = text.strip().replace("\n  ", " ").splitlines()
    pairs = (line.split(": ") for line in lines)
    return {name: tuple(names.split(", ")) for name, names in pairs}


SYNONYMS = _table(_SYNONYMS)
NEEDLESS = {name: reason for reason, names in _table(_NEEDLESS).items() for name in names}
COUNTED = {name: counted for counted, names in _table(_COUNTED).items() for name in names}
SPLITS = frozenset(("train", "test", "val", "valid", "validation", "dev", "eval"))
SAYING = {name: frozenset(words) for name, words in _table(_SAYING).items()}
