"""Record the hidden states and attention of a model while your own code runs it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from tracestore.errors import UsageError


class Capture:
    """The recording of a model: hidden states of each layer, attention of each head, and input tokens.

    Made by `capture`. A recording starts with the first forward pass after `traces()` or `clear()`.
    """

    def __init__(self, dtype: torch.dtype, with_attention: bool) -> None:
        self._dtype, self._with_attention = dtype, with_attention
        self.clear()

    def clear(self) -> None:
        """Discard the recording."""
        self._hidden: list[list[torch.Tensor]] = []  # by pass and layer, each (B, s, D)
        self._attention: list[list[torch.Tensor]] = []  # by pass and layer, each (B, H, s, tokens so far)
        self._tokens: list[torch.Tensor] = []  # by pass, each (B, s)
        self._mask: torch.Tensor | None = None  # of the last pass, (B, tokens so far)

    @property
    def num_tokens(self) -> int:
        """Number of recorded tokens per row, padding included."""
        return sum(layers[0].shape[1] for layers in self._hidden)

    def traces(self, lengths: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return one trace per row of the batch, and discard the recording.

        Add `question_id` and any other fields to a trace, and pass it to `append` of
        `tracestore.create`. The last token of generate() is missing, because it never went through
        the model.

        Parameters
        ----------
        lengths : sequence of int, optional
            Number of tokens to keep of each row, counted from its first token that is not padding.
            generate() pads rows that end before the others. Default: all tokens.

        Returns
        -------
        list of dict
            Traces in the pickle schema: `hidden_states`, L arrays (S, D); `attentions`, L arrays
            (H, S, S), if attention is recorded; `tokens`, int32 (S,), if the model received input_ids.
            Tokens that the attention mask excludes are left out.

        Raises
        ------
        UsageError
            Nothing was recorded, or `lengths` does not fit the recording.
        """
        if not self._hidden:
            raise UsageError("nothing was recorded: run the model inside `with capture(model)` first")
        rows = self._hidden[0][0].shape[0]
        if lengths is not None and len(lengths) != rows:
            raise UsageError(f"found {len(lengths)} lengths, expected {rows}, one per row of the batch")
        hidden = [torch.cat(parts, dim=1) for parts in zip(*self._hidden, strict=True)]
        attention = [_square(parts) for parts in zip(*self._attention, strict=True)]
        # Passes that received embeddings recorded no tokens.
        tokens = torch.cat(self._tokens, dim=1) if len(self._tokens) == len(self._hidden) else None
        traces = []
        for row in range(rows):
            kept = self._unpadded_positions(row)
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
        """Return the trace of a single-row batch, and discard the recording.

        Parameters
        ----------
        length : int, optional
            Number of tokens to keep. Default: all.

        Raises
        ------
        UsageError
            The batch has several rows, nothing was recorded, or `length` exceeds the recording.
        """
        if self._hidden and self._hidden[0][0].shape[0] != 1:
            raise UsageError(f"the batch has {self._hidden[0][0].shape[0]} rows; call traces() for all of them")
        return self.traces(None if length is None else [length])[0]

    def _unpadded_positions(self, row: int) -> torch.Tensor:
        """Return the positions of the tokens that are not padding."""
        if self._mask is None:
            return torch.arange(self.num_tokens)
        # The masks of generate() may cover more tokens than were recorded.
        return torch.nonzero(self._mask[row, : self.num_tokens].cpu()).squeeze(1)

    def _add(
        self,
        hidden: Sequence[torch.Tensor],
        attention: Sequence[torch.Tensor] | None,
        tokens: torch.Tensor | None,
        mask: torch.Tensor | None,
        cached: int | None,
    ) -> None:
        """Record a forward pass.

        Parameters
        ----------
        hidden : sequence of Tensor
            Hidden states of each layer, (B, s, D).
        attention : sequence of Tensor or None
            Attention of each layer, (B, H, s, tokens so far).
        tokens : Tensor or None
            Input tokens, (B, s).
        mask : Tensor or None
            Attention mask, (B, tokens so far).
        cached : int or None
            Number of tokens in the key-value cache after the pass. None: the model has no cache.
        """
        added = hidden[0].shape[1]
        seen = added if cached is None else cached
        if self._with_attention:
            if not attention or any(a is None for a in attention):
                raise UsageError(
                    "the model returns no attention weights: load it with attn_implementation='eager', "
                    "or call capture(model, attention=False)"
                )
            seen = attention[0].shape[-1]
        if seen == added and self._hidden:
            self.clear()  # without a cache, generate() runs the whole text in each pass
        if seen != self.num_tokens + added:
            raise UsageError(
                f"a pass of {added} tokens continues from {seen - added}, but {self.num_tokens} were recorded: "
                "begin with the whole prompt, and call traces() before the next text"
            )
        if self._hidden and self._hidden[0][0].shape[0] != hidden[0].shape[0]:
            raise UsageError("the batch size changed between two passes: call traces() before the next batch")
        if self._with_attention:
            assert attention is not None
            # Copied to the CPU at once, because the recording would fill the memory of the device.
            self._attention.append([a.detach().to("cpu", self._dtype) for a in attention])
        self._hidden.append([h.detach().to("cpu", self._dtype) for h in hidden])
        if tokens is not None:
            self._tokens.append(tokens.detach().cpu())
        self._mask = mask if mask is not None and mask.ndim == 2 else None


