"""Record modules of any PyTorch model."""

import torch

from tracestore.extract import Select, capture

model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.ReLU())
with capture(model, select=Select(layers=["0", "1"], heads="none")) as states:
    model(torch.arange(6)[None])
    trace = states.trace()
print(len(trace["hidden_states"]), trace["hidden_states"][0].shape, trace["tokens"])
