"""A causal language model, its greedy answer, and the trace that the answer leaves."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from tracestore.errors import UsageError
from tracestore.extras import needs


@dataclass
class LanguageModel:
    """A Hugging Face model in evaluation mode with eager attention, and its tokenizer."""

    model: Any
    tokenizer: Any
    name: str

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)


def _locate(model: str) -> tuple[str, str | None]:
    """-> what from_pretrained takes: an id or folder, and the GGUF file in it."""
    if model.startswith("package:"):
        package = model.removeprefix("package:")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(f"--model {model}: the package {package} is not installed")
        folder = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(folder.glob("*.gguf"))
        if not files:
            raise UsageError(f"--model {model}: the package holds no .gguf file")
        return str(folder), files[0].name
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"--model {model}: no such file")
        return str(path.parent), path.name
    return model, None


def load_model(model: str, *, device: str = "auto", dtype: str = "float32") -> LanguageModel:
    """Loads a model by Hugging Face id, local folder, .gguf file, or package:NAME for the
    .gguf file inside an installed Python package. UsageError where it cannot be loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    location, gguf = _locate(model)
    if gguf:
        with needs("extract"):
            import gguf as _  # noqa: F401 - transformers says several lines where it is missing
    extra = {"gguf_file": gguf} if gguf else {}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **extra)
        network = AutoModelForCausalLM.from_pretrained(
            location, dtype=getattr(torch, dtype), attn_implementation="eager", **extra
        )
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"--model {model}: cannot be loaded: {str(error).splitlines()[0]}") from None
    network.to(device)  # type: ignore[arg-type]
    return LanguageModel(network.eval(), tokenizer, model)


def prompt_ids(lm: LanguageModel, question: str, instruction: str) -> torch.Tensor:
    """(1, S) token ids of the prompt, by the model's chat template where it has one."""
    if getattr(lm.tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": instruction}, {"role": "user", "content": question}]
        encoded = lm.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids: torch.Tensor = encoded["input_ids"]
    else:
        ids = lm.tokenizer(f"{instruction}\nQ: {question}\nA:", return_tensors="pt")["input_ids"]
    return ids.to(lm.device)


def _ends_sentence(text: str) -> bool:
    """Whether text ends with a full stop that is not an initial's, an abbreviation's or a number's."""
    return re.search(r"[^\W\d_]{3,}[\"')\]]*[.!?]$|\d[.!?]$", text) is not None


def _cut(lm: LanguageModel, ids: list[int]) -> tuple[list[int], str]:
    """The answer's tokens up to its end: the end-of-sequence token, the first new line or
    full stop after some text, or the last token generated. -> tokens, how it was cut."""
    ends = lm.model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    ends.add(lm.tokenizer.eos_token_id)
    for k, token in enumerate(ids):
        if token in ends:
            return ids[:k], "eos"
        text = lm.tokenizer.decode(ids[: k + 1])
        if k and "\n" in text.lstrip():
            return ids[:k], "newline"
        following = lm.tokenizer.decode(ids[k + 1 : k + 2])
        if _ends_sentence(text) and following[:1] in ("", " ", "\n"):
            return ids[: k + 1], "sentence"
    return ids, "max_tokens"


class _StopAtCut(StoppingCriteria):
    """Stops a row once its answer has been cut and one token has shown it."""

    def __init__(self, lm: LanguageModel, prompt_length: int) -> None:
        self._lm, self._prompt_length = lm, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        answers = input_ids[:, self._prompt_length :].tolist()
        return torch.tensor([_is_cut(self._lm, answer) for answer in answers], device=input_ids.device)


def _is_cut(lm: LanguageModel, answer: list[int]) -> bool:
    return len(_cut(lm, answer)[0]) < len(answer)


def _without_padding(lm: LanguageModel, answer: list[int]) -> list[int]:
    """What was generated of a row before the others of its batch went on alone."""
    return next((answer[:k] for k in range(1, len(answer)) if _is_cut(lm, answer[:k])), answer)


def _padded(rows: Sequence[torch.Tensor], pad: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids as (B, longest), and the attention mask."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad, dtype=rows[0].dtype, device=rows[0].device)
    mask = torch.zeros_like(ids)
    for k, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(len(row))
        ids[k, place], mask[k, place] = row, 1
    return ids, mask


@torch.inference_mode()
def answer_questions(
    lm: LanguageModel, questions: Sequence[str], *, instruction: str, max_new_tokens: int
) -> list[dict[str, Any]]:
    """A trace a question, as dicts of the pickle schema: hidden states of every layer (S, D) and
    attention of every head (H, S, S) over prompt and answer, float16.

    The answers are generated greedily, all in one batch; one more pass over prompts and answers
    then gives all states at once. Padding is left out. In a batch, sums are rounded in another
    order than alone: values differ in their last bits, and where two tokens are as good, answers."""
    pad = lm.tokenizer.pad_token_id or lm.tokenizer.eos_token_id or 0
    prompts = [prompt_ids(lm, question, instruction)[0] for question in questions]
    padded, mask = _padded(prompts, pad, left=True)
    generated = lm.model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        stopping_criteria=StoppingCriteriaList([_StopAtCut(lm, padded.shape[1])]),
        pad_token_id=pad,
    )
    raw = [_without_padding(lm, row) for row in generated[:, padded.shape[1] :].tolist()]
    cuts = [_cut(lm, row) for row in raw]
    whole = [
        torch.cat([prompt, torch.tensor(answer, dtype=prompt.dtype, device=prompt.device)])
        for prompt, (answer, _) in zip(prompts, cuts, strict=True)
    ]
    # On the right: positions count from the first token, and no token looks at what follows it.
    ids, mask = _padded(whole, pad, left=False)
    out = lm.model(ids, attention_mask=mask, output_hidden_states=True, output_attentions=True, use_cache=False)
    traces = []
    for k, (question, tokens) in enumerate(zip(questions, whole, strict=True)):
        size = len(tokens)
        # hidden_states[0] are the embeddings; entry l + 1 is what layer l puts out.
        states: dict[str, Any] = {
            "hidden_states": [_numpy(h[k, :size]) for h in out.hidden_states[1:]],
            "attentions": [_numpy(a[k, :, :size, :size]) for a in out.attentions],
            "num_layers": len(out.attentions),
        }
        traces.append(states | _texts(lm, question, tokens, len(prompts[k]), raw[k], *cuts[k]))
    return traces


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float16).cpu().contiguous().numpy()


def _texts(
    lm: LanguageModel,
    question: str,
    tokens: torch.Tensor,
    prompt_length: int,
    raw: list[int],
    answer: list[int],
    method: str,
) -> dict[str, Any]:
    decode, ids = lm.tokenizer.decode, tokens.cpu().numpy().astype("int32")
    return {
        "tokens": ids,
        "tokens_decoded": [decode([int(t)]) for t in ids],
        "question": question,
        "generated_text": decode(tokens, skip_special_tokens=False),
        "generated_answer": decode(raw, skip_special_tokens=True),
        "generated_answer_clean": decode(answer, skip_special_tokens=True).strip(),
        "prompt_length": prompt_length,
        "cutoff_method": method,
        "tokens_before_cutoff": prompt_length + len(raw),
        "tokens_after_cutoff": len(ids),
    }
