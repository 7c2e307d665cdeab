"""The final norm and the unembedding matrix in a store: writing, reading, verification, merge and subset."""

import json
import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

import tracestore
from tests.helpers import as_torch, command, make_traces, tree_bytes, write_store
from tests.store.second_reader import read_lens, read_store
from tracestore.errors import CorruptStoreError, InvalidInputError, UsageError
from tracestore.store import lens as lens_module
from tracestore.store.format.lens_attribute import MAX_VOCABULARY
from tracestore.store.format.manifest import Manifest
from tracestore.store.maintain.merge import merge_stores
from tracestore.store.maintain.verify import verify_store

VOCABULARY, DIM = 301, 8


def values(seed=0, dtype="f4"):
    """Return the arguments of set_lens."""
    rng = np.random.default_rng(seed)
    return {
        "unembedding": rng.standard_normal((VOCABULARY, DIM)).astype(dtype),
        "norm_weight": rng.standard_normal(DIM).astype("f4"),
        "norm_bias": rng.standard_normal(DIM).astype("f4"),
        "bias": rng.standard_normal(VOCABULARY).astype("f4"),
        "norm": "layer",
        "eps": 1e-5,
    }


def write(path, lens=None, traces=3, **options):
    """Write a store with a lens, which is committed with the first trace, and return its path."""
    with tracestore.create(path, **options) as writer:
        for k, trace in enumerate(make_traces(traces, layers=2, dim=DIM)):
            writer.append(trace)
            if k == 0:
                writer.set_lens(**(lens or values()))
                writer.flush()
    return path


def expected(lens, hidden, normalized=False):
    """Return the logits in float64."""
    states = hidden.astype("f8")
    if not normalized and lens["norm"] != "none":
        if lens["norm"] == "layer":
            states = states - states.mean(-1, keepdims=True)
        states = states / np.sqrt((states**2).mean(-1, keepdims=True) + lens["eps"])
        states = states * lens.get("norm_weight", 1) + lens.get("norm_bias", 0)
    return states @ lens["unembedding"].astype("f8").T + lens.get("bias", 0)


@pytest.mark.parametrize("norm", ["rms", "layer", "none"])
@pytest.mark.parametrize(("codec", "dtype"), [("none", "float16"), ("zstd", "keep")])
def test_logits(tmp_path, monkeypatch, norm, codec, dtype):
    monkeypatch.setattr(lens_module, "_BLOCK_VALUES", 64 * DIM)
    given = values(dtype="f2") | {"norm": norm}
    if norm == "none":
        del given["norm_weight"], given["norm_bias"]
    with tracestore.open(write(tmp_path / "s.zarr", given, codec=codec, dtype=dtype)) as store:
        lens, hidden = store.lens, store[1].hidden_states
        assert (lens.num_tokens, lens.hidden_dim, lens.norm, lens.eps) == (VOCABULARY, DIM, norm, 1e-5)
        assert lens.unembedding.tobytes() == given["unembedding"].tobytes() and not lens.unembedding.flags.writeable
        for normalized in (False, True):
            found, wanted = lens.logits(hidden, normalized=normalized), expected(given, hidden, normalized)
            assert found.shape == (*hidden.shape[:-1], VOCABULARY) and found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
            ids = [300, 0, 7, 7, *range(200)]
            some = lens.logits(hidden, ids, normalized=normalized)
            np.testing.assert_allclose(some, wanted[..., ids], rtol=1e-4, atol=1e-4)
        assert lens.logits(hidden[0, 0], []).shape == (0,)
        for ids in ([VOCABULARY], [-1]):
            with pytest.raises(IndexError):
                lens.logits(hidden, ids)
        for ids in ([1.7], np.arange(VOCABULARY) < 2, [True, False], ["1"]):
            with pytest.raises(UsageError, match="found ids of"):
                lens.logits(hidden, ids)
        for wrong in (hidden[..., :-1], hidden.astype("i4"), np.float32(1)):
            with pytest.raises(UsageError):
                lens.logits(wrong)
        assert len(store) == 3 and store[2].num_tokens
    assert verify_store(tmp_path / "s.zarr").damaged == {}


