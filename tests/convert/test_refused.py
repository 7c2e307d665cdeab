"""--skip-bad: traces that are refused one by one, and the list of them next to the store."""

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, field_flags, make_trace, make_traces, tree_bytes, write_pickle
from tracestore.cli import main
from tracestore.convert import cutting
from tracestore.convert.refused import RefusedTraces
from tracestore.errors import InvalidInputError
from tracestore.store.io.files import RemoteURL
from tracestore.store.write.writer import StoreWriter


def without(trace, key):
    return {name: value for name, value in trace.items() if name != key}


def read_list(store):
    path = store.with_name(f"{store.name}.refused.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else None


@pytest.fixture
def traces():
    """Five traces, of which the first, third and last are refused for different reasons."""
    traces = make_traces(5)
    traces[0] = without(traces[0], "hidden_states")
    traces[2] = traces[2] | {"hidden_states": [h.astype("f4") * 1e6 for h in traces[2]["hidden_states"]]}
    traces[4] = traces[4] | {"hidden_states": traces[4]["hidden_states"][:1], "attentions": traces[4]["attentions"][:1]}
    return traces


FIELDS = ["hidden_states", "hidden_states[0]", "num_layers"]


@pytest.mark.parametrize("flags", [[], ["--workers", 1], ["--codec", "zstd"]], ids=["two", "one", "codec"])
@pytest.mark.parametrize("suffix", [".pkl", ".pkl.gz"])
def test_refused_traces_are_skipped_and_listed(tmp_path, traces, suffix, flags):
    write_pickle(tmp_path / f"a{suffix}", traces)
    store = tmp_path / "s.zarr"
    done = convert(tmp_path / f"a{suffix}", store, "--skip-bad", *flags)
    assert tracestore.open(store).question_ids == ["q1", "q3"]
    assert [trace.source for trace in tracestore.open(store)] == [(f"a{suffix}", 1), (f"a{suffix}", 3)]
    entries = read_list(store)
    assert [(e["source"], e["position"], e["field"]) for e in entries] == [
        (f"a{suffix}", position, field) for position, field in zip((0, 2, 4), FIELDS, strict=True)
    ]
    assert all(e["reason"] for e in entries)
    assert f"skipped a{suffix}, trace 2, hidden_states[0]: found" in done.stdout
    assert "3 traces refused, listed in" in done.stdout and str(store) + ".refused.jsonl" in done.stdout
    command("verify", store, check=0)


def test_the_first_refused_trace_ends_a_conversion_without_the_flag(tmp_path, traces):
    path = write_pickle(tmp_path / "a.pkl", traces)
    assert "a.pkl, trace 0, hidden_states: missing key" in error_of("convert", path, tmp_path / "s.zarr", code=3)
    assert read_list(tmp_path / "s.zarr") is None and not (tmp_path / "s.zarr").exists()


def test_what_a_refused_conversion_keeps_is_said(tmp_path, traces):
    write_pickle(tmp_path / "in/a.pkl", make_traces(3))
    write_pickle(tmp_path / "in/b.pkl", [trace | {"question_id": f"b{k}"} for k, trace in enumerate(traces)])
    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", check=3)
    assert (
        "s.zarr keeps 3 new traces of earlier files" in done.stdout and len(tracestore.open(tmp_path / "s.zarr")) == 3
    )
    again = command("convert", tmp_path / "in", tmp_path / "s.zarr", check=3)
    assert "new traces of earlier files" not in again.stdout


def test_the_next_conversion_reads_refused_traces_again(tmp_path, traces):
    path, store = write_pickle(tmp_path / "a.pkl", traces), tmp_path / "s.zarr"
    convert(path, store, "--skip-bad")
    assert tracestore.open(store).question_ids == ["q1", "q3"] and len(read_list(store)) == 3
    again = convert(path, store, "--skip-bad")
    assert "some of its traces were refused" in again.stdout and len(read_list(store)) == 3
    write_pickle(tmp_path / "a.pkl", make_traces(5))
    convert(path, store)
    assert sorted(tracestore.open(store).question_ids) == [f"q{k}" for k in range(5)]
    assert read_list(store) is None
    before = tree_bytes(store)
    assert "1 file already in the store" in convert(path, store).stdout and tree_bytes(store) == before
    command("verify", store, check=0)


def test_a_file_without_a_valid_trace_is_skipped(tmp_path, traces):
    write_pickle(tmp_path / "bad.pkl", [traces[0], traces[0]])
    (tmp_path / "none.pkl").write_bytes(b"hello")
    write_pickle(tmp_path / "good.pkl", make_traces(2))
    store = tmp_path / "s.zarr"
    done = convert(*[tmp_path / f"{name}.pkl" for name in ("bad", "none", "good")], store, "--skip-bad", "--json")
    assert json.loads(done.stdout)["num_sources_skipped"] == 2 and len(tracestore.open(store)) == 2
    entries = read_list(store)
    assert [(e["source"], e["position"]) for e in entries] == [("bad.pkl", None), ("none.pkl", None)]
    only = convert(tmp_path / "bad.pkl", tmp_path / "t.zarr", "--skip-bad", check=3)
    assert "no file could be converted" in only.stderr


@pytest.mark.long
def test_traces_before_a_damage_are_stored(tmp_path):
    data = pickle.dumps(make_traces(6, tokens=200, dim=512))  # several chunks of the gzip reader
    (tmp_path / "cut.pkl").write_bytes(data[: len(data) * 2 // 3])
    packed = gzip.compress(data, 1)
    (tmp_path / "cut.pkl.gz").write_bytes(packed[: len(packed) * 4 // 5])
    for name in ("cut.pkl", "cut.pkl.gz"):
        store = tmp_path / f"{name}.zarr"
        done = convert(tmp_path / name, store, "--skip-bad")
        count = len(tracestore.open(store))
        assert 0 < count < 6
        (entry,) = read_list(store)
        assert entry["position"] == count and "truncated" in entry["reason"] and "skipped cut" in done.stdout
        command("verify", store, check=0)


def test_a_damage_behind_a_refused_trace_has_its_own_position(tmp_path, traces):
    """A trace whose values exceed float16 is read, and refused after that: it counts once."""
    data = pickle.dumps([make_trace(0), traces[2], *make_traces(5)[3:]])
    (tmp_path / "cut.pkl").write_bytes(data[:-100])
    convert(tmp_path / "cut.pkl", tmp_path / "s.zarr", "--skip-bad")
    assert tracestore.open(tmp_path / "s.zarr").question_ids == ["q0", "q3"]
    assert [entry["position"] for entry in read_list(tmp_path / "s.zarr")] == [1, 3]


def test_nothing_of_a_file_with_a_wrong_checksum_is_stored(tmp_path):
    data = bytearray(gzip.compress(pickle.dumps(make_traces(6))))
    data[-8] ^= 1
    (tmp_path / "bad.pkl.gz").write_bytes(data)
    write_pickle(tmp_path / "good.pkl", [make_trace(9)])
    store = tmp_path / "s.zarr"
    convert(tmp_path / "bad.pkl.gz", tmp_path / "good.pkl", store, "--skip-bad")
    assert tracestore.open(store).question_ids == ["q9"]


def test_nothing_of_a_file_with_a_row_too_many_is_stored(tmp_path):
    states = np.random.default_rng(0).standard_normal((4, 3, 5, 8)).astype("f2")
    np.savez(tmp_path / "a.npz", h=states, y=np.array([0, 1, 0, 1, 1]))
    write_pickle(tmp_path / "good.pkl", [make_trace(9)])
    lines = ["hidden_states = a.npz : h -> N L S D", "is_correct = a.npz : y -> N", "S.padding = none"]
    lines += ["ignore = good.pkl"]
    flags = [flag for line in lines for flag in ("--field", line)]
    message = error_of("convert", tmp_path, tmp_path / "s.zarr", *flags, "--skip-bad", code=3)
    assert "no file could be converted: 1 refused" in message


def test_conflicts_are_refused_one_by_one(tmp_path):
    traces = [*make_traces(2), make_trace(1) | {"generated_answer_clean": "other"}, make_trace(2)]
    store = tmp_path / "s.zarr"
    convert(write_pickle(tmp_path / "a.pkl", traces), store, "--skip-bad")
    assert tracestore.open(store).question_ids == ["q0", "q1", "q2"] and read_list(store)[0]["position"] == 2


def test_answers_of_another_file_of_the_same_name_join_no_question(tmp_path):
    store, rng = tmp_path / "s.zarr", np.random.default_rng(0)
    for folder, num_answers in (("a", 2), ("b", 3)):
        states = rng.normal(size=(2, num_answers, 3, 5, 8)).astype(np.float32)
        (tmp_path / folder).mkdir()
        write_pickle(tmp_path / folder / "run.pkl", [[{"hs": h} for h in question] for question in states])
        convert(tmp_path / folder, store, "--skip-bad", "--field", "hidden_states = run.pkl : []/[K]/hs -> L S D")
    stored = tracestore.open(store)
    assert [(trace.question_id, trace.sample) for trace in stored] == [
        (f"run.pkl:{q}", k) for q in (0, 1) for k in (0, 1)
    ]
    assert len(read_list(store)) == 1


# The samples and questions of the traces of files that are converted one after the other; the last one is refused.
OTHER_QUESTIONS = {
    "in a file": [{"a": [(0, "Who?"), (1, "Where?")]}],
    "in a run": [{"a": [(1, "Who?")], "b": [(0, None)], "c": [(2, "Where?")]}],
    "in two runs": [{"a": [(0, "Who?")]}, {"a": [(1, "Where?")]}],
    "the first answer": [{"a": [(1, "Who?")]}, {"b": [(0, "Where?")]}],
}


@pytest.mark.parametrize("flags", [[], ["--workers", 2], ["--codec", "zstd"], ["--on-conflict", "keep-first"]])
@pytest.mark.parametrize("case", OTHER_QUESTIONS)
def test_answers_to_other_questions_join_no_question(tmp_path, monkeypatch, case, flags):
    monkeypatch.setattr(cutting, "MIN_BYTES", 1)
    store, expected = tmp_path / "s.zarr", []
    for number, files in enumerate(OTHER_QUESTIONS[case]):
        data = tmp_path / str(number)
        for name, traces in files.items():
            write_pickle(data / f"{name}.pkl", [of_sample(*trace) for trace in traces])
            expected += [sample for sample, _ in traces]
        if number == len(OTHER_QUESTIONS[case]) - 1:
            for words in [flags, [*flags, "--dry-run"]]:
                message = error_of("convert", data, store, *words, code=3)
                assert "question: found 'Where?', expected that of sample " in message
                assert "of question id 'q1', 'Who?' (an answer to another question needs another id" in message
            convert(data, store, *flags, "--skip-bad")
        else:
            convert(data, store, *flags)
    assert [(t.question_id, t.sample) for t in tracestore.open(store)] == [("q1", sample) for sample in expected[:-1]]
    assert [entry["field"] for entry in read_list(store)] == ["question"]


def of_sample(sample, question):
    trace = make_trace(1, seed=sample) | {"sample": sample, "question": question}
    return trace if question else without(trace, "question")


@pytest.mark.parametrize("choice", ["keep-first", "keep-last"])
def test_a_trace_with_another_question_replaces_no_answer(tmp_path, choice):
    store, path = tmp_path / "s.zarr", tmp_path / "a.pkl"
    convert(write_pickle(path, [of_sample(0, "Who?"), of_sample(1, "Who?")]), store)
    write_pickle(path, [of_sample(0, "Where?") | {"tokens": np.arange(2)}, of_sample(2, "Where?")])
    message = error_of("convert", path, store, "--on-conflict", choice, code=3)
    assert f"trace {choice == 'keep-first':d}, question: found 'Where?', expected that of sample" in message
    assert [(t.sample, t.question) for t in tracestore.open(store)] == [(0, "Who?"), (1, "Who?")]


def test_a_conflict_with_another_writer_ends_a_conversion(tmp_path, monkeypatch, capsys):
    """Also with --skip-bad: a commit leaves complete sources out. The next run reads them again."""
    data, store, commit = tmp_path / "data", tmp_path / "s.zarr", StoreWriter.commit
    write_pickle(data / "a.pkl", make_traces(3))
    write_pickle(data / "b.pkl", [make_trace(5)])

    def late(writer, **keywords):
        monkeypatch.setattr(StoreWriter, "commit", commit)
        with tracestore.create(store, append=True) as other:
            other.append(make_trace(1) | {"generated_answer_clean": "other"})
        writer.commit(**keywords)

    monkeypatch.setattr(StoreWriter, "commit", late)
    monkeypatch.setattr(cutting, "MIN_BYTES", 1)
    arguments = ["convert", str(data), str(store), "--skip-bad"]
    assert main(arguments) == 3
    assert "a.pkl, trace 1, question_id: found a second trace of question id 'q1'" in capsys.readouterr().err
    assert tracestore.open(store).question_ids == ["q1"] and read_list(store) is None
    assert main(arguments) == 0
    assert "3 traces added from 2 files" in capsys.readouterr().out
    assert [entry["position"] for entry in read_list(store)] == [1]


def test_graphs_are_refused_one_by_one(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    from tests.helpers import make_graphs

    graphs = [make_graphs(t) for t in make_traces(3, tokens=4)]
    graphs[1][0].edge_attr = None
    torch.save({"graphs": graphs, "question_ids": ["a", "b", "c"], "labels": torch.zeros(3)}, tmp_path / "g.pt")
    store = tmp_path / "s.zarr"
    convert(tmp_path / "g.pt", store, "--skip-bad")
    assert tracestore.open(store).question_ids == ["a", "c"]
    assert read_list(store)[0]["field"] == "graphs[0].edge_attr"


def test_many_refused_traces_are_printed_in_part(tmp_path, traces):
    many = [make_trace(1)] + [traces[0]] * 25
    done = convert(write_pickle(tmp_path / "a.pkl", many), tmp_path / "s.zarr", "--skip-bad")
    assert done.stdout.count("skipped a.pkl") == 10 and "skipped 15 more traces of a.pkl" in done.stdout
    assert len(read_list(tmp_path / "s.zarr")) == 25


def test_a_file_of_that_name_with_other_content_is_not_touched(tmp_path):
    other = tmp_path / "s.zarr.refused.jsonl"
    other.write_text("mine\n")
    path = write_pickle(tmp_path / "a.pkl", make_traces(1))
    assert "s.zarr.refused.jsonl" in error_of("convert", path, tmp_path / "s.zarr", "--skip-bad", code=2)
    assert other.read_text() == "mine\n"


def test_overwrite_begins_a_new_list(tmp_path, traces):
    store = tmp_path / "s.zarr"
    convert(write_pickle(tmp_path / "a.pkl", traces), store, "--skip-bad")
    convert(write_pickle(tmp_path / "b.pkl", make_traces(2)), store, "--overwrite")
    assert read_list(store) is None
    np.testing.assert_equal(len(tracestore.open(store)), 2)


def test_files_that_are_refused_for_one_reason_are_one_line(tmp_path):
    for k in range(30):
        write_pickle(tmp_path / "in" / f"b{k}.pkl", [without(make_trace(k), "hidden_states")])
    write_pickle(tmp_path / "in" / "a.pkl", make_traces(2))
    write_pickle(tmp_path / "in" / "c.pkl", [make_trace(90) | {"tokens": np.arange(90)}])
    layout = field_flags(*LINES)

    done = convert(tmp_path / "in", tmp_path / "s.zarr", "--skip-bad", *layout)

    lines = [line for line in done.stdout.splitlines() if line.startswith("skipped")]
    assert len(lines) == 2 and "skipped 30 files (b0.pkl, b1.pkl, b2.pkl and 27 more): hidden_states:" in lines[0]
    assert lines[1].startswith("skipped c.pkl, trace 0, tokens: ")
    assert len(read_list(tmp_path / "s.zarr")) == 31


def test_many_reasons_are_some_lines_and_a_count(tmp_path):
    for k in range(25):
        write_pickle(tmp_path / "in" / f"b{k}.pkl", [make_trace(k) | {"tokens": np.arange(50 + k)}])
    write_pickle(tmp_path / "in" / "a.pkl", make_traces(2))
    layout = field_flags(*LINES)

    done = convert(tmp_path / "in", tmp_path / "s.zarr", "--skip-bad", *layout)

    lines = [line for line in done.stdout.splitlines() if line.startswith("skipped")]
    assert len(lines) == 11 and lines[-1] == f"skipped 15 more files; {tmp_path / 's.zarr'}.refused.jsonl lists all"


LINES = (
    "hidden_states = *.pkl : []/hidden_states -> L S D",
    "attentions = *.pkl : []/attentions -> L H S S",
    "tokens = *.pkl : []/tokens -> S",
    "records = *.pkl : []",
)


def test_the_advice_about_layers_names_no_other_files(tmp_path):
    for k in range(2):
        np.savez(tmp_path / f"q{k}.npz", hs=make_trace(0, tokens=3)["hidden_states"][0][None].repeat(2 + k, 0))
    error = error_of(
        "convert", tmp_path, tmp_path / "s.zarr", "--field", "hidden_states = {id}.npz : hs -> L S D", code=3
    )
    assert (
        "q1.npz, trace 0, num_layers: found 3, expected 2" in error
        and "-> S L D; where that changed, --overwrite" in error
    )
    assert ".pkl" not in error


def test_files_that_a_table_refuses_are_named_with_the_table(tmp_path):
    (tmp_path / "in").mkdir()
    for k in range(2):
        np.savez(tmp_path / f"in/q{k}.npz", hs=np.ones((3, 4 + k, 8), "f2"))
    (tmp_path / "in/t.jsonl").write_text('{"id": "q0", "ok": 1}\n{"id": "q1", "ok": 0}\n')
    lines = field_flags("hidden_states = {id}.npz : hs -> L S D", "is_correct = t.jsonl : [id=id]/ok")
    command("convert", tmp_path / "in", tmp_path / "s.zarr", *lines, check=0)
    (tmp_path / "in/t.jsonl").write_text("")
    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", *lines, "--skip-bad", check=0)
    assert "skipped 2 files (q0.npz, q1.npz): t.jsonl: the file is empty" in done.stdout


def test_a_store_next_to_its_sources_is_extended_after_a_refusal(tmp_path):
    write_pickle(tmp_path / "a.pkl", [*make_traces(3), {"question_id": "bad"}])
    convert(tmp_path, tmp_path / "s.zarr", "--skip-bad")
    write_pickle(tmp_path / "b.pkl", [make_trace(3)])
    convert(tmp_path, tmp_path / "s.zarr", "--skip-bad")
    assert len(tracestore.open(tmp_path / "s.zarr")) == 4 and len(read_list(tmp_path / "s.zarr")) == 1


def test_each_place_has_a_list_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    urls = [RemoteURL(f"s3://{place}/s.zarr") for place in ("a", "b", "a/b")]
    lists = [RefusedTraces(store, is_new=False) for store in (Path("s.zarr"), *urls)]
    for number, refused in enumerate(lists):
        refused.replace("a.pkl", [InvalidInputError("bad", position=k) for k in range(number + 1)])
    assert sorted(map(str, tmp_path.iterdir())) == sorted(str(tmp_path / refused.path) for refused in lists)
    RefusedTraces(urls[0], is_new=True).replace("a.pkl", [])
    assert [len(RefusedTraces(store, is_new=False)) for store in (Path("s.zarr"), *urls)] == [1, 0, 3, 4]
    assert RefusedTraces(RemoteURL("s3://b/s.zarr/"), is_new=False).path == lists[2].path
