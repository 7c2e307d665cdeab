"""The three detectors: a trace in, the logit that its answer is a hallucination out.

Sizes: B traces, L layers, D hidden size of the language model, N nodes of all graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from tracestore.detectors.config import ModelConfig
from tracestore.detectors.dropout import TraceDropout, TraceMasks
from tracestore.detectors.graph.gine import GINE
from tracestore.detectors.graph.inputs import GraphInputs

AUXILIARY_WEIGHT = 0.1
GNN_DROPOUT = 0.2
# The layers that drop out, numbered; those between layers of the LSTM from _LSTM on.
_ENCODER, _HEAD, _LSTM = 0, 1, 3


@dataclass
class Output:
    """logits (B,); auxiliary: terms of the loss beside the cross-entropy, each a mean
    over traces and layers."""

    logits: torch.Tensor
    auxiliary: dict[str, torch.Tensor] = field(default_factory=dict)


class StackedLSTM(nn.Module):
    """Bidirectional LSTMs, each over the outputs of the one before, with dropout between them:
    nn.LSTM(num_layers, dropout) with masks that belong to traces."""

    def __init__(self, in_channels: int, hidden: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        widths = [in_channels] + [2 * hidden] * (num_layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(n, hidden, batch_first=True, bidirectional=True) for n in widths)
        self.dropouts = nn.ModuleList(TraceDropout(dropout, _LSTM + k) for k in range(num_layers - 1))

    def forward(self, x: torch.Tensor, masks: TraceMasks | None = None) -> torch.Tensor:
        """(B, L, in) -> (B, 2 * hidden): the last states of the top layer's two directions."""
        x, (final, _) = self.layers[0](x)
        for dropout, layer in zip(self.dropouts, self.layers[1:], strict=True):
            x, (final, _) = layer(dropout(x, masks))
        return torch.cat([final[0], final[1]], dim=1)


class LayerLSTM(nn.Module):
    """A bidirectional LSTM along the layers and the head: (B, L, in) -> logits (B,)."""

    def __init__(self, in_channels: int, config: ModelConfig) -> None:
        super().__init__()
        hidden, dropout = config.lstm_hidden, config.dropout
        self.lstm = StackedLSTM(in_channels, hidden, config.num_lstm_layers, dropout)
        self.head = nn.Sequential(
            nn.Linear(2 * hidden, 128),
            nn.ReLU(),
            TraceDropout(dropout, _HEAD),
            nn.Linear(128, 64),
            nn.ReLU(),
            TraceDropout(dropout, _HEAD + 1),
            nn.Linear(64, 1),
        )

    def forward(self, x: torch.Tensor, masks: TraceMasks | None = None) -> torch.Tensor:
        x = self.lstm(x, masks)
        for layer in self.head:
            x = layer(x, masks) if isinstance(layer, TraceDropout) else layer(x)
        return x.squeeze(1)


