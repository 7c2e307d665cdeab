"""Store the final norm and the unembedding matrix of a model, and read logits of every layer."""

import numpy as np

import tracestore

hidden = [np.zeros((5, 8), "float16") for layer in range(3)]
with tracestore.create("lens.zarr", attention="none") as writer:
    writer.append({"question_id": "q0", "hidden_states": hidden})
    # model.lm_head.weight, model.model.norm.weight
    writer.set_lens(np.ones((100, 8)), np.ones(8), norm="rms", eps=1e-6)

with tracestore.open("lens.zarr") as store:
    states = store[0].hidden_states
    print(store.lens.logits(states).shape)  # (L, S, V): the logits after each layer
    print(store.lens.logits(states[1], ids=[3, 5]).shape)  # (S, 2)
