"""The dropout kernel compared with numpy, in Triton's interpreter and on a GPU if there is one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.detectors.layers.interpreted import interpreted
from tracestore.detectors.layers import dropout
from tracestore.detectors.layers.dropout import TraceMasks, draw_noise, drop, kernel_mask, kernel_noise
from tracestore.detectors.layers.readers import NOISE_STREAM

triton = pytest.importorskip("triton", reason="Triton is not installed")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
KEYS = [0, 1, 16, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]


@pytest.fixture(scope="module")
def kernels():
    return interpreted(
        "tracestore.detectors.layers.dropout_triton",
        lambda m: m.apply(torch.ones(3, 1), None, 3, torch.tensor([1, 0]), 0, 0, 1 << 31),
    )


@pytest.fixture
def on_kernel(kernels, monkeypatch):
    """Let tensors of the CPU use the kernel."""
    monkeypatch.setattr("tracestore.detectors.layers.dropout_triton.apply", kernels.apply)
    return lambda x, masks, bound, *arguments: dropout._KernelDropout.apply(x, masks, bound, *arguments)


def expected(masks, stream, rows, columns, bound):
    return kernel_mask(masks.keys(stream), [n * columns for n in rows], bound).reshape(-1, columns)


@pytest.mark.parametrize("key", KEYS)
def test_rows_of_traces_have_the_masks_of_numpy(on_kernel, key):
    masks, rows, bound = TraceMasks(key, 5, 4), [3, 0, 400, 1], dropout._bound(0.7, 1 << 32)
    row_ptr = 7 + torch.tensor([0, *np.cumsum(rows)])
    x = torch.randn(404, 5, dtype=torch.float64, requires_grad=True)
    every_second = torch.stack([row_ptr, row_ptr - 1], 1)[:, 0]  # a view with a stride
    out = on_kernel(x, masks, bound, 2, 0, every_second)
    mask = torch.from_numpy(expected(masks, 2, rows, 5, bound))
    torch.testing.assert_close(out, x * mask / (bound / 2**32), rtol=1e-15, atol=0)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(grad, mask.double() / (bound / 2**32), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_groups_of_rows_use_streams_of_their_own(on_kernel, dtype):
    masks, bound = TraceMasks(9, 0, 3), dropout._bound(0.7, 1 << 32)
    x = torch.ones(12, 2, 50, dtype=dtype)
    out = on_kernel(x, masks, bound, 4, 1 << 16, None).view(4, 3, 100)
    assert out.dtype == dtype and abs(float(out.max()) - 2**32 / bound) <= torch.finfo(dtype).eps
    for group in range(4):
        assert np.array_equal(out[group] != 0, expected(masks, 4 + (group << 16), [1] * 3, 100, bound))


@pytest.mark.long
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 9), min_size=2, max_size=6), st.data())
@settings(max_examples=15, deadline=None)
def test_a_slice_of_a_batch_has_the_masks_of_the_whole_batch(kernels, key, rows, data):
    begin = data.draw(st.integers(0, len(rows) - 1))
    end = data.draw(st.integers(begin + 1, len(rows)))
    ptr = torch.tensor([0, *np.cumsum(rows)])
    x = torch.ones(sum(rows), 5)
    whole = kernels.apply(x, ptr, len(rows), TraceMasks(key, 3, len(rows)).state, 1, 0, 1 << 31)
    state = TraceMasks(key, 3 + begin, end - begin).state
    part = kernels.apply(x[ptr[begin] : ptr[end]], ptr[begin : end + 1], end - begin, state, 1, 0, 1 << 31)
    assert torch.equal(whole[ptr[begin] : ptr[end]], part)


@pytest.mark.parametrize("kept", [0.001, 0.3, 0.8, 1.0])
def test_the_kept_share_is_the_requested_probability(kept):
    """The mean of a million draws lies within 5 standard deviations."""
    bound = dropout._bound(kept, 1 << 32)
    mask = kernel_mask(TraceMasks(1, 0, 2).keys(0), [600_000, 400_000], bound)
    assert abs(bound / 2**32 - kept) < 1e-9 and abs(mask.mean() - kept) <= 5 * (kept * (1 - kept) / 1e6) ** 0.5


def test_a_kernel_that_fails_is_reported_and_masks_come_from_the_cpu(monkeypatch):
    def fails(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(dropout, "_run_kernel", fails)
    with pytest.warns(RuntimeWarning, match="the dropout kernel on cpu failed: RuntimeError: no compiler"):
        assert not dropout._kernel_works.__wrapped__(torch.device("cpu"))


@pytest.mark.long
def test_compiles_for_a_gpu(tmp_path, monkeypatch):
    """The kernel compiles to machine code of a Hopper GPU, for which no GPU is needed."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        pytest.skip("Triton's ASTSource takes other arguments")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tracestore.detectors.layers.dropout_triton import _apply

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for dtype, search in (("fp32", 5), ("bf16", -1), ("fp64", 0)):
        constants = {"BOUND": 3 << 30, "SCALE": 4 / 3, "SEARCH": search, "BLOCK": 1024}
        types = {"out": f"*{dtype}", "x": f"*{dtype}", "row_ptr": "*i64", "state": "*i64"}
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in _apply.arg_names}
        values = {(_apply.arg_names.index(n),): value for n, value in constants.items()}
        compiled = triton.compile(ASTSource(_apply, signature, values), target=GPUTarget("cuda", 90, 32))
        assert len(compiled.asm["cubin"]) > 0


@pytest.mark.gpu
@gpu
def test_gpu_equals_numpy():
    masks, rows = TraceMasks(2**64 - 3, 7, 3), [1000, 1, 30_000]
    row_ptr = torch.tensor([0, *np.cumsum(rows)]).cuda()
    x = torch.ones(sum(rows), 33, device="cuda", requires_grad=True)
    out = drop(x, 0.25, masks, 4, row_ptr=row_ptr)
    mask = torch.from_numpy(expected(masks, 4, rows, 33, 3 << 30))
    assert torch.equal(out.cpu() != 0, mask) and torch.equal(torch.autograd.grad(out.sum(), x)[0], out)


@pytest.mark.parametrize("key", KEYS)
def test_the_noise_of_traces_is_that_of_numpy(kernels, key):
    masks = TraceMasks(key, 5, 4)
    found = kernels.normal(masks.state, NOISE_STREAM, 4, 900).numpy()
    np.testing.assert_allclose(found, kernel_noise(masks.keys(NOISE_STREAM), 900), rtol=1e-4, atol=1e-5)


def test_noise_is_standard_normal_and_that_of_the_whole_batch():
    """The moments of a million values lie within 5 standard errors, and neighbors and traces are independent."""
    whole = draw_noise(TraceMasks(3, 0, 1000), NOISE_STREAM, torch.empty(1000, 4, 250))
    values = whole.double().reshape(1000, 1000).numpy()
    moments = [(values**power).mean() for power in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=5 * (96 / 1e6) ** 0.5)
    for pairs in (values[:, 1:] * values[:, :-1], values[1:] * values[:-1]):
        assert abs(pairs.mean()) < 5e-3
    part = draw_noise(TraceMasks(3, 400, 7), NOISE_STREAM, torch.empty(7, 4, 250))
    assert torch.equal(part, whole[400:407]) and np.abs(values).max() < 6
