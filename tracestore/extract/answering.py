"""Answers of a causal language model, and their traces with log-probability and entropy at each generated token."""

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

import tracestore
from tracestore.extract.answer_end import AnswerEnd
from tracestore.extract.decoding import generate, padded, seed_of_answer
from tracestore.extract.hooks import capture
from tracestore.extract.model import LanguageModel, attention_weights
from tracestore.extract.prompts import PromptTemplate, prompt_of_turn, special_tokens, template_of
from tracestore.extract.questions import Question
from tracestore.extract.select import EVERYTHING, Select
from tracestore.store.format.provenance import Provenance
from tracestore.store.format.schema import TOKEN_FIELDS


@dataclass(frozen=True)
class AnswerOptions:
    """Options of generation and recording.

    Attributes
    ----------
    instruction : str
        System prompt.
    max_new_tokens : int
        Maximum number of tokens of an answer.
    template : PromptTemplate, optional
        Default: the chat template of the model, or PLAIN_PROMPT.
    temperature : float
        0: the most likely token at each step; else tokens are drawn at this temperature.
    seed : int
        Seed of the run, from which the seed of each answer is derived.
    top_logprobs : int
        Number of most likely tokens to record for each generated token.
    select : Select
        Layers, positions and heads to record. With the positions "answer" an empty answer keeps the token before it.
    """

    instruction: str
    max_new_tokens: int
    template: PromptTemplate | None = None
    temperature: float = 0.0
    seed: int = 0
    top_logprobs: int = 0
    select: Select = EVERYTHING


@dataclass
class _Conversation:
    """The token ids of a question so far.

    Attributes
    ----------
    runs : list of (int, int)
        The positions of each answer: its first token, and the token after its last one.
    """

    question: Question
    seed: int
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    end: AnswerEnd | None = None

    @property
    def turns(self) -> tuple[str, ...]:
        """The text of the user in each turn."""
        return (*self.question.earlier, self.question.text)


def provenance_of(lm: LanguageModel, options: AnswerOptions) -> Provenance:
    """Return the provenance of the traces that answer_questions() makes."""
    template = (options.template or template_of(lm)).text
    num_layers = lm.model.config.get_text_config().num_hidden_layers
    layer_ids = options.select.layer_ids(num_layers)
    sampling: dict[str, Any] = {"do_sample": options.temperature > 0, "max_new_tokens": options.max_new_tokens}
    if options.temperature:
        sampling["temperature"] = options.temperature
    return Provenance(
        model=lm.name,
        model_revision=lm.revision,
        tokenizer=lm.name,
        prompt_sha256=hashlib.sha256(json.dumps([template, options.instruction]).encode()).hexdigest(),
        layer_ids=tuple(layer_ids),
        hidden_states_at="block output",
        final_norm=layer_ids[-1] == num_layers,
        attention_kind="softmax",
        compute_dtype=str(lm.model.dtype).removeprefix("torch."),
        sampling=sampling,
        tool=f"tracestore {tracestore.__version__}",
        positions=str(options.select.positions),
    )


@torch.inference_mode()
def answer_questions(lm: LanguageModel, questions: Sequence[Question], options: AnswerOptions) -> list[dict[str, Any]]:
    """Answer questions in one batch, and return their traces.

    After generation one forward pass over prompts and answers yields all states. Only this pass uses eager
    attention, which returns its weights. Rounding depends on the batch, so that values can differ in their last bits
    from those of a question that is answered alone. If two tokens are almost equally likely, answers can differ as
    well. The random numbers of a sampled answer depend on its seed alone.

    Parameters
    ----------
    lm : LanguageModel
        The model.
    questions : sequence of Question
        The questions.
    options : AnswerOptions
        How they are answered.

    Returns
    -------
    list of dict
        Traces in the pickle schema, float16: hidden states of each layer (S, D) and attention of each
        head (H, S, S) over the tokens of prompt and answer, without padding. Log-probabilities and entropies are
        those of the model's distribution at temperature 1.
    """
    rows = []
    for question in questions:
        seed = seed_of_answer(options.seed, question.question_id, question.sample)
        rows.append(_Conversation(question, seed, torch.Generator(lm.model.device).manual_seed(seed)))
    for turn in range(max(len(row.turns) for row in rows)):
        _answer_turn(lm, [row for row in rows if turn < len(row.turns)], turn, options)
    pad = lm.tokenizer.pad_token_id or lm.tokenizer.eos_token_id or 0
    # Padding on the right changes nothing: positions count from the first token, and attention is causal.
    ids, mask = padded([torch.tensor(row.ids, device=lm.model.device) for row in rows], pad, "right")
    # The logits at a position are those of the next token.
    first = max(0, min(row.runs[0][0] for row in rows) - 1)
    kept: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(lm.model.forward).parameters:
        kept["logits_to_keep"] = torch.arange(first, max(first + 1, ids.shape[1] - 1), device=ids.device)
    begins = [_first_recorded(row, options.select.positions) for row in rows]
    select = replace(options.select, positions="all")
    with attention_weights(lm.model, select.heads != "none"), capture(lm.model, select=select) as states:
        states.skip(min(begins))
        logits = lm.model(ids, attention_mask=mask, use_cache=False, **kept).logits
    if not kept:
        logits = logits[:, first:]
    traces, specials = states.traces(), special_tokens(lm)
    for k, (row, trace) in enumerate(zip(rows, traces, strict=True)):
        trace |= _fields(lm, row, specials)
        trace |= token_values(logits[k], first, row.ids, row.runs, options.top_logprobs)
        if options.temperature:
            trace |= {"temperature": options.temperature, "seed": row.seed}
        trace["num_layers"] = len(trace["hidden_states"])
        if options.select.positions != "all":
            _remove_first(trace, begins[k], min(begins))
    return traces


