"""A small network over all tokens of the answer, with attention pooling."""

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tracestore.detectors.interface import Detector
from tracestore.detectors.published.probes import usable
from tracestore.evaluation.store_split import inner_bins
from tracestore.features.feature_table import token_state_bits
from tracestore.oom.guard import OOMGuard
from tracestore.oom.optimizers import AdamW
from tracestore.store.format import schema
from tracestore.store.read.store import TraceStore

# One in so many questions of the training split chooses the epoch.
_VALIDATION_BINS = 6
_BATCH_SIZE, _LEARNING_RATE, _WEIGHT_DECAY, _DROPOUT = 32, 2e-3, 1e-2, 0.3
# The layers that are read, as fractions of the depth.
_DEPTHS = (0.4, 0.6, 0.8)


class PooledNetwork(nn.Module):
    """h_t = relu(U z_t + b), p = sum_t softmax_t(v h_t) h_t, logit = w p + c, with z_t = P (x_t - mean) / std.

    P projects to principal components, scaled by the standard deviation of the first one.
    """

    mean: torch.Tensor
    std: torch.Tensor
    projection: torch.Tensor

    def __init__(self, mean: torch.Tensor, std: torch.Tensor, projection: torch.Tensor, hidden: int) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.register_buffer("projection", projection)
        self.encode = nn.Linear(projection.shape[1], hidden)
        self.attend = nn.Linear(hidden, 1)
        self.drop = nn.Dropout(_DROPOUT)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return logits (B,) of padded tokens x (B, T, columns), where mask (B, T) is True for tokens."""
        return self.pool(self.project(x), mask)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return the components of tokens (..., columns)."""
        return (x - self.mean) / self.std @ self.projection

    def pool(self, z: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the logits of traces from the components of their tokens."""
        h = self.drop(F.relu(self.encode(z)))
        weights = self.attend(h).squeeze(2).masked_fill(~mask, -torch.inf).softmax(1)
        pooled = (weights.unsqueeze(2) * h).sum(1)
        logits: torch.Tensor = self.head(self.drop(pooled)).squeeze(1)
        return logits


@dataclass
class PooledMLP(Detector):
    """Attention-pooled network over the hidden states of all tokens of the answer, in three layers.

    The tokens are standardized and projected to principal components of the training tokens. Trained with AdamW in the out-of-memory guard; a sixth of the training questions chooses the epoch.

    Parameters
    ----------
    components : int
        Principal components of the columns of the three layers.
    hidden : int
    epochs : int
    networks : int
        Networks with different seeds and validation questions, whose logits are averaged.
    """

    components: int = 128
    hidden: int = 64
    epochs: int = 30
    networks: int = 3
    _models: list[PooledNetwork] = field(default_factory=list, init=False, repr=False)

    fields: ClassVar[tuple[str, ...]] = ("hidden_states", "answer")
    layers: ClassVar[str] = "three, at 0.4, 0.6 and 0.8 of the depth"
    cost: ClassVar[str] = "a projection of 3 x D columns, and a small network, for each token"
    reference: ClassVar[str] = "pooling: Ilse, Tomczak and Welling 2018, arXiv:1802.04712, equations 7 and 8"
    source: ClassVar[str] = "by formula"

    def _inputs(self, store: TraceStore) -> tuple[np.ndarray, np.ndarray]:
        layers = sorted({round((store.num_layers - 1) * depth) for depth in _DEPTHS})
        return token_state_bits(store, layers)

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Standardize with the training tokens, and train the networks."""
        values, offsets = self._inputs(store)
        is_known = (np.diff(offsets) > 0) & ~store.has_nonfinite
        kept = usable(labels, is_known[indices], "finite states of the answer")
        rows, y = indices[kept], torch.from_numpy(labels[kept]).float()
        x, mask = _padded(values, offsets, rows, store.hidden_dtype)
        self._models = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            mean, std, projection = _components(x[mask], self.components)
            x = (x - mean) / std @ projection
            for number in range(self.networks):
                seed = 1000 * self.seed + number
                torch.manual_seed(seed)
                bins = inner_bins(store, rows, labels[kept], _VALIDATION_BINS, seed, self.keep_together)
                is_train = torch.from_numpy(bins > 0)
                network = PooledNetwork(mean, std, projection, self.hidden)
                self._models.append(_train(network, x, mask, y, is_train, self.epochs))
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the mean logit of the networks."""
        values, offsets = self._inputs(store)
        out = np.full(len(indices), np.nan)
        present = np.flatnonzero(np.diff(offsets)[indices] > 0)
        for first in range(0, len(present), 256):
            part = present[first : first + 256]
            x, mask = _padded(values, offsets, indices[part], store.hidden_dtype)
            with torch.no_grad():
                logits = torch.stack([model(x, mask) for model in self._models]).mean(0).double().numpy()
            out[part] = np.where(np.isfinite(logits), logits, np.nan)
        return out

    def state(self) -> dict[str, Any]:
        """Return the weights of the networks."""
        return {"models": [{k: v.numpy() for k, v in m.state_dict().items()} for m in self._models]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the weights of the networks."""
        self._models = []
        for arrays in state["models"]:
            weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
            (columns, components), hidden = weights["projection"].shape, len(weights["encode.weight"])
            with torch.device("meta"):
                network = PooledNetwork(
                    torch.empty(columns), torch.empty(columns), torch.empty(columns, components), hidden
                )
            network.load_state_dict(weights, assign=True)
            self._models.append(network.eval())


def _padded(values: np.ndarray, offsets: np.ndarray, rows: np.ndarray, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens (n, T, columns) float32 of some traces, padded with zeros, and the mask (n, T) of tokens."""
    counts = (offsets[rows + 1] - offsets[rows]).tolist()
    x = np.zeros((len(rows), max(counts), values.shape[1] * values.shape[2]), np.float32)
    for out, row, count in zip(x, rows.tolist(), counts, strict=True):
        out[:count] = schema.as_float32(values[offsets[row] : offsets[row + 1]], dtype).reshape(count, -1)
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    return torch.from_numpy(x), mask


def _components(tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of the columns of tokens (M, columns), and the projection (columns, count)."""
    mean, std = tokens.mean(0), tokens.std(0)
    # A column that is constant, up to rounding, is only centered: other traces may have another value.
    std = torch.where(std > 1e-6 * mean.abs(), std.clamp_min(1e-6), 1)
    standardized = (tokens - mean) / std
    _, singular, right = torch.svd_lowrank(standardized, q=min(count, *tokens.shape), niter=2)
    return mean, std, right * (len(tokens) ** 0.5 / singular[0])


def _train(
    network: PooledNetwork, z: torch.Tensor, mask: torch.Tensor, y: torch.Tensor, is_train: torch.Tensor, epochs: int
) -> PooledNetwork:
    """Train a network, and return it with the weights of the epoch with the smallest validation loss."""
    optimizer = AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    guard = OOMGuard(network, optimizer)
    train, held_out = is_train.nonzero().squeeze(1), (~is_train).nonzero().squeeze(1)
    lengths = mask.sum(1)
    best, best_loss = copy.deepcopy(network.state_dict()), float("inf")
    for _ in range(epochs):
        network.train()
        for batch in train[torch.randperm(len(train))].split(_BATCH_SIZE):

            def loss(begin: int, end: int, batch: torch.Tensor = batch) -> torch.Tensor:
                part = batch[begin:end]
                longest = int(lengths[part].max())
                logits = network.pool(z[part, :longest], mask[part, :longest])
                return F.binary_cross_entropy_with_logits(logits, y[part])

            guard.step(len(batch), loss)
        network.eval()
        with torch.no_grad():
            logits = network.pool(z[held_out], mask[held_out])
            value = float(F.binary_cross_entropy_with_logits(logits, y[held_out]))
        if value < best_loss:
            best, best_loss = copy.deepcopy(network.state_dict()), value
    network.load_state_dict(best)
    return network.eval()
