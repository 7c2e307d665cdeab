"""Read graphs of one layer with PyTorch Geometric."""

from torch_geometric.loader import DataLoader

from tracestore.bridges.pyg import TraceGraphs

graphs = TraceGraphs("store.zarr", layer=-1, dtype="float32")  # one layer of each trace; without `layer` all of them
for batch in DataLoader(graphs, batch_size=16, shuffle=True):
    print(batch.x.shape, batch.edge_index.shape, batch.y)
