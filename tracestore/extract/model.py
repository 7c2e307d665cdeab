"""A causal language model: loading, and its final norm and unembedding matrix for a logit lens."""

import copy
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tracestore.errors import UsageError
from tracestore.extras import needs
from tracestore.ingest.sources import fingerprint


@dataclass
class LanguageModel:
    """A Hugging Face model in evaluation mode, its tokenizer, id and revision."""

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
        "auto", "cpu" or "cuda". Processes of torchrun take turns at the GPUs of their machine.
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
    if device == "cuda":
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % max(1, torch.cuda.device_count())}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **extra)
        load = partial(AutoModelForCausalLM.from_pretrained, location, dtype=getattr(torch, dtype), **extra)
        network = load()
        with attention_weights(network):
            if network.config._attn_implementation != "eager":
                network = load(attn_implementation="eager")
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


@contextmanager
def attention_weights(model: Any, is_wanted: bool = True) -> Iterator[None]:
    """Let a model return attention weights within a `with` block: use its eager attention."""
    usual = model.config._attn_implementation
    if not is_wanted or usual == "eager":
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(usual)


# Names that models of transformers give to their final norm.
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "layer_norm")
_EPS = ("variance_epsilon", "eps", "epsilon")
_PROBES = 8


@torch.inference_mode()
def lens_of(lm: LanguageModel) -> dict[str, Any]:
    """Return the arguments of TraceWriter.set_lens for a model.

    The kind of the norm is determined with random states, and the logits of a short input are compared with
    those that the model computes, so that a model of another structure is refused.

    Raises
    ------
    UsageError
        The model has no unembedding matrix or final norm that is known, or changes its logits afterwards.
    """
    head = lm.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise UsageError(f"--lens: {lm.name} ({type(lm.model).__name__}) has no unembedding matrix")
    for module in _norms(lm.model):
        lens = _norm_of(module, weight.shape[1])
        if lens is not None:
            break
    else:
        raise UsageError(f"--lens: the final norm of {lm.name} ({type(lm.model).__name__}) is of an unknown kind")
    if not _explains_logits(lm.model, module, head):
        raise UsageError(
            f"--lens: {lm.name} ({type(lm.model).__name__}) changes the logits after its final norm and unembedding"
        )
    return lens | {"unembedding": weight, "bias": getattr(head, "bias", None)}


def _norms(model: Any) -> Iterator[nn.Module]:
    """Yield the modules that may be the final norm, by their names."""
    base = getattr(model, "base_model", model)
    for owner in (base, *(getattr(base, name, None) for name in ("decoder", "language_model", "model"))):
        for name in _NORMS:
            if isinstance(found := getattr(owner, name, None), nn.Module):
                yield found


def _norm_of(module: nn.Module, hidden_dim: int) -> dict[str, Any] | None:
    """Return kind, eps and parameters of a norm, or None if it is of another kind."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = next((value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None)
    if eps is None or not isinstance(weight, torch.Tensor) or weight.shape != (hidden_dim,):
        return None
    weight = weight.float()
    # The mean differs from 0, by which the two kinds differ.
    states = 1 + torch.randn(_PROBES, hidden_dim, generator=torch.Generator().manual_seed(0)).to(weight)
    # In float32 the rounding errors are less than the differences between the kinds.
    expected = copy.deepcopy(module).float()(states)
    centered = states - states.mean(-1, keepdim=True)
    # Gemma multiplies by 1 + weight.
    for factor in (weight, 1 + weight):
        for kind, values in (("rms", states), ("layer", centered)):
            found = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * factor
            if bias is not None:
                found += bias.float()
            if _are_close(found, expected, 1e-5):
                return {"norm": kind, "eps": eps, "norm_weight": factor, "norm_bias": bias}
    return None


def _explains_logits(model: Any, module: nn.Module, head: nn.Module) -> bool:
    """Return whether the logits of the model are those that `head` computes from the output of `module`."""
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        return False  # The difference can be less than a rounding error.
    outputs: list[torch.Tensor] = []
    with module.register_forward_hook(lambda _module, _args, output: outputs.append(output)):
        ids = torch.arange(min(4, head.weight.shape[0]), device=model.device)[None]  # type: ignore[arg-type, index]
        logits = model(ids, use_cache=False).logits
    if len(outputs) != 1 or outputs[0].shape[:2] != logits.shape[:2]:
        return False
    return _are_close(head(outputs[0]), logits, 2 * torch.finfo(head.weight.dtype).eps)  # type: ignore[arg-type]


def _are_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Return whether the largest difference is at most `tolerance` times the largest absolute value."""
    if found.shape != expected.shape:
        return False
    difference = (found.float() - expected.float()).abs().max()
    return bool(difference <= tolerance * expected.float().abs().max())
