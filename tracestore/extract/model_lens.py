"""The final norm and the unembedding matrix of a Hugging Face model, for a logit lens."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tracestore.errors import UsageError
from tracestore.extract.model import LanguageModel

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
