"""Sizes and options of a detector. Imports no torch."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from tracestore.data.batch_format import EdgeFormat
from tracestore.errors import MissingFieldError, UsageError
from tracestore.store.read.store import TraceStore

Precision = Literal["float32", "bf16", "fp16"]
MessagePassing = Literal["fused", "pyg"]
Aggregation = Literal["mean", "sum"]
Pooling = Literal["answer", "all", "last"]
# Device types that have the fused operators: GPUs need Triton.
FUSED_DEVICES = ("cpu", "cuda") if importlib.util.find_spec("triton") else ("cpu",)

# Upper limits, because an untrusted checkpoint may claim any size.
_MAX_SIZES = {
    "num_layers": 4096,
    "hidden_dim": 1 << 20,
    "gnn_hidden": 1 << 16,
    "latent_dim": 1 << 16,
    "lstm_hidden": 1 << 16,
    "num_lstm_layers": 64,
    "num_readers": 64,
    "num_heads": 4096,
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a detector; the names are options of ``tracestore train``.

    Parameters
    ----------
    num_layers, hidden_dim : int
        Layers and hidden size of the language model.
    gnn_hidden, latent_dim, lstm_hidden : int
        Widths of the graph encoder, of the latent space of gvae_lstm, and of the LSTM.
    num_lstm_layers : int
    dropout : float
        Dropout probability of the LSTM and the head.
    kl_weight : float
        Weight of the KL divergence in the loss of gvae_lstm.
    message_passing : {"fused", "pyg"}
        Fused operators, or PyTorch Geometric as the slow reference.
    standardize : bool
        Standardize the inputs per layer and column with statistics of the training split.
    edge_features : {"mean", "heads"}
        An edge carries the mean attention weight over the heads, or one weight per head.
    num_heads : int
        Weights per edge with ``edge_features="heads"``.
    layers : tuple of int, optional
        Layers of the language model that the detector reads, ascending. Default: all; graph detectors read
        those in the middle.
    normalization : {"layer", "graph", "batch", "none"}
        Of graph models, after each convolution: LayerNorm of each node, GraphNorm of each graph, BatchNorm
        with statistics of each layer of the language model.
    aggregation : {"mean", "sum"}
        The messages of the edges into a node are averaged or summed.
    residual : bool
        Add the input of the second convolution to its output.
    pooling : {"answer", "all", "last"}
        Tokens that the readout of a graph averages: those of the answer, all, or the last one.
    layer_pooling : {"mean", "final"}
        What the head reads: the outputs of the LSTM, averaged over the layers of the language model, or
        its final states.
    num_readers : int
        Number of LSTMs with heads, whose logits are averaged.
    skip : {"answer", "last", "none"}
        Hidden states that the LSTM of graph models reads in addition to the encoded graph of each layer: their mean
        over the tokens of the answer, those of the last token, or none.
    mask_diagonal : bool
        Remove the edges of a token to itself.
    mask_sinks : int
        Remove the edges from so many first tokens, the attention sinks.
    neighbors : int, optional
        Keep so many edges into each token, those with the largest weights. Default: all.
    detach_target : bool
        The gradient of the reconstruction error of gvae_lstm stops at the vector that is reconstructed.
    column_mean : bool
        The reconstruction error and the KL divergence of gvae_lstm are means over columns, not sums.
    edges : bool
        False: the graph encoder has no edges.

    Raises
    ------
    UsageError
        A size is out of range, or `layers` is not an ascending subset of the layers.
    """

    num_layers: int
    hidden_dim: int
    gnn_hidden: int = 64
    latent_dim: int = 128
    lstm_hidden: int = 64
    num_lstm_layers: int = 1
    dropout: float = 0.3
    kl_weight: float = 0.001
    message_passing: MessagePassing = "fused"
    standardize: bool = True
    edge_features: Literal["mean", "heads"] = "mean"
    num_heads: int = 1
    layers: tuple[int, ...] | None = None
    normalization: Literal["layer", "graph", "batch", "none"] = "layer"
    aggregation: Aggregation = "mean"
    residual: bool = True
    pooling: Pooling = "answer"
    layer_pooling: Literal["mean", "final"] = "mean"
    num_readers: int = 4
    skip: Literal["answer", "last", "none"] = "answer"
    mask_diagonal: bool = True
    mask_sinks: int = 1
    neighbors: int | None = None
    detach_target: bool = True
    column_mean: bool = True
    edges: bool = True

    def __post_init__(self) -> None:
        for name, limit in _MAX_SIZES.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= limit:
                raise UsageError(f"found {name} {value!r:.40}, expected 1 to {limit:,}")
        for name, least in (("mask_sinks", 0), ("neighbors", 1)):
            value = getattr(self, name)
            if not (name == "neighbors" and value is None) and (type(value) is not int or value < least):
                raise UsageError(f"found {name} {value!r:.40}, expected a whole number of at least {least}")
        for field in fields(self):
            choices = get_args(field.type) if get_origin(field.type) is Literal else None
            if choices and (value := getattr(self, field.name)) not in choices:
                raise UsageError(f"found {field.name} {value!r:.40}, expected one of {', '.join(choices)}")
        layers = self.layers
        if layers is not None and (not layers or list(layers) != [k for k in range(self.num_layers) if k in layers]):
            raise UsageError(
                f"found layers {', '.join(map(str, layers))}, expected some of 0 to {self.num_layers - 1}, in order"
            )

    @classmethod
    def from_store(cls, store: TraceStore, **model_options: Any) -> "ModelConfig":
        """Return the config for the traces of a store; `model_options` are the other fields."""
        if model_options.get("edge_features") == "heads":
            model_options = {"num_heads": store.num_stored_heads} | model_options
        return cls(store.num_layers, store.hidden_dim, **model_options)

    def edge_format(self, store: TraceStore, device_type: str) -> EdgeFormat:
        """Return the ``edge_format`` argument of TraceLoader for a graph model on a type of device.

        Returns
        -------
        str
            "packed", "coo" or "heads".

        Raises
        ------
        MissingFieldError
            The store has no attention weights of the heads that the model needs.
        """
        is_causal = store.attention_layout == "causal"
        if self.edge_features != "heads":
            # PyG needs edge lists. On a CPU GraphInputs builds them graph by graph, on a GPU the loader does.
            is_fused = self.message_passing == "fused" and device_type in FUSED_DEVICES
            return "packed" if is_causal and (device_type == "cpu" or is_fused) else "coo"
        if store.attention_mode != "heads":
            raise MissingFieldError(f"{store.path}: no attention of every head; convert with --attention heads")
        if not is_causal or store.num_stored_heads != self.num_heads:
            raise MissingFieldError(
                f"{store.path}: holds {store.attention_layout} attention of {store.num_stored_heads} heads; the model "
                f"needs causal attention of {self.num_heads} heads"
            )
        return "heads"

    @property
    def layers_read(self) -> Sequence[int]:
        """Layers of the language model that the detector reads, ascending."""
        return range(self.num_layers) if self.layers is None else self.layers

    @property
    def edge_dim(self) -> int:
        """Number of weights per edge."""
        return self.num_heads if self.edge_features == "heads" else 1
