"""Generation of answers: greedy, or sampled with a random generator for each answer."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from tracestore.extract.answer_end import AnswerEnd
from tracestore.extract.model import LanguageModel

# Half the distance of uniform random numbers in float32. Smaller ones are rounded to 0, whose logarithm is infinite.
_SMALLEST_NOISE = 2**-25
# Settings of the cache of keys and values, which a model may need.
_OF_CACHE = ("use_cache", "cache_implementation", "cache_config")


def seed_of_answer(seed: int, question_id: str, sample: int) -> int:
    """Return the seed of an answer, a hash of the seed of the run and the key of the trace, below 2^63."""
    key = f"{seed}\0{question_id}\0{sample}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1


def generate(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    generators: Sequence[torch.Generator] = (),
) -> list[AnswerEnd]:
    """Return the answers to prompts of token ids, generated in one batch.

    Parameters
    ----------
    lm : LanguageModel
        The model.
    prompts : sequence of sequence of int
        Token ids of each prompt.
    max_new_tokens : int
        Maximum number of tokens of an answer.
    temperature : float
        0: the most likely token. Else the logits are divided by it, and a token is drawn.
    generators : sequence of torch.Generator
        Random generator of each answer, on the device of the model. A token consumes one number for each entry of
        the vocabulary, until the end of the answer is known.
    """
    device = lm.model.device
    pad = lm.tokenizer.pad_token_id or lm.tokenizer.eos_token_id or 0
    ids, mask = padded([torch.tensor(p, device=device) for p in prompts], pad, "left")
    end_tokens = _end_tokens(lm)
    ends = [AnswerEnd(lm.tokenizer, end_tokens) for _ in prompts]
    processors = LogitsProcessorList([_Draw(ends, temperature, generators)] if temperature else [])
    own = lm.model.generation_config
    # Penalties, beams and other settings that a model contains would choose other tokens.
    kept = {name: getattr(own, name) for name in ("eos_token_id", *_OF_CACHE)}
    lm.model.generation_config = GenerationConfig(**kept)
    try:
        lm.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,  # _Draw leaves one token of each row.
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([_StopAtEnd(ends, ids.shape[1])]),
            pad_token_id=pad,
        )
    finally:
        lm.model.generation_config = own
    return ends


def padded(rows: Sequence[torch.Tensor], pad: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids padded to (B, longest row), and the attention mask."""
    ids = pad_sequence(list(rows), batch_first=True, padding_value=pad, padding_side=side)
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)


def _end_tokens(lm: LanguageModel) -> set[int]:
    """Return the end-of-sequence tokens of model and tokenizer."""
    ends = lm.model.generation_config.eos_token_id
    return {lm.tokenizer.eos_token_id, *([ends] if isinstance(ends, int) else ends or ())}


class _StopAtEnd(StoppingCriteria):
    """Stop a row one token after the end of its answer, which that token confirms."""

    def __init__(self, ends: Sequence[AnswerEnd], prompt_length: int) -> None:
        self._ends, self._num_seen = ends, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        for end, tokens in zip(self._ends, input_ids[:, self._num_seen :].tolist(), strict=True):
            for token in tokens:
                end.add(token)
        self._num_seen = input_ids.shape[1]
        return torch.tensor([end.is_known for end in self._ends], device=input_ids.device)


class _Draw(LogitsProcessor):
    """Replace the logits of each row by those of one token, drawn from softmax(logits / temperature).

    The largest logit after adding Gumbel noise (the negative logarithm of exponential noise) is such a draw. The
    noise of a row depends on its own generator alone, whatever the other rows of the batch are.
    """

    def __init__(self, ends: Sequence[AnswerEnd], temperature: float, generators: Sequence[torch.Generator]) -> None:
        self._ends, self._temperature, self._generators = ends, temperature, generators

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        drawn = scores.argmax(-1)
        for row, (end, generator) in enumerate(zip(self._ends, self._generators, strict=True)):
            if not end.is_known:
                logits = scores[row].float() / self._temperature
                noise = torch.empty_like(logits).exponential_(generator=generator).clamp_(min=_SMALLEST_NOISE)
                drawn[row] = (logits - noise.log_()).argmax()
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn[:, None], 0.0)
