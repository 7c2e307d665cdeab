"""Writing and reading a store, also with plain zarr, zarr's peers and the second reader."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import zarr

import tracestore
from tests.helpers import make_trace, make_traces, read_all, tree_bytes
from tests.store.second_reader import read_store
from tracestore.errors import CorruptStoreError, InvalidInputError, MissingFieldError, StoreLockedError, UsageError
from tracestore.store.format import schema
from tracestore.store.maintain.verify import repair_store, verify_store
from tracestore.store.write.writer import StoreWriter


@pytest.mark.parametrize("codec", schema.CODECS)
@pytest.mark.parametrize("attention", ["mean", "heads"])
def test_round_trip(tmp_path, codec, attention):
    traces = make_traces(12)
    with tracestore.create(tmp_path / "s.zarr", attention=attention, codec=codec) as writer:
        for k, trace in enumerate(traces):
            writer.append(trace, score=k / 12)
    store = tracestore.open(tmp_path / "s.zarr", cache_bytes=4096)
    assert len(store) == 12 and store.question_ids == [t["question_id"] for t in traces]
    np.testing.assert_array_equal(store.scores, np.arange(12) / 12)
    for k, trace in enumerate(traces):
        got = store[k]
        hidden, full = np.stack(trace["hidden_states"]), np.stack(trace["attentions"])
        np.testing.assert_array_equal(got.hidden_states, hidden)
        np.testing.assert_array_equal(got.last_token, hidden[:, -1])
        np.testing.assert_array_equal(got.tokens, trace["tokens"])
        assert got.tokens_decoded == trace["tokens_decoded"]
        assert got.answer == trace["generated_answer_clean"]
        assert store.index_of(trace["question_id"]) == k
        if attention == "heads":
            np.testing.assert_array_equal(got.attention, full)
        exact = full.astype("f8").mean(1)
        mean = got.attention.mean(1) if attention == "heads" else got.attention
        assert np.abs(mean.astype("f8") - exact).max() <= 0.5 * np.spacing(np.float16(1)) + 1e-4 * (
            attention == "heads"
        )
    assert verify_store(tmp_path / "s.zarr").damaged == {}


def test_arrays_are_zero_copy_and_read_only(store_path):
    store = tracestore.open(store_path)
    hidden = store[4].hidden_states
    base = hidden
    while isinstance(base, np.ndarray):
        base = base.base
    assert type(getattr(base, "obj", base)).__name__ == "MappedFile"
    with pytest.raises(ValueError):
        hidden[0, 0, 0] = 1
    expected = hidden.copy()
    store.close()
    np.testing.assert_array_equal(hidden, expected)


def test_missing_scores_and_ids(store_path):
    store = tracestore.open(store_path)
    assert np.isnan(store.scores[10:]).all() and not np.isnan(store.scores[:10]).any()
    assert np.isnan(store.targets()[10:]).all()
    with pytest.raises(KeyError, match="nowhere"):
        store.index_of("nowhere")
    with pytest.raises(IndexError):
        store[12]
    assert store[-1].index == 11


def test_generations_merge_their_index(tmp_path):
    path = tmp_path / "s.zarr"
    with tracestore.create(path) as writer:
        for trace in make_traces(40):
            writer.append(trace)
            writer.flush()
    store = tracestore.open(path)
    assert store.generation == 40 and len(store.internals.manifest.parts) <= 7
    assert [store.index_of(f"q{k}") for k in range(40)] == list(range(40))
    assert len(list((path / "manifest").iterdir())) == 2
    assert verify_store(path).damaged == {} and verify_store(path).leftovers == []


def test_order_of_calls_decides_the_bytes(tmp_path):
    for name in ("a.zarr", "b.zarr"):
        with tracestore.create(tmp_path / name) as writer:
            for trace in make_traces(9):
                writer.append(trace, score=0.5)
    assert tree_bytes(tmp_path / "a.zarr") == tree_bytes(tmp_path / "b.zarr")


def test_square_attention_is_kept(tmp_path):
    with tracestore.create(tmp_path / "s.zarr", attention="heads") as writer:
        writer.append(make_trace(1, tokens=4))
        writer.append(make_trace(2, tokens=5, causal=False))
    store = tracestore.open(tmp_path / "s.zarr")
    np.testing.assert_array_equal(store[1].attention, np.stack(make_trace(2, tokens=5, causal=False)["attentions"]))
    assert store.attention_layout == "square" and store[0].attention_layout == "causal"


def test_refusals_leave_the_store_as_it_was(tmp_path):
    path = tmp_path / "s.zarr"
    with tracestore.create(path) as writer:
        writer.append(make_trace(0))
        for bad, words in (
            (make_trace(1, dim=9), "hidden_dim"),
            (make_trace(1, layers=4), "num_layers"),
            (make_trace(1, heads=3), "num_heads"),
            (make_trace(0, tokens=4, seed=9), "different content"),
            ({**make_trace(1), "tokens": [1]}, "tokens"),
        ):
            if words == "tokens":
                bad["hidden_states"] = make_trace(3)["hidden_states"]
                bad["attentions"] = make_trace(3)["attentions"]
            with pytest.raises(InvalidInputError, match=words):
                writer.append(bad)
        writer.append(make_trace(1))
        writer.append(make_trace(1))  # the same again: counted and skipped
    store = tracestore.open(path)
    assert store.question_ids == ["q0", "q1"]
    assert read_all(store)[1]["hidden"] == np.stack(make_trace(1)["hidden_states"]).tobytes()
    assert verify_store(path).damaged == {}


def test_several_answers_to_one_question(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for sample in range(3):
            writer.append({**make_trace(0, tokens=4, seed=sample), "sample": sample})
    store = tracestore.open(tmp_path / "s.zarr")
    assert [t.sample for t in store] == [0, 1, 2] and store.index_of("q0", 2) == 2


def test_second_writer_is_told(tmp_path):
    with StoreWriter(tmp_path / "s.zarr"), pytest.raises(StoreLockedError, match="another writer"):
        StoreWriter(tmp_path / "s.zarr")


def test_an_unused_store_is_not_left_behind(tmp_path):
    with StoreWriter(tmp_path / "s.zarr"):
        pass
    assert not (tmp_path / "s.zarr").exists()
    with pytest.raises(UsageError, match="no such store"):
        tracestore.open(tmp_path / "s.zarr")


def test_pickled_store_reopens(store_path):
    store = tracestore.open(store_path)
    assert read_all(pickle.loads(pickle.dumps(store))) == read_all(store) or np.isnan(store.scores).any()


def test_numeric_arrays_read_by_zarr_tensorstore_and_zarrs(store_path):
    import tensorstore

    arrays = [p.parent for p in store_path.rglob("zarr.json") if '"array"' in p.read_text()]
    assert len(arrays) > 40
    for folder in arrays:
        with_zarr = zarr.open_array(folder, mode="r")[...]
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
        with_tensorstore = tensorstore.open(spec, read=True).result().read().result()
        np.testing.assert_array_equal(with_zarr, with_tensorstore)
        assert with_zarr.dtype == with_tensorstore.dtype
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            np.testing.assert_array_equal(with_zarr, zarr.open_array(folder, mode="r")[...])


def test_second_reader_agrees(store_path):
    store, second = tracestore.open(store_path), read_store(store_path)
    assert len(second) == len(store)
    for mine, theirs in zip(store, second, strict=True):
        assert mine.question_id == theirs["question_id"]
        np.testing.assert_array_equal(mine.hidden_states, theirs["hidden_states"])
        np.testing.assert_array_equal(mine.attention, theirs["attention"])
        np.testing.assert_array_equal(mine.last_token, theirs["last_token"])


def test_every_flipped_bit_is_found(store_path):
    """One bit of each file is inverted; the report names the file."""
    rng = np.random.default_rng(0)
    files = [p for p in sorted(store_path.rglob("*")) if p.is_file() and p.name != "lock" and p.stat().st_size]
    for path in files:
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        position, bit = int(rng.integers(len(data))), 1 << int(rng.integers(8))
        data[position] ^= bit
        path.write_bytes(data)
        name = path.relative_to(store_path).as_posix()
        assert name in verify_store(store_path).damaged, f"{name} byte {position} bit {bit}"
        data[position] ^= bit
        path.write_bytes(data)
    assert verify_store(store_path).damaged == {}


def test_truncated_shard_is_named(store_path):
    store = tracestore.open(store_path)
    path = store_path / "segments/00000000/hidden_states/c/0/0"
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CorruptStoreError, match="segments/00000000/hidden_states/c/0/0"):
        _ = store[0].hidden_states


def test_damaged_newest_manifest_costs_nothing(store_path):
    newest = max((store_path / "manifest").iterdir())
    whole = len(tracestore.open(store_path))
    newest.chmod(0o644)
    newest.write_bytes(b"")
    with pytest.warns(tracestore.errors.TracestoreWarning, match="reading generation 1"):
        assert len(tracestore.open(store_path)) == 7
    with pytest.raises(CorruptStoreError, match="--repair"):
        StoreWriter(store_path)
    report = repair_store(store_path)
    assert any("restored from its copy" in line for line in report.repaired)
    with StoreWriter(store_path) as writer:
        assert writer.manifest.num_traces == whole


def test_a_field_that_is_not_there_says_so(tmp_path):
    with tracestore.create(tmp_path / "s.zarr", attention="none") as writer:
        writer.append(make_trace(0))
    store = tracestore.open(tmp_path / "s.zarr")
    with pytest.raises(MissingFieldError, match="attention"):
        _ = store[0].attention
    with pytest.raises(MissingFieldError, match="no graphs"):
        store.require_view("graph")


def test_exception_in_a_writer_keeps_what_is_whole(tmp_path):
    with pytest.raises(RuntimeError), tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append(make_trace(0))
        raise RuntimeError
    assert len(tracestore.open(tmp_path / "s.zarr")) == 1


def test_read_path_imports_neither_zarr_nor_torch(store_path):
    code = (
        f"import sys, tracestore; s = tracestore.open({str(store_path)!r}); "
        "[t.attention for t in s]; print([m for m in ('zarr', 'torch', 'numcodecs') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("where", ["replace_file", "write_file", "fsync_path"])
def test_a_commit_that_fails_is_not_repeated(tmp_path, monkeypatch, where):
    """ENOSPC or Ctrl-C at any step of a commit: the last generation stays, the next is sound."""
    from tracestore.store.io import fsio

    path = tmp_path / "s.zarr"
    with tracestore.create(path) as writer:
        writer.append(make_trace(0))
    original, calls = getattr(fsio, where), [0]
    for step in [*range(8), 21, 50, 101, 10_000]:
        calls[0] = 0

        def fail(*args, _step=step, **kwargs):
            calls[0] += 1
            if calls[0] == _step + 1:
                raise KeyboardInterrupt if _step % 2 else OSError(28, "No space left on device")
            return original(*args, **kwargs)

        for module in ("io.fsio", "write.segment_writer"):
            target = sys.modules[f"tracestore.store.{module}"]
            if hasattr(target, where):
                monkeypatch.setattr(target, where, fail)
        try:
            with tracestore.create(path, append=True) as writer:
                writer.append(make_trace(1, tokens=300, dim=8))
            finished = True
        except (KeyboardInterrupt, tracestore.DiskFullError):
            finished = False
        monkeypatch.undo()
        assert verify_store(path).damaged == {}
        for trace in tracestore.open(path):
            assert trace.hidden_states.shape[0] == 3
        if finished:
            break
    assert finished and len(tracestore.open(path)) == 2


def test_a_write_that_fails_half_way_is_taken_back(tmp_path, monkeypatch):
    from tracestore.store.write import shard_writer

    original = shard_writer.pwritev_all

    def short(fd, pieces, offset):
        if len(pieces[0]) > 500_000:
            original(fd, [pieces[0][: len(pieces[0]) // 2]], offset)
            raise OSError(28, "No space left on device")
        original(fd, pieces, offset)

    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append(make_trace(1, tokens=40, dim=3000))
        monkeypatch.setattr(shard_writer, "pwritev_all", short)
        with pytest.raises(OSError):
            writer.append(make_trace(2, tokens=400, dim=3000))
        monkeypatch.undo()
        writer.append(make_trace(3, tokens=4, dim=3000))
    store = tracestore.open(tmp_path / "s.zarr")
    for k, trace in zip((1, 3), store, strict=True):
        tokens = 40 if k == 1 else 4
        expected = np.stack(make_trace(k, tokens=tokens, dim=3000)["hidden_states"])
        np.testing.assert_array_equal(trace.hidden_states, expected)


def test_a_missing_file_of_the_index_is_damage(store_path):
    next((store_path / "index").glob("*/part")).unlink()
    with pytest.raises(CorruptStoreError):
        StoreWriter(store_path)


def test_chunks_are_of_even_size_and_hardly_padded(tmp_path):
    traces = make_traces(7, tokens=301, layers=10, dim=64)
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for trace in traces:
            writer.append(trace)
    group = zarr.open_group(tmp_path / "s.zarr" / "segments" / "00000000", mode="r")
    for name, row_bytes in (("hidden_states", 128), ("attention", 2)):
        array = group[name]
        chunk_bytes = array.chunks[0] * row_bytes
        num_chunks = -(-array.shape[0] // array.chunks[0])
        assert num_chunks > 2 and chunk_bytes <= schema.INNER_CHUNK_BYTES
        (file,) = (p for p in (tmp_path / "s.zarr/segments/00000000" / name / "c").rglob("*") if p.is_file())
        index_bytes = 16 * num_chunks + 4
        assert 0 <= file.stat().st_size - index_bytes - array.nbytes < num_chunks * row_bytes
    with tracestore.open(tmp_path / "s.zarr") as store:
        for trace, stored in zip(traces, store, strict=True):
            assert np.array_equal(stored.hidden_states, trace["hidden_states"])
    hidden = np.concatenate([np.concatenate(t["hidden_states"]) for t in traces])
    assert np.array_equal(group["hidden_states"][:], hidden)