def _first_recorded(row: _Conversation, positions: str | int) -> int:
    """Return the position of the first recorded token of a conversation."""
    if positions == "all":
        return 0
    begin = row.runs[-1][0] if positions == "answer" else len(row.ids) - int(positions)
    return max(0, min(begin, len(row.ids) - 1))


def _remove_first(trace: dict[str, Any], begin: int, num_removed: int) -> None:
    """Remove the tokens before the position `begin` from a trace, whose arrays lack the first `num_removed`."""
    cut = begin - num_removed
    trace["hidden_states"] = [np.ascontiguousarray(h[cut:]) for h in trace["hidden_states"]]
    if "attentions" in trace:
        trace["attentions"] = [np.ascontiguousarray(a[:, cut:, cut:]) for a in trace["attentions"]]
    trace["tokens"] = trace["tokens"][cut:]
    for name in ("tokens_decoded", *TOKEN_FIELDS.keys() & trace.keys()):
        trace[name] = trace[name][begin:]
    answer_begin, answer_end = trace["answer_span"]
    trace["answer_span"] = (max(0, answer_begin - begin), answer_end - begin)
    trace["prompt_length"] = max(0, trace["prompt_length"] - begin)
    trace["first_position"] = begin


def _answer_turn(lm: LanguageModel, rows: Sequence[_Conversation], turn: int, options: AnswerOptions) -> None:
    """Append the prompt and the answer of a turn to each conversation."""
    template = options.template or template_of(lm)
    for row in rows:
        row.ids += prompt_of_turn(lm, template, options.instruction, row.turns[: turn + 1], row.answers)
    ends = generate(
        lm,
        [row.ids for row in rows],
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        generators=[row.generator for row in rows],
    )
    for row, end in zip(rows, ends, strict=True):
        begin = len(row.ids)
        row.ids += end.answer
        row.runs.append((begin, len(row.ids)))
        row.answers.append(lm.tokenizer.decode(end.answer, skip_special_tokens=True).strip())
        row.end = end


def _fields(lm: LanguageModel, row: _Conversation, specials: set[int]) -> dict[str, Any]:
    """Return texts, masks and lengths of a conversation."""
    decode, end = lm.tokenizer.decode, row.end
    assert end is not None
    generated = np.zeros(len(row.ids), "u1")
    for begin, stop in row.runs:
        generated[begin:stop] = 1
    begin, stop = row.runs[-1]
    return {
        "tokens_decoded": [decode([token]) for token in row.ids],
        "question": row.question.text,
        "generated_text": decode(row.ids, skip_special_tokens=False),
        "generated_answer": decode(end.tokens, skip_special_tokens=True),
        "generated_answer_clean": row.answers[-1],
        "prompt_length": begin,
        "answer_span": (begin, stop),
        "generated_mask": generated,
        "special_mask": np.isin(row.ids, list(specials)).astype("u1"),
        "cutoff_method": end.method,
        "tokens_before_cutoff": begin + len(end.tokens),
        "tokens_after_cutoff": stop,
    }


# Tokens whose distributions are computed at once: 64 of a vocabulary of 150,000 take 38 MB in float32.
_CHUNK_TOKENS = 64


def token_values(
    logits: torch.Tensor, first: int, tokens: Sequence[int], runs: Sequence[tuple[int, int]], top_k: int = 0
) -> dict[str, Any]:
    """Return the optional fields of a trace that describe the distribution of each generated token.

    Parameters
    ----------
    logits : Tensor
        Logits (P, V). Row i is the distribution of the token at position first + i + 1.
    first : int
        Position of the first row.
    tokens : sequence of int
        Token ids (T,).
    runs : sequence of (int, int)
        First generated token, and the token after the last one, for each answer. No run begins before first + 1.
    top_k : int
        Number of most likely tokens.

    Returns
    -------
    dict
        `token_logprob` and `token_entropy` (in nats), float32 (T,), NaN where the token was not generated; with
        `top_k`, `top_ids` int32 and `top_logprobs` float32 (T, K), the most likely first, -1 and NaN there.
    """
    count, top_k = len(tokens), min(top_k, logits.shape[-1])
    logprob, entropy = np.full(count, np.nan, "f4"), np.full(count, np.nan, "f4")
    top_ids, top_logprobs = np.full((count, top_k), -1, "i4"), np.full((count, top_k), np.nan, "f4")
    for begin, end in _chunks(runs):
        log_p = logits[begin - 1 - first : end - 1 - first].float().log_softmax(-1)
        drawn = torch.tensor(tokens[begin:end], device=logits.device)
        logprob[begin:end] = log_p.gather(-1, drawn[:, None])[:, 0].cpu().numpy()
        entropy[begin:end] = torch.special.entr(log_p.exp()).sum(-1).cpu().numpy()
        if top_k:
            values, ids = log_p.topk(top_k)
            top_ids[begin:end], top_logprobs[begin:end] = ids.cpu().numpy(), values.cpu().numpy()
    fields: dict[str, Any] = {"token_logprob": logprob, "token_entropy": entropy}
    return fields | ({"top_ids": top_ids, "top_logprobs": top_logprobs} if top_k else {})


def _chunks(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the runs in parts of at most _CHUNK_TOKENS."""
    return [(part, min(part + _CHUNK_TOKENS, end)) for begin, end in runs for part in range(begin, end, _CHUNK_TOKENS)]
