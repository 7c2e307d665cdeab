"""The PyTorch Geometric Dataset, with the real library."""

import pytest
import torch

import tracestore
from tests.helpers import make_traces, write_store
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


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [1, 3, 24])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_of_pyg_takes_the_items_of_a_dataset(path, batch_size, workers):
    """Its batches are lists: one Batch for each layer, with the values of the traces."""
    from torch_geometric.data import Batch
    from torch_geometric.loader import DataLoader

    dataset = tracestore.TraceDataset(path, view="graph")
    ours = tracestore.TraceLoader(path, "graph", batch_size=batch_size, shuffle=False)
    for layers, expected in zip(DataLoader(dataset, batch_size, num_workers=workers), ours, strict=True):
        assert len(layers) == expected.num_layers
        for k, batch in enumerate(layers):
            assert isinstance(batch, Batch) and batch.num_graphs == len(expected.y)
            assert torch.equal(batch.y.nan_to_num(-1), expected.y.nan_to_num(-1)) and batch.y.dtype == torch.float32
            assert torch.equal(batch.score.nan_to_num(-1), expected.score.nan_to_num(-1))
            assert batch.question_id == expected.question_id
            assert torch.equal(batch.trace_index, expected.trace_index)
            of_layer = [expected[n * expected.num_layers + k] for n in range(batch.num_graphs)]
            assert torch.equal(batch.x, torch.cat([graph.x for graph in of_layer]))
            assert [graph.y.shape for graph in batch.to_data_list()] == [(1,)] * batch.num_graphs


def test_graphs_of_a_store_without_scores(tmp_path):
    from torch_geometric.loader import DataLoader

    store = write_store(tmp_path / "bare.zarr", make_traces(5, tokens=3))
    (layers,) = DataLoader(tracestore.TraceDataset(store, view="graph"), batch_size=5)
    for batch in layers:
        assert batch.y.shape == (5,) and batch.y.isnan().all() and batch.score.isnan().all()
        assert batch.trace_index.tolist() == [0, 1, 2, 3, 4] and batch.question_id[4] == "q4"


def test_our_collation_has_the_values_once_per_trace(path):
    from torch_geometric.data import Data

    items = [tracestore.TraceDataset(path, view="graph")[k] for k in (2, 7)]
    batch = tracestore.collate_graphs(items)
    (expected,) = tracestore.TraceLoader(path, "graph", batch_size=2, indices=[2, 7], shuffle=False)
    assert type(batch) is type(expected) and batch.y.shape == batch.score.shape == (2,)
    assert batch.trace_index.tolist() == [2, 7] and batch.question_id == ["q2", "q7"]
    assert [set(graph.keys()) for graph in batch.to_data_list()] == [{"x", "edge_index", "edge_attr", "num_nodes"}] * 6
    plain = [[Data(x=torch.zeros(2, 4), edge_index=torch.zeros(2, 1, dtype=torch.long), mine=3)]]
    assert tracestore.collate_graphs(plain).mine.tolist() == [3]
