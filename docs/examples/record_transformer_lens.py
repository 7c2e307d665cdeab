"""Record a model with TransformerLens."""


def trace_of_transformer_lens(bridge, tokens):
    """Return the trace of token ids (1, S), given a TransformerBridge of TransformerLens 4."""
    names = ("hook_resid_post", "hook_pattern")
    _, cache = bridge.run_with_cache(tokens, names_filter=lambda name: name.endswith(names))
    layers = range(bridge.cfg.n_layers)
    return {
        "hidden_states": [cache["resid_post", layer] for layer in layers],
        "attentions": [cache["pattern", layer] for layer in layers],
        "tokens": tokens[0],
    }
