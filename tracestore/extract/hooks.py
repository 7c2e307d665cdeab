"""Recording what happens inside a model while one's own code runs it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from tracestore.errors import UsageError


class Capture:
    """What a model did since the last `traces()`: hidden states after every layer, attention of
    every head, and the tokens that went in. See `capture`."""

    def __init__(self, dtype: torch.dtype, with_attention: bool) -> None:
        self._dtype, self._with_attention = dtype, with_attention
        self.clear()

    def clear(self) -> None:
        """Forgets what was recorded."""
        self._hidden: list[list[torch.Tensor]] = []  # by pass and layer, (B, s, D)
        self._attention: list[list[torch.Tensor]] = []  # by pass and layer, (B, H, s, tokens so far)
        self._tokens: list[torch.Tensor] = []  # by pass, (B, s)
        self._mask: torch.Tensor | None = None  # of the last pass, (B, tokens so far)

    @property
    def num_tokens(self) -> int:
        """Tokens that went through the model, padding included."""
        return sum(layers[0].shape[1] for layers in self._hidden)

    def traces(self, lengths: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """A dict of the pickle schema for each row of the batch, and forgets what was recorded:
        `hidden_states`, L arrays (S, D); `attentions`, L arrays (H, S, S), where they are recorded;
        `tokens` (S,) int32, where the model was given input_ids. What the attention mask leaves out
        is left out. lengths: tokens of each row that are kept of the rest, the first ones; rows of
        a batch that have ended go on with padding in generate().

        Add `question_id` and whatever else is known, and give the dict to `tracestore.create`'s
        append. The last token that generate() chose never went through the model: it is not there.
        UsageError where nothing was recorded, or a length is beyond what was."""
        if not self._hidden:
            raise UsageError("nothing was recorded: run the model inside `with capture(model)` first")
        rows = self._hidden[0][0].shape[0]
        if lengths is not None and len(lengths) != rows:
            raise UsageError(f"found {len(lengths)} lengths, expected {rows}, one a row of the batch")
        hidden = [torch.cat(parts, dim=1) for parts in zip(*self._hidden, strict=True)]
        attention = [_square(parts) for parts in zip(*self._attention, strict=True)]
        # Not where some passes were given embeddings in their place.
        tokens = torch.cat(self._tokens, dim=1) if len(self._tokens) == len(self._hidden) else None
        traces = []
        for row in range(rows):
            kept = self._kept(row)
            if lengths is not None:
                if not 0 < lengths[row] <= len(kept):
                    raise UsageError(f"found a length of {lengths[row]}, expected 1 to {len(kept)}")
                kept = kept[: lengths[row]]
            trace: dict[str, Any] = {"hidden_states": [_numpy(h[row, kept]) for h in hidden]}
            if self._with_attention:
                trace["attentions"] = [_numpy(a[row][:, kept][:, :, kept]) for a in attention]
            if tokens is not None:
                trace["tokens"] = _numpy(tokens[row, kept]).astype("int32")
            traces.append(trace)
        self.clear()
        return traces

    def trace(self, length: int | None = None) -> dict[str, Any]:
        """The one of a batch of one."""
        if self._hidden and self._hidden[0][0].shape[0] != 1:
            raise UsageError(f"the batch has {self._hidden[0][0].shape[0]} rows: traces() gives all of them")
        return self.traces(None if length is None else [length])[0]

    def _kept(self, row: int) -> torch.Tensor:
        """Positions that are no padding."""
        if self._mask is None:
            return torch.arange(self.num_tokens)
        # Masks of generate() are at least as long as what went through.
        return torch.nonzero(self._mask[row, : self.num_tokens].cpu()).squeeze(1)

    def _add(
        self,
        hidden: Sequence[torch.Tensor],
        attention: Sequence[torch.Tensor] | None,
        tokens: torch.Tensor | None,
        mask: torch.Tensor | None,
        cached: int | None,
    ) -> None:
        """cached: tokens that the model's cache holds after the pass; None: it has none."""
        added = hidden[0].shape[1]
        seen = added if cached is None else cached
        if self._with_attention:
            if not attention or any(a is None for a in attention):
                raise UsageError(
                    "the model gives no attention weights: load it with attn_implementation='eager', "
                    "or capture(model, attention=False)"
                )
            seen = attention[0].shape[-1]
        if seen == added and self._hidden:
            self.clear()  # the whole text anew, as generate() does without a cache
        if seen != self.num_tokens + added:
            raise UsageError(
                f"a pass of {added} tokens goes on from {seen - added}, but {self.num_tokens} were recorded before: "
                "begin with the whole prompt, and take traces() before the next text"
            )
        # Before anything is kept of the pass.
        if self._hidden and self._hidden[0][0].shape[0] != hidden[0].shape[0]:
            raise UsageError("the batch changed its size between two passes: take traces() before")
        if self._with_attention:
            assert attention is not None
            # To the CPU now: what a pass leaves behind would fill the device.
            self._attention.append([a.detach().to("cpu", self._dtype) for a in attention])
        self._hidden.append([h.detach().to("cpu", self._dtype) for h in hidden])
        if tokens is not None:
            self._tokens.append(tokens.detach().cpu())
        self._mask = mask if mask is not None and mask.ndim == 2 else None


