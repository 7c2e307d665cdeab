"""The flags that say what a detector is and what a step of its training costs: those of
tracestore train that `tracestore plan` takes as well. Imports no torch: wrong usage answers at once."""

import argparse
from typing import Any

from tracestore.console import float_where, int_ranges, positive_int

# Fields of model_config.ModelConfig.
_SIZES = (
    "gnn_hidden",
    "latent_dim",
    "lstm_hidden",
    "num_lstm_layers",
    "dropout",
    "kl_weight",
    "message_passing",
    "standardize",
    "edge_features",
    "layers",
)
# Fields of config.TrainConfig.
_STEP = ("batch_size", "attention_threshold", "top_k", "precision", "activation_checkpointing", "max_cache_batches")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them."""
    add = parser.add_argument
    add("--batch-size", type=positive_int, default=16)
    add("--precision", choices=("float32", "bf16", "fp16"), default="float32", help="fp16: on a GPU only")
    add("--activation-checkpointing", action="store_true", help="less memory: compute activations again in backward")
    add("--max-cache-batches", type=positive_int, default=2, help="decoded batches kept of a compressed store")
    add("--attention-threshold", type=float, default=0.0, help="edges are pairs with attention above this")
    fraction = float_where(lambda f: 0 < f <= 1, "a fraction above 0 and at most 1")
    add("--top-k", type=fraction, metavar="FRACTION", help="instead: this fraction of each layer's pairs")
    add(
        "--edge-features",
        choices=("mean", "heads"),
        default="mean",
        help="weights of an edge: the mean over the heads, or every head's (of a store made with --attention heads)",
    )
    add("--layers", type=int_ranges, metavar="LIST", help="layers of the language model that are used, e.g. 0-9,20,29")
    add("--gnn-hidden", type=positive_int, default=128)
    add("--latent-dim", type=positive_int, default=128)
    add("--lstm-hidden", type=positive_int, default=128)
    add("--num-lstm-layers", type=positive_int, default=2)
    add("--dropout", type=float_where(lambda p: 0 <= p < 1, "a number of at least 0 and below 1"), default=0.3)
    add("--kl-weight", type=float, default=0.01)
    add("--standardize", action="store_true", help="per layer and column, statistics of training traces")
    add("--message-passing", choices=("fused", "pyg"), default="fused", help="pyg is the slow reference")
    add("--num-threads", type=positive_int, metavar="N", help="threads of torch and of the loader")


def model_sizes(args: argparse.Namespace) -> dict[str, Any]:
    """What they say of model_config.ModelConfig."""
    return {name: getattr(args, name) for name in _SIZES}


def step_options(args: argparse.Namespace) -> dict[str, Any]:
    """What they say of config.TrainConfig."""
    return {name: getattr(args, name) for name in _STEP} | {"loader_threads": args.num_threads or 2}
