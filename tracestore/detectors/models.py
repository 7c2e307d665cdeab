"""The three detectors. Each maps a batch of traces to logits of "the answer is a hallucination".

`ModelConfig` has the options of the architecture; the registry sets those of the edge-free twins and of
version 0. Sizes: B traces, L layers, D hidden size of the language model, N nodes of all graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from tracestore.detectors.config import ModelConfig, Pooling
from tracestore.detectors.dropout import TraceDropout, TraceMasks
from tracestore.detectors.graph.gine import GINE, mean_pool
from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.detectors.graph.normalization import NORMALIZATIONS
from tracestore.detectors.readers import ENCODER_STREAM, Readers

AUXILIARY_WEIGHT = 0.1
GNN_DROPOUT = 0.2


@dataclass
class Output:
    """Output of a detector.

    Parameters
    ----------
    reader_logits : torch.Tensor
        ``(B, R)``, those of each reader.
    auxiliary : dict of torch.Tensor
        Further terms of the loss, each a scalar mean over traces and layers.
    """

    reader_logits: torch.Tensor
    auxiliary: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def logits(self) -> torch.Tensor:
        """The means over the readers, ``(B,)``."""
        return self.reader_logits.mean(1)


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
        self.readers = Readers(config.hidden_dim, config)

    def forward(self, sequences: torch.Tensor, masks: TraceMasks | None = None) -> Output:
        """Return logits for sequences (B, L, D) of any float dtype. Default masks: drawn by torch."""
        x = self.standardiser(sequences.to(next(self.parameters()).dtype))
        return Output(self.readers(x if len(self.layers_read) == x.shape[1] else x[:, list(self.layers_read)], masks))


class GraphEncoder(nn.Module):
    """Two GINE convolutions, shared by all layers, each followed by a normalization, and a readout.

    h = dropout(relu(norm(GINE(x)))), h' = h + relu(norm(GINE(h))); the readout is the mean of h' over
    the tokens of the answer. With ``config.skip`` standardized hidden states that bypass the
    convolutions are appended. Without edges, GINE is an MLP of each node, and only the tokens of the
    readout are computed.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, passing = config.gnn_hidden, config.message_passing
        self.layers, self.config = config.layers_read, config
        # The name is a part of the keys of checkpoints.
        self.standardiser = Standardizer(config)
        edge_dim = config.edge_dim if config.edges else 0
        self.conv1 = GINE(config.hidden_dim, hidden, passing, edge_dim, config.aggregation)
        self.conv2 = GINE(hidden, hidden, passing, edge_dim, config.aggregation)
        norm = NORMALIZATIONS[config.normalization]
        self.norm1, self.norm2 = norm(hidden, len(self.layers)), norm(hidden, len(self.layers))
        self.dropout = TraceDropout(GNN_DROPOUT, ENCODER_STREAM)

    @property
    def width(self) -> int:
        """Columns of the encoded graphs."""
        return self.config.gnn_hidden + (self.config.hidden_dim if self.config.skip != "none" else 0)

    def forward(self, inputs: GraphInputs, masks: TraceMasks | None = None) -> torch.Tensor:
        """Return the encoded graphs (B, layers read, width)."""
        c = self.config
        if len(self.layers) < inputs.num_layers:
            inputs = inputs.select_layers(self.layers)
        skipped = None if c.skip == "none" else self._skip(inputs, c.skip)
        if c.edges:
            inputs = inputs.mask_edges(diagonal=c.mask_diagonal, sinks=c.mask_sinks, neighbors=c.neighbors)
        elif c.pooling != "all" and c.normalization in ("layer", "none"):
            # Each token is computed by itself: the others have no effect on the readout.
            inputs = inputs.readout_nodes(c.pooling)
        x = self.standardiser.standardize_nodes(inputs.x, inputs.node_ptr, self.layers)
        scale = self.conv1.message_scale(inputs)
        x = F.relu(self.norm1(self.conv1(x, inputs, scale), inputs))
        x = self.dropout(x, masks, inputs.node_ptr[:: inputs.num_layers])
        pooled = self._read_out(x, inputs, scale)
        parts = [pooled] if skipped is None else [pooled, skipped.to(pooled.dtype)]
        return torch.cat(parts, dim=1).reshape(inputs.num_traces, inputs.num_layers, -1)

    def _skip(self, inputs: GraphInputs, pooling: Pooling) -> torch.Tensor:
        """Return the standardized hidden states of each graph, pooled: (G, D)."""
        rows, counts = inputs.readout_rows(pooling)
        x = mean_pool(inputs.x[rows].to(next(self.parameters()).dtype), counts)
        return self.standardiser.standardize_nodes(x, torch.arange(len(x) + 1, device=x.device), self.layers)

    def _read_out(self, x: torch.Tensor, inputs: GraphInputs, scale: torch.Tensor | None) -> torch.Tensor:
        """Return the second convolution, pooled: (N, hidden) -> (G, hidden)."""
        c = self.config
        if c.normalization == "none" and not c.residual and c.pooling == "all":
            pooled: torch.Tensor = self.conv2(x, inputs, scale, pooled=True)
            return pooled
        out = self.norm2(self.conv2(x, inputs, scale), inputs)
        if c.normalization != "none":
            out = F.relu(out)
        if c.residual:
            out = x + out
        if c.pooling == "last":
            last: torch.Tensor = out[inputs.last_rows()]
            return last
        rows, counts = inputs.readout_rows(c.pooling)
        return mean_pool(out if c.pooling == "all" else out[rows], counts)


