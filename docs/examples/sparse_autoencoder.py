"""Train a sparse autoencoder on one layer of a store; docs/loading.md makes loading.zarr."""

import torch

import tracestore

tokens = tracestore.TraceLoader("loading.zarr", view="tokens", layers=1, batch_size=64, dtype="float32")
dim, width = tokens.store.hidden_dim, 32
encoder, decoder = torch.nn.Linear(dim, width), torch.nn.Linear(width, dim)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for _ in range(2):  # each iteration is an epoch in another order
    for batch in tokens:
        x = batch.hidden_states
        features = torch.relu(encoder(x - decoder.bias))
        loss = (decoder(features) - x).pow(2).mean() + 1e-3 * features.abs().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# The tokens that activate feature 0 most, of one batch
for k in features[:, 0].topk(3).indices.tolist():
    trace = tokens.store[int(batch.trace_index[k])]
    trace.question_id, trace.tokens_decoded[int(batch.position[k])]
