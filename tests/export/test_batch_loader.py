"""TraceBatchLoader over a folder and over a store."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import tracestore
from tests.helpers import ROOT, as_torch, convert, make_trace, make_traces, write_pickle, write_scores, write_store
from tracestore.errors import InvalidInputError, UsageError


@pytest.fixture
def traces():
    found = make_traces(7, dim=2000, tokens=9)
    for k, trace in enumerate(found):
        trace |= {"global_example_id": 500 + k, "question": f"question {k}?", "prompt_length": 1 + k % 2}
    del found[5]["question_id"]
    return found


@pytest.fixture
def data(tmp_path, traces):
    folder = tmp_path / "traces_data"
    write_pickle(folder / "trivia_qa_traces_batch_0000.pkl", traces[:3])
    write_pickle(folder / "trivia_qa_traces_batch_0001.pkl.gz", traces[3:6])
    write_pickle(folder / "trivia_qa_traces_batch_0002.pkl", traces[6:])
    return folder


def assert_equal(found, saved, *, mean=False):
    assert set(saved) | {"question_id"} == set(found)
    for name, value in saved.items():
        if name in ("hidden_states", "attentions"):
            if mean and name == "attentions":
                value = [a.astype("f8").mean(0).astype("f2")[None] for a in value]
            assert isinstance(found[name], list)
            for a, b in zip(found[name], value, strict=True):
                np.testing.assert_array_equal(a, b)
        elif name == "tokens":
            np.testing.assert_array_equal(found[name], value)
        else:
            assert found[name] == value, name


def test_files_of_no_built_in_layout_are_refused(tmp_path):
    np.save(tmp_path / "q0.npy", np.ones((2, 3, 4), "f2"))
    with pytest.raises(InvalidInputError, match=r"q0.npy: no built-in layout describes it"):
        list(tracestore.TraceBatchLoader(tmp_path).iter_traces())


@pytest.mark.parametrize("source", ["folder", "heads", "mean"])
def test_batches_of_a_folder_and_of_stores(data, traces, tmp_path, source):
    path = data
    if source != "folder":
        path = tmp_path / "s.zarr"
        convert(data, path, "--attention", source)
    loader = tracestore.TraceBatchLoader(str(path))
    same = {"mean": source == "mean"}
    assert len(loader) == 3 and loader.get_total_traces() == 7
    for trace, saved in zip(loader.iter_traces(), traces, strict=True):
        assert_equal(trace, saved, **same)
    batches = list(loader.iter_batches())
    assert [len(b) for b in batches] == [3, 3, 1] == [len(loader.get_batch(k)) for k in range(3)]
    assert_equal(batches[1][2], traces[5], **same)
    assert batches[1][2]["question_id"] == "505"
    assert_equal(loader.get_trace_by_global_id(503), traces[3], **same)
    assert loader.get_trace_by_global_id(7) is None
    info = loader.get_batch_info()
    assert [(i["batch_idx"], i["num_traces"]) for i in info] == [(0, 3), (1, 3), (2, 1)]
    for i in info:
        assert i["filename"].startswith("trivia_qa_traces_batch_")
        assert i["size_mb"] == pytest.approx((data / i["filename"]).stat().st_size / 2**20)
    for wrong in (3, -1):
        with pytest.raises(IndexError, match=f"batch {wrong} of 3"):
            loader.get_batch(wrong)


@pytest.mark.parametrize("source", ["folder", "store"])
def test_batches_into_one_file(data, traces, tmp_path, source):
    path = data
    if source == "store":
        path = tmp_path / "s.zarr"
        convert(data, path, "--attention", "heads")
    assert tracestore.merge_batches(tmp_path / "all.pkl", path) == 7
    for found, saved in zip(pickle.loads((tmp_path / "all.pkl").read_bytes()), traces, strict=True):
        assert_equal(found, saved)
    assert tracestore.extract_batch_subset([2, 0], tmp_path / "some.pkl", path) == 4
    found = pickle.loads((tmp_path / "some.pkl").read_bytes())
    assert [t["global_example_id"] for t in found] == [506, 500, 501, 502]
    with pytest.raises(IndexError):
        tracestore.extract_batch_subset([0, 9], tmp_path / "none.pkl", path)
    assert not (tmp_path / "none.pkl").exists()
    before = (tmp_path / "all.pkl").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        tracestore.merge_batches(tmp_path / "all.pkl", path)
    with pytest.raises(UsageError, match="is a store"):
        tracestore.merge_batches(write_store(tmp_path / "other.zarr", traces) / "new.pkl", path)
    assert (tmp_path / "all.pkl").read_bytes() == before


VERDICTS = {
    "label and group": ({"label": 1, "group": "g"}, {"label": 1, "group": "g"}),
    "scores": ({"score": 0.25, "is_correct": False, "bleurt_score": 0.5},) * 2,
    "other direction": ({"hallucination_score": 0.25, "is_hallucinated": 1},) * 2,
    "named score": ({"score": -1.0, "scores": {"em": 0.5}}, {"score": -1.0, "em": 0.5}),
    "score that is none in files": ({"scores": {"judge": 0.5}}, {"score_judge": 0.5}),
}


@pytest.mark.parametrize("name", VERDICTS)
@pytest.mark.parametrize("is_folder", [False, True])
def test_labels_scores_groups_and_layers_are_kept(tmp_path, name, is_folder):
    given, expected = VERDICTS[name]
    traces = [trace | {"layer_ids": [2, 4, 6]} for trace in make_traces(3)]
    traces[1] |= given
    (tmp_path / "all").mkdir()
    is_known = "judge" not in given.get("scores", {})
    if is_folder and is_known:
        write_pickle(tmp_path / "s" / "a.pkl", traces)
    else:
        with tracestore.create(tmp_path / "s") as writer:
            if not is_known:
                writer.define_score("judge", direction="hallucination")
            for trace in traces:
                writer.append(trace)
    assert tracestore.merge_batches(tmp_path / "all" / "all.pkl", tmp_path / "s") == 3
    found = pickle.loads((tmp_path / "all" / "all.pkl").read_bytes())
    assert [set(trace) - set(traces[0]) for trace in found] == [set(), set(expected), set()]
    assert {key: found[1][key] for key in expected} == expected
    if not is_known:  # a refusal, and no store without the score
        with pytest.raises(InvalidInputError, match="score_judge"):
            tracestore.convert_files(tmp_path / "all", tmp_path / "back.zarr")
        return
    tracestore.convert_files(tmp_path / "all", tmp_path / "back.zarr")
    source = write_store(tmp_path / "source.zarr", traces)
    one, two = (tracestore.open(path) for path in (source, tmp_path / "back.zarr"))
    assert one.score_fields.keys() == two.score_fields.keys()
    for a, b in zip(one, two, strict=True):
        assert (a.scores, a.group, repr(a.label)) == (b.scores, b.group, repr(b.label))
    assert two[1].provenance.layer_ids == (2, 4, 6)


def test_a_default_score_of_hallucinations_is_read_as_such_again(tmp_path):
    write_store(tmp_path / "s", make_traces(3), score=lambda k: k / 2, score_direction="hallucination")
    (tmp_path / "all").mkdir()
    tracestore.merge_batches(tmp_path / "all" / "all.pkl", tmp_path / "s")
    tracestore.convert_files(tmp_path / "all", tmp_path / "back.zarr")
    one, two = tracestore.open(tmp_path / "s"), tracestore.open(tmp_path / "back.zarr")
    assert one.scores.tolist() == two.scores.tolist() and one.targets().tolist() == two.targets().tolist() == [0, 1, 1]


def test_verdicts_that_a_scores_file_replaced_do_not_come_back(tmp_path):
    write_pickle(tmp_path / "data" / "a.pkl", [trace | {"label": 1, "is_correct": 0} for trace in make_traces(2)])
    write_scores(tmp_path / "scores.csv", {"q0": 0.75, "q1": 1})
    convert(tmp_path / "data", tmp_path / "s.zarr", "--scores", tmp_path / "scores.csv")
    assert tracestore.open(tmp_path / "s.zarr")[0].extras == {"label": 1, "is_correct": 0}
    found = tracestore.TraceBatchLoader(tmp_path / "s.zarr").get_batch(0)[0]
    assert found["score"] == 0.75 and not {"label", "is_correct"} & found.keys()


def test_traces_a_program_appended_and_bfloat16(tmp_path):
    import torch

    traces = [as_torch(make_trace(k, dtype="f4"), torch.bfloat16) for k in range(3)]
    write_store(tmp_path / "s.zarr", traces, attention="heads", dtype="keep")
    write_pickle(tmp_path / "a.pkl", traces)
    for path in (tmp_path / "s.zarr", tmp_path / "a.pkl"):
        loader = tracestore.TraceBatchLoader(path)
        assert len(loader) == 1
        for found, saved in zip(loader.get_batch(0), traces, strict=True):
            for name in ("hidden_states", "attentions"):
                assert all(torch.equal(a, b) for a, b in zip(found[name], saved[name], strict=True))


def test_a_file_that_was_read_again_is_no_empty_batch(data, tmp_path):
    convert(data, tmp_path / "s.zarr")
    for file in data.iterdir():
        os.utime(file, (1, 1))
    convert(data, tmp_path / "s.zarr")
    loader = tracestore.TraceBatchLoader(tmp_path / "s.zarr")
    assert [len(loader.get_batch(k)) for k in range(len(loader))] == [3, 3, 1]


def test_errors(tmp_path, data):
    for path in (tmp_path / "nowhere", tmp_path):
        (tmp_path / "nothing").mkdir(exist_ok=True)
        with pytest.raises(UsageError):
            tracestore.TraceBatchLoader(tmp_path / "nothing" if path == tmp_path else path)
    (data / "evil.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/evil'\ntR.")
    with pytest.raises(InvalidInputError, match="os"):
        list(tracestore.TraceBatchLoader(data).iter_traces())
    with pytest.raises(InvalidInputError, match="convert the file"):
        import torch

        write = {"sequences": torch.zeros(2, 3, 4).half(), "labels": torch.zeros(2), "question_ids": ["a", "b"]}
        torch.save(write, tmp_path / "preprocessed_0.pt")
        tracestore.TraceBatchLoader(tmp_path / "preprocessed_0.pt").get_batch(0)


@pytest.mark.long
def test_iterating_needs_no_torch(data):
    code = "import sys, tracestore; print(sum(1 for t in tracestore.TraceBatchLoader(sys.argv[1]).iter_traces()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, data], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["7", "False"]


def test_a_subset_has_batches_of_its_sources(data, tmp_path):
    convert(data, tmp_path / "s.zarr")
    with tracestore.open(tmp_path / "s.zarr") as store:
        loader = tracestore.TraceBatchLoader(store[[6, 1, 0]])
        found = [[trace["question_id"] for trace in batch] for batch in loader.iter_batches()]
        assert found == [["q6"], ["q1", "q0"]]
        assert repr(loader) == f"TraceBatchLoader({str(store.path)!r}, 2 batches)"
        assert tracestore.TraceBatchLoader(store).get_total_traces() == len(store)


@pytest.mark.parametrize(
    "chosen", [slice(None), slice(None, None, -1), [7, 2, 7], [9, 0, 8, 0, 3, 11, 3], [0, 0], [], [11, 10, 6, 5, 4, 3]]
)
@pytest.mark.parametrize("num_files", [0, 2, 4])
def test_a_subset_keeps_its_order(tmp_path, num_files, chosen):
    traces, path = make_traces(12), tmp_path / "s.zarr"
    for k in range(num_files):
        write_pickle(tmp_path / f"in/{k}.pkl", traces[2 * k : 2 * k + 2])
    if num_files:
        convert(tmp_path / "in", path)
    with tracestore.create(path, append=num_files > 0) as writer:
        for trace in traces[2 * num_files :]:
            writer.append(trace)
    with tracestore.open(path) as store:
        subset = store[chosen]
        loader = tracestore.TraceBatchLoader(subset)
        assert [trace["question_id"] for trace in loader.iter_traces()] == list(subset.question_ids)
        assert loader.get_total_traces() == len(subset) == sum(map(len, loader.iter_batches()))
        assert all(info["num_traces"] > 0 for info in loader.get_batch_info())
        if len(subset) and list(subset.indices) == sorted(subset.indices) and len(set(subset.indices)) == 12:
            whole = tracestore.TraceBatchLoader(store)
            assert whole.get_batch_info() == loader.get_batch_info()
