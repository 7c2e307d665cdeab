"""Record the hidden states and attention of a model while your own code runs it."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tracestore.errors import UsageError
from tracestore.extract.select import EVERYTHING, Select


@dataclass
class _Pass:
    """The recording of a forward pass.

    Attributes
    ----------
    start, first_key : int
        Column of its first recorded token, and of the first token that its attention covers.
    hidden : list of Tensor
        Hidden states of each layer, (B, s, D).
    attention : list of Tensor
        Attention of each layer, (B, H, s, keys).
    tokens : Tensor or None
        Input tokens, (B, s).
    """

    start: int
    first_key: int
    hidden: list[torch.Tensor]
    attention: list[torch.Tensor]
    tokens: torch.Tensor | None


class Capture:
    """The recording of a model: hidden states of each layer, attention of each head, and input tokens.

    Made by `capture`. A recording starts with the first forward pass after `traces()` or `clear()`.
    """

    def __init__(self, dtype: torch.dtype, select: Select) -> None:
        self._dtype, self._select = dtype, select
        self._num_skipped, self._is_on_gpu = 0, False
        self.clear()

    def clear(self) -> None:
        """Discard the recording."""
        self._passes: list[_Pass] = []
        self._num_seen = 0  # columns of all passes
        self._begin = self._num_skipped  # first recorded column
        self._mask: torch.Tensor | None = None  # of the last pass, (B, tokens so far)

    def skip(self, num_tokens: int) -> None:
        """Leave out the first tokens of each row of the next texts, padding included."""
        self._num_skipped = self._begin = num_tokens

    @property
    def num_tokens(self) -> int:
        """Number of recorded tokens per row, padding included."""
        return max(0, self._num_seen - self._begin)

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
        if not self._passes:
            raise UsageError("nothing was recorded: run the model inside `with capture(model)` first")
        begin, device = self._begin, self._passes[0].hidden[0].device
        rows = self._passes[0].hidden[0].shape[0]
        if lengths is not None and len(lengths) != rows:
            raise UsageError(f"found {len(lengths)} lengths, expected {rows}, one per row of the batch")
        if self._is_on_gpu:
            torch.cuda.synchronize()  # the copies of the last passes
        hidden = [
            torch.cat([h[:, max(0, begin - p.start) :] for p, h in zip(self._passes, layer, strict=True)], dim=1)
            for layer in zip(*(p.hidden for p in self._passes), strict=True)
        ]
        attention = [self._square(layer) for layer in zip(*(p.attention for p in self._passes), strict=True)]
        # Passes that received embeddings recorded no tokens.
        given = [p.tokens[:, max(0, begin - p.start) :] for p in self._passes if p.tokens is not None]
        tokens = torch.cat(given, dim=1).to(device) if len(given) == len(self._passes) else None
        traces = []
        for row in range(rows):
            kept = self._kept_columns(row, None if lengths is None else lengths[row]) - begin
            trace: dict[str, Any] = {"hidden_states": [_numpy(h[row, kept]) for h in hidden]}
            if self._select.heads != "none":
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
        if self._passes and (rows := self._passes[0].hidden[0].shape[0]) != 1:
            raise UsageError(f"the batch has {rows} rows; call traces() for all of them")
        return self.traces(None if length is None else [length])[0]

    def _kept_columns(self, row: int, length: int | None) -> torch.Tensor:
        """Return the columns of the selected tokens of a row, without padding."""
        kept = torch.arange(self._num_seen)
        if self._mask is not None:
            # The masks of generate() may cover more tokens than were recorded.
            kept = torch.nonzero(self._mask[row, : self._num_seen].cpu()).squeeze(1)
        if length is not None:
            if not 0 < length <= len(kept):
                raise UsageError(f"found a length of {length}, expected 1 to {len(kept)}")
            kept = kept[:length]
        if isinstance(self._select.positions, int):
            kept = kept[-self._select.positions :]
            if kept[0] < self._begin:
                raise UsageError(
                    f"row {row} ended before others, so that its last {self._select.positions} tokens were not "
                    "recorded: select more positions"
                )
        kept = kept[kept >= self._begin]
        if not len(kept):
            raise UsageError(f"row {row} has no token at the selected positions")
        return kept

    def _square(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the attention of a layer (B, H, S, S) from its passes, with zeros for later tokens."""
        size, blocks = self._num_seen - self._begin, []
        for p, part in zip(self._passes, parts, strict=True):
            part = part[:, :, max(0, self._begin - p.start) :, self._begin - p.first_key :]
            blocks.append(nn.functional.pad(part, (0, size - part.shape[-1])))
        return torch.cat(blocks, dim=2)

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
        added, has_attention = hidden[0].shape[1], self._select.heads != "none"
        seen = added if cached is None else cached
        if has_attention:
            if not attention or any(a is None for a in attention):
                raise UsageError(
                    "the model returns no attention weights: load it with attn_implementation='eager', "
                    "or call capture(model, select=Select(heads='none'))"
                )
            seen = attention[0].shape[-1]
        if seen == added and self._num_seen:
            self.clear()  # without a cache, generate() runs the whole text in each pass
        if seen != self._num_seen + added:
            raise UsageError(
                f"a pass of {added} tokens continues from {seen - added}, but {self._num_seen} were recorded: "
                "begin with the whole prompt, and call traces() before the next text"
            )
        if self._passes and self._passes[0].hidden[0].shape[0] != hidden[0].shape[0]:
            raise UsageError("the batch size changed between two passes: call traces() before the next batch")
        start, self._num_seen = self._num_seen, seen
        self._mask = mask if mask is not None and mask.ndim == 2 else None
        self._begin = max(self._begin, self._first_selected(added))
        self._passes = [p for p in self._passes if p.start + p.hidden[0].shape[1] > self._begin]
        skipped = max(0, self._begin - start)
        if not self._select.names:
            layers = [k - 1 for k in self._select.layer_ids(len(hidden))]
            hidden, attention = [hidden[k] for k in layers], [attention[k] for k in layers] if attention else None
        self._passes.append(
            _Pass(
                start + skipped,
                self._begin,
                [self._copy(h[:, skipped:]) for h in hidden],
                [self._copy(self._heads(a[:, :, skipped:, self._begin :])) for a in attention or () if has_attention],
                None if tokens is None else tokens[:, skipped:].detach().clone(),
            )
        )

    def _first_selected(self, added: int) -> int:
        """Return the first column that is selected after a pass of `added` tokens."""
        positions = self._select.positions
        if positions == "answer":
            # If the prompt is all there is so far, nothing is.
            return added if self._num_seen == added else 0
        if positions == "all":
            return 0
        end = self._num_seen
        if self._mask is not None:
            columns = torch.arange(1, self._num_seen + 1, device=self._mask.device)
            end = int((self._mask[:, : self._num_seen] * columns).amax(1).min())
        return max(0, end - positions)

    def _heads(self, attention: torch.Tensor) -> torch.Tensor:
        if self._select.heads == "mean":
            return attention.mean(1, keepdim=True, dtype=torch.float32)
        return attention

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in the memory of the CPU, in the dtype of the recording.

        The recording would fill the memory of a GPU. Its next kernels run during the copy.
        """
        self._is_on_gpu = tensor.is_cuda
        return tensor.detach().to(self._dtype, copy=not tensor.is_cuda).to("cpu", non_blocking=True)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().numpy()


@contextmanager
def capture(model: nn.Module, *, select: Select = EVERYTHING, dtype: torch.dtype = torch.float16) -> Iterator[Capture]:
    """Record the hidden states and attention of a model within a `with` block.

    Of a Hugging Face model hooks request hidden states and attention from each forward pass, and copy them to the CPU. They also
    work while generate() runs token by token with a cache, so that no second pass is needed. The output
    that the caller of the model receives is unchanged. The recorded states are those of
    `output_hidden_states` without the embeddings. Those of the last layer come after the final norm.

    `Select(layers=[NAME, ...], heads="none")` records the outputs of modules of any PyTorch model instead. Its
    `forward` receives token ids or embeddings first, or as input_ids.

    Rows of a batch may be padded on either side, as the attention mask describes. Beam search is not
    supported, because it reorders rows between passes.

    Parameters
    ----------
    model : nn.Module
        A Hugging Face model. With attention it needs attn_implementation="eager". Or, with layers by name, any
        module.
    select : Select
        Layers, positions and heads. Default: all.
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
    states = Capture(dtype, select)
    if select.names:
        with _module_hooks(model, states, select.names):
            yield states
        return
    wanted = {"output_hidden_states": True, "return_dict": True}
    if select.heads != "none":
        wanted["output_attentions"] = True

    requested: list[Mapping[str, Any]] = []  # the keyword arguments of the caller of the current pass

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        requested[:] = [kwargs]
        return args, kwargs | wanted

    def after(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        if getattr(output, "hidden_states", None) is None:
            raise UsageError(f"{type(model).__name__} returns no hidden states; expected a Hugging Face model")
        attentions = getattr(output, "attentions", None)
        states._add(output.hidden_states[1:], attentions, *_inputs(model, args, kwargs, output))
        # Remove the outputs that only the hook requested.
        extra = {
            name
            for name in ("hidden_states", "attentions")
            if not requested[0].get(f"output_{name}", getattr(model.config, f"output_{name}", False))
        }
        output = type(output)(**{name: value for name, value in output.items() if name not in extra})
        return output.to_tuple() if requested[0].get("return_dict") is False else output

    with (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ):
        yield states


@contextmanager
def _module_hooks(model: nn.Module, states: Capture, names: Sequence[str]) -> Iterator[None]:
    """Record the outputs of modules by name within a `with` block."""
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            known = ", ".join([n for n in modules if n][:5])
            raise UsageError(f"layers: {type(model).__name__} has no module {name!r}; its modules are {known}, ...")
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if not isinstance(output, torch.Tensor) or output.ndim != 3:
            raise UsageError(f"layers: the output of {name} is no tensor (B, S, D)")
        outputs[name] = output.detach().clone()  # later modules may change it in place

    def after(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        missing = [name for name in names if name not in outputs]
        if missing:
            raise UsageError(f"layers: {missing[0]} was not called in a forward pass")
        hidden = [outputs.pop(name) for name in names]
        states._add(hidden, None, *_inputs(model, args, kwargs, output))

    with ExitStack() as handles:
        for name in names:
            hook = modules[name].register_forward_hook(lambda _module, _args, output, name=name: keep(name, output))
            handles.enter_context(hook)
        handles.enter_context(model.register_forward_hook(after, with_kwargs=True))
        yield


def _inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, int | None]:
    """Return token ids, attention mask and number of cached tokens of a forward pass."""
    tokens = args[0] if args else kwargs.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.is_floating_point():
        tokens = None
    # Transformers named it past_key_values until 5.23.
    cache = getattr(output, "cache" if hasattr(output, "cache") else "past_key_values", None)
    given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | dict(kwargs)
    return tokens, given.get("attention_mask"), None if cache is None else int(cache.get_seq_length())