class Standardizer(nn.Module):
    """(x - mean) / std per layer and column, from training traces; the identity until set."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.active = config.standardize
        if self.active:
            self.register_buffer("mean", torch.zeros(config.num_layers, config.hidden_dim))
            self.register_buffer("std", torch.ones(config.num_layers, config.hidden_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, L, D)."""
        return (x - self.mean) / self.std if self.active else x

    def graphs(self, x: torch.Tensor, node_ptr: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """The rows x (N, D) of graphs, graph g of layer layers[g % len(layers)]."""
        if not self.active:
            return x
        if x.device.type != "cpu":
            of_graph = torch.tensor(layers, device=x.device).repeat((len(node_ptr) - 1) // len(layers))
            of_row = torch.repeat_interleave(of_graph, node_ptr.diff(), output_size=len(x))
            return (x - self.mean[of_row]) / self.std[of_row]
        # Graph by graph: mean and std of each row, gathered, would be twice the batch.
        out = torch.empty(x.shape, dtype=self.mean.dtype)
        mean, std = self.mean.unbind(), self.std.unbind()
        for g, (begin, end) in enumerate(pairwise(node_ptr.tolist())):
            layer = layers[g % len(layers)]
            torch.sub(x[begin:end], mean[layer], out=out[begin:end]).div_(std[layer])
        return out


class LstmSolo(nn.Module):
    """The last token of every layer, read by the LSTM."""

    view = "sequence"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers_read = config.layers_read
        self.standardiser = Standardizer(config)
        self.reader = LayerLSTM(config.hidden_dim, config)

    def forward(self, sequences: torch.Tensor, masks: TraceMasks | None = None) -> Output:
        """sequences (B, L, D), any float dtype. masks: of dropout, drawn by torch where not given."""
        x = self.standardiser(sequences.to(self.reader.head[0].weight.dtype))  # type: ignore[arg-type]
        return Output(self.reader(x if len(self.layers_read) == x.shape[1] else x[:, list(self.layers_read)], masks))


class GraphEncoder(nn.Module):
    """Two convolutions shared by all layers, mean over nodes: graphs -> (B, layers read, gnn_hidden)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, passing = config.gnn_hidden, config.message_passing
        self.layers = config.layers_read
        self.standardiser = Standardizer(config)
        self.conv1 = GINE(config.hidden_dim, hidden, passing, config.edge_dim)
        self.conv2 = GINE(hidden, hidden, passing, config.edge_dim)
        self.dropout = TraceDropout(GNN_DROPOUT, _ENCODER)

    def forward(self, inputs: GraphInputs, masks: TraceMasks | None = None) -> torch.Tensor:
        if len(self.layers) < inputs.num_layers:
            inputs = inputs.of_layers(self.layers)
        x = self.standardiser.graphs(inputs.x, inputs.node_ptr, self.layers)
        x = self.dropout(F.relu_(self.conv1(x, inputs)), masks, inputs.nodes_of_traces())
        pooled = self.conv2.pooled(x, inputs)
        return pooled.reshape(inputs.num_traces, inputs.num_layers, -1)


class GnnDetLstm(nn.Module):
    """Graph encoder, then the LSTM over the layers."""

    view = "graph"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers_read = config.layers_read
        self.encoder = GraphEncoder(config)
        self.reader = LayerLSTM(config.gnn_hidden, config)

    def forward(self, inputs: GraphInputs, masks: TraceMasks | None = None) -> Output:
        """masks: of dropout, drawn by torch where not given."""
        return Output(self.reader(self.encoder(inputs, masks), masks))


class GvaeLstm(nn.Module):
    """A variational bottleneck between the graph encoder and the LSTM."""

    view = "graph"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, latent = config.gnn_hidden, config.latent_dim
        self.kl_weight = config.kl_weight
        self.layers_read = config.layers_read
        self.encoder = GraphEncoder(config)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.reader = LayerLSTM(latent, config)

    def forward(self, inputs: GraphInputs, masks: TraceMasks | None = None, eps: torch.Tensor | None = None) -> Output:
        """masks: of dropout; eps (B, layers read, latent): the noise, none when evaluating. Drawn by
        torch where not given."""
        pooled = self.encoder(inputs, masks)
        mu, logvar = self.mu(pooled), self.logvar(pooled).clamp(-10, 10)
        z = mu
        if self.training or eps is not None:
            z = mu + torch.exp(logvar / 2) * (torch.randn_like(mu) if eps is None else eps)
        # Summed over columns, averaged over traces and layers: a batch in two halves
        # then weighs as much as the whole one.
        reconstruction = (self.decoder(z) - pooled).square().sum(-1).mean()
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(-1).mean()
        return Output(self.reader(z, masks), {"reconstruction": reconstruction, "kl": kl})


_CLASSES = {"lstm_solo": LstmSolo, "gnn_det_lstm": GnnDetLstm, "gvae_lstm": GvaeLstm}
Detector = LstmSolo | GnnDetLstm | GvaeLstm


def make_model(name: str, config: ModelConfig) -> Detector:
    """The detector of a name in MODEL_NAMES."""
    return _CLASSES[name](config)  # type: ignore[return-value]


def detector_loss(output: Output, y: torch.Tensor, kl_weight: float) -> torch.Tensor:
    """Binary cross-entropy with logits, mean over traces, plus for the VAE
    0.1 (reconstruction + kl_weight KL)."""
    loss = F.binary_cross_entropy_with_logits(output.logits, y.to(output.logits.dtype))
    if output.auxiliary:
        loss = loss + AUXILIARY_WEIGHT * (output.auxiliary["reconstruction"] + kl_weight * output.auxiliary["kl"])
    return loss
