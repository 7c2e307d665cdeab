"""The GINE operator compared with plain indexing in float64, and PyTorch's checks of operators."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from tracestore.detectors.graph import gine_op
from tracestore.detectors.graph.gine import GINE
from tracestore.detectors.graph.gine_op import gine_linear, gine_linear_backward
from tracestore.detectors.graph.inputs import GraphInputs

SIZES = (5, 1, 0, 7, 3)


def pointers(counts):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


def triangles(dim, dtype=torch.float64, sizes=SIZES, threshold=0.0, missing=0.0):
    """Return random graphs as packed triangles, with a share `missing` of the weights NaN, as with top-k."""
    torch.manual_seed(0)
    pairs = [s * (s + 1) // 2 for s in sizes]
    weight = torch.rand(sum(pairs), dtype=torch.float64)
    weight[torch.rand(len(weight)) < missing] = torch.nan
    x = torch.randn(sum(sizes), dim, dtype=torch.float64).to(dtype)
    return GraphInputs(x, pointers(sizes), weight.to(dtype), pointers(pairs), 1, threshold=threshold)


def heads(dim, dtype=torch.float64, edge_dim=3, sizes=SIZES, threshold=0.0):
    """Return random graphs with the triangles of several heads, and a few NaN weights in one of them."""
    one = triangles(dim, dtype, sizes, threshold, missing=0.1)
    torch.manual_seed(3)
    parts = []
    for g in range(len(sizes)):
        pairs = slice(int(one.weight_ptr[g]), int(one.weight_ptr[g + 1]))
        parts += [one.weight[pairs], *(torch.rand_like(one.weight[pairs]) for _ in range(edge_dim - 1))]
    return replace(one, weight=torch.cat(parts), weight_ptr=one.weight_ptr * edge_dim, edge_dim=edge_dim)


def shuffled_lists(inputs):
    """Return the same edges as lists, in random order within each graph."""
    edge_index, weight = inputs.coo()
    weight = weight[:, 0]
    graph = torch.bucketize(edge_index[0], inputs.node_ptr[1:], right=True)
    order = torch.argsort(graph * 100 + torch.randint(100, graph.shape))
    counts = torch.bincount(graph, minlength=len(inputs.node_ptr) - 1).tolist()
    return GraphInputs(inputs.x, inputs.node_ptr, weight[order], pointers(counts), 1, edge_index[:, order])


def plain(x, w, b, edge_index, weight):
    """Compute the formula edge by edge."""
    source, target = edge_index
    messages = (x[source] + weight.to(x.dtype) @ w + b).relu()
    return x.index_add(0, target, messages)


def parameters(inputs, dtype=torch.float64):
    """Return w and b."""
    torch.manual_seed(1)
    shapes = ((inputs.edge_dim, inputs.x.shape[1]), (inputs.x.shape[1],))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def sums(x, w, b, *edges):
    """Return the sums (N, D): the product with the identity."""
    dim = b.shape[-1]
    return gine_linear(x, w, b, torch.eye(dim, dtype=w.dtype, device=w.device), w.new_zeros(dim), *edges)


FORMS = {
    "triangles": lambda dim, dtype=torch.float64: triangles(dim, dtype, threshold=0.3),
    "top-k": lambda dim, dtype=torch.float64: triangles(dim, dtype, threshold=-torch.inf, missing=0.6),
    "lists": lambda dim, dtype=torch.float64: shuffled_lists(triangles(dim, dtype)),
    "square": lambda dim, dtype=torch.float64: square(dim, dtype),
    "no edges": lambda dim, dtype=torch.float64: triangles(dim, dtype, threshold=2.0),
    "no lists": lambda dim, dtype=torch.float64: shuffled_lists(triangles(dim, dtype, threshold=2.0)),
    "heads": lambda dim, dtype=torch.float64: heads(dim, dtype, threshold=0.4),
    "all heads' edges": lambda dim, dtype=torch.float64: heads(dim, dtype, 12, (4, 1, 6), -torch.inf),
    "one token": lambda dim, dtype=torch.float64: triangles(dim, dtype, sizes=(1,)),
    "one token, heads": lambda dim, dtype=torch.float64: heads(dim, dtype, 2, sizes=(1,)),
}


def square(dim, dtype):
    """Return edges in both directions, with some pairs twice."""
    inputs = shuffled_lists(triangles(dim, dtype, sizes=(6,)))
    edge_index = torch.cat([inputs.edge_index, inputs.edge_index.flip(0)], 1)
    weight = inputs.weight.repeat(2)
    return GraphInputs(inputs.x, inputs.node_ptr, weight, pointers([len(weight)]), 1, edge_index)


@pytest.mark.parametrize("dim", [1, 16, 67, 130])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form, dim):
    inputs = FORMS[form](dim)
    w, b = parameters(inputs)
    x = inputs.x.requires_grad_()
    cotangent = torch.randn_like(x)
    found = sums(x, w, b, *inputs.edges())
    expected = plain(x, w, b, *inputs.coo())
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(found, (x, w, b), cotangent),
        torch.autograd.grad(expected, (x, w, b), cotangent),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["triangles", "lists", "heads"])
def test_16_bit_inputs_equal_converted_inputs(form, dtype):
    """The result equals that of inputs converted to float32, bit for bit."""
    inputs = FORMS[form](70, dtype)
    w, b = parameters(inputs, torch.float32)
    wide = replace(inputs, x=inputs.x.float(), weight=inputs.weight.float())
    results = []
    for graphs in (inputs, wide):
        x = graphs.x.requires_grad_()
        out = sums(x, w, b, *graphs.edges())
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, w, b))])
    assert results[0][0].dtype == torch.float32 and results[0][1].dtype == dtype
    assert torch.equal(results[0][1], results[1][1].to(dtype))
    for k in (0, 2, 3):
        assert torch.equal(results[0][k], results[1][k])


def test_threshold_is_compared_exactly():
    """The float32 weight is next to a threshold that float32 cannot represent."""
    weight = torch.tensor([0.1], dtype=torch.float32)
    inputs = GraphInputs(torch.ones(1, 1), pointers([1]), weight, pointers([1]), 1, threshold=0.1)
    assert float(weight.double()) > 0.1
    out = sums(inputs.x, torch.ones(1, 1), torch.zeros(1), *inputs.edges())
    assert float(out) > 2 and inputs.coo()[0].shape[1] == 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("form", ["triangles", "lists", "heads"])
def test_operators_pass_the_checks_of_torch(form, dtype):
    inputs = FORMS[form](5, dtype)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    w, b = parameters(inputs, kind)
    x = inputs.x if dtype == torch.float16 else inputs.x.requires_grad_()
    matrix, bias = torch.randn(4, 5, dtype=kind, requires_grad=True), torch.randn(4, dtype=kind, requires_grad=True)
    results = [torch.library.opcheck(gine_linear, (x, w, b, matrix, bias, *inputs.edges()))]
    rest = [t.detach() for t in (x, w, b)]
    for need in (True, False):
        grad = torch.randn(x.shape, dtype=kind)[:, :4]
        arguments = (grad, need, *rest, matrix.detach(), bias.detach(), *inputs.edges())
        results.append(torch.library.opcheck(gine_linear_backward, arguments))
    assert {outcome for result in results for outcome in result.values()} == {"SUCCESS"}


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("form", ["triangles", "lists", "heads", "one token", "no lists"])
def test_product_of_the_sums_for_any_chunk_size(form, mean, monkeypatch):
    """The product is the same for the whole batch and graph by graph."""
    inputs = FORMS[form](20)
    edges = inputs.edges(mean=mean)
    w, b = parameters(inputs)
    first = nn.Linear(20, 6).double()
    x = inputs.x.requires_grad_()
    leaves = (x, w, b, first.weight, first.bias)
    expected = first(sums(x, w, b, *edges))
    cotangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, cotangent)
    for size in (1, 6 * 20 * 8, 1 << 20):
        monkeypatch.setitem(gine_op.CHUNK_BYTES, "cpu", size)
        found = gine_linear(*leaves, *edges)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(torch.autograd.grad(found, leaves, cotangent), gradients, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


def test_chunks_cover_the_graphs_once():
    ptr = pointers([3, 0, 900, 4, 5, 0]).tolist()
    for limit in (1 << 24, 1 << 12, 32, 0):
        chunks = list(gine_op._chunks(ptr, limit))
        assert [r for rows, _ in chunks for r in range(rows.start, rows.stop)] == list(range(912))
        graphs = [g for _, p in chunks for g in range(p.start, p.stop - 1)]
        assert graphs == list(range(6))
        assert all(rows.stop - rows.start <= limit or p.stop - p.start == 2 for rows, p in chunks)


@pytest.mark.parametrize("form", ["triangles", "lists", "heads"])
def test_results_are_bitwise_equal_for_any_number_of_threads(form):
    inputs = FORMS[form](70, torch.float32)
    w, b = parameters(inputs, torch.float32)
    x = inputs.x.requires_grad_()
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        out = sums(x, w, b, *inputs.edges())
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), (x, w, b))])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(results[0], other, strict=True))


def _changed(tensor, at, value):
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("triangles", lambda n, a, p, s, t, _: {"node_ptr": _changed(n, -1, 10**9)}),
        ("triangles", lambda n, a, p, s, t, _: {"node_ptr": _changed(n, 1, -5)}),
        ("triangles", lambda n, a, p, s, t, _: {"node_ptr": _changed(n, 1, 2**62)}),
        ("triangles", lambda n, a, p, s, t, _: {"node_ptr": n[:0]}),
        ("triangles", lambda n, a, p, s, t, _: {"node_ptr": n.int()}),
        ("triangles", lambda n, a, p, s, t, _: {"weight_ptr": p[:-1]}),
        ("triangles", lambda n, a, p, s, t, _: {"weight_ptr": _changed(p, 1, 3)}),
        ("triangles", lambda n, a, p, s, t, _: {"weight_ptr": p + 1}),
        ("triangles", lambda n, a, p, s, t, _: {"weight_ptr": p - 1}),
        ("triangles", lambda n, a, p, s, t, _: {"weight": a[:-1]}),
        ("triangles", lambda n, a, p, s, t, _: {"weight": a.long()}),
        ("triangles", lambda n, a, p, s, t, _: {"source": n}),
        ("heads", lambda n, a, p, s, t, _: {"weight": a[:-1]}),
        ("heads", lambda n, a, p, s, t, _: {"weight_ptr": p // 3}),
        ("heads", lambda n, a, p, s, t, _: {"source": n.new_zeros(len(a)), "target": n.new_zeros(len(a))}),
        ("lists", lambda n, a, p, s, t, _: {"source": s[:-1]}),
        ("lists", lambda n, a, p, s, t, _: {"source": _changed(s, 3, 10**6)}),
        ("lists", lambda n, a, p, s, t, _: {"target": _changed(t, 3, -1)}),
        ("lists", lambda n, a, p, s, t, _: {"target": _changed(t, -1, 0)}),
        ("lists", lambda n, a, p, s, t, _: {"weight_ptr": _changed(p, -1, 10**6)}),
    ],
)
def test_pointers_and_edges_out_of_bounds_are_refused(form, change):
    inputs = FORMS[form](6)
    w, b = (p.detach() for p in parameters(inputs))
    edges = inputs.edges()._replace(**change(*inputs.edges()[:6]))
    with pytest.raises(ValueError):
        sums(inputs.x, w, b, *edges)
    with pytest.raises(ValueError):
        gine_linear_backward(inputs.x, True, inputs.x, w, b, torch.eye(6).double(), b, *edges)


def test_shapes_that_do_not_match_are_refused():
    inputs = FORMS["triangles"](6)
    w, b = (p.detach() for p in parameters(inputs))
    for x, left, right in (
        (inputs.x[:, :5], w, b),
        (inputs.x, w[:, :5], b),
        (inputs.x, w[0], b),
        (inputs.x, w[:0], b),
        (inputs.x[:-1], w, b),
        (inputs.x[0], w, b),
    ):
        with pytest.raises(ValueError):
            sums(x, left, right, *inputs.edges())


no_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "backend"),
    [
        ("triangles", "aot_eager"),
        ("lists", "aot_eager"),
        ("heads", "aot_eager"),
        pytest.param("heads", "inductor", marks=no_cxx),
    ],
)
def test_compiled_equals_eager(form, backend):
    """Two layers compile without a graph break."""
    # The mean over the nodes of an empty graph would be NaN.
    sizes = {"sizes": (5, 1, 7), "threshold": 0.3}
    inputs = heads(8, torch.float32, **sizes) if form == "heads" else triangles(8, torch.float32, **sizes)
    inputs = shuffled_lists(inputs) if form == "lists" else inputs
    torch.manual_seed(2)
    layer = GINE(8, 8, edge_dim=inputs.edge_dim)

    def step(x, *parts):
        graphs = GraphInputs(x, *parts, edge_dim=inputs.edge_dim)
        return layer(layer(x, graphs), graphs, pooled=True).square().sum()

    parts = inputs.node_ptr, inputs.weight, inputs.weight_ptr, 1, inputs.edge_index, inputs.threshold
    results = []
    for run in (step, torch.compile(step, backend=backend, fullgraph=True)):
        layer.zero_grad()
        x = inputs.x.detach().requires_grad_()
        loss = run(x, *parts)
        loss.backward()
        results.append([loss.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_autocast_multiplies_in_its_dtype_and_sums_in_float32():
    inputs = FORMS["triangles"](32, torch.float32)
    torch.manual_seed(3)
    layer = GINE(32, 16)
    exact = layer(inputs.x, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(inputs.x, inputs)
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), exact, rtol=0.05, atol=0.05)
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


def test_autocast_sums_many_nodes_and_graphs_in_float32(monkeypatch):
    """A thousand equal nodes in chunks of one graph; a bfloat16 sum of ones stops growing at 256."""
    monkeypatch.setitem(gine_op.CHUNK_BYTES, "cpu", 1)
    ptr = torch.tensor([0, 1000, 1001, 1401])
    none = torch.zeros(4, dtype=torch.int64)
    inputs = GraphInputs(torch.ones(1401, 32), ptr, torch.zeros(0), none, 1, torch.zeros(2, 0, dtype=torch.int64))
    torch.manual_seed(3)
    layer = GINE(32, 16)
    gradients = []
    for enabled in (False, True):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = layer(inputs.x, inputs, pooled=True)
        gradients.append(out.float())
        out.float().square().sum().backward()
        gradients += [p.grad.clone() for p in layer.conv.nn.parameters()]
    half = len(gradients) // 2
    for exact, mine in zip(gradients[:half], gradients[half:], strict=True):
        assert (exact - mine).abs().max() <= 0.02 * exact.abs().max()


def test_fused_and_reference_share_weights():
    fused, pyg = GINE(24, 16, "fused"), GINE(24, 16, "pyg")
    pyg.load_state_dict(fused.state_dict())
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in pyg.named_parameters()]
    inputs = FORMS["lists"](24, torch.float32)
    assert torch.allclose(fused(inputs.x, inputs), pyg(inputs.x, inputs), rtol=1e-5, atol=1e-5)
    nonempty = inputs.node_ptr.diff() > 0
    pooled = [layer(inputs.x, inputs, pooled=True)[nonempty] for layer in (fused, pyg)]
    assert torch.allclose(*pooled, rtol=1e-5, atol=1e-5)
