"""Readers side by side compared with readers one after the other."""

import itertools

import pytest
import torch

from tracestore.detectors.layers.dropout import TraceMasks
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.layers.readers import Readers

LAYERS, WIDTH, TRACES = 5, 7, 3
SHAPES = list(itertools.product((1, 2, 4), (1, 2, 3), ("mean", "final"), (0.0, 0.4)))


def make(num_readers, num_lstm_layers, pooling, p, dtype=torch.float64):
    sizes = {"lstm_hidden": 6, "num_lstm_layers": num_lstm_layers, "num_readers": num_readers}
    torch.manual_seed(0)
    return Readers(WIDTH, ModelConfig(LAYERS, WIDTH, dropout=p, layer_pooling=pooling, **sizes)).to(dtype)


def run(readers, forward, x, cotangent):
    out = forward(x, TraceMasks(3, 1, TRACES))
    return [out.detach(), *torch.autograd.grad(out, [x, *readers.parameters()], cotangent)]


@pytest.mark.parametrize(("num_readers", "num_lstm_layers", "pooling", "p"), SHAPES)
def test_side_by_side_equals_one_after_the_other(num_readers, num_lstm_layers, pooling, p):
    readers = make(num_readers, num_lstm_layers, pooling, p)
    x = torch.randn(TRACES, LAYERS, WIDTH, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(TRACES, num_readers, dtype=torch.float64)
    one, side = (run(readers, call, x, cotangent) for call in (readers, readers.side_by_side))
    for a, b in zip(one, side, strict=True):
        assert (a - b).abs().max() <= 1e-10 * a.abs().max()


def test_evaluation_and_masks_of_torch():
    readers = make(4, 2, "mean", 0.4)
    x = torch.randn(TRACES, LAYERS, WIDTH).half()
    torch.manual_seed(1)
    drawn = readers.side_by_side(x)
    assert drawn.dtype == torch.float64 and not torch.equal(drawn, readers.side_by_side(x))
    readers.eval()
    torch.testing.assert_close(readers.side_by_side(x), readers(x.double()), rtol=1e-10, atol=1e-10)


def test_the_parameters_stay_those_of_each_reader():
    """Gradients are those of the parameters: zeros outside of the blocks have no place to go."""
    readers = make(2, 1, "mean", 0.0)
    names = [name for name, _ in readers.named_parameters()]
    assert "1.lstm.layers.0.weight_hh_l0_reverse" in names and "0.head.6.bias" in names
    readers.side_by_side(torch.randn(TRACES, LAYERS, WIDTH)).sum().backward()
    assert all(p.grad.shape == p.shape and p.grad.is_contiguous() for p in readers.parameters())
    before = readers.side_by_side(x := torch.ones(1, LAYERS, WIDTH))
    with torch.no_grad():
        readers[1].head[6].bias += 1
    torch.testing.assert_close(readers.side_by_side(x) - before, torch.tensor([[0.0, 1.0]], dtype=torch.float64))


def test_the_first_lstm_has_its_weights_at_the_start_of_their_memory():
    """cuDNN copies weights that are not one piece in its order: matrices of both directions, then biases."""
    readers = make(2, 2, "mean", 0.0)
    readers.side_by_side(torch.randn(TRACES, LAYERS, WIDTH))
    for weights in readers._packing.weights(list(readers.parameters()))[0]:
        in_order = [weights[k] for k in (0, 1, 4, 5, 2, 3, 6, 7)]
        sizes = [w.numel() for w in in_order]
        assert [w.storage_offset() for w in in_order] == [sum(sizes[:k]) for k in range(8)]
        assert len({w.untyped_storage().data_ptr() for w in in_order}) == 1


def test_a_cpu_computes_the_readers_one_after_the_other(monkeypatch):
    readers = make(2, 1, "mean", 0.0)
    monkeypatch.delattr(Readers, "side_by_side")
    assert readers(torch.ones(1, LAYERS, WIDTH, dtype=torch.float64)).shape == (1, 2)
