"""The substitutes for classes of PyG and for optimizers of torch equal the originals."""

import sys

import pytest
import torch
from torch import nn
from torch_geometric.nn import GINEConv

import tracestore
from tests.helpers import make_traces, write_store
from tracestore.data.batches.batch import GraphBatch, layer_graph_class, pyg_classes
from tracestore.detectors.graph.gine import PlainGINEConv
from tracestore.errors import MissingExtraError
from tracestore.oom import optimizers


@pytest.fixture
def store(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(7, tokens=lambda k: 3 + k))
    return tracestore.open(tmp_path / "s.zarr")


@pytest.mark.parametrize("edges", ["coo", "packed"])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_graph_batch_equals_the_pyg_batch(store, edges, num_threads):
    both = [
        list(
            tracestore.TraceLoader(
                store, "graph", batch_size=3, edge_format=edges, num_threads=num_threads, as_pyg=as_pyg
            )
        )
        for as_pyg in (True, False)
    ]
    for pyg, plain in zip(*both, strict=True):
        assert isinstance(plain, GraphBatch) and len(plain) == len(pyg.y)
        again = plain.to("cpu").as_pyg()
        assert type(again) is type(pyg) and list(again.keys()) == list(pyg.keys())
        for key in pyg.keys():  # noqa: SIM118 - a Data is no dict
            left, right = pyg[key], again[key]
            assert torch.equal(left.nan_to_num(), right.nan_to_num()) if torch.is_tensor(left) else left == right


def test_without_pyg_only_graph_batches_are_available(store, monkeypatch):
    pyg_classes.cache_clear()
    layer_graph_class.cache_clear()
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    for kind in (tracestore.TraceLoader, tracestore.TraceDataset):
        with pytest.raises(
            MissingExtraError, match=r"torch-geometric is not installed; run: pip install 'tracestore\[train\]'"
        ):
            kind(store, "graph")
    (batch,) = tracestore.TraceLoader(store, "graph", as_pyg=False)
    assert len(batch) == 7


@pytest.mark.parametrize("edge_dim", [1, 3])
def test_the_plain_layer_equals_that_of_pyg(edge_dim):
    """The layers have the same parameter names, the same initial values for a seed, and the same result."""
    layers = []
    for kind in (GINEConv, PlainGINEConv):
        torch.manual_seed(5)
        mlp = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4))
        layers.append(kind(mlp, edge_dim=edge_dim) if kind is GINEConv else kind(mlp, 6, edge_dim, "sum"))
        layers.append(torch.rand(1))
    pyg, next_drawn, plain, next_drawn_plain = layers
    assert torch.equal(next_drawn, next_drawn_plain)
    theirs, mine = pyg.state_dict(), plain.state_dict()
    assert theirs.keys() == mine.keys() and all(torch.equal(theirs[k], mine[k]) for k in theirs)
    assert [n for n, _ in pyg.named_parameters()] == [n for n, _ in plain.named_parameters()]
    x, edge_index, edge_attr = torch.randn(5, 6), torch.tensor([[0, 1, 1, 4], [2, 2, 3, 0]]), torch.rand(4, edge_dim)
    torch.testing.assert_close(plain(x, edge_index, edge_attr), pyg(x, edge_index, edge_attr))


@pytest.mark.parametrize(("name", "options"), [("Adam", {"fused": True}), ("Adam", {}), ("SGD", {"momentum": 0.9})])
def test_the_optimizers_equal_those_of_torch(name, options):
    weights, states = [], []
    for module in (torch.optim, optimizers):
        parameter = nn.Parameter(torch.arange(6.0))
        optimizer = getattr(module, name)([parameter], lr=0.1, weight_decay=0.01, **options)
        for k in range(4):
            optimizer.zero_grad()
            ((parameter - k) ** 2).sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        weights.append(parameter.detach())
        states.append(optimizer.state_dict())
    assert torch.equal(*weights) and repr(states[0]) == repr(states[1])
    assert isinstance(optimizer, getattr(torch.optim, name))
