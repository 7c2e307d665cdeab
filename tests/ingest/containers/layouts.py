"""Layouts of the arrays of one trace, by the names that files in the wild have for them."""

import numpy as np

from tests.helpers import make_trace


def base(k=0, tokens=4, attention=True):
    """Return the arrays of a trace: hidden states, attention, tokens."""
    trace = make_trace(k, tokens=tokens)
    arrays = {"hidden_states": np.stack(trace["hidden_states"]), "tokens": trace["tokens"]}
    return arrays | ({"attentions": np.stack(trace["attentions"])} if attention else {})


def by_layer(arrays, hidden, attention, axis=None):
    """Return the arrays with one entry per layer; `hidden` and `attention` are formats of their names."""
    layers = {hidden.format(n): h for n, h in enumerate(arrays["hidden_states"])}
    layers |= {attention.format(n): a for n, a in enumerate(arrays["attentions"])}
    return {name: a if axis is None else np.expand_dims(a, axis) for name, a in layers.items()} | {
        "tokens": arrays["tokens"]
    }


def with_embeddings(arrays):
    hidden = arrays["hidden_states"]
    return arrays | {"hidden_states": np.concatenate([hidden[:1] + 1, hidden])}


LAYOUTS = {
    "stacked": lambda a: a,
    "batch dimension of one": lambda a: {
        "hidden_states": a["hidden_states"][:, None],
        "attentions": a["attentions"][:, None],
        "input_ids": a["tokens"][None],
    },
    "a stack of one trace": lambda a: {name: value[None] for name, value in a.items()},
    "embeddings": with_embeddings,
    "hidden_states.0": lambda a: by_layer(a, "hidden_states.{}", "attentions.{}"),
    "hidden_states_0": lambda a: by_layer(a, "hidden_states_{}", "attentions_{}"),
    "hidden_states/layer_0": lambda a: by_layer(a, "hidden_states/layer_{}", "attentions/layer_{}"),
    "layer_0": lambda a: by_layer(a, "layer_{}", "attention_{}"),
    "layer_0, batch dimension of one": lambda a: by_layer(a, "layer_{}", "attention_{}", axis=0),
    "layer_0/hidden_states": lambda a: by_layer(a, "layer_{}/hidden_states", "layer_{}/attentions"),
    "model.layers.0": lambda a: by_layer(a, "model.layers.{}", "model.layers.{}.self_attn.attentions"),
    "TransformerLens": lambda a: by_layer(a, "blocks.{}.hook_resid_post", "blocks.{}.attn.hook_pattern", axis=0),
    "more than ten layers": lambda a: by_layer(
        {
            "hidden_states": np.concatenate([a["hidden_states"]] * 4),
            "attentions": np.concatenate([a["attentions"]] * 4),
            "tokens": a["tokens"],
        },
        "layer_{}",
        "attn_{}",
    ),
    "token_ids": lambda a: {("token_ids" if name == "tokens" else name): value for name, value in a.items()},
    "tokens first": lambda a: a | {"hidden_states": a["hidden_states"].transpose(1, 0, 2)},
}


def check(store, expected, layout=""):
    """Compare the traces of a store with the arrays of `base`."""
    assert len(store) == len(expected)
    for trace, arrays in zip(store, expected, strict=True):
        repeats = 4 if layout == "more than ten layers" else 1
        np.testing.assert_array_equal(trace.hidden_states, np.concatenate([arrays["hidden_states"]] * repeats))
        if "attentions" in arrays:
            np.testing.assert_array_equal(trace.attention, np.concatenate([arrays["attentions"]] * repeats))
        np.testing.assert_array_equal(trace.tokens, arrays["tokens"])
