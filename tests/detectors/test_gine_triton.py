"""The Triton kernels compared with the C core, in Triton's interpreter and on a GPU if there is one."""

import pytest
import torch

from tests.detectors.layers.interpreted import interpreted
from tests.detectors.test_gine import FORMS, parameters, plain, sums
from tracestore.detectors.graph import gine_cpu, gine_op
from tracestore.detectors.graph.edges import Edges
from tracestore.detectors.graph.gine_op import gine_linear
from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.detectors.layers.model_config import ModelConfig

pytestmark = pytest.mark.long

triton = pytest.importorskip("triton", reason="Triton is not installed")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def kernels():
    """Return a copy of gine_triton whose kernels are interpreted on CPU tensors."""
    ptr, one = torch.tensor([0, 1]), torch.ones(1, 1)
    inputs = GraphInputs(one, ptr, torch.ones(1), ptr, 1)
    return interpreted(
        "tracestore.detectors.graph.gine_triton",
        lambda m: m.aggregate(torch.empty(1, 1), one, one, torch.zeros(1), inputs.edges()),
    )


def run(kernels, inputs, w, b, cotangent, need_x=True, edges=None):
    x, out = inputs.x, torch.empty(inputs.x.shape, dtype=w.dtype)
    edges = inputs.edges() if edges is None else edges
    kernels.aggregate(out, x, w, b, edges)
    grad_x = torch.empty_like(out) if need_x else None
    grad_w, grad_b = kernels.aggregate_backward(cotangent.clone(), x, w, b, edges, grad_x)
    return [out, grad_w, grad_b] + ([grad_x] if need_x else [])


@pytest.mark.parametrize(("mean", "is_prepared"), [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_interpreted_equals_the_c_core(kernels, form, dtype, mean, is_prepared):
    inputs = FORMS[form](5, dtype)
    if is_prepared:
        features = {"edge_features": "heads", "num_heads": inputs.edge_dim} if inputs.edge_dim > 1 else {}
        masks = {"mask_diagonal": False, "mask_sinks": 0}
        inputs = inputs.prepare(ModelConfig(1, 5, pooling="all", skip="none", **masks, **features))
    edges = inputs.edges(mean=mean)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    w, b = (p.detach() for p in parameters(inputs, wide))
    cotangent = torch.randn(inputs.x.shape, dtype=wide)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    # Whether the gradient of x is wanted does not depend on the type of the inputs.
    for need_x in (True, False) if dtype == torch.float64 else (True,):
        mine, theirs = (run(k, inputs, w, b, cotangent, need_x, edges) for k in (kernels, gine_cpu))
        for p, q in zip(mine, theirs, strict=True):
            assert torch.allclose(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", ["triangles", "heads", "lists"])
def test_interpreted_chunks_equal_the_whole_batch(kernels, form, monkeypatch):
    """Graph by graph, the rows of a chunk find their graphs."""
    inputs = FORMS[form](5)
    features = {"edge_features": "heads", "num_heads": inputs.edge_dim} if inputs.edge_dim > 1 else {}
    inputs = inputs.prepare(ModelConfig(1, 5, mask_diagonal=False, mask_sinks=0, skip="none", **features))
    w, b = parameters(inputs)
    leaves = (inputs.x.requires_grad_(), w, b, torch.randn(4, 5).double(), torch.randn(4).double())
    results = []
    for chosen, size in ((gine_cpu, 1 << 20), (kernels, 1 << 20), (kernels, 1)):
        monkeypatch.setattr(gine_op, "_kernels", lambda _, chosen=chosen: chosen)
        monkeypatch.setitem(gine_op.CHUNK_BYTES, "cpu", size)
        out = gine_linear(*leaves, *inputs.edges(mean=True))
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves[:3])])
    for other in results[1:]:
        for p, q in zip(results[0], other, strict=True):
            assert torch.allclose(p, q, rtol=1e-12, atol=1e-12)


def test_interpreted_threshold_is_compared_exactly(kernels):
    """The float32 weight is next to a threshold that float32 cannot represent."""
    ptr = torch.tensor([0, 1])
    inputs = GraphInputs(torch.ones(1, 1), ptr, torch.tensor([0.1]), ptr, 1, threshold=0.1)
    out = torch.empty(1, 1)
    kernels.aggregate(out, inputs.x, torch.ones(1, 1), torch.zeros(1), inputs.edges())
    assert float(out) > 2


