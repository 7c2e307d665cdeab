"""Assembly of batches compared with numpy oracles."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.oracles import CODES, oracle_edges, raw
from tracestore._core import gather, kernels

RULES = [(0.0, 0.0), (0.3, 0.0), (0.25, 0.0), (2.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (0.0, 0.1), (0.0, 0.5)]
RULES += [(0.0, 1.0)]


class Weights:
    """A GraphBatchJob without hidden states, for edges and for packed weights."""

    def __init__(self, weights, tokens, causal, layers, heads, dtype, out_dtype, threshold, top_k, threads=1):
        def make(packed):
            return gather.GraphBatchJob(
                gather.CopyJob([], kernels.F16, kernels.F16), weights, dtype, out_dtype, tokens, causal, layers, heads,
                threshold, top_k, packed,
            )  # fmt: skip

        self.coo, self.packed, self.threads = make(False), make(True), threads
        self.num_nodes, self.num_pairs = self.coo.num_nodes, self.coo.num_pairs
        self.itemsize = {kernels.F16: 2, kernels.F32: 4}[out_dtype]
        self.tokens = np.repeat(tokens, layers)

    def _run(self, job):
        """Run a job in a pool. Return edge_index, weights and edge_ptr after checking the other arrays."""
        max_edges, graphs, nodes = job.max_edges(), job.num_graphs, job.num_nodes
        at = np.cumsum(
            [0, 16 * max_edges, -(-max_edges * self.itemsize // 8) * 8, 8 * nodes, 8 * (graphs + 1), 8 * (graphs + 1)]
        )
        out = np.full(at[-1], 0xEE, "u1")
        job.set_output(out, 0, *at[:-1].tolist())
        pool = gather.ThreadPool(2)
        job.submit(pool, self.threads)
        job.wait()
        n = job.num_edges
        edges, weights, owner, ptr, edge_ptr = (out[a:b] for a, b in itertools.pairwise(at))
        np.testing.assert_array_equal(owner.view("i8"), np.repeat(np.arange(graphs), self.tokens))
        np.testing.assert_array_equal(ptr.view("i8"), np.concatenate([[0], np.cumsum(self.tokens)]))
        return edges, weights[: n * self.itemsize], edge_ptr.view("i8")

    def edges(self, counted):
        """Return edge_index (2, E), the bytes of the weights (E,) and edge_ptr; count the edges first if asked."""
        if counted:
            self.coo.count_edges(self.threads)
        edges, weights, edge_ptr = self._run(self.coo)
        n = self.coo.num_edges
        return edges[: 16 * n].view("i8").reshape(2, n), weights, edge_ptr

    def pack(self):
        """Return the bytes of the packed weights."""
        return self._run(self.packed)[1]


def stored_weights(rng, shape, dtype, special):
    """Return weights of few distinct values, so that top-k has ties; with NaN, infinities and -0 if `special`."""
    values = (rng.integers(0, 5, shape) / 4).astype(dtype)
    if special:
        flat = values.reshape(-1)
        flat[rng.integers(0, flat.size, 1 + flat.size // 9)] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 6e-8, -0.5])
    return values


@pytest.mark.long
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(RULES),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["f2", "f4"]),
    st.booleans(),
    st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_edges_equal_the_oracle(seed, sizes, rule, causal, special, dtype, wide, threads):
    rng = np.random.default_rng(seed)
    layers, stored, expected, node = 2, [], [[], [], []], 0
    counts = [0]
    for tokens in sizes:
        square = stored_weights(rng, (layers, tokens, tokens), dtype, special)
        stored.append(np.stack([s[np.tril_indices(tokens)] if causal else s.reshape(-1) for s in square]))
        for layer in square:
            source, target, weight = oracle_edges(layer, causal, *rule)
            for part, values in zip(expected, (source + node, target + node, weight), strict=True):
                part.append(values)
            counts.append(counts[-1] + len(source))
            node += tokens
    out_dtype = "f4" if wide else dtype
    weights = Weights(
        [raw(s) for s in stored], np.array(sizes), np.full(len(sizes), causal, "u1"), layers, 1,
        CODES[dtype], CODES[out_dtype], *rule, threads,
    )  # fmt: skip
    assert weights.num_nodes == node
    index, weight, ptr = weights.edges(counted=seed % 2 == 0)
    weight = weight.view(out_dtype)
    np.testing.assert_array_equal(index[0], np.concatenate(expected[0]))
    np.testing.assert_array_equal(index[1], np.concatenate(expected[1]))
    np.testing.assert_array_equal(weight, np.concatenate(expected[2]).astype(out_dtype))
    np.testing.assert_array_equal(ptr, counts)
    # Packed triangles: with top-k, dropped pairs are NaN; without, all pairs are written.
    packed = weights.pack().view(out_dtype)
    whole = np.concatenate([s.reshape(-1) for s in stored]).astype(out_dtype)
    if rule[1]:
        assert (~np.isnan(packed)).sum() == counts[-1]
        kept = ~np.isnan(packed)
        np.testing.assert_array_equal(packed[kept], whole[kept])
    else:
        np.testing.assert_array_equal(packed, whole)


@given(st.integers(0, 2**16), st.sampled_from(["f2", "f4"]), st.floats(-2, 2, width=64))
@settings(max_examples=60, deadline=None)
def test_thresholds_are_not_rounded(seed, dtype, threshold):
    """Compare with any float64 threshold, also for weights next to it."""
    rng = np.random.default_rng(seed)
    near = np.array(threshold).astype(dtype)
    values = np.concatenate(
        [[near, np.nextafter(near, near.dtype.type(9)), np.nextafter(near, near.dtype.type(-9))],
         rng.standard_normal(42).astype(dtype)]
    ).astype(dtype)  # fmt: skip
    weights = Weights(
        [raw(values)], np.array([9]), np.array([1], "u1"), 1, 1, CODES[dtype], CODES[dtype], threshold, 0.0
    )
    assert weights.coo.count_edges() == (values.astype("f8") > threshold).sum()


@pytest.mark.parametrize("tokens", [1023, 1024, 1025, 1400])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_long_traces(tokens, threshold):
    """Compare edges around the length where the table of pairs ends."""
    rng = np.random.default_rng(tokens)
    square = rng.random((tokens, tokens)).astype("f2")
    stored = square[np.tril_indices(tokens)]
    weights = Weights(
        [raw(stored), raw(np.ones(1, "f2"))], np.array([tokens, 1]), np.ones(2, "u1"), 1, 1,
        kernels.F16, kernels.F16, threshold, 0.0, 2,
    )  # fmt: skip
    index, weight, _ = weights.edges(counted=threshold == 0)
    weight = weight.view("f2")
    source, target, expected = oracle_edges(square, True, threshold, 0.0)
    np.testing.assert_array_equal(index[:, :-1], [source, target])
    np.testing.assert_array_equal(weight[:-1], expected)
    assert index[:, -1].tolist() == [tokens, tokens]


def test_head_means_equal_those_of_the_store():
    rng = np.random.default_rng(3)
    sizes, layers, heads = [5, 1, 17], 2, 3
    stored = [rng.random((layers, heads, s * (s + 1) // 2)).astype("f2") for s in sizes]
    arrays = [raw(s) for s in stored], np.array(sizes), np.ones(3, "u1")
    weights = Weights(*arrays, layers, heads, kernels.F16, kernels.F16, 0.0, 0.0, 2)
    packed = weights.pack().view("f2")
    expected = []
    for trace in stored:
        for layer in trace:
            mean = np.empty(layer.shape[1], "f2")
            kernels.mean_rows(raw(layer), kernels.F16, heads, layer.shape[1], raw(mean))
            expected.append(mean)
    np.testing.assert_array_equal(packed, np.concatenate(expected))


@given(
    st.lists(st.integers(0, 700), max_size=6),
    st.sampled_from(["f2", "f4"]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 63),
)
@settings(max_examples=60, deadline=None)
def test_copies_are_concatenated(sizes, dtype, wide, threads, shift):
    rng = np.random.default_rng(len(sizes))
    parts = [rng.standard_normal(k).astype(dtype) for k in sizes]
    out_dtype = np.dtype("f4" if wide else dtype)
    buffer = np.zeros(sum(sizes) * out_dtype.itemsize + 64 + shift * out_dtype.itemsize, "u1")
    out = buffer[shift * out_dtype.itemsize :][: sum(sizes) * out_dtype.itemsize]
    views = [gather.ArrayView(raw(np.concatenate([p, p])), 2 * len(p), p.itemsize) for p in parts]
    sources = [
        raw(p) if k % 2 else s.rows(len(p), 2 * len(p)) for k, (p, s) in enumerate(zip(parts, views, strict=True))
    ]
    copies = gather.CopyJob(sources, CODES[dtype], CODES[out_dtype.str[1:]])
    copies.set_output(out)
    for view in views:
        with pytest.raises(IndexError, match="rows"):
            view.rows(1, view.num_rows + 1)
    copies.run(threads)
    expected = np.concatenate([*parts, np.zeros(0, dtype)]).astype(out_dtype)
    np.testing.assert_array_equal(out.view(out_dtype), expected)
    assert not buffer[out.size + shift * out_dtype.itemsize :].any()  # nothing after the end
    with pytest.raises(ValueError, match="bytes at offset"):
        copies.set_output(np.zeros(out.size + 8, "u1"), 16)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 60),
    st.sampled_from([1, 3, 33, 4096]),
    st.sampled_from(["f2", "f4"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_rows_equal_the_oracle(seed, n, items, dtype, wide, scattered, threads):
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((k, items)).astype(dtype) for k in (1, 40, 7)]
    views = [gather.ArrayView(raw(a), len(a), items * a.itemsize) for a in arrays]
    array = rng.integers(0, 3, n).astype("i4")
    row = rng.integers(0, np.array([1, 40, 7])[array])
    target = rng.permutation(n) if scattered else np.arange(n)
    out = np.zeros((n, items), "f4" if wide else dtype)
    job = gather.RowJob(
        [*views, None], array, row, CODES[dtype], CODES[out.dtype.str[1:]], target if scattered else None, n
    )
    assert job.out_bytes == out.nbytes
    if n:
        job.set_output(out.reshape(-1).view("u1"))
        job.run(threads)
    expected = np.array([arrays[a][r] for a, r in zip(array, row, strict=True)]).reshape(n, items).astype(out.dtype)
    np.testing.assert_array_equal(out[target], expected)


def test_rows_outside_their_array_are_refused():
    view = gather.ArrayView(np.zeros(64, "u1"), 4, 16)
    other = gather.ArrayView(np.zeros(64, "u1"), 8, 8)
    for arrays, array, row, target in (
        ([view], [1], [0], None),
        ([view], [-1], [0], None),
        ([view], [0], [4], None),
        ([view], [0], [-1], None),
        ([view], [0], [0, 1], None),
        ([view, other], [0, 1], [0, 0], None),
        ([view], [0], [0], [1]),
        ([view], [0], [0], [-1]),
    ):
        with pytest.raises(ValueError, match=r"array|row|target"):
            gather.RowJob(
                arrays, np.array(array, "i4"), np.array(row), kernels.F16, kernels.F16,
                None if target is None else np.array(target), 1,
            )  # fmt: skip
    with pytest.raises(TypeError):
        gather.RowJob([None], np.zeros(1, "i4"), np.zeros(1, "i8"), kernels.F16, kernels.F16)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=90), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_runs_equal_the_oracle(lengths, seed):
    first = np.cumsum(lengths) - lengths
    numbers = np.random.default_rng(seed).integers(0, sum(lengths), 100)
    found = np.empty(100, np.int64)
    gather.find_runs(first, numbers, found)
    np.testing.assert_array_equal(found, np.searchsorted(first, numbers, side="right") - 1)
    with pytest.raises(ValueError, match="outside 0"):
        gather.find_runs(first, np.array([-1]), np.empty(1, np.int64))
    with pytest.raises(ValueError, match="begin with 0"):
        gather.find_runs(first + 1, numbers, found)


@given(st.integers(0, 300), st.integers(1, 2**50), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_rough_order_is_a_permutation_that_ascends_over_ranges(n, total, seed):
    numbers = np.random.default_rng(seed).integers(0, total, n)
    order = np.full(n, -1)
    gather.sort_roughly(numbers, total, order)
    assert sorted(order.tolist()) == list(range(n))
    assert (np.diff(numbers[order]) > -4 * total / max(n, 1) - 2).all()
    with pytest.raises(ValueError, match="outside 0"):
        gather.sort_roughly(np.array([total]), total, np.empty(1, np.int64))


def run_copies(sources, dtype, out, out_dtype, threads):
    copies = gather.CopyJob(sources, dtype, out_dtype)
    copies.set_output(out)
    copies.run(threads)


def test_large_copies_are_split_over_threads():
    values = np.random.default_rng(0).standard_normal(700_001).astype("f4")
    out = np.empty_like(values)
    run_copies([raw(values[:3]), raw(values[3:])], kernels.F32, raw(out), kernels.F32, 4)
    np.testing.assert_array_equal(out, values)
    half = values.astype("f2")
    run_copies([raw(half)], kernels.F16, raw(out), kernels.F32, 4)
    np.testing.assert_array_equal(out, half.astype("f4"))
    with pytest.raises(ValueError, match="cannot convert"):
        gather.CopyJob([raw(values)], kernels.F32, kernels.F16)


def test_a_pool_runs_jobs_in_order_and_cancels_deleted_ones():
    values = np.arange(300_000, dtype="f4")
    for size in (1, 3):
        pool = gather.ThreadPool(size)
        outs = [np.zeros_like(values) for _ in range(20)]
        jobs = [gather.CopyJob([raw(values)], kernels.F32, kernels.F32) for _ in outs]
        with pytest.raises(ValueError, match="set_output"):
            jobs[0].submit(pool)
        for job, out in zip(jobs, outs, strict=True):
            job.set_output(raw(out))
            job.submit(pool)
        for job, out in zip(jobs[:5], outs, strict=False):
            job.wait()
            np.testing.assert_array_equal(out, values)
        with pytest.raises(ValueError, match="not submitted"):
            jobs[0].wait()
        del jobs[10:15], job  # queued jobs are canceled, a running one is waited for
        pool.close()
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            jobs[-1].submit(pool)


def test_stored_edges_are_split():
    rng = np.random.default_rng(1)
    sizes, layers = [4, 1, 9], 2
    edges, weights, source, target, node, counts = [], [], [], [], 0, [0]
    for tokens in sizes:
        per_layer = rng.integers(0, 700, layers)
        index = rng.integers(0, tokens, (per_layer.sum(), 2)).astype("i4")
        edges.append((np.concatenate([[0], np.cumsum(per_layer)]), index))
        weights.append(rng.random(len(index)).astype("f4"))
        for layer, part in enumerate(np.split(index, np.cumsum(per_layer)[:-1])):
            source.append(part[:, 0] + node + layer * tokens)
            target.append(part[:, 1] + node + layer * tokens)
            counts.append(counts[-1] + len(part))
        node += layers * tokens
    flat = [raw(w) for w in weights]
    arguments = (flat, kernels.F32, kernels.F32, np.array(sizes), np.zeros(3, "u1"), layers, 1, 9.0, 0.0)
    job = gather.GraphBatchJob(gather.CopyJob([], kernels.F16, kernels.F16), *arguments, False, edges)
    n = job.num_pairs
    at = np.cumsum([0, 16 * n, 8 * n, 8 * node, 8 * 7, 8 * 7])
    buffer = np.empty(at[-1], "u1")
    job.set_output(buffer, 0, *at[:-1].tolist())
    job.run(2)
    out, weight, edge_ptr = buffer[: at[1]].view("i8"), buffer[at[1] :].view("f4")[:n], buffer[at[4] :].view("i8")
    assert job.num_edges == n == counts[-1]
    np.testing.assert_array_equal(out.reshape(2, n), [np.concatenate(source), np.concatenate(target)])
    np.testing.assert_array_equal(weight, np.concatenate(weights))
    np.testing.assert_array_equal(edge_ptr, counts)
    with pytest.raises(ValueError, match="match"):
        gather.GraphBatchJob(gather.CopyJob([], 0, 0), *arguments, False, [(p + 1, i) for p, i in edges])


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([rule for rule in RULES if rule[0] == rule[0]]),
    st.booleans(),
    st.integers(0, 45),
    st.sampled_from(["f2", "f4"]),
    st.booleans(),
    st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_masks_and_degrees_equal_the_oracle(seed, sizes, rule, diagonal, sinks, dtype, wide, threads):
    rng = np.random.default_rng(seed)
    stored = [stored_weights(rng, (2, n * (n + 1) // 2), dtype, True) for n in sizes]
    out_dtype = "f4" if wide else dtype

    def packed(masks):
        job = gather.GraphBatchJob(
            gather.CopyJob([], kernels.F16, kernels.F16), [raw(s) for s in stored], CODES[dtype], CODES[out_dtype],
            np.array(sizes), np.ones(len(sizes), "u1"), 2, 1, *rule, True, masks=masks,
        )  # fmt: skip
        room, nodes, graphs = -(-job.num_pairs * 4 // 8) * 8, job.num_nodes, job.num_graphs
        at = np.cumsum([0, room, 8 * nodes, 8 * (graphs + 1), 8 * (graphs + 1), -(-4 * nodes // 8) * 8]).tolist()
        out = np.full(at[-1], 0xEE, "u1")
        job.set_output(out, 0, 0, 0, *at[1:-1])
        job.run(threads)
        weights = out[: job.num_pairs * np.dtype(out_dtype).itemsize].view(out_dtype)
        return weights, out[at[4] :].view("i4")[:nodes]

    weights, degree = packed((diagonal, sinks))
    expected, counts = packed(None)[0].copy(), []
    at = 0
    for size in np.repeat(sizes, 2):
        for i in range(size):
            row = expected[at : at + i + 1]
            row[:sinks] = np.nan
            if diagonal:
                row[i] = np.nan
            counts.append(max(1, (row.astype("f8") > (-np.inf if rule[1] else rule[0])).sum()))
            at += i + 1
    np.testing.assert_array_equal(weights, expected)
    np.testing.assert_array_equal(degree, counts)


def test_masks_require_packed_weights_of_one_head():
    arguments = [np.zeros(4, "f2")], kernels.F16, kernels.F16, np.array([1]), np.ones(1, "u1"), 1, 4, 0.0, 0.0
    for packed, every_head in ((False, False), (True, True)):
        with pytest.raises(ValueError, match="packed weights of one head"):
            gather.GraphBatchJob(
                gather.CopyJob([], kernels.F16, kernels.F16), *arguments, packed, None, every_head, (True, 1)
            )
