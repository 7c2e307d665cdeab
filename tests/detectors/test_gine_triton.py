"""The Triton kernels compared with the C core, in Triton's interpreter and on a GPU if there is one."""

import pytest
import torch

from tests.detectors.kernels.interpreted import interpreted
from tests.detectors.test_gine import FORMS, parameters, plain, sums
from tracestore.detectors.graph import gine_cpu
from tracestore.detectors.graph.gine_op import gine_linear
from tracestore.detectors.graph.inputs import GraphInputs

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


def run(kernels, inputs, w, b, cotangent, need_x=True):
    x, out = inputs.x, torch.empty(inputs.x.shape, dtype=w.dtype)
    kernels.aggregate(out, x, w, b, inputs.edges())
    grad_x = torch.empty_like(out) if need_x else None
    grad_w, grad_b = torch.empty_like(w), torch.empty_like(b)
    kernels.aggregate_backward(cotangent, x, w, b, inputs.edges(), grad_x, grad_w, grad_b)
    return [out, grad_w, grad_b] + ([grad_x] if need_x else [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_interpreted_equals_the_c_core(kernels, form, dtype):
    inputs = FORMS[form](5, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    w, b = (p.detach() for p in parameters(inputs, wide))
    cotangent = torch.randn(inputs.x.shape, dtype=wide)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for need_x in (True, False):
        mine, theirs = (run(k, inputs, w, b, cotangent, need_x) for k in (kernels, gine_cpu))
        for p, q in zip(mine, theirs, strict=True):
            assert torch.allclose(p, q, rtol=tolerance, atol=tolerance)


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
    node_ptr, weight, weight_ptr, source, target, threshold = inputs.edges()
    bad = [(node_ptr - 1, weight, weight_ptr), (node_ptr, weight, weight_ptr + 1), (node_ptr[:-1], weight, weight_ptr)]
    bad += [(node_ptr.flip(0), weight, weight_ptr), (node_ptr, weight[:-1], weight_ptr)]
    for begin in bad:
        with pytest.raises(ValueError):
            kernels.aggregate(out, inputs.x, w, b, (*begin, source, target, threshold))
    if source is not None:
        for ends in ((source + 100, target), (source, target - 100), (source[:-1], target), (source, None)):
            with pytest.raises(ValueError):
                kernels.aggregate(out, inputs.x, w, b, (node_ptr, weight, weight_ptr, *ends, threshold))


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3), reason="Triton's ASTSource takes other arguments"
)
@pytest.mark.parametrize(("lists", "channels"), [(False, 1), (False, 16), (True, 1)])
def test_compiles_for_a_gpu(lists, channels, tmp_path, monkeypatch):
    """The kernels compile to machine code of a Hopper GPU, for which no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tracestore.detectors.graph import gine_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("out", "w", "b", "grad_out", "grad_x", "partial_w", "partial_b"), "*fp32")
    types |= dict.fromkeys(("begin", "count", "first", "stride"), "*i64") | {"x": "*fp16", "weight": "*fp16"}
    types |= {"other": "*i64" if lists else "*fp16", "threshold": "*fp64", "N": "i32", "D": "i32", "C": "i32"}
    constants = {"LISTS": lists, "CHANNELS": channels, "BLOCK": 128}
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