def test_bfloat16_is_kept(tmp_path):
    torch = pytest.importorskip("torch")
    given = {k: torch.from_numpy(v).bfloat16() if isinstance(v, np.ndarray) else v for k, v in values().items()}
    path = tmp_path / "s.zarr"
    with tracestore.create(path, dtype="keep") as writer:
        writer.set_lens(**given)
        writer.append(as_torch(make_traces(1, layers=2, dim=DIM, dtype="f4")[0], torch.bfloat16))
    with tracestore.open(path) as store:
        lens, hidden = store.lens, store[0].hidden_states
        assert lens.dtype == "bfloat16"
        assert np.array_equal(lens.unembedding.astype("f4"), given["unembedding"].float().numpy())
        states = hidden.astype("f4")
        plain = {k: v.float().numpy() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        np.testing.assert_allclose(lens.logits(hidden), expected(plain, states), rtol=1e-4, atol=1e-4)
    assert merge_stores([path], tmp_path / "m.zarr").lens == "copied"
    with tracestore.open(tmp_path / "m.zarr") as merged:
        assert merged.lens.dtype == "bfloat16"
    with tracestore.create(path, append=True, dtype="keep") as writer:
        writer.set_lens(**given)
    assert verify_store(path).damaged == {}


def test_a_lens_is_set_once(tmp_path):
    path, other = write(tmp_path / "s.zarr"), values(1)
    before = tree_bytes(path)
    with tracestore.create(path, append=True) as writer:
        writer.set_lens(**values())
        with pytest.raises(UsageError, match="another lens"):
            writer.set_lens(**other)
        with pytest.raises(UsageError, match="another lens"):
            writer.set_lens(**values() | {"eps": 1e-6})
    assert tree_bytes(path) == before
    with tracestore.create(tmp_path / "new.zarr") as writer:
        writer.set_lens(**other)
        writer.set_lens(**other)
        with pytest.raises(UsageError, match="another lens"):
            writer.set_lens(**values())
    with tracestore.open(tmp_path / "new.zarr") as store:
        assert len(store) == 0 and store.lens.logits(np.ones(DIM, "f4")).shape == (VOCABULARY,)
    assert verify_store(tmp_path / "new.zarr").damaged == {}
    with tracestore.create(tmp_path / "new.zarr", append=True) as writer:
        with pytest.raises(InvalidInputError, match="hidden_dim"):
            writer.append(make_traces(1, layers=2, dim=4)[0])
        writer.append(make_traces(1, layers=2, dim=DIM)[0])
    with tracestore.open(tmp_path / "new.zarr") as store:
        assert len(store) == 1 and store.lens is not None and store.num_layers == 2


def test_wrong_values_change_nothing(tmp_path):
    path = write_store(tmp_path / "s.zarr", make_traces(2, layers=2, dim=DIM))
    before = tree_bytes(path)
    wrong = [
        ({"unembedding": np.zeros((9, DIM + 1), "f2")}, InvalidInputError),
        ({"unembedding": np.zeros((0, DIM), "f2")}, InvalidInputError),
        ({"unembedding": np.zeros((9, DIM), "i4")}, InvalidInputError),
        ({"unembedding": [[1.0]]}, InvalidInputError),
        ({"unembedding": np.full((9, DIM), 1e6, "f4")}, InvalidInputError),
        ({"norm_weight": np.zeros(3, "f4")}, InvalidInputError),
        ({"bias": np.zeros(DIM, "f4")}, InvalidInputError),
        ({"norm": "batch"}, UsageError),
        ({"norm": "none"}, UsageError),
        ({"eps": -1.0}, UsageError),
        ({"eps": float("nan")}, UsageError),
    ]
    with tracestore.create(path, append=True) as writer:
        for change, error in wrong:
            with pytest.raises(error):
                writer.set_lens(**{"unembedding": values()["unembedding"], "norm_weight": np.ones(DIM)} | change)
    assert tree_bytes(path) == before
    known = {"model": "m", "layer_ids": [1, 2, 3]}
    with (
        tracestore.create(path, append=True, provenance=known) as writer,
        pytest.raises(InvalidInputError, match="layer_ids"),
    ):
        writer.set_lens(**values())
    assert tree_bytes(path) == before


def test_without_a_commit_nothing_is_left(tmp_path):
    from tracestore.store.write.field_values import lens_arrays
    from tracestore.store.write.writer import StoreWriter

    path = write_store(tmp_path / "s.zarr", make_traces(2, layers=2, dim=DIM))
    before = tree_bytes(path)
    with StoreWriter(path) as writer:
        writer.set_lens(lens_arrays(values()["unembedding"], {}, "rms", 1e-6))
        assert writer.pending_bytes > VOCABULARY * DIM
    assert tree_bytes(path) == before


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    path = write_store(tmp_path / "s.zarr", make_traces(2, layers=2, dim=DIM))
    before = tree_bytes(path)
    (path / ".tmp-0123456789abcdef/00000001/unembedding/c/0").mkdir(parents=True)
    (path / ".tmp-0123456789abcdef/00000001/unembedding/c/0/0").write_bytes(b"x")
    with tracestore.create(path, append=True):
        pass
    assert tree_bytes(path) == before


def test_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(lens_module, "_BLOCK_VALUES", 1 << 16)
    matrix = np.ones((100_000, 32), "f2")
    tracemalloc.start()
    try:
        with tracestore.create(tmp_path / "s.zarr") as writer:
            writer.set_lens(matrix)
        with tracestore.open(tmp_path / "s.zarr") as store:
            found = store.lens.logits(np.ones(32), normalized=True)
            assert found.shape == (100_000,) and (found == 32).all()
            lens, peak = store.lens, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < matrix.nbytes // 2
    with pytest.raises(UsageError, match="closed"):
        lens.logits(np.ones(32))


def test_info_and_the_second_reader(tmp_path):
    known = {"model": "m", "layer_ids": [1, 2], "final_norm": True}
    path, given = write(tmp_path / "s.zarr", provenance=known), values()
    lens = json.loads(command("info", path, "--json", check=0).stdout)["lens"]
    assert lens == {"num_tokens": VOCABULARY, "dtype": "float16", "norm": "layer", "eps": 1e-5, "provenance": 0}
    assert "301 tokens, float16, norm layer" in command("info", path, check=0).stdout
    plain = write_store(tmp_path / "plain.zarr", make_traces(1, layers=2, dim=DIM))
    assert json.loads(command("info", plain, "--json", check=0).stdout)["lens"] is None
    with tracestore.open(path) as store, tracestore.open(plain) as other:
        assert store.lens.provenance.model == "m" and other.lens is None
    second = read_lens(path)
    assert len(read_store(path)) == 3 and read_lens(plain) is None
    assert np.array_equal(second["unembedding"], given["unembedding"].astype("f2"))
    for name, key in (
        ("final_norm_weight", "norm_weight"),
        ("final_norm_bias", "norm_bias"),
        ("unembedding_bias", "bias"),
    ):
        assert np.array_equal(second[name], given[key])


def test_merge_and_subset(tmp_path):
    one, two = write(tmp_path / "one.zarr", traces=5), write(tmp_path / "two.zarr", traces=2)
    other = write(tmp_path / "other.zarr", values(1))
    plain = write_store(tmp_path / "plain.zarr", make_traces(2, layers=2, dim=DIM))

    def lens_of(path):
        assert verify_store(path).damaged == {}
        with tracestore.open(path) as store:
            return store.lens and store.lens.unembedding.tobytes()

    assert merge_stores([one], tmp_path / "subset.zarr", chosen=[np.array([1, 3])], codec="zstd").lens == "copied"
    assert lens_of(tmp_path / "subset.zarr") == lens_of(one) is not None
    assert merge_stores([plain, one, two], tmp_path / "all.zarr").lens == "copied"
    assert merge_stores([two], tmp_path / "all.zarr").lens == "copied"
    assert lens_of(tmp_path / "all.zarr") == lens_of(one)
    assert merge_stores([plain], tmp_path / "none.zarr").lens == "none"
    assert merge_stores([one, other], tmp_path / "different.zarr").lens == "different"
    assert lens_of(tmp_path / "different.zarr") is None
    done = command("merge", other, tmp_path / "all.zarr", check=0)
    assert "lenses of the stores differ" in done.stdout
    assert lens_of(tmp_path / "all.zarr") == lens_of(one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment": 9}, "segment 9 of"),
        ({"segment": -1}, "segment"),
        ({"segment": 0}, "a segment of 1 traces"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": MAX_VOCABULARY + 1}, "num_tokens"),
        ({"num_tokens": VOCABULARY + 1}, "expected 302"),
        ({"dtype": "float64"}, "dtype"),
        ({"dtype": "float32"}, "not the metadata"),
        ({"norm": "other"}, "norm"),
        ({"norm": "none"}, "found a norm"),
        ({"eps": 2.0}, "eps"),
        ({"eps": True}, "eps"),
        ({"provenance": 0}, "provenance"),
        (None, "no such array"),
    ],
)
def test_wrong_attributes_are_corruption(tmp_path, change, message):
    path = write(tmp_path / "s.zarr")
    newest = max(os.listdir(path / "manifest"))
    for name in os.listdir(path / "manifest"):
        if name != newest:
            (path / "manifest" / name).unlink()
    file = path / "manifest" / newest
    manifest = Manifest.from_bytes(file.read_bytes())
    lens = None if change is None else replace(manifest.attributes.lens, **change)
    changed = replace(manifest, attributes=replace(manifest.attributes, lens=lens))
    for place in (file, path / "index" / f"{newest}.manifest"):
        place.chmod(0o644)
        place.write_bytes(changed.to_bytes())
    assert message in " ".join(verify_store(path).damaged.values())
    if change is not None:
        with pytest.raises(CorruptStoreError), tracestore.open(path) as store:
            store.lens.logits(np.ones(DIM, "f4"))


def test_other_hidden_size_is_corruption(tmp_path):
    path = write(tmp_path / "s.zarr", traces=1)
    file = path / "manifest" / max(os.listdir(path / "manifest"))
    manifest = Manifest.from_bytes(file.read_bytes())
    file.chmod(0o644)
    file.write_bytes(replace(manifest, attributes=replace(manifest.attributes, hidden_dim=DIM + 1)).to_bytes())
    with pytest.raises(CorruptStoreError, match="expected 9"), tracestore.open(path) as store:
        _ = store.lens
