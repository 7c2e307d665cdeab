"""The comparison of the fused kernels with the plain operator, and the fallback."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.detectors.test_gine import FORMS
from tracestore.detectors import graph
from tracestore.detectors.graph import gine, gine_cpu
from tracestore.detectors.graph.gine import GINE


@pytest.fixture
def kernels(monkeypatch):
    """Replace the Triton kernels by those of the C core, of which a test may change one."""
    stand_in = SimpleNamespace(aggregate=gine_cpu.aggregate, aggregate_backward=gine_cpu.aggregate_backward)
    monkeypatch.setitem(sys.modules, "tracestore.detectors.graph.gine_triton", stand_in)
    # The module may have been imported before.
    monkeypatch.setattr(graph, "gine_triton", stand_in, raising=False)
    gine.fused_kernels_work.cache_clear()
    yield stand_in
    gine.fused_kernels_work.cache_clear()


def test_kernels_that_agree_are_used_without_a_warning(kernels, recwarn):
    assert gine.fused_kernels_work(torch.device("cpu"))
    # Others warn of files that a test before has left open.
    assert not [w for w in recwarn.list if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize("wrong", ["sums", "gradients", "nan", "error"])
def test_kernels_that_differ_or_fail_are_replaced_with_one_warning(kernels, wrong):
    def aggregate(out, *arguments):
        gine_cpu.aggregate(out, *arguments)
        out[-1, -1] = {"sums": 9.0, "nan": torch.nan}[wrong]

    def aggregate_backward(*arguments):
        if wrong == "error":
            raise RuntimeError("no kernel image\nis available")
        grad_w, grad_b = gine_cpu.aggregate_backward(*arguments)
        return 1.01 * grad_w, grad_b

    if wrong in ("sums", "nan"):
        kernels.aggregate = aggregate
    else:
        kernels.aggregate_backward = aggregate_backward

    with pytest.warns(RuntimeWarning, match="the plain operator, which is slower") as warned:
        assert not gine.fused_kernels_work(torch.device("cpu"))
        assert not gine.fused_kernels_work(torch.device("cpu"))

    assert len(warned) == 1


def test_the_comparison_is_repeated_after_an_out_of_memory_error(kernels):
    def aggregate(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernels.aggregate = aggregate
    with pytest.raises(torch.OutOfMemoryError):
        gine.fused_kernels_work(torch.device("cpu"))
    kernels.aggregate = gine_cpu.aggregate
    assert gine.fused_kernels_work(torch.device("cpu"))


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
@pytest.mark.parametrize("form", ["triangles", "lists", "heads"])
def test_the_plain_operator_equals_the_fused_one(form, aggregation, monkeypatch):
    inputs = FORMS[form](8)
    torch.manual_seed(0)
    layer = GINE(8, 5, edge_dim=inputs.edge_dim, aggregation=aggregation).double()
    fused = layer(inputs.x, inputs)
    monkeypatch.setattr(gine, "is_fused", lambda device: False)
    assert torch.allclose(fused, layer(inputs.x, inputs), rtol=1e-12, atol=1e-12)
