"""The models of `tracestore train`. Each maps a batch of traces to logits of "the answer is a hallucination".

`ModelConfig` has the options of the architecture; the registry sets those of the edge-free twins and of
version 0. Sizes: B traces, L layers, D hidden size of the language model, N nodes of all graphs.

A model has `layers_read`, a Standardizer, which is fitted before training, `recomputed`, the name of a child that is called
with positional arguments and whose activations are recomputed in backward to save memory, and `forward(inputs, masks)`, which
returns a DetectorOutput with the logits (B, R) of R readers. Inputs are sequences (B, layers read, D) of any float dtype,
or GraphInputs. It drops by TraceDropout, so that a mask does not depend on the division of a batch. DetectorModel names its class.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from tracestore.detectors.graph.gine import GINE, mean_pool
from tracestore.detectors.graph.graph_index import GraphIndex
from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.detectors.graph.normalization import NORMALIZATIONS
from tracestore.detectors.layers.dropout import TraceDropout, TraceMasks, draw_noise
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.layers.readers import ENCODER_STREAM, NOISE_STREAM, Readers

AUXILIARY_WEIGHT = 0.1
GNN_DROPOUT = 0.2


@dataclass
class DetectorOutput:
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

    def forward(self, x: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """Standardize vectors of some layers of the language model: x (B, len(layers), D)."""
        if not self.is_active:
            return x
        # A slice is a view; a list of indices would be copied to the device in each step.
        is_range = list(layers) == list(range(layers[0], layers[0] + len(layers)))
        chosen = slice(layers[0], layers[0] + len(layers)) if is_range else list(layers)
        return (x - self.mean[chosen]) / self.std[chosen]

    def standardize_nodes(self, x: torch.Tensor, index: GraphIndex, layers: Sequence[int]) -> torch.Tensor:
        """Standardize the nodes x (N, D) of graphs, where graph g belongs to layer layers[g % len(layers)]."""
        if not self.is_active:
            return x
        if x.device.type != "cpu":
            return (x - self.mean[index.layer]) / self.std[index.layer]
        # Graph by graph, because mean and std gathered for all rows would take twice the memory of the batch.
        out = torch.empty(x.shape, dtype=self.mean.dtype)
        mean, std = self.mean.unbind(), self.std.unbind()
        for g, (begin, end) in enumerate(pairwise(index.ptr)):
            layer = layers[g % len(layers)]
            torch.sub(x[begin:end], mean[layer], out=out[begin:end]).div_(std[layer])
        return out


class LstmSolo(nn.Module):
    """An LSTM over the last token of every layer."""

    recomputed = "readers"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers_read = config.layers_read
        # The name is a part of the keys of checkpoints.
        self.standardiser = Standardizer(config)
        self.readers = Readers(config.hidden_dim, config)

    def forward(self, sequences: torch.Tensor, masks: TraceMasks | None = None) -> DetectorOutput:
        """Return logits for sequences of any float dtype.

        Parameters
        ----------
        sequences : torch.Tensor
            ``(B, layers read, D)``.
        masks : TraceMasks, optional
            Dropout masks. Default: drawn by torch.
        """
        if sequences.shape[1] != len(self.layers_read):
            raise ValueError(f"found sequences of {sequences.shape[1]} layers, expected {len(self.layers_read)}")
        x = self.standardiser(sequences.to(next(self.parameters()).dtype), self.layers_read)
        return DetectorOutput(self.readers(x, masks))


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
        """Return the encoded graphs (B, layers read, width). ValueError for graphs of other layers."""
        if inputs.held_layers != self.layers:
            raise ValueError(f"found graphs of the layers {inputs.held_layers}, expected {self.layers}")
        return self.encode(inputs, masks)

    def encode(self, inputs: GraphInputs, masks: TraceMasks | None = None) -> torch.Tensor:
        """Return the encoded graphs of the layers that the inputs hold, (B, layers, width)."""
        inputs = inputs.prepare(self.config)
        index = inputs.index
        assert index is not None
        skipped = None if index.skip_counts is None else self._skip(inputs, index)
        x = inputs.x if index.gathered is None else inputs.x[index.gathered]
        x = self.standardiser.standardize_nodes(x, index, inputs.held_layers)
        x = F.relu(self.norm1(self.conv1(x, inputs), inputs))
        x = self.dropout(x, masks, index.node_ptr[:: inputs.num_layers])
        pooled = self._read_out(x, inputs, index)
        parts = [pooled] if skipped is None else [pooled, skipped.to(pooled.dtype)]
        return torch.cat(parts, dim=1).reshape(inputs.num_traces, inputs.num_layers, -1)

    def _skip(self, inputs: GraphInputs, index: GraphIndex) -> torch.Tensor:
        """Return the standardized hidden states of each graph, pooled: (G, D)."""
        assert index.skip_counts is not None
        x = inputs.x if index.skip_rows is None else inputs.x[index.skip_rows]
        x = mean_pool(x.to(next(self.parameters()).dtype), index.skip_counts)
        by_trace: torch.Tensor = x.view(inputs.num_traces, inputs.num_layers, x.shape[1])
        standardized: torch.Tensor = self.standardiser(by_trace, inputs.held_layers)
        return standardized.flatten(0, 1)

    def _read_out(self, x: torch.Tensor, inputs: GraphInputs, index: GraphIndex) -> torch.Tensor:
        """Return the second convolution, pooled: (N, hidden) -> (G, hidden)."""
        c = self.config
        if c.normalization == "none" and not c.residual and c.pooling == "all":
            pooled: torch.Tensor = self.conv2(x, inputs, pooled=True)
            return pooled
        out = self.norm2(self.conv2(x, inputs), inputs)
        if c.normalization != "none":
            out = F.relu(out)
        if c.residual:
            out = x + out
        out = out if index.rows is None else out[index.rows]
        return out if c.pooling == "last" else mean_pool(out, index.counts)


class GnnDetLstm(nn.Module):
    """The graph encoder, followed by the LSTM over the layers."""

    recomputed = "encoder"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers_read = config.layers_read
        self.encoder = GraphEncoder(config)
        self.readers = Readers(self.encoder.width, config)

    def forward(self, inputs: GraphInputs, masks: TraceMasks | None = None) -> DetectorOutput:
        """Return logits (B,). Default masks: drawn by torch."""
        return DetectorOutput(self.readers(self.encoder(inputs, masks), masks))


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

    recomputed = "encoder"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, latent = config.gnn_hidden, config.latent_dim
        self.layers_read, self.config = config.layers_read, config
        self.encoder = GraphEncoder(config)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.readers = Readers(latent + self.encoder.width - hidden, config)

    def forward(
        self, inputs: GraphInputs, masks: TraceMasks | None = None, eps: torch.Tensor | None = None
    ) -> DetectorOutput:
        """Return logits (B,), the reconstruction error and the KL divergence.

        Parameters
        ----------
        inputs : GraphInputs
        masks : TraceMasks, optional
            Dropout masks and noise. Default: drawn by torch.
        eps : torch.Tensor, optional
            ``(B, layers read, latent)``, standard normal noise. Default: drawn in training, zero in evaluation.
        """
        encoded = self.encoder(inputs, masks)
        pooled, skipped = encoded.split([self.config.gnn_hidden, encoded.shape[2] - self.config.gnn_hidden], dim=2)
        mu, logvar = self.mu(pooled), self.logvar(pooled).clamp(-10, 10)
        z = mu
        if self.training and eps is None:
            eps = torch.randn_like(mu) if masks is None else draw_noise(masks, NOISE_STREAM, mu)
        if eps is not None:
            z = mu + torch.exp(logvar / 2) * eps
        # The mean over traces, not the sum: the micro-batches of a split batch add up to the whole one.
        target = pooled.detach() if self.config.detach_target else pooled
        over_columns = torch.mean if self.config.column_mean else torch.sum
        reconstruction = over_columns((self.decoder(z) - target).square(), -1).mean()
        kl = -0.5 * over_columns(1 + logvar - mu.square() - logvar.exp(), -1).mean()
        read = torch.cat([mu, skipped], dim=2) if self.config.skip != "none" else z
        return DetectorOutput(self.readers(read, masks), {"reconstruction": reconstruction, "kl": kl})


DetectorModel = LstmSolo | GnnDetLstm | GvaeLstm


def detector_loss(output: DetectorOutput, y: torch.Tensor, kl_weight: float) -> torch.Tensor:
    """Return the mean binary cross-entropy of the readers, plus 0.1 (reconstruction + kl_weight KL) for gvae_lstm.

    Parameters
    ----------
    output : DetectorOutput
    y : torch.Tensor
        ``(B,)``, 1 for a hallucination.
    kl_weight : float
    """
    logits = output.reader_logits
    loss = F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype)[:, None].expand_as(logits))
    if output.auxiliary:
        loss = loss + AUXILIARY_WEIGHT * (output.auxiliary["reconstruction"] + kl_weight * output.auxiliary["kl"])
    return loss
