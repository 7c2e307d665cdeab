"""A causal language model, its greedy answer, and the trace that the answer leaves."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from tracestore.errors import UsageError


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
    """Stops generating once the answer has been cut and one token has shown it."""

    def __init__(self, lm: LanguageModel, prompt_length: int) -> None:
        self._lm, self._prompt_length = lm, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        answer = input_ids[0, self._prompt_length :].tolist()
        done = len(_cut(self._lm, answer)[0]) < len(answer)
        return torch.full((len(input_ids),), done, device=input_ids.device)


@torch.inference_mode()
def answer_question(lm: LanguageModel, question: str, *, instruction: str, max_new_tokens: int) -> dict[str, Any]:
    """One trace as a dict of the pickle schema: hidden states of every layer (S, D) and
    attention of every head (H, S, S) over prompt and answer, float16.

    The answer is generated greedily; one more pass over prompt and answer then
    gives all states at once."""
    prompt = prompt_ids(lm, question, instruction)
    generated = lm.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        stopping_criteria=StoppingCriteriaList([_StopAtCut(lm, prompt.shape[1])]),
        pad_token_id=lm.tokenizer.pad_token_id or lm.tokenizer.eos_token_id or 0,
    )
    raw = generated[0, prompt.shape[1] :].tolist()
    answer, method = _cut(lm, raw)
    ids = torch.cat([prompt, torch.tensor([answer], dtype=prompt.dtype, device=prompt.device)], dim=1)
    out = lm.model(ids, output_hidden_states=True, output_attentions=True, use_cache=False)
    # hidden_states[0] are the embeddings; entry l + 1 is what layer l puts out.
    hidden = [h[0].to(torch.float16).cpu().numpy() for h in out.hidden_states[1:]]
    attention = [a[0].to(torch.float16).cpu().numpy() for a in out.attentions]
    tokens = ids[0].cpu().numpy().astype("int32")
    decode = lm.tokenizer.decode
    return {
        "hidden_states": hidden,
        "attentions": attention,
        "tokens": tokens,
        "tokens_decoded": [decode([int(t)]) for t in tokens],
        "question": question,
        "generated_text": decode(ids[0], skip_special_tokens=False),
        "generated_answer": decode(raw, skip_special_tokens=True),
        "generated_answer_clean": decode(answer, skip_special_tokens=True).strip(),
        "prompt_length": int(prompt.shape[1]),
        "num_layers": len(hidden),
        "cutoff_method": method,
        "tokens_before_cutoff": int(prompt.shape[1] + len(raw)),
        "tokens_after_cutoff": len(tokens),
    }