class GnnDetLstm(nn.Module):
    """The graph encoder, followed by the LSTM over the layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers_read = config.layers_read
        self.encoder = GraphEncoder(config)
        self.readers = Readers(self.encoder.width, config)

    def forward(self, inputs: GraphInputs, masks: TraceMasks | None = None) -> Output:
        """Return logits (B,). Default masks: drawn by torch."""
        return Output(self.readers(self.encoder(inputs, masks), masks))


class GvaeLstm(nn.Module):
    """A variational autoencoder between the graph encoder and the LSTM.

    The LSTM reads mu and the states of ``config.skip``. The decoder reconstructs the pooled vector, which is a
    constant for this term: otherwise the encoder could reduce it by shrinking its output. In version 0
    (``skip="none", detach_target=False, column_mean=False``) the LSTM reads z.

    References
    ----------
    Kingma and Welling 2014, "Auto-Encoding Variational Bayes", appendix B (the KL divergence
    of a Gaussian from the standard normal).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, latent = config.gnn_hidden, config.latent_dim
        self.layers_read, self.config = config.layers_read, config
        self.encoder = GraphEncoder(config)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.readers = Readers(latent + self.encoder.width - hidden, config)

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
        encoded = self.encoder(inputs, masks)
        pooled, skipped = encoded.split([self.config.gnn_hidden, encoded.shape[2] - self.config.gnn_hidden], dim=2)
        mu, logvar = self.mu(pooled), self.logvar(pooled).clamp(-10, 10)
        z = mu
        if self.training or eps is not None:
            z = mu + torch.exp(logvar / 2) * (torch.randn_like(mu) if eps is None else eps)
        # The mean over traces, not the sum: the micro-batches of a split batch add up to the whole one.
        target = pooled.detach() if self.config.detach_target else pooled
        over_columns = torch.mean if self.config.column_mean else torch.sum
        reconstruction = over_columns((self.decoder(z) - target).square(), -1).mean()
        kl = -0.5 * over_columns(1 + logvar - mu.square() - logvar.exp(), -1).mean()
        read = torch.cat([mu, skipped], dim=2) if self.config.skip != "none" else z
        return Output(self.readers(read, masks), {"reconstruction": reconstruction, "kl": kl})


Detector = LstmSolo | GnnDetLstm | GvaeLstm


def detector_loss(output: Output, y: torch.Tensor, kl_weight: float) -> torch.Tensor:
    """Return the mean binary cross-entropy of the readers, plus 0.1 (reconstruction + kl_weight KL) for gvae_lstm.

    Parameters
    ----------
    output : Output
    y : torch.Tensor
        ``(B,)``, 1 for a hallucination.
    kl_weight : float
    """
    logits = output.reader_logits
    loss = F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype)[:, None].expand_as(logits))
    if output.auxiliary:
        loss = loss + AUXILIARY_WEIGHT * (output.auxiliary["reconstruction"] + kl_weight * output.auxiliary["kl"])
    return loss
