"""The three detectors. Each maps a batch of traces to logits of "the answer is a hallucination".

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
# Streams of TraceMasks: the graph encoder, two layers of the head, then one per layer of the LSTM.
_ENCODER, _HEAD, _LSTM = 0, 1, 3


@dataclass
class Output:
    """Output of a detector.

    Parameters
    ----------
    logits : torch.Tensor
        ``(B,)``.
    auxiliary : dict of torch.Tensor
        Further terms of the loss, each a scalar mean over traces and layers.
    """

    logits: torch.Tensor
    auxiliary: dict[str, torch.Tensor] = field(default_factory=dict)


class StackedLSTM(nn.Module):
    """nn.LSTM with several bidirectional layers, whose dropout uses masks of `TraceMasks`."""

    def __init__(self, in_channels: int, hidden: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        widths = [in_channels] + [2 * hidden] * (num_layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(n, hidden, batch_first=True, bidirectional=True) for n in widths)
        self.dropouts = nn.ModuleList(TraceDropout(dropout, _LSTM + k) for k in range(num_layers - 1))

    def forward(self, x: torch.Tensor, masks: TraceMasks | None = None) -> torch.Tensor:
        """Return the final states of both directions of the last layer: (B, L, in) -> (B, 2 * hidden)."""
        x, (final, _) = self.layers[0](x)
        for dropout, layer in zip(self.dropouts, self.layers[1:], strict=True):
            x, (final, _) = layer(dropout(x, masks))
        return torch.cat([final[0], final[1]], dim=1)


class LayerLSTM(nn.Module):
    """A bidirectional LSTM over the layers of the language model, and a head."""

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
        """Return the logits: (B, L, in) -> (B,)."""
        x = self.lstm(x, masks)
        for layer in self.head:
            x = layer(x, masks) if isinstance(layer, TraceDropout) else layer(x)
        return x.squeeze(1)


class Standardizer(nn.Module):
    """(x - mean) / std per layer and column; the identity unless ``config.standardize``."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_active = config.standardize
        if self.is_active:
            self.register_buffer("mean", torch.zeros(config.num_layers, config.hidden_dim))
            self.register_buffer("std", torch.ones(config.num_layers, config.hidden_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Standardize sequences (B, L, D)."""
        return (x - self.mean) / self.std if self.is_active else x

    def standardize_nodes(self, x: torch.Tensor, node_ptr: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """Standardize the nodes x (N, D) of graphs, where graph g belongs to layer layers[g % len(layers)]."""
        if not self.is_active:
            return x
        if x.device.type != "cpu":
            graph_layers = torch.tensor(layers, device=x.device).repeat((len(node_ptr) - 1) // len(layers))
            row_layers = torch.repeat_interleave(graph_layers, node_ptr.diff(), output_size=len(x))
            return (x - self.mean[row_layers]) / self.std[row_layers]
        # Graph by graph, because mean and std gathered for all rows would take twice the memory of the batch.
        out = torch.empty(x.shape, dtype=self.mean.dtype)
        mean, std = self.mean.unbind(), self.std.unbind()
        for g, (begin, end) in enumerate(pairwise(node_ptr.tolist())):
            layer = layers[g % len(layers)]
            torch.sub(x[begin:end], mean[layer], out=out[begin:end]).div_(std[layer])
        return out


class LstmSolo(nn.Module):
    """An LSTM over the last token of every layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers_read = config.layers_read
        # The name is a part of the keys of checkpoints.
        self.standardiser = Standardizer(config)
        self.reader = LayerLSTM(config.hidden_dim, config)

    def forward(self, sequences: torch.Tensor, masks: TraceMasks | None = None) -> Output:
        """Return logits for sequences (B, L, D) of any float dtype. Default masks: drawn by torch."""
        x = self.standardiser(sequences.to(self.reader.head[0].weight.dtype))  # type: ignore[arg-type]
        return Output(self.reader(x if len(self.layers_read) == x.shape[1] else x[:, list(self.layers_read)], masks))


class GraphEncoder(nn.Module):
    """Two GINE convolutions, shared by all layers, and the mean over the nodes of each graph."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, passing = config.gnn_hidden, config.message_passing
        self.layers = config.layers_read
        # The name is a part of the keys of checkpoints.
        self.standardiser = Standardizer(config)
        self.conv1 = GINE(config.hidden_dim, hidden, passing, config.edge_dim)
        self.conv2 = GINE(hidden, hidden, passing, config.edge_dim)
        self.dropout = TraceDropout(GNN_DROPOUT, _ENCODER)

    def forward(self, inputs: GraphInputs, masks: TraceMasks | None = None) -> torch.Tensor:
        """Return the encoded graphs (B, layers read, gnn_hidden)."""
        if len(self.layers) < inputs.num_layers:
            inputs = inputs.select_layers(self.layers)
        x = self.standardiser.standardize_nodes(inputs.x, inputs.node_ptr, self.layers)
        x = self.dropout(F.relu_(self.conv1(x, inputs)), masks, inputs.nodes_per_trace())
        pooled: torch.Tensor = self.conv2(x, inputs, pooled=True)
        return pooled.reshape(inputs.num_traces, inputs.num_layers, -1)


class GnnDetLstm(nn.Module):
    """The graph encoder, followed by the LSTM over the layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers_read = config.layers_read
        self.encoder = GraphEncoder(config)
        self.reader = LayerLSTM(config.gnn_hidden, config)

    def forward(self, inputs: GraphInputs, masks: TraceMasks | None = None) -> Output:
        """Return logits (B,). Default masks: drawn by torch."""
        return Output(self.reader(self.encoder(inputs, masks), masks))


class GvaeLstm(nn.Module):
    """A variational autoencoder between the graph encoder and the LSTM.

    References
    ----------
    Kingma and Welling 2014, "Auto-Encoding Variational Bayes", appendix B (the KL divergence
    of a Gaussian from the standard normal).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, latent = config.gnn_hidden, config.latent_dim
        self.layers_read = config.layers_read
        self.encoder = GraphEncoder(config)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.reader = LayerLSTM(latent, config)

    def forward(self, inputs: GraphInputs, masks: TraceMasks | None = None, eps: torch.Tensor | None = None) -> Output:
        """Return logits (B,), the reconstruction error and the KL divergence.

        Parameters
        ----------
        inputs : GraphInputs
        masks : TraceMasks, optional
            Dropout masks. Default: drawn by torch.
        eps : torch.Tensor, optional
            ``(B, layers read, latent)``, standard normal noise. Default: drawn by torch in
            training, zero in evaluation.
        """
        pooled = self.encoder(inputs, masks)
        mu, logvar = self.mu(pooled), self.logvar(pooled).clamp(-10, 10)
        z = mu
        if self.training or eps is not None:
            z = mu + torch.exp(logvar / 2) * (torch.randn_like(mu) if eps is None else eps)
        # The mean over traces, not the sum: the micro-batches of a split batch add up to the whole one.
        reconstruction = (self.decoder(z) - pooled).square().sum(-1).mean()
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(-1).mean()
        return Output(self.reader(z, masks), {"reconstruction": reconstruction, "kl": kl})


Detector = LstmSolo | GnnDetLstm | GvaeLstm


def detector_loss(output: Output, y: torch.Tensor, kl_weight: float) -> torch.Tensor:
    """Return the mean binary cross-entropy, plus 0.1 (reconstruction + kl_weight KL) for gvae_lstm.

    Parameters
    ----------
    output : Output
    y : torch.Tensor
        ``(B,)``, 1 for a hallucination.
    kl_weight : float
    """
    loss = F.binary_cross_entropy_with_logits(output.logits, y.to(output.logits.dtype))
    if output.auxiliary:
        loss = loss + AUXILIARY_WEIGHT * (output.auxiliary["reconstruction"] + kl_weight * output.auxiliary["kl"])
    return loss
