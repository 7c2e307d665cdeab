"""Writing of stores: values, bytes, refused traces and failures."""

import math
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import zarr

import tracestore
from tests.helpers import make_trace, make_traces, read_all, segment_of, tree_bytes, write_store
from tracestore.errors import CorruptStoreError, InvalidInputError, UsageError
from tracestore.store.format import schema
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write.create import open_writer
from tracestore.store.write.writer import StoreWriter


@pytest.mark.parametrize("codec", schema.CODECS)
@pytest.mark.parametrize("attention", ["mean", "heads"])
def test_traces_are_read_back_as_written(tmp_path, codec, attention):
    traces = make_traces(12)
    write_store(tmp_path / "s.zarr", traces, score=lambda k: k / 12, attention=attention, codec=codec)
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


@pytest.mark.long
def test_many_commits_merge_the_index_parts(tmp_path):
    path = tmp_path / "s.zarr"
    store = tracestore.open(write_store(path, make_traces(40), commit_after=range(40)))
    assert store.generation == 40 and len(store.internals.manifest.parts) <= 7
    assert [store.index_of(f"q{k}") for k in range(40)] == list(range(40))
    assert len(list((path / "manifest").iterdir())) == 2
    assert verify_store(path).damaged == {} and verify_store(path).leftovers == []


def test_equal_calls_write_equal_bytes(tmp_path):
    for name in ("a.zarr", "b.zarr"):
        write_store(tmp_path / name, make_traces(9), score=0.5)
    assert tree_bytes(tmp_path / "a.zarr") == tree_bytes(tmp_path / "b.zarr")


def test_square_attention_is_kept(tmp_path):
    traces = [make_trace(1, tokens=4), make_trace(2, tokens=5, causal=False)]
    store = tracestore.open(write_store(tmp_path / "s.zarr", traces, attention="heads"))
    np.testing.assert_array_equal(store[1].attention, np.stack(traces[1]["attentions"]))
    assert store.attention_layout == "square" and store[0].attention_layout == "causal"


def test_refused_traces_do_not_change_the_store(tmp_path):
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
        writer.append(make_trace(1))  # A duplicate is skipped.
    store = tracestore.open(path)
    assert store.question_ids == ["q0", "q1"]
    assert read_all(store)[1]["hidden"] == np.stack(make_trace(1)["hidden_states"]).tobytes()
    assert verify_store(path).damaged == {}


def test_samples_of_one_question_are_separate_traces(tmp_path):
    traces = [make_trace(0, tokens=4, seed=sample) | {"sample": sample} for sample in range(3)]
    store = tracestore.open(write_store(tmp_path / "s.zarr", traces))
    assert [t.sample for t in store] == [0, 1, 2] and store.index_of("q0", 2) == 2


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (7, 2)])
def test_samples_of_one_id_answer_one_question(tmp_path, first, second, is_committed):
    def of_sample(sample, **fields):
        return make_trace(0, seed=sample) | {"sample": sample, **fields}

    with tracestore.create(tmp_path / "s.zarr") as writer:
        for trace in (
            of_sample(first, question="Who  wrote \u201cBare\u0301\u201d?"),
            of_sample(3),
            of_sample(4, question=" \n"),
            of_sample(5) | {"question_id": "q1", "question": "Where?"},
            of_sample(second, question='who wrote "Bar\u00e9"?'),
        ):
            if trace["sample"] == second:
                with pytest.raises(
                    InvalidInputError, match=f"found 'Where', .* sample {first} of question id 'q0', 'Who"
                ):
                    writer.append(trace | {"question": "Where"})
            writer.append(trace)
            if is_committed:
                writer.flush()
    assert [t.sample for t in tracestore.open(tmp_path / "s.zarr")] == [first, 3, 4, 5, second]


