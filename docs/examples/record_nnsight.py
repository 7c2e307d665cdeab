"""Record a model with nnsight."""

import nnsight
import torch


def trace_of_nnsight(model, tokens):
    """Return the trace of token ids (1, S), given an nnsight model of a Llama model with eager attention."""
    with torch.no_grad(), model.trace(tokens):
        hidden_states, attentions = nnsight.save([]), nnsight.save([])
        for layer in model.model.layers:
            attentions.append(layer.self_attn.output[1])
            hidden_states.append(layer.output)
    return {"hidden_states": hidden_states, "attentions": attentions, "tokens": tokens[0]}
