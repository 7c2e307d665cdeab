"""LSTMs with heads over the layers of the language model, one after the other or side by side.

Sizes: B traces, L layers, R readers, H hidden size of an LSTM.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from tracestore.detectors.layers.dropout import TraceDropout, TraceMasks, drop
from tracestore.detectors.layers.model_config import ModelConfig

# Streams of TraceMasks: the graph encoder, then those of each reader: two layers of its head, and one per layer of
# its LSTM.
ENCODER_STREAM, _READERS, NOISE_STREAM = 0, 1, 1 << 31
_HEAD, _LSTM, _PER_READER = 0, 2, 1 << 16


class StackedLSTM(nn.Module):
    """nn.LSTM with several bidirectional layers, whose dropout uses masks of `TraceMasks`."""

    def __init__(self, in_channels: int, config: ModelConfig, stream: int) -> None:
        super().__init__()
        hidden, num_layers = config.lstm_hidden, config.num_lstm_layers
        self.is_mean = config.layer_pooling == "mean"
        widths = [in_channels] + [2 * hidden] * (num_layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(n, hidden, batch_first=True, bidirectional=True) for n in widths)
        self.dropouts = nn.ModuleList(TraceDropout(config.dropout, stream + k) for k in range(num_layers - 1))

    def forward(self, x: torch.Tensor, masks: TraceMasks | None = None) -> torch.Tensor:
        """Return the outputs of the last layer, averaged, or its final states: (B, L, in) -> (B, 2 H)."""
        x, (final, _) = self.layers[0](x)
        for dropout, layer in zip(self.dropouts, self.layers[1:], strict=True):
            x, (final, _) = layer(dropout(x, masks))
        return x.mean(1) if self.is_mean else torch.cat([final[0], final[1]], dim=1)


class LayerLSTM(nn.Module):
    """A bidirectional LSTM over the layers of the language model, and a head."""

    def __init__(self, in_channels: int, config: ModelConfig, stream: int) -> None:
        super().__init__()
        self.lstm = StackedLSTM(in_channels, config, stream + _LSTM)
        self.head = nn.Sequential(
            nn.Linear(2 * config.lstm_hidden, 128),
            nn.ReLU(),
            TraceDropout(config.dropout, stream + _HEAD),
            nn.Linear(128, 64),
            nn.ReLU(),
            TraceDropout(config.dropout, stream + _HEAD + 1),
            nn.Linear(64, 1),
        )

    def forward(self, x: torch.Tensor, masks: TraceMasks | None = None) -> torch.Tensor:
        """Return the logits: (B, L, in) -> (B,)."""
        x = self.lstm(x, masks)
        for layer in self.head:
            x = layer(x, masks) if isinstance(layer, TraceDropout) else layer(x)
        return x.squeeze(1)


class Readers(nn.ModuleList):
    """``config.num_readers`` LSTMs with heads, which differ in their first weights and dropout masks.

    Each is trained on the labels by itself, and the detector's logit is their mean (`DetectorOutput.logits`).

    A GPU computes them side by side: one LSTM whose hidden state is that of all readers, with block-diagonal
    recurrent weights, and batched heads. It starts a quarter as many operations, and the zeros outside of the
    blocks cost nothing that a GPU would notice. On a CPU they can double the time.

    References
    ----------
    Lee et al. 2015, "Why M Heads are Better than One: Training a Diverse Ensemble of Deep Networks",
    section 3.1 (several heads on shared first layers).
    """

    def __init__(self, in_channels: int, config: ModelConfig) -> None:
        streams = (_READERS + k * _PER_READER for k in range(config.num_readers))
        super().__init__(LayerLSTM(in_channels, config, stream) for stream in streams)
        self.p, self.hidden = config.dropout, config.lstm_hidden
        self._packing: _Packing | None = None

    def forward(self, x: torch.Tensor, masks: TraceMasks | None = None) -> torch.Tensor:
        """Return the logits of each reader: (B, L, in) -> (B, R)."""
        if x.device.type == "cpu":
            return torch.stack([reader(x, masks) for reader in self], dim=1)
        # In float32 also under autocast: converting the weights takes more operations than it saves time.
        with torch.autocast(x.device.type, enabled=False):
            return self.side_by_side(x, masks)

    def side_by_side(self, x: torch.Tensor, masks: TraceMasks | None = None) -> torch.Tensor:
        """Return what `forward` returns, computed for all readers at once."""
        parameters = list(self.parameters())
        if self._packing is None or self._packing.device != x.device:
            self._packing = _Packing(self, x.device)
        lstms, heads = self._packing.weights(parameters)
        B, R, H = len(x), len(self), self.hidden
        x, zeros, final = x.to(parameters[0].dtype), parameters[0].new_zeros(2, B, R * H), None
        for k, weights in enumerate(lstms):
            if k > 0:
                by_reader = x.view(B, -1, 2, R, H).permute(3, 0, 1, 2, 4)
                dropped = self._drop(by_reader, masks, _LSTM + k - 1)
                x = dropped.permute(1, 2, 3, 0, 4).reshape(x.shape)
            x, final, _ = torch._VF.lstm(x, (zeros, zeros), weights, True, 1, 0.0, self.training, True, True)
        # (B, 2 directions, R, H) -> (R, B, 2 H)
        is_mean = cast(LayerLSTM, self[0]).lstm.is_mean
        pooled = x.mean(1) if is_mean else cast(torch.Tensor, final).transpose(0, 1)
        out = pooled.view(B, 2, R, H).permute(2, 0, 1, 3).reshape(R, B, 2 * H)
        for k, (matrix, bias) in enumerate(heads):
            if k > 0:
                out = self._drop(out.relu(), masks, _HEAD + k - 1)
            out = torch.baddbmm(bias, out, matrix)
        return out.squeeze(2).t()

    def _drop(self, x: torch.Tensor, masks: TraceMasks | None, stream: int) -> torch.Tensor:
        """Apply the dropout of one layer of every reader to x (R, B, ...)."""
        if not self.training or self.p == 0:
            return x
        flat = x.reshape(-1, *x.shape[2:])
        return drop(flat, self.p, masks, _READERS + stream, stream_step=_PER_READER).view(x.shape)


class _Packing:
    """Map the elements of the parameters of some readers to the weights of all of them.

    Each LSTM has its weights in a memory of its own, in the order of cuDNN, which would copy them otherwise.
    """

    def __init__(self, readers: Readers, device: torch.device) -> None:
        self.device = device
        R, H = len(readers), readers.hidden
        self.shapes = [p.shape for p in readers.parameters()]
        self.sizes = [shape.numel() for shape in self.shapes]
        total = sum(self.sizes)
        # Each weight is described by the numbers of the elements that it holds; `total` is a zero.
        numbers = [n.view(s) for n, s in zip(torch.arange(total).split(self.sizes), self.shapes, strict=True)]
        names = [name for name, _ in readers[0].named_parameters()]
        # Name -> (R, *shape of the parameter)
        by_name = {name: torch.stack(numbers[k :: len(names)]) for k, name in enumerate(names)}

        def blocks(number: torch.Tensor, columns: int) -> torch.Tensor:
            """Return (4 R H, columns R H) for (R, 4 H, columns H): gates and columns of each reader apart."""
            out = torch.full((4, R, H, columns, R, H), total)
            out.diagonal(dim1=1, dim2=4).copy_(number.view(R, 4, H, columns, H).permute(1, 2, 3, 4, 0))
            return out.view(4 * R * H, -1)

        parts: list[list[torch.Tensor]] = []
        for k in range(len(cast(LayerLSTM, readers[0]).lstm.layers)):
            matrices, biases = [], []
            for direction in ("", "_reverse"):
                w_ih, w_hh, b_ih, b_hh = (
                    by_name[f"lstm.layers.{k}.{name}_l0{direction}"]
                    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                )
                # All readers read the same input; their further LSTMs read their own states of both directions.
                by_gate = w_ih.view(R, 4, H, -1).transpose(0, 1).reshape(4 * R * H, -1)
                matrices += [by_gate if k == 0 else blocks(w_ih, 2), blocks(w_hh, 1)]
                biases += [b.view(R, 4, H).transpose(0, 1).reshape(-1) for b in (b_ih, b_hh)]
            parts.append([*matrices, *biases])
        self._num_lstms = len(parts)
        heads = []
        for k in (0, 3, 6):
            heads += [by_name[f"head.{k}.weight"].transpose(1, 2), by_name[f"head.{k}.bias"][:, None]]
        parts.append(heads)
        self.part_shapes = [[t.shape for t in part] for part in parts]
        gathered = [torch.cat([t.reshape(-1) for t in part]) for part in parts]
        whole = torch.cat(gathered)
        places = torch.empty(total, dtype=torch.int64)
        places[whole[whole < total]] = torch.arange(len(whole))[whole < total]
        self.gathered, self.places = [g.to(device) for g in gathered], places.to(device)

    def weights(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[list[list[torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the weights of each LSTM in the order of torch, and matrix (R, in, out) and bias (R, 1, out) of heads."""
        tensors = list(_Pack.apply(self, *parameters))  # type: ignore[no-untyped-call]
        lstms = []
        for k in range(self._num_lstms):
            (ih, hh, ih_reverse, hh_reverse), biases = tensors[8 * k : 8 * k + 4], tensors[8 * k + 4 : 8 * k + 8]
            lstms.append([ih, hh, *biases[:2], ih_reverse, hh_reverse, *biases[2:]])
        heads = tensors[8 * self._num_lstms :]
        return lstms, list(zip(heads[::2], heads[1::2], strict=True))


class _Pack(torch.autograd.Function):
    """The weights of a `_Packing` from the parameters, in two operations and one for each LSTM; backward takes two."""

    @staticmethod
    def forward(ctx: Any, packing: _Packing, *parameters: torch.Tensor) -> Any:
        ctx.packing = packing
        flat = torch.cat([*(p.reshape(-1) for p in parameters), parameters[0].new_zeros(1)])
        out: list[torch.Tensor] = []
        for index, shapes in zip(packing.gathered, packing.part_shapes, strict=True):
            parts = flat[index].split([shape.numel() for shape in shapes])
            out += [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        packing = ctx.packing
        flat = torch.cat([g.reshape(-1) for g in grads])[packing.places]
        parts = flat.split(packing.sizes)
        return None, *(part.view(shape) for part, shape in zip(parts, packing.shapes, strict=True))
