"""Batches of several stores that are opened as one equal those of the merged store."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import tracestore
from tests.data.expected_batches import assert_same_batches
from tests.helpers import make_trace, write_store
from tracestore._core.index import LocationTable
from tracestore.data.batches.batch_format import EdgeMasks
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.maintain.merge import merge_stores

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

VIEWS = {
    "sequence": {},
    "layers": {"layers": [2, 0]},
    "graph": {"view": "graph", "as_pyg": False},
    "pyg": {"view": "graph", "top_k": 0.5},
    "graph layers": {"view": "graph", "as_pyg": False, "layers": [1, 2], "attention_threshold": 0.3},
    "packed": {"view": "graph", "as_pyg": False, "edge_format": "packed", "edge_masks": EdgeMasks(True, 1)},
    "float32": {"view": "graph", "as_pyg": False, "dtype": "float32"},
    "tokens": {"view": "tokens", "batch_size": 7},
    "last tokens": {"view": "tokens", "positions": "last", "layers": 1},
    "listed tokens": {"view": "tokens", "positions": slice(-2, None), "batch_size": 5},
    "first token": {"positions": 0},
    "by bytes": {"batch_by": "bytes", "max_batch_cost": 3000},
    "block": {"shuffle": "block", "block_bytes": 900},
    "buffer": {"shuffle": "buffer", "buffer_size": 5},
    "in this thread": {"num_threads": 0},
}


@pytest.mark.parametrize("options", VIEWS.values(), ids=VIEWS.keys())
def test_batches_equal_those_of_the_merged_store(joined, options):
    one, merged = joined
    options = {"batch_size": 4, "seed": 3} | options
    for chosen in (slice(None), [30, 2, 11, 12, 13, 29, 0]):
        pair = [tracestore.TraceLoader(store.select(chosen), **options) for store in (one, merged)]
        for _ in range(2):  # epochs
            assert_same_batches(*pair)


def test_traces_and_columns_equal_those_of_the_merged_store(joined):
    one, merged = joined
    assert len(one) == len(merged) == 31 and one.question_ids == merged.question_ids
    assert one.to_pandas(texts=True).equals(merged.to_pandas(texts=True))
    for name in ("scores", "labels", "y", "num_tokens", "has_nonfinite"):
        np.testing.assert_array_equal(getattr(one, name), getattr(merged, name))
    np.testing.assert_array_equal(one.features(1), merged.features(1))
    assert one.digest(one.indices) == merged.digest(merged.indices)
    for a, b in zip(one, merged, strict=True):
        assert (a.index, a.source, a.provenance, a.scores) == (b.index, b.source, b.provenance, b.scores)
        np.testing.assert_array_equal(a.attention, b.attention)
        np.testing.assert_array_equal(a.hidden_states, b.hidden_states)
    ignored = {"path", "generation", "num_segments", "bytes", "stores"}
    facts = [{k: v for k, v in store.info().items() if k not in ignored} for store in joined]
    assert facts[0] == facts[1]


def test_splits_equal_those_of_the_merged_store(tmp_path):
    groups = lambda k: "" if k % 3 else f"g{k % 5}"  # noqa: E731
    traces = [make_trace(k) for k in range(60)]
    paths = [
        write_store(tmp_path / "a", traces[:25], score=lambda k: k % 2, group=groups),
        write_store(tmp_path / "b", traces[25:], score=lambda k: k % 3 / 2, group=groups),
    ]
    merge_stores(paths, tmp_path / "merged")
    one, merged = tracestore.open(paths), tracestore.open(tmp_path / "merged")
    for by in (None, "question", "group", "question_id", "source"):
        for a, b in zip(one.split(7, by), merged.split(7, by), strict=True):
            assert a.indices.tolist() == b.indices.tolist()


def test_a_question_in_two_stores_lies_in_one_split_and_the_first_store_wins_lookups(tmp_path):
    paths = []
    for k in range(3):
        traces = [make_trace(q, seed=k) for q in range(30)]
        paths.append(write_store(tmp_path / f"{k}", traces, score=lambda q, k=k: (q + k) % 2))
    with tracestore.open(paths) as store:
        assert store.index_of("q7") == 7 and store["q7"].index == 7 and "q29" in store and "q30" not in store
        assert store.select(["q7"]).indices.tolist() == [7, 37, 67]
        parts = [set(part.question_ids) for part in store.split(1)]
        assert all(len(part) for part in parts) and sum(map(len, parts)) == len(set.union(*parts)) == 30


@pytest.mark.parametrize("codec", ["none", "zstd", "blosc-lz4"])
@pytest.mark.parametrize("view", ["sequence", "graph", "tokens"])
def test_stores_of_different_codecs(tmp_path, codec, view):
    traces = [make_trace(k, tokens=1 + k % 7) for k in range(24)]
    # Both stores have segments and chunks of the same names.
    paths = [
        write_store(tmp_path / "a", traces[:12], codec="zstd"),
        write_store(tmp_path / "b", traces[12:], codec=codec),
    ]
    plain = write_store(tmp_path / "plain", traces)
    loaders = [tracestore.TraceLoader(p, view, batch_size=5, seed=2, cache_bytes=1 << 20) for p in (paths, plain)]
    found, expected = ([b for _ in range(2) for b in loader] for loader in loaders)
    for a, b in zip(found, expected, strict=True):
        name = {"sequence": "sequences", "graph": "x", "tokens": "hidden_states"}[view]
        assert torch.equal(getattr(a, name), getattr(b, name)) and torch.equal(a.trace_index, b.trace_index)


def make(folder, k, **options):
    trace = {name: options.pop(name) for name in ("layers", "dim", "heads", "causal") if name in options}
    dtype = options.pop("states", "f2")
    provenance = options.pop("provenance", None)
    return write_store(
        folder / f"{k}", [make_trace(k, tokens=4, dtype=dtype, **trace)], **options, provenance=provenance
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 2}, "num_layers: found 2, expected 3"),
        ({"dim": 16}, "hidden_dim: found 16, expected 8"),
        ({"heads": 4}, "num_heads: found 4, expected 2"),
        ({"attention": "heads"}, "was made with --attention heads"),
        ({"attention": "none"}, "was made with --attention none"),
        ({"dtype": "keep"}, "was made with --dtype keep"),
        ({"provenance": {"model": "other"}}, "other provenance: model"),
    ],
)
def test_stores_that_merge_refuses_are_refused(tmp_path, options, message):
    first = make(tmp_path, 0, provenance={"model": "one"})
    other = make(tmp_path, 1, **({"provenance": {"model": "one"}} | options))
    with pytest.raises(UsageError, match=message):
        tracestore.open([first, other])
    with pytest.raises(tracestore.TracestoreError):
        merge_stores([first, other], tmp_path / "merged")


def test_stores_that_merge_accepts_are_accepted(tmp_path):
    first = make(tmp_path, 0, provenance={"model": "one"})
    square, other = make(tmp_path, 1, causal=False), make(tmp_path, 2, provenance={"model": "other"})
    assert tracestore.open([first, square]).attention_layout == "square"
    mixed = tracestore.open([first, other], allow_mixed_provenance=True)
    assert [p.model for p in mixed.provenance] == ["one", "other"] and mixed[1].provenance.model == "other"
    assert pickle.loads(pickle.dumps(mixed))[1].provenance.model == "other"
    assert len(tracestore.TraceLoader(mixed, batch_size=1)) == 2


def test_float16_and_float32_stores_of_dtype_keep_are_refused(tmp_path):
    one, other = (make(tmp_path, k, dtype="keep", states=states) for k, states in enumerate(("f2", "f4")))
    with pytest.raises(UsageError, match="hidden_dtype: found float32, expected float16"):
        tracestore.open([one, other])


def test_scores_and_labels_of_one_store_only(tmp_path):
    traces = [make_trace(k) for k in range(12)]
    scored = write_store(tmp_path / "scored", traces[:4], score=0.25)
    labeled = write_store(tmp_path / "labeled", traces[4:8], label=1)
    bare = write_store(tmp_path / "bare", traces[8:])
    for paths in ([scored, labeled, bare], [bare, labeled, scored]):
        with tracestore.open(paths) as store:
            assert np.isfinite(store.scores).sum() == 4 and np.isfinite(store.labels).sum() == 4
            assert np.isfinite(store.y).sum() == 8 and store.info()["num_scored"] == store.info()["num_labeled"] == 4
            assert store.score_name == "score"


def test_named_scores(tmp_path):
    traces = [make_trace(k) for k in range(4)]
    one, two = tmp_path / "one", tmp_path / "two"
    for path, chosen, scores in ((one, traces[:2], {"bleurt": 0.1}), (two, traces[2:], {"rouge": 0.2})):
        with tracestore.create(path) as writer:
            for trace in chosen:
                writer.append(trace, scores=scores)
    with tracestore.open([one, two]) as store:
        assert store.score_name == "bleurt" and list(store.score_fields) == ["bleurt", "rouge"]
        assert store.info()["num_scored"] == 2 and np.isnan(store.scores[2:]).all()
    with tracestore.open([one, two], score="rouge") as store:
        assert store.scores[2:].tolist() == [0.2, 0.2] and np.isnan(store.scores[:2]).all()
    with pytest.raises(UsageError, match="found no score 'other'"):
        tracestore.open([one, two], score="other")


def test_one_store_in_a_list_is_that_store(pair):
    with tracestore.open([pair[0]]) as store:
        assert store.path == pair[0] and store.generation > 0
    for paths in ([pair[0], pair[0]], [pair[0], pair[1], f"{pair[0]}/."]):
        with pytest.raises(UsageError, match="is given twice"):
            tracestore.open(paths)
    with pytest.raises(UsageError, match="found no store"):
        tracestore.open([])


def test_a_closed_store_and_one_that_is_missing(pair, tmp_path):
    store = tracestore.open(pair[:2])
    store.close()
    with pytest.raises(UsageError, match="closed"):
        _ = store[20].hidden_states
    with pytest.raises(UsageError, match="no such store"):
        tracestore.open([pair[0], tmp_path / "none.zarr"])


@pytest.mark.long
def test_pickled_stores_and_worker_processes(joined):
    one = joined[0]
    copy = pickle.loads(pickle.dumps(one[5:20]))
    assert copy.question_ids == one[5:20].question_ids and copy.path == one.path
    datasets = [tracestore.TraceDataset(store, "graph") for store in joined]
    for workers in (0, 2):
        assert_same_batches(*(DataLoader(d, batch_size=5, num_workers=workers) for d in datasets))
    iterable = [tracestore.TraceIterableDataset(store, batch_size=4, seed=1) for store in joined]
    assert_same_batches(*(DataLoader(d, batch_size=None, num_workers=2) for d in iterable))


def test_a_store_that_grew_is_read_as_it_was(pair, tmp_path):
    store = tracestore.open(pair[:2])
    data = pickle.dumps(store)
    merge_stores([write_store(tmp_path / "c.zarr", [make_trace(k) for k in range(40, 43)])], pair[0])
    assert len(store.reopen()) == 31  # its generation is pinned
    assert len(tracestore.open(pair[:2])) == 34
    assert len(pickle.loads(data)) == 31
    store.close()
    merge_stores([write_store(tmp_path / "d.zarr", [make_trace(50)])], pair[0])
    with pytest.raises(CorruptStoreError, match=r"generation .* is gone"):
        pickle.loads(data)


def test_stores_whose_traces_come_from_two_sources(tmp_path):
    """The graphs of the traces were added by a later commit: patches of the index."""
    traces, paths = [make_trace(k, tokens=2 + k % 3) for k in range(20)], []
    for name, chosen in (("a", traces[:8]), ("b", traces[8:])):
        last = [
            {"question_id": t["question_id"], "last_token": np.stack([layer[-1] for layer in t["hidden_states"]])}
            for t in chosen
        ]
        whole = write_store(tmp_path / f"whole-{name}", chosen)
        paths.append(write_store(tmp_path / name, last, attention="mean"))
        merge_stores([whole], paths[-1])
    write_store(tmp_path / "plain", traces)
    with tracestore.open(paths) as one, tracestore.open(tmp_path / "plain") as plain:
        np.testing.assert_array_equal(one.num_tokens, plain.num_tokens)
        for view in ("sequence", "graph", "tokens"):
            options = {"as_pyg": False} if view == "graph" else {}
            assert_same_batches(
                *(tracestore.TraceLoader(s, view, batch_size=6, seed=1, **options) for s in (one, plain))
            )


def test_a_location_of_a_damaged_index_is_not_one_of_the_next_store(pair):
    """A segment number that the first store lacks, and the two stores together have."""
    with tracestore.open(pair[:2]) as store:
        first, second = store.internals.members
        parts = []
        for number, member in enumerate((first, second)):
            manifest = member.manifest
            of_store = 12 * number, first.manifest.num_segments * number, manifest.num_segments, 3
            for begin, arrays, mapped, *_ in member.index.location_parts():
                if number == 0:
                    segments = np.full(len(arrays["graph_segment"]), manifest.num_segments, "<i4")
                    arrays = arrays | {"graph_segment": segments}
                parts.append((12 * number + begin, arrays, mapped, *of_store))
        table = LocationTable(parts)
        out = np.empty((1, 6), np.int64)
        table.look_up(np.array([12]), out)
        assert out[0, 0] == first.manifest.num_segments
        with pytest.raises(ValueError, match="invalid location"):
            table.look_up(np.array([3]), out)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_equal_lenses_are_one_whatever_their_codec(tmp_path, codec):
    for name, options, scale in (("a", {}, 1), ("b", {"codec": codec}, 1), ("c", {"codec": codec}, 2)):
        with tracestore.create(tmp_path / name, attention="none", **options) as writer:
            writer.append({"question_id": name, "hidden_states": np.ones((2, 3, 8), "f2")})
            writer.set_lens(scale * np.arange(40, dtype="f4").reshape(5, 8))

    same, other = (tracestore.open([tmp_path / "a", tmp_path / name]).lens for name in "bc")
    assert same is not None and same.arrays().digest() == tracestore.open(tmp_path / "b").lens.arrays().digest()
    assert other is None
