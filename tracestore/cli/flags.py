"""Options of commands that are fields of dataclasses.

The name, default and choices of an option are taken from its field; the tables below add what only
argparse needs.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tracestore.console import float_where, int_between, int_ranges, positive_int
from tracestore.store.format.labels import DEFAULT_THRESHOLD, DIRECTIONS
from tracestore.store.format.provenance import ALLOW_FLAG

# The help text of an option by the name of its field, or arguments of ``add_argument``.
Flags = Mapping[str, str | dict[str, Any]]

_SWITCH = argparse.BooleanOptionalAction
_at_least_0 = int_between(0, 2**31 - 1, "a whole number of at least 0")

# Arguments by the type of the field.
_BY_TYPE: dict[Any, dict[str, Any]] = {
    bool: {"action": "store_true"},
    int: {"type": positive_int, "metavar": "N"},
    float: {"type": float},
    tuple[int, ...]: {"type": int_ranges, "metavar": "LIST"},
}
THRESHOLD_HELP = (
    f"label 1 (hallucination) where score < T (default: {DEFAULT_THRESHOLD:g}, for scores in [0, 1]; others need it)"
)
# Fields of convert.options.ConvertOptions, and parameters of ingest.scores.read_scores.
SCORE_FLAGS: Flags = {
    "id_column": {"metavar": "NAME", "help": "column of the question ids (default: question_id or a usual other name)"},
    "score_column": {"metavar": "NAME", "help": "column of the scores (default: score or another usual name)"},
    "score_direction": {"choices": DIRECTIONS, "help": "meaning of a high score (default: by the name of the column)"},
    "group_column": {"metavar": "NAME", "help": "column of groups, which splits keep together (default: group)"},
}
# A field of TrainConfig and of BenchmarkOptions.
DROP_NONFINITE_HELP = "leave out traces with NaN or infinite values, and list them"
# A field of several dataclasses; see add_allow_mixed_provenance() for commands without one.
PROVENANCE_FLAGS = {"allow_mixed_provenance": "accept traces whose models, layers or prompts differ"}
# Fields of detectors.model_config.ModelConfig.
MODEL_FLAGS: Flags = {
    "edge_features": "weights of an edge: the mean over the heads, or one per head (needs --attention heads)",
    "layers": "stored layers to read, from 0, e.g. 0-9,20,29 (default: all; graph models: from 1/4 to 7/8)",
    "gnn_hidden": "width of the graph layers",
    "latent_dim": "width of the latent vectors of gvae_lstm",
    "lstm_hidden": "width of the LSTM",
    "num_lstm_layers": "layers of the LSTM",
    "dropout": {
        "type": float_where(lambda p: 0 <= p < 1, "a number of at least 0 and below 1"),
        "help": "probability of dropping a value in training",
    },
    "kl_weight": "weight of the Kullback-Leibler divergence in the loss of gvae_lstm",
    "standardize": {"action": _SWITCH, "help": "inputs per layer and column, with statistics of the training split"},
    "normalization": "of graph models, after each convolution; batch: statistics depend on how a batch is split",
    "aggregation": "of the messages into a token",
    "residual": {"action": _SWITCH, "help": "add the input of the second convolution to its output"},
    "pooling": "tokens that the readout of a graph averages",
    "layer_pooling": "what the head reads: the mean of the LSTM's outputs over the layers, or its final states",
    "num_readers": "LSTMs with heads that read the layers; their logits are averaged",
    "skip": "hidden states that the LSTM of graph models also reads: their mean over the answer, or the last token",
    "mask_diagonal": {"action": _SWITCH, "help": "leave out the edges of tokens to themselves"},
    "mask_sinks": {"type": _at_least_0, "metavar": "N", "help": "leave out the edges from the first N tokens"},
    "neighbors": "keep the N edges into each token that have the largest weights (default: all)",
    "message_passing": "pyg is the slow reference",
}
# Fields of train.config.TrainConfig that change the cost of a step.
STEP_FLAGS: Flags = {
    "batch_size": "traces in a step",
    "precision": "fp16 needs a GPU",
    "activation_checkpointing": "less memory: compute activations a second time in backward",
    "max_cache_batches": "decoded batches to keep of a compressed store",
    "attention_threshold": "edges are pairs with attention above this",
    "top_k": {
        "type": float_where(lambda f: 0 < f <= 1, "a fraction above 0 and at most 1"),
        "metavar": "FRACTION",
        "help": "keep this fraction of the pairs of each layer, those with the largest attention "
        "(default: all above --attention-threshold)",
    },
}


def add_flags(parser: argparse._ActionsContainer, options: type, flags: Flags) -> None:
    """Add an option for each of some fields of a dataclass.

    Parameters
    ----------
    parser : argparse.ArgumentParser or group
    options : type
        The dataclass. A bool field becomes a switch, the values of a Literal become choices.
    flags : mapping
        Help texts, or arguments of ``add_argument``, by field name. A suffix ``_s`` (seconds) is left out
        of the flag.
    """
    hints = get_type_hints(options)
    defaults = {f.name: f.default for f in fields(options)}
    for name, given in flags.items():
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        arguments: dict[str, Any] = {}
        kinds = (hints[name], *get_args(hints[name]))
        for kind in kinds:
            arguments |= {"choices": get_args(kind)} if get_origin(kind) is Literal else _BY_TYPE.get(kind, {})
        arguments |= {"help": given} if isinstance(given, str) else given
        parser.add_argument(flag, dest=name, default=defaults[name], **arguments)


def values(args: argparse.Namespace, *tables: Iterable[str]) -> dict[str, Any]:
    """Return the parsed values of the fields in some tables, by field name."""
    return {name: getattr(args, name) for flags in tables for name in flags}


def add_shard(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the flag --shard, whose value is a pair of integers; `text` states the share of process I of N."""
    parser.add_argument(
        "--shard",
        type=_shard,
        default=f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}",
        metavar="I/N",
        help=f"{text} (default: RANK/WORLD_SIZE as torchrun sets them, else all)",
    )


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected I/N with 0 <= I < N")
    return int(match[1]), int(match[2])


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the argument STORE."""
    parser.add_argument("store", metavar="STORE", help="folder or URL of a store")


def add_stores(parser: argparse.ArgumentParser, type: Callable[[str], Any]) -> None:
    """Add the argument STORE, which may be several."""
    text = "folder or URL of a store; several are read as one"
    parser.add_argument("stores", metavar="STORE", nargs="+", type=type, help=text)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add --overwrite of a command that writes one file."""
    parser.add_argument("--overwrite", action="store_true", help="replace an existing FILE")


def add_num_threads(parser: argparse.ArgumentParser) -> None:
    """Add --num-threads."""
    text = "threads of torch and of the loader (default: torch's own number, and 2 of the loader)"
    parser.add_argument("--num-threads", type=positive_int, metavar="N", help=text)


def add_allow_mixed_provenance(parser: argparse.ArgumentParser) -> None:
    """Add the flag that permits a provenance conflict."""
    parser.add_argument(ALLOW_FLAG, action="store_true", help=PROVENANCE_FLAGS["allow_mixed_provenance"])


def add_score(parser: argparse.ArgumentParser) -> None:
    """Add --score and --score-threshold."""
    parser.add_argument("--score", metavar="NAME", help="named score to use (default: the store's)")
    add_score_threshold(parser)


def add_score_threshold(parser: argparse.ArgumentParser) -> None:
    """Add --score-threshold."""
    parser.add_argument("--score-threshold", type=float, metavar="T", help=THRESHOLD_HELP)