def _square(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """(B, H, S, S) of a layer from the rows of each pass, zeros for later tokens."""
    size = parts[-1].shape[-1]
    return torch.cat([nn.functional.pad(p, (0, size - p.shape[-1])) for p in parts], dim=2)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().numpy()


@contextmanager
def capture(model: nn.Module, *, attention: bool = True, dtype: torch.dtype = torch.float16) -> Iterator[Capture]:
    """Records a Hugging Face model in one's own loop, while the block runs:

        with tracestore.extract.capture(model) as states, tracestore.create("run.zarr") as writer:
            for question in questions:
                answer = model.generate(**tokenizer(question.text, return_tensors="pt"))
                trace = states.trace()
                writer.append(trace | {"question_id": question.id, "tokens_decoded": [...]}, score=...)

    Hooks on the model ask each pass for its hidden states and attention and keep copies on the CPU
    in `dtype`, also while generate() runs it token by token with a cache; no second pass is needed.
    The states are those of `output_hidden_states` without the embeddings: the last layer's are
    those after the final norm. The model answers its caller as it would have done.

    attention: needs a model loaded with attn_implementation="eager". Rows of a batch may be padded
    on either side, as the attention mask says. Beam search changes rows between passes and is not
    for this. UsageError where a pass does not continue what was recorded.
    """
    if dtype not in (torch.float16, torch.float32):
        raise UsageError(f"found dtype {dtype}, expected torch.float16 or torch.float32: numpy has no other of both")
    states = Capture(dtype, attention)
    wanted = {"output_hidden_states": True, "return_dict": True} | ({"output_attentions": True} if attention else {})

    asked: list[Mapping[str, Any]] = []  # by the caller of the pass that runs

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        asked[:] = [kwargs]
        return args, kwargs | wanted

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        if getattr(output, "hidden_states", None) is None:
            raise UsageError(f"{type(model).__name__} gives no hidden states: a Hugging Face model is wanted")
        tokens = args[0] if args else kwargs.get("input_ids")
        cache = getattr(output, "past_key_values", None)
        cached = None if cache is None else int(cache.get_seq_length())
        attentions = getattr(output, "attentions", None)
        states._add(output.hidden_states[1:], attentions, tokens, kwargs.get("attention_mask"), cached)
        # What the caller did not ask for goes out again.
        unasked = {
            name
            for name in ("hidden_states", "attentions")
            if not asked[0].get(f"output_{name}", getattr(model.config, f"output_{name}", False))
        }
        output = type(output)(**{name: value for name, value in output.items() if name not in unasked})
        return output.to_tuple() if asked[0].get("return_dict") is False else output

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
