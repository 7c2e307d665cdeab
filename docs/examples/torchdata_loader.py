"""Read a store with the stateful loader of torchdata."""

from torchdata.stateful_dataloader import StatefulDataLoader

import tracestore

dataset = tracestore.TraceIterableDataset("store.zarr", "sequence", batch_size=16, dtype="float32")
loader = StatefulDataLoader(dataset, batch_size=None)
batches = iter(loader)
next(batches)
state = loader.state_dict()  # load_state_dict(state) continues here
