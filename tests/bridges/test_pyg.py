"""The PyTorch Geometric Dataset, with the real library."""

import pytest
import torch

import tracestore
from tracestore.errors import UsageError


def test_graphs_equal_those_of_the_loader(path):
    from torch_geometric.loader import DataLoader

    from tracestore.bridges.pyg import TraceGraphs

    with tracestore.open(path) as store:
        graphs = TraceGraphs(store)
        assert len(graphs) == 24 * store.num_layers
        batch = next(iter(DataLoader(graphs, batch_size=2 * store.num_layers)))
        ours = next(iter(tracestore.TraceLoader(store, "graph", batch_size=2, shuffle="none")))
        assert torch.equal(batch.x, ours.x) and torch.equal(batch.edge_index, ours.edge_index)
        assert torch.equal(batch.edge_attr, ours.edge_attr) and torch.equal(batch.batch, ours.batch)
        assert batch.trace_index.tolist() == [0] * store.num_layers + [1] * store.num_layers
        assert batch.layer.tolist() == 2 * list(range(store.num_layers)) and batch.question_id[-1] == "q1"
        last = TraceGraphs(store, layer=-1)
        assert len(last) == 24 and torch.equal(last[5].x, graphs[5 * store.num_layers + store.num_layers - 1].x)
        assert last[5].question_id == store.question_ids[5] and last[5].y.item() == 0 and last[5].score.item() == 1
        assert last[7].y.isnan() and last[7].layer == store.num_layers - 1
        with pytest.raises(UsageError, match="layer"):
            TraceGraphs(store, layer=3)


def test_graphs_of_a_subset_in_float32(path):
    from tracestore.bridges.pyg import TraceGraphs

    with tracestore.open(path) as store:
        graphs = TraceGraphs(store[[7, 2]], layer=0, dtype="float32")
        assert repr(graphs) == "TraceGraphs(2)" and [graph.trace_index for graph in graphs] == [7, 2]
        assert graphs[1].x.dtype == graphs[1].edge_attr.dtype == torch.float32
        assert torch.equal(graphs[1].x, TraceGraphs(store, layer=0)[2].x.float())