def _square(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the attention of a layer (B, H, S, S) from its passes, with zeros for later tokens."""
    size = parts[-1].shape[-1]
    return torch.cat([nn.functional.pad(p, (0, size - p.shape[-1])) for p in parts], dim=2)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().numpy()


@contextmanager
def capture(model: nn.Module, *, attention: bool = True, dtype: torch.dtype = torch.float16) -> Iterator[Capture]:
    """Record the hidden states and attention of a Hugging Face model within a `with` block.

    Hooks request hidden states and attention from each forward pass, and copy them to the CPU. They also
    work while generate() runs token by token with a cache, so that no second pass is needed. The output
    that the caller of the model receives is unchanged. The recorded states are those of
    `output_hidden_states` without the embeddings. Those of the last layer come after the final norm.

    Rows of a batch may be padded on either side, as the attention mask describes. Beam search is not
    supported, because it reorders rows between passes.

    Parameters
    ----------
    model : nn.Module
        A Hugging Face model.
    attention : bool
        Record attention as well. Needs a model loaded with attn_implementation="eager".
    dtype : torch.dtype
        dtype of the recording, torch.float16 or torch.float32.

    Yields
    ------
    Capture
        The recording.

    Raises
    ------
    UsageError
        A pass does not continue the recording, or the model returns no hidden states or attention.

    Examples
    --------
    ::

        with tracestore.extract.capture(model) as states, tracestore.create("run.zarr") as writer:
            for question in questions:
                answer = model.generate(**tokenizer(question.text, return_tensors="pt"))
                trace = states.trace()
                writer.append(trace | {"question_id": question.id, "tokens_decoded": [...]}, score=...)
    """
    if dtype not in (torch.float16, torch.float32):
        raise UsageError(f"found dtype {dtype}, expected torch.float16 or torch.float32")
    states = Capture(dtype, attention)
    wanted = {"output_hidden_states": True, "return_dict": True} | ({"output_attentions": True} if attention else {})

    requested: list[Mapping[str, Any]] = []  # the keyword arguments of the caller of the current pass

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        requested[:] = [kwargs]
        return args, kwargs | wanted

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        if getattr(output, "hidden_states", None) is None:
            raise UsageError(f"{type(model).__name__} returns no hidden states; expected a Hugging Face model")
        tokens = args[0] if args else kwargs.get("input_ids")
        cache = getattr(output, "past_key_values", None)
        cached = None if cache is None else int(cache.get_seq_length())
        attentions = getattr(output, "attentions", None)
        states._add(output.hidden_states[1:], attentions, tokens, kwargs.get("attention_mask"), cached)
        # Remove the outputs that only the hook requested.
        extra = {
            name
            for name in ("hidden_states", "attentions")
            if not requested[0].get(f"output_{name}", getattr(model.config, f"output_{name}", False))
        }
        output = type(output)(**{name: value for name, value in output.items() if name not in extra})
        return output.to_tuple() if requested[0].get("return_dict") is False else output

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
