"""Sizes and options of a detector. Imports no torch."""

import importlib.util
from argparse import BooleanOptionalAction
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from tracestore.console import float_where, non_negative_int, option
from tracestore.data.batches.batch_format import EdgeFormat
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
    """Sizes and options of a detector. Those with a help text are options of ``tracestore train`` and ``plan``.

    Parameters
    ----------
    num_layers, hidden_dim : int
        Layers and hidden size of the language model.
    num_heads : int
        Weights per edge with ``edge_features="heads"``.
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
    edge_features: Literal["mean", "heads"] = option(
        "mean", "weights of an edge: the mean over the heads, or one per head (needs --attention heads)"
    )
    layers: tuple[int, ...] | None = option(
        None, "stored layers to read, from 0, e.g. 0-9,20,29 (default: all; graph models: from 1/4 to 7/8)"
    )
    gnn_hidden: int = option(64, "width of the graph layers")
    latent_dim: int = option(128, "width of the latent vectors of gvae_lstm")
    lstm_hidden: int = option(64, "width of the LSTM")
    num_lstm_layers: int = option(1, "layers of the LSTM")
    dropout: float = option(
        0.3,
        "probability of dropping a value in training",
        type=float_where(lambda p: 0 <= p < 1, "a number of at least 0 and below 1"),
    )
    kl_weight: float = option(0.001, "weight of the Kullback-Leibler divergence in the loss of gvae_lstm")
    standardize: bool = option(
        True, "inputs per layer and column, with statistics of the training split", action=BooleanOptionalAction
    )
    normalization: Literal["layer", "graph", "batch", "none"] = option(
        "layer", "of graph models, after each convolution; batch: statistics depend on how a batch is split"
    )
    aggregation: Aggregation = option("mean", "of the messages into a token")
    residual: bool = option(True, "add the input of the second convolution to its output", action=BooleanOptionalAction)
    pooling: Pooling = option("answer", "tokens that the readout of a graph averages")
    layer_pooling: Literal["mean", "final"] = option(
        "mean", "what the head reads: the mean of the LSTM's outputs over the layers, or its final states"
    )
    num_readers: int = option(4, "LSTMs with heads that read the layers; their logits are averaged")
    skip: Literal["answer", "last", "none"] = option(
        "answer",
        "hidden states that the LSTM of graph models also reads: their mean over the answer, or the last token",
    )
    mask_diagonal: bool = option(True, "leave out the edges of tokens to themselves", action=BooleanOptionalAction)
    mask_sinks: int = option(1, "leave out the edges from the first N tokens", type=non_negative_int)
    neighbors: int | None = option(
        None, "keep the N edges into each token that have the largest weights (default: all)"
    )
    message_passing: MessagePassing = option("fused", "pyg is the slow reference")
    num_heads: int = 1
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
    def layers_read(self) -> tuple[int, ...]:
        """Layers of the language model that the detector reads, ascending."""
        return tuple(range(self.num_layers) if self.layers is None else self.layers)

    @property
    def edge_dim(self) -> int:
        """Number of weights per edge."""
        return self.num_heads if self.edge_features == "heads" else 1