@pytest.mark.parametrize("form", ["triangles", "lists"])
def test_interpreted_refuses_pointers_and_edges_out_of_bounds(kernels, form):
    inputs = FORMS[form](4)
    w, b = (p.detach() for p in parameters(inputs))
    out = torch.empty_like(inputs.x)
    node_ptr, weight, weight_ptr, source, target, threshold, *_ = inputs.edges()
    bad = [(node_ptr - 1, weight, weight_ptr), (node_ptr, weight, weight_ptr + 1), (node_ptr[:-1], weight, weight_ptr)]
    bad += [(node_ptr.flip(0), weight, weight_ptr), (node_ptr, weight[:-1], weight_ptr)]
    for begin in bad:
        with pytest.raises(ValueError):
            kernels.aggregate(out, inputs.x, w, b, Edges(*begin, source, target, threshold))
    if source is not None:
        for ends in ((source + 100, target), (source, target - 100), (source[:-1], target), (source, None)):
            with pytest.raises(ValueError):
                kernels.aggregate(out, inputs.x, w, b, Edges(node_ptr, weight, weight_ptr, *ends, threshold))


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3), reason="Triton's ASTSource takes other arguments"
)
@pytest.mark.parametrize(
    ("lists", "mean", "channels"), [(False, True, 1), (False, False, 1), (False, True, 16), (True, True, 1)]
)
def test_compiles_for_a_gpu(lists, mean, channels, tmp_path, monkeypatch):
    """The kernels compile to machine code of a Hopper GPU, for which no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tracestore.detectors.graph import gine_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("out", "w", "b", "grad_out", "grad_x", "partial"), "*fp32")
    types |= dict.fromkeys(("place", "begin", "extent"), "*i64") | {"x": "*fp16", "weight": "*fp16", "degree": "*i32"}
    types |= {"threshold": "*fp64", "N": "i32", "D": "i32", "C": "i32"}
    constants = {"LISTS": lists, "MEAN": mean, "CHANNELS": channels, "BLOCK": 128}
    for kernel, more in ((gine_triton._forward, {}), (gine_triton._backward, {"NEED_X": True, "ROWS": 16})):
        fixed = constants | more
        signature = {n: "constexpr" if n in fixed else types[n] for n in kernel.arg_names}
        values = {(kernel.arg_names.index(n),): value for n, value in fixed.items()}
        compiled = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32))
        assert len(compiled.asm["cubin"]) > 0


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_gpu_equals_the_formula(form, dtype):
    host = FORMS[form](150, dtype)
    inputs = host.to("cuda")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    w, b = (p.detach().cuda().requires_grad_() for p in parameters(inputs, wide))
    matrix = torch.randn(7, 150, dtype=wide, device="cuda", requires_grad=True)
    bias = torch.randn(7, dtype=wide, device="cuda", requires_grad=True)
    x = inputs.x.to(wide).requires_grad_()
    exact = plain(x, w, b, *inputs.coo())
    summed = sums(inputs.x, w, b, *inputs.edges())
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    assert torch.allclose(summed, exact, rtol=tolerance, atol=tolerance)
    mine = gine_linear(inputs.x, w, b, matrix, bias, *inputs.edges())
    theirs = exact @ matrix.T + bias
    leaves = (w, b, matrix, bias)
    for p, q in zip(torch.autograd.grad(mine.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves), strict=True):
        assert torch.allclose(p, q, rtol=10 * tolerance, atol=10 * tolerance * float(q.abs().max()))


@pytest.mark.gpu
@gpu
def test_operators_on_a_gpu_pass_the_checks_of_torch():
    inputs = FORMS["triangles"](5, torch.float32).to("cuda")
    w, b = (p.detach().cuda().requires_grad_() for p in parameters(inputs, torch.float32))
    x = inputs.x.requires_grad_()
    arguments = (x, w, b, torch.randn(4, 5, device="cuda"), torch.randn(4, device="cuda"), *inputs.edges())
    assert set(torch.library.opcheck(gine_linear, arguments).values()) == {"SUCCESS"}
