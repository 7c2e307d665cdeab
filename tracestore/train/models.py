"""The three detectors: a trace in, the logit that its answer is a hallucination out.

Sizes: B traces, L layers, D hidden size of the language model, N nodes of all graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from tracestore.train.gine import GINE
from tracestore.train.graph_inputs import GraphInputs
from tracestore.train.model_config import ModelConfig

AUXILIARY_WEIGHT = 0.1
GNN_DROPOUT = 0.2


@dataclass
class Output:
    """logits (B,); auxiliary: terms of the loss beside the cross-entropy, each a mean
    over traces and layers."""

    logits: torch.Tensor
    auxiliary: dict[str, torch.Tensor] = field(default_factory=dict)


class LayerLSTM(nn.Module):
    """A bidirectional LSTM along the layers and the head: (B, L, in) -> logits (B,)."""

    def __init__(self, in_channels: int, config: ModelConfig) -> None:
        super().__init__()
        hidden, dropout = config.lstm_hidden, config.dropout
        self.lstm = nn.LSTM(
            in_channels,
            hidden,
            num_layers=config.num_lstm_layers,
            batch_first=True,
            bidirectional=True,
            dropout=dropout if config.num_lstm_layers > 1 else 0.0,
        )
        self.head = nn.Sequential(
            nn.Linear(2 * hidden, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(64, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, (h, _) = self.lstm(x)
        # h: (num_lstm_layers * 2, B, hidden); the last two are the top layer's directions.
        logits: torch.Tensor = self.head(torch.cat([h[-2], h[-1]], dim=1))
        return logits.squeeze(1)


class Standardiser(nn.Module):
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
        self.layers = config.layers
        self.standardiser = Standardiser(config)
        self.reader = LayerLSTM(config.hidden_dim, config)

    def forward(self, sequences: torch.Tensor) -> Output:
        """sequences (B, L, D), any float dtype."""
        x = self.standardiser(sequences.to(self.reader.head[0].weight.dtype))  # type: ignore[arg-type]
        return Output(self.reader(x if self.layers is None else x[:, list(self.layers)]))


class GraphEncoder(nn.Module):
    """Two convolutions shared by all layers, mean over nodes: graphs -> (B, layers read, gnn_hidden)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, passing = config.gnn_hidden, config.message_passing
        self.layers = range(config.num_layers) if config.layers is None else config.layers
        self.standardiser = Standardiser(config)
        self.conv1 = GINE(config.hidden_dim, hidden, passing, config.edge_dim)
        self.conv2 = GINE(hidden, hidden, passing, config.edge_dim)
        self.dropout = nn.Dropout(GNN_DROPOUT)

    def forward(self, inputs: GraphInputs) -> torch.Tensor:
        if len(self.layers) < inputs.num_layers:
            inputs = inputs.of_layers(self.layers)
        x = self.standardiser.graphs(inputs.x, inputs.node_ptr, self.layers)
        x = self.dropout(F.relu_(self.conv1(x, inputs)))
        pooled = self.conv2.pooled(x, inputs)
        return pooled.reshape(inputs.num_traces, inputs.num_layers, -1)


class GnnDetLstm(nn.Module):
    """Graph encoder, then the LSTM over the layers."""

    view = "graph"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = GraphEncoder(config)
        self.reader = LayerLSTM(config.gnn_hidden, config)

    def forward(self, inputs: GraphInputs) -> Output:
        return Output(self.reader(self.encoder(inputs)))


class GvaeLstm(nn.Module):
    """A variational bottleneck between the graph encoder and the LSTM."""

    view = "graph"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, latent = config.gnn_hidden, config.latent_dim
        self.kl_weight = config.kl_weight
        self.encoder = GraphEncoder(config)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.reader = LayerLSTM(latent, config)

    def forward(self, inputs: GraphInputs, eps: torch.Tensor | None = None) -> Output:
        """eps (B, layers read, latent): the noise, drawn where it is not given; none when evaluating."""
        pooled = self.encoder(inputs)
        mu, logvar = self.mu(pooled), self.logvar(pooled).clamp(-10, 10)
        z = mu
        if self.training or eps is not None:
            z = mu + torch.exp(logvar / 2) * (torch.randn_like(mu) if eps is None else eps)
        # Summed over columns, averaged over traces and layers: a batch in two halves
        # then weighs as much as the whole one.
        reconstruction = (self.decoder(z) - pooled).square().sum(-1).mean()
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(-1).mean()
        return Output(self.reader(z), {"reconstruction": reconstruction, "kl": kl})


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
