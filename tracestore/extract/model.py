"""Greedy answers of a causal language model, and their traces."""

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteria, StoppingCriteriaList

import tracestore
from tracestore.errors import UsageError
from tracestore.extract.answer_end import AnswerEnd
from tracestore.extract.hooks import capture
from tracestore.extras import needs
from tracestore.ingest.sources import fingerprint
from tracestore.store.format.provenance import Provenance

# Prompt for a model without a chat template.
PLAIN_PROMPT = "{instruction}\nQ: {question}\nA:"


@dataclass
class LanguageModel:
    """A Hugging Face model in evaluation mode with eager attention, its tokenizer, id and revision."""

    model: Any
    tokenizer: Any
    name: str
    revision: str | None


def _locate(model: str) -> tuple[str, str | None]:
    """Return the id or folder for from_pretrained, and the name of the GGUF file in it or None."""
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
    """Load a causal language model with its tokenizer.

    Parameters
    ----------
    model : str
        Hugging Face id, local folder, .gguf file, or package:NAME for the .gguf file of an installed
        Python package.
    device : str
        "auto", "cpu" or "cuda".
    dtype : str
        Name of a torch dtype.

    Raises
    ------
    UsageError
        The model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    location, gguf = _locate(model)
    if gguf:
        with needs("extract"):
            import gguf as _  # noqa: F401 - the error of transformers has several lines
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
    # Stores hold no path of this machine: a model of a local folder or file has the name of that.
    name = gguf or (Path(location).resolve().name if Path(location).is_dir() else model)
    revision = getattr(network.config, "_commit_hash", None) or _hash_of_files(Path(location), gguf)
    return LanguageModel(network.eval(), tokenizer, name, revision)


def _hash_of_files(folder: Path, gguf: str | None) -> str | None:
    """Return a hash of names, sizes and samples of the files of a model in a local folder, or None without files."""
    files = [folder / gguf] if gguf else sorted(folder.iterdir()) if folder.is_dir() else []
    files = [path for path in files if path.suffix in (".safetensors", ".bin", ".gguf", ".json")]
    digest = hashlib.sha256(json.dumps([[path.name, *fingerprint(path)] for path in files]).encode())
    return f"files:{digest.hexdigest()}" if files else None


def provenance_of(lm: LanguageModel, *, instruction: str, max_new_tokens: int) -> Provenance:
    """Return the provenance of the traces that answer_questions() makes."""
    template = getattr(lm.tokenizer, "chat_template", None) or PLAIN_PROMPT
    num_layers = lm.model.config.get_text_config().num_hidden_layers
    return Provenance(
        model=lm.name,
        model_revision=lm.revision,
        tokenizer=lm.name,
        prompt_sha256=hashlib.sha256(json.dumps([template, instruction]).encode()).hexdigest(),
        layer_ids=tuple(range(1, num_layers + 1)),
        hidden_states_at="block output",
        final_norm=True,
        attention_kind="softmax",
        compute_dtype=str(lm.model.dtype).removeprefix("torch."),
        sampling={"do_sample": False, "max_new_tokens": max_new_tokens},
        tool=f"tracestore {tracestore.__version__}",
    )


def prompt_ids(lm: LanguageModel, question: str, instruction: str) -> torch.Tensor:
    """Return the token ids (S,) of the prompt, in the chat template of the model if it has one."""
    if getattr(lm.tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": instruction}, {"role": "user", "content": question}]
        encoded = lm.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = lm.tokenizer(PLAIN_PROMPT.format(instruction=instruction, question=question), return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"][0]
    return ids.to(lm.model.device)


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


def _end_tokens(lm: LanguageModel) -> set[int]:
    """Return the end-of-sequence tokens of model and tokenizer."""
    ends = lm.model.generation_config.eos_token_id
    return {lm.tokenizer.eos_token_id, *([ends] if isinstance(ends, int) else ends or ())}


def _padded(rows: Sequence[torch.Tensor], pad: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids padded to (B, longest row), and the attention mask."""
    ids = pad_sequence(list(rows), batch_first=True, padding_value=pad, padding_side=side)
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)


@torch.inference_mode()
def answer_questions(
    lm: LanguageModel, questions: Sequence[str], *, instruction: str, max_new_tokens: int
) -> list[dict[str, Any]]:
    """Answer questions in one batch, and return their traces.

    Answers are generated greedily. One more forward pass over prompts and answers then yields all states.
    Rounding depends on the batch, so that values can differ in their last bits from those of a question
    that is answered alone. If two tokens are equally likely, answers can differ as well.

    Parameters
    ----------
    lm : LanguageModel
        The model.
    questions : sequence of str
        The questions.
    instruction : str
        System prompt.
    max_new_tokens : int
        Maximum number of tokens of an answer.

    Returns
    -------
    list of dict
        Traces in the pickle schema, float16: hidden states of each layer (S, D) and attention of each
        head (H, S, S) over the tokens of prompt and answer, without padding.
    """
    pad = lm.tokenizer.pad_token_id or lm.tokenizer.eos_token_id or 0
    prompts = [prompt_ids(lm, question, instruction) for question in questions]
    padded, mask = _padded(prompts, pad, "left")
    ends = [AnswerEnd(lm.tokenizer, _end_tokens(lm)) for _ in prompts]
    lm.model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        stopping_criteria=StoppingCriteriaList([_StopAtEnd(ends, padded.shape[1])]),
        pad_token_id=pad,
    )
    whole = [torch.cat([p, p.new_tensor(end.answer)]) for p, end in zip(prompts, ends, strict=True)]
    # Padding on the right changes nothing: positions count from the first token, and attention is causal.
    ids, mask = _padded(whole, pad, "right")
    with capture(lm.model) as states:
        lm.model(ids, attention_mask=mask, use_cache=False)
    decode, traces = lm.tokenizer.decode, states.traces()
    for k, trace in enumerate(traces):
        end = ends[k]
        trace |= {
            "num_layers": len(trace["attentions"]),
            "tokens_decoded": [decode([token]) for token in trace["tokens"].tolist()],
            "question": questions[k],
            "generated_text": decode(whole[k], skip_special_tokens=False),
            "generated_answer": decode(end.tokens, skip_special_tokens=True),
            "generated_answer_clean": decode(end.answer, skip_special_tokens=True).strip(),
            "prompt_length": len(prompts[k]),
            "cutoff_method": end.method,
            "tokens_before_cutoff": len(prompts[k]) + len(end.tokens),
            "tokens_after_cutoff": len(whole[k]),
        }
    return traces
