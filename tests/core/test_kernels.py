"""Kernels compared with numpy oracles."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.oracles import CODES, raw
from tracestore._core import kernels


@given(st.binary(max_size=50_000), st.integers(0, 50_000))
@settings(max_examples=60, deadline=None)
def test_crc32c_equals_the_reference(data, cut):
    cut = min(cut, len(data))
    assert kernels.crc32c(data) == google_crc32c.value(data)
    assert kernels.crc32c(data[cut:], kernels.crc32c(data[:cut])) == google_crc32c.value(data)
    combined = kernels.crc32c_combine(kernels.crc32c(data[:cut]), kernels.crc32c(data[cut:]), len(data) - cut)
    assert combined == google_crc32c.value(data)


@given(st.integers(0, 2**32 - 1), st.integers(1, 700), st.sampled_from(["f4", "f8"]))
@settings(max_examples=60, deadline=None)
def test_to_float16_rounds_as_numpy_does(seed, n, dtype):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(n) * 10.0 ** rng.integers(-9, 4, n)).astype(dtype)
    values[::7] = [np.nan, np.inf, -np.inf, -0.0][seed % 4]
    out = np.empty(n, "f2")
    assert kernels.to_float16(raw(values), CODES[dtype], raw(out)) == -1
    np.testing.assert_array_equal(out, values.astype("f2"))


def test_to_float16_returns_the_position_of_an_overflow():
    values = np.ones(1000, "f4")
    values[777] = -7e4
    assert kernels.to_float16(raw(values), kernels.F32, raw(np.empty(1000, "f2"))) == 777


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 5), st.sampled_from(["f2", "f4", "f8"]))
@settings(max_examples=60, deadline=None)
def test_triangles_and_head_mean(seed, tokens, heads, dtype):
    rng = np.random.default_rng(seed)
    full = np.tril(rng.random((heads, tokens, tokens))).astype(dtype)
    pairs = tokens * (tokens + 1) // 2
    rows, columns = np.tril_indices(tokens)
    packed, mean = np.empty((heads, pairs), dtype), np.empty(pairs, "f2")
    is_causal, *_ = kernels.pack_attention([full], CODES[dtype], [full], CODES[dtype], heads, tokens, True, raw(packed))
    assert is_causal
    np.testing.assert_array_equal(packed, full[:, rows, columns])
    back = np.empty_like(full)
    kernels.unpack_triangle(raw(packed), full.itemsize, heads, tokens, raw(back))
    np.testing.assert_array_equal(back, full)
    kernels.pack_attention([full], CODES[dtype], None, kernels.F16, heads, tokens, True, raw(mean))
    exact = full.astype("f8").mean(0)[rows, columns]
    step = np.spacing(mean.astype("f2")).astype("f8")
    assert (np.abs(mean.astype("f8") - exact) <= step / 2).all()
    from_packed = np.empty(pairs, "f2")
    kernels.mean_rows(raw(packed), CODES[dtype], heads, pairs, raw(from_packed))
    np.testing.assert_array_equal(from_packed, mean)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["f2", "f4"]),
    st.sampled_from(["mean", "heads", "keep"]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_packed_attention_equals_numpy(seed, tokens, heads, layers, dtype, mode, causal):
    rng = np.random.default_rng(seed)
    full = rng.random((layers, heads, tokens, tokens)).astype(dtype)
    full[rng.random(full.shape) < 0.02] = [np.nan, np.inf, -0.0, 6e-8][seed % 4]
    if causal:
        full = np.tril(full)
    is_causal = not np.triu(full, 1).any()
    name = dtype if mode == "keep" else "f2"
    stored = None if mode == "mean" else [layer.astype(name) for layer in full]
    with np.errstate(invalid="ignore"):
        wanted = full.astype("f8").mean(1).astype("f2")[:, None] if stored is None else np.stack(stored)
    rows, columns = np.tril_indices(tokens)
    for want_causal in (True, False):
        expected = wanted[..., rows, columns] if want_causal else wanted
        out = np.empty(expected.size, name)
        needs_out = want_causal or stored is None or seed % 2
        target, crcs = out if needs_out else None, np.zeros(len(full), "<u4")
        sizes = heads, tokens, want_causal
        packed, nonfinite, crc = kernels.pack_attention(
            list(full), CODES[dtype], stored, CODES[name], *sizes, target, crcs if seed % 3 else None
        )
        assert packed == (is_causal or not want_causal)
        if packed:
            if needs_out:
                np.testing.assert_array_equal(out, expected.reshape(-1))
            given = out if needs_out else np.stack(stored)
            assert nonfinite == (~np.isfinite(given)).sum() and crc == google_crc32c.value(given.tobytes())
            if seed % 3:
                assert crcs.tolist() == [google_crc32c.value(a.tobytes()) for a in given.reshape(len(full), -1)]


@given(st.integers(0, 2**32 - 1), st.integers(0, 70_000), st.integers(0, 3), st.sampled_from(["f2", "f4", "f8"]))
@settings(max_examples=60, deadline=None)
def test_checksum_scan_equals_numpy(seed, n, count, dtype):
    rng = np.random.default_rng(seed)
    arrays = [rng.random(n).astype(dtype) for _ in range(count)]
    for array in arrays:
        array[rng.random(n) < [0, 0.001, 1][seed % 3]] = [np.nan, -np.inf][seed % 2]
    data = b"".join(a.tobytes() for a in arrays)
    found = sum(int((~np.isfinite(a)).sum()) for a in arrays)
    assert kernels.checksum_scan(arrays, CODES[dtype], n) == (found, google_crc32c.value(data))
    out = np.empty(count * n, dtype)
    assert kernels.checksum_scan(arrays, CODES[dtype], n, out) == (found, google_crc32c.value(data))
    assert out.tobytes() == data
    crcs = np.empty(count, "<u4")
    assert kernels.checksum_scan(arrays, CODES[dtype], n, None, crcs) == (found, google_crc32c.value(data))
    assert crcs.tolist() == [google_crc32c.value(a.tobytes()) for a in arrays]


def test_pack_attention_rejects_wrong_sizes():
    layer = np.ones((2, 3, 3), "f2")
    with pytest.raises(ValueError, match="layer 1"):
        kernels.pack_attention([layer, layer[:1]], kernels.F16, None, kernels.F16, 2, 3, True, np.empty(12, "f2"))
    with pytest.raises(ValueError, match="out"):
        kernels.pack_attention([layer], kernels.F16, [layer], kernels.F16, 2, 3, True, np.empty(11, "f2"))
    with pytest.raises(ValueError, match="out"):
        kernels.pack_attention([layer], kernels.F16, [layer], kernels.F16, 2, 3, True, None)
    with pytest.raises(ValueError, match="layer_crcs"):
        kernels.checksum_scan([layer, layer], kernels.F16, 18, None, np.empty(1, "<u4"))
    with pytest.raises(OverflowError, match="1"):
        large = [np.ones((1, 1, 1), "f4"), np.full((1, 1, 1), 1e5, "f4")]
        kernels.pack_attention(large, kernels.F32, None, kernels.F16, 1, 1, True, np.empty(2, "f2"))