def test_questions_that_end_differently_are_others(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append(make_trace(0) | {"question": "context " * 50 + "Who?"})
        with pytest.raises(InvalidInputError, match=r"'q0', 'context .*', which ends differently$"):
            writer.append(make_trace(0) | {"question": "context " * 50 + "Where?", "sample": 1})


@pytest.mark.parametrize("question", ["Who?", "Where?"])
def test_a_question_that_a_file_adds_to_a_trace_is_that_of_its_samples(tmp_path, question):
    trace = make_trace(0) | {"sample": 1}
    last = np.stack(trace["hidden_states"])[:, -1]
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append({"question_id": "q0", "last_token": last, "question": "Who?"})
        writer.append({"question_id": "q0", "last_token": last, "sample": 1})
        with nullcontext() if question == "Who?" else pytest.raises(InvalidInputError, match=r"found 'Where\?'"):
            writer.append(trace | {"question": question})
    assert tracestore.open(tmp_path / "s.zarr")[1].question == ("Who?" if question == "Who?" else None)


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_trace_that_exists_gets_the_values_that_are_appended(tmp_path, is_committed):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append(make_trace(0), score=0.5)
        writer.append(make_trace(1), score=0.25, group="a")
        if is_committed:
            writer.flush()
        writer.define_score("judge", direction="hallucination")
        writer.append(make_trace(0), scores={"judge": 0.125}, label=1)
        writer.append(make_trace(0), group="b")
        writer.append(make_trace(1), score=0.75)
    with tracestore.open(tmp_path / "s.zarr") as store:
        found = [(trace.scores, trace.group, trace.label) for trace in store]
    np.testing.assert_equal(found, [({"score": 0.5, "judge": 0.125}, "b", 1), ({"score": 0.75}, "a", math.nan)])


def test_a_score_that_is_only_defined_is_committed(tmp_path):
    write_store(tmp_path / "s.zarr", [make_trace(0)], score=0.5)
    for _ in range(2):
        with tracestore.create(tmp_path / "s.zarr", append=True) as writer:
            writer.define_score("judge", direction="hallucination", default=True)
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert (store.score_name, store.score_direction, store.generation) == ("judge", "hallucination", 2)


def test_a_definition_keeps_the_values_that_wait_for_the_commit(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(2), score=0.5)
    with tracestore.create(tmp_path / "s.zarr", append=True) as writer:
        writer.append(make_trace(0), label=1)
        writer.append(make_trace(1), label=0)
        writer.define_score("judge")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.labels.tolist() == [1, 0] and "judge" in store.score_fields


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_trace_that_gets_arrays_gets_the_values_that_are_appended(tmp_path, is_committed):
    trace = make_trace(0)
    last = {"question_id": "q0", "last_token": np.stack(trace["hidden_states"])[:, -1]}
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append(last, score=0.125)
        if is_committed:
            writer.flush()
        writer.append(trace, score=0.875, group="a")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert (store[0].scores, store[0].group, store[0].num_tokens) == ({"score": 0.875}, "a", len(trace["tokens"]))


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("choice", ["keep-first", "error"])
def test_a_trace_keeps_its_values_if_another_one_is_rejected(tmp_path, choice, is_pending):
    """Another writer has added the trace meanwhile."""
    path, other = tmp_path / "s.zarr", make_trace(0, seed=5)
    with open_writer(path, append=True, on_conflict=choice) as writer:
        writer.append(make_trace(9), score=0.25)
        writer.flush()
        if is_pending:
            writer.append(other)
        with tracestore.create(path, append=True) as first:
            first.append(make_trace(0), score=1.0)
        if not is_pending:
            writer.append(make_trace(8), score=0.25)
            writer.flush()
        with pytest.raises(InvalidInputError, match="different content") if choice == "error" else nullcontext():
            writer.append(other, score=0.0, group="a")
    with tracestore.open(path) as store:
        assert (store[1].scores, store[1].group) == ({"score": 1.0}, "")


def test_values_of_a_trace_that_is_refused_late_are_left_out(tmp_path):
    path = tmp_path / "s.zarr"
    writer = tracestore.create(path, append=True)
    writer.append(make_trace(0, dim=9))
    writer.append(make_trace(0, dim=9), score=0.75)
    with tracestore.create(path, append=True) as first:
        first.append(make_trace(1), score=0.125)
        first.append(make_trace(2), score=0.25)
    with pytest.raises(InvalidInputError, match="hidden_dim"):
        writer.flush()
    writer.close()
    with tracestore.open(path) as store:
        assert store.scores.tolist() == [0.125, 0.25]


def test_a_store_without_a_trace_is_not_created(tmp_path):
    with StoreWriter(tmp_path / "s.zarr"):
        pass
    assert not (tmp_path / "s.zarr").exists()
    with pytest.raises(UsageError, match="no such store"):
        tracestore.open(tmp_path / "s.zarr")


def test_an_exception_in_the_block_keeps_earlier_traces(tmp_path):
    with pytest.raises(RuntimeError), tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append(make_trace(0))
        raise RuntimeError
    assert len(tracestore.open(tmp_path / "s.zarr")) == 1


@pytest.mark.parametrize("where", ["replace_file", "write_file", "fsync_path"])
def test_a_failed_commit_keeps_the_previous_generation(tmp_path, monkeypatch, where):
    """A full disk or Ctrl-C at any step of a commit keeps the last generation; the next commit is correct."""
    from tracestore.store.io import fsio

    path = tmp_path / "s.zarr"
    write_store(path, make_traces(1))
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


def test_a_partial_write_is_rolled_back(tmp_path, monkeypatch):
    from tracestore.store.io import shard_writer

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


def test_the_hint_of_a_copied_object_store_names_the_newest_generation(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(1))
    hint = tmp_path / "s.zarr/manifest/newest"
    assert not hint.exists()
    hint.write_text("0000000001\n")
    with tracestore.create(tmp_path / "s.zarr", append=True) as writer:
        writer.append(make_trace(1))
    assert hint.read_text() == "0000000002\n"
    assert verify_store(tmp_path / "s.zarr").leftovers == []


def test_a_missing_index_part_is_an_error(store_path):
    next((store_path / "index").glob("*.zip")).unlink()
    with pytest.raises(CorruptStoreError):
        StoreWriter(store_path)


def test_chunks_have_equal_sizes_and_little_padding(tmp_path):
    traces = make_traces(7, tokens=301, layers=10, dim=64)
    write_store(tmp_path / "s.zarr", traces)
    group = zarr.open_group(tmp_path / "s.zarr" / segment_of(tmp_path / "s.zarr"), mode="r")
    for name, row_bytes in (("hidden_states", 128), ("attention", 2)):
        array = group[name]
        chunk_bytes = array.chunks[0] * row_bytes
        num_chunks = -(-array.shape[0] // array.chunks[0])
        assert num_chunks > 2 and chunk_bytes <= schema.INNER_CHUNK_BYTES
        (file,) = (p for p in (tmp_path / "s.zarr").glob(f"segments/*/{name}/c/**/*") if p.is_file())
        index_bytes = 16 * num_chunks + 4
        assert 0 <= file.stat().st_size - index_bytes - array.nbytes < num_chunks * row_bytes
    with tracestore.open(tmp_path / "s.zarr") as store:
        for trace, stored in zip(traces, store, strict=True):
            assert np.array_equal(stored.hidden_states, trace["hidden_states"])
    hidden = np.concatenate([np.concatenate(t["hidden_states"]) for t in traces])
    assert np.array_equal(group["hidden_states"][:], hidden)
