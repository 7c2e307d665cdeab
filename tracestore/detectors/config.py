"""The detectors' names and sizes. Imports no torch."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracestore.errors import MissingFieldError, UsageError
from tracestore.store.read.store import TraceStore

MODEL_NAMES = ("lstm_solo", "gnn_det_lstm", "gvae_lstm")
# Where the fused operators run: on GPUs by Triton.
FUSED_DEVICES = ("cpu", "cuda") if importlib.util.find_spec("triton") else ("cpu",)
VIEWS = {"lstm_solo": "sequence", "gnn_det_lstm": "graph", "gvae_lstm": "graph"}


# The largest sizes of a detector: a checkpoint from elsewhere may say any.
_MOST = {
    "num_layers": 4096,
    "hidden_dim": 1 << 20,
    "gnn_hidden": 1 << 16,
    "latent_dim": 1 << 16,
    "lstm_hidden": 1 << 16,
    "num_lstm_layers": 64,
    "num_heads": 4096,
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a detector; the names are tracestore train's flags. num_layers and
    hidden_dim are the language model's; `layers` of it are used, None: all. num_heads: heads
    whose weights an edge has, with edge_features "heads". UsageError where layers are none of it."""

    num_layers: int
    hidden_dim: int
    gnn_hidden: int = 128
    latent_dim: int = 128
    lstm_hidden: int = 128
    num_lstm_layers: int = 2
    dropout: float = 0.3
    kl_weight: float = 0.01
    message_passing: str = "fused"
    standardize: bool = False
    edge_features: str = "mean"
    num_heads: int = 1
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= most:
                raise UsageError(f"found {name} {value!r:.40}, expected 1 to {most:,}")
        layers = self.layers
        if layers is not None and (not layers or list(layers) != [k for k in range(self.num_layers) if k in layers]):
            raise UsageError(
                f"found layers {', '.join(map(str, layers))}, expected some of 0 to {self.num_layers - 1}, in order"
            )

    @classmethod
    def of_store(cls, store: TraceStore, **sizes: Any) -> "ModelConfig":
        """For the traces of a store."""
        if sizes.get("edge_features") == "heads":
            sizes = {"num_heads": store.num_stored_heads} | sizes
        return cls(store.num_layers, store.hidden_dim, **sizes)

    def edge_format(self, store: TraceStore, device: str) -> str:
        """The form in which TraceLoader brings edges to a graph model on a type of `device`: "packed", "coo"
        or "heads". MissingFieldError where the store has no such weights."""
        is_causal = store.attention_layout == "causal"
        if self.edge_features != "heads":
            # PyG wants lists; on a CPU they are made of triangles graph by graph, on a GPU by the loader.
            is_fused = self.message_passing == "fused" and device in FUSED_DEVICES
            return "packed" if is_causal and (device == "cpu" or is_fused) else "coo"
        if store.attention != "heads":
            raise MissingFieldError(f"{store.path}: no attention of every head; convert with --attention heads")
        if not is_causal or store.num_stored_heads != self.num_heads:
            raise MissingFieldError(
                f"{store.path}: holds {store.attention_layout} attention of {store.num_stored_heads} heads; the model's "
                f"edges are causal attention of {self.num_heads}"
            )
        return "heads"

    @property
    def layers_read(self) -> Sequence[int]:
        return range(self.num_layers) if self.layers is None else self.layers

    @property
    def num_layers_read(self) -> int:
        return len(self.layers_read)

    @property
    def edge_dim(self) -> int:
        """Weights of an edge."""
        return self.num_heads if self.edge_features == "heads" else 1
