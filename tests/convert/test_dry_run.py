"""convert --dry-run: the layouts of the files, and what their first traces would become, without writing."""

import gc
import json
import tracemalloc

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, make_trace, make_traces, write_pickle
from tests.ingest.execute.folders import dump, save, states, table
from tracestore.convert.options import ConvertOptions
from tracestore.errors import UsageError
from tracestore.store.read import generation
from tracestore.store.write.trial import TrialWriter
from tracestore.tasks import plan_tasks


def lines_of(done):
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_the_layout_and_the_first_traces_are_printed(tmp_path):
    write_pickle(tmp_path / "a.pkl", [t | {"note": "x", "bleurt_score": 0.5} for t in make_traces(5)])
    lines = lines_of(convert(tmp_path / "a.pkl", tmp_path / "s.zarr", "--dry-run"))
    assert lines[0] == "a.pkl: built-in layout traces"
    assert 'hidden_states = "**/*.pkl : []/hidden_states -> L S D"' in lines
    text = "trace 2 would be stored: question_id 'q2', L 3, S 3, D 8 float16, 3 tokens, causal attention"
    assert any(line.startswith(text) and "score bleurt_score 0.5" in line for line in lines)
    assert not any("trace 3" in line for line in lines)
    assert not (tmp_path / "s.zarr").exists() and lines[-1] == "1 file, 0 refused; nothing was written"


def test_files_of_one_layout_are_described_together(tmp_path):
    for k in range(5):
        write_pickle(tmp_path / f"batch_{k}.pkl", make_traces(2))
    (tmp_path / "config.json").write_text('{"model": "m"}')
    done = convert(tmp_path, tmp_path / "s.zarr", "--dry-run", "--json", "--skip-bad")
    report = json.loads(done.stdout)
    (part, *others) = report["parts"]
    assert part["files"] == [f"batch_{k}.pkl" for k in range(5)] and part["layout"]["records"] == ["**/*.pkl : []"]
    assert len(part["stored"]) == 2 and part["refused"] == {} and len(others) == 1
    assert report["num_sources"] == 6 and "batch_0.pkl, batch_1.pkl, batch_2.pkl and 2 more: built-in" in done.stderr


def test_a_stated_layout_is_printed_with_what_it_stores(tmp_path):
    np.savez(tmp_path / "a.npz", hs=np.arange(24, dtype="f4").reshape(2, 3, 4) + 1)
    line = "hidden_states = {id}.npz : hs -> L S D"
    report = json.loads(convert(tmp_path, tmp_path / "s.zarr", "--field", line, "--dry-run", "--json").stdout)
    (part,) = report["parts"]
    assert part["origin"] == "stated layout" and part["layout"] == {"hidden_states": line.partition(" = ")[2]}
    assert part["stored"] == ["question_id 'a', L 2, S 3, D 4 float16, rounded from float32"]
    assert report["attention"] == "none"


def test_a_refused_file_is_described_and_ends_with_its_error(tmp_path):
    write_pickle(tmp_path / "a.pkl", [{"question_id": "a", "hs": 1}])
    write_pickle(tmp_path / "b.pkl", make_traces(1))
    (tmp_path / "c.pkl").write_bytes(b"x")
    done = convert(tmp_path, tmp_path / "s.zarr", "--dry-run", check=3)
    lines = lines_of(done)
    assert any(line.startswith("trace 0 would be stored: question_id 'q0'") for line in lines)
    assert any(line.startswith("refused: c.pkl: ") for line in lines)
    assert done.stderr.count("\n") == 1 and "c.pkl" in done.stderr
    convert(tmp_path, tmp_path / "s.zarr", "--dry-run", "--skip-bad")


def test_the_options_of_an_existing_store_apply(tmp_path):
    path = write_pickle(tmp_path / "a.pkl", make_traces(2, dtype="f4"))
    convert(path, tmp_path / "s.zarr", "--attention", "none", "--dtype", "keep")
    done = convert(path, tmp_path / "s.zarr", "--dry-run")
    assert "D 8 float32" in done.stdout and "causal attention" not in done.stdout


def test_preprocessed_files(tmp_path):
    torch = pytest.importorskip("torch")
    value = {"sequences": torch.ones(2, 3, 4).half(), "labels": torch.ones(2), "question_ids": ["a", "b"]}
    torch.save(value, tmp_path / "a.pt")
    lines = lines_of(convert(tmp_path / "a.pt", tmp_path / "s.zarr", "--dry-run"))
    assert "trace 1 would be stored: question_id 'b', L 3, D 4 float16, label 1" in lines


def test_a_damaged_or_odd_file_ends_in_one_line(tmp_path):
    write_pickle(tmp_path / "a.pkl", [{"\x1b[2J": object, 7: {"a": [[[[1]]]]}, "hidden_states": [[[1.0]]]}])
    done = convert(tmp_path / "a.pkl", tmp_path / "s.zarr", "--dry-run", check=3)
    assert "\x1b" not in done.stdout + done.stderr and done.stderr.count("\n") == 1


def test_a_trace_is_described_as_it_is_stored(tmp_path):
    write_pickle(tmp_path / "a.pkl", [make_trace(4) | {"label": 1, "sample": 2}])
    done = convert(tmp_path / "a.pkl", tmp_path / "s.zarr", "--dry-run", "--attention", "heads")
    assert "question_id 'q4', sample 2, L 3, S 5, D 8 float16, 5 tokens, causal attention of 2 heads" in done.stdout
    assert ", label 1" in done.stdout


STATES = {"hidden_states": "*.pkl : [id=id]/hs -> L S D"}
LABELS = STATES | {"is_correct": "t.json : [id=id]/ok"}
LABELED = STATES | {"is_correct": "*.pkl : [id=id]/ok"}
IN_ORDER = {"hidden_states": "a.npy -> N L S D", "S.padding": "none", "is_correct": "t.json : []/ok"}


def items(*names):
    """Return a trace for each name."""
    return [{"id": name, "hs": states(2, 4, 8, seed=k)} for k, name in enumerate(names)]


def labels(*names):
    """Return rows of labels."""
    return [{"id": name, "ok": k % 2} for k, name in enumerate(names)]


def _zero_token():
    found = items(*"abcdef")
    found[5]["hs"][:, 1] = 0
    return found


# By what is wrong: the files, the layout, other options. A conversion refuses each, as does a look at all traces.
REFUSED = {
    "a table of other ids": ({"a.pkl": items("a", "b"), "t.json": labels("x", "y")}, LABELS, []),
    "ids in another spelling": ({"a.pkl": items("a", "q1"), "t.json": labels("a", "Q1")}, LABELS, []),
    "a row twice": ({"a.pkl": items("a"), "t.json": [*labels("a"), {"id": "a", "ok": 1}]}, LABELS, []),
    "a label that is none": ({"a.pkl": items("a"), "t.json": [{"id": "a", "ok": 7}]}, LABELS, []),
    "rows that lack one": ({"a.npy": states(3, 2, 4, 8), "t.json": labels("a", "b")}, IN_ORDER, []),
    "a late trace": ({"a.pkl": _zero_token()}, STATES, []),
    "a late trace without an id": ({"a.pkl": [*items(*"abcd"), {"hs": states(2, 4, 8)}]}, STATES, []),
    "an id in two files": ({"a.pkl": items("a", "b"), "b.pkl": items("c", "a")}, STATES, []),
    "another text in a second file": (
        {f"{text}.pkl": [one | {"q": text} for one in items("a")] for text in ("b", "c")},
        STATES | {"question": "*.pkl : [id=id]/q"},
        [],
    ),
    "a marked copy": ({"a.pkl": items("q1"), "b.pkl": items("q1 (1)")}, STATES, []),
    "other layers in a file": (
        {f"{name}_{k}.npy": states(4, 8, seed=k) for name, layers in (("a", (0, 1)), ("b", (0, 2))) for k in layers},
        {"hidden_states": "{id}_{layer}.npy -> S D"},
        [],
    ),
    "another hidden size": ({"a.pkl": items("a"), "b.pkl": [{"id": "b", "hs": states(2, 4, 6)}]}, STATES, []),
    "another number of layers": ({"a.pkl": items("a"), "b.pkl": [{"id": "b", "hs": states(3, 4, 8)}]}, STATES, []),
    "layers that differ within a file": (
        {"a.pkl": [one | {"ids": [1, 2 + k]} for k, one in enumerate(items("a", "b"))]},
        STATES | {"L.ids": "a.pkl : [id=id]/ids"},
        [],
    ),
    "a path without values": ({"a.pkl": items("a")}, STATES | {"question": "*.pkl : [id=id]/q"}, []),
    "an entry without a copy": ({"a.pkl": items("a", "b")}, STATES | {"duplicates": "keep"}, []),
    "a scores file of other ids": ({"a.pkl": items("a")}, STATES, ["question_id,bleurt_score", "x,0.5"]),
}


def write(folder, files, layout, scores):
    """Write the files and the layout; return the words of the command."""
    for name, value in files.items():
        {"pkl": dump, "npy": save, "json": table}[name.rpartition(".")[2]](folder / name, value)
    lines = [f"{name} = {address}" for name, address in layout.items()]
    words = [word for line in lines for word in ("--field", line)]
    if scores:
        (folder.parent / "scores.csv").write_text("\n".join(scores))
        words += ["--scores", folder.parent / "scores.csv"]
    return [folder, folder.parent / "s.zarr", *words]


@pytest.mark.parametrize(("files", "layout", "scores"), REFUSED.values(), ids=REFUSED)
def test_what_a_conversion_refuses(tmp_path, files, layout, scores):
    words = write(tmp_path / "in", files, layout, scores)

    done = convert(*words, "--dry-run", check=3)

    error, own = convert(*words, check=3).stderr.splitlines()[-1], done.stderr.splitlines()[-1]
    assert own == error or ("question_id: " in own and own.partition(": ")[0] == error.partition(": ")[0])


ACCEPTED = {
    "by id": ({"a.pkl": items(*"abcdef"), "b.pkl": items("g"), "t.json": labels(*"bcdefghi")}, LABELS, []),
    "in order": ({"a.npy": states(3, 2, 4, 8), "t.json": labels(*"abc")}, IN_ORDER | {"ignore": "t.json : []/id"}, []),
    "scores": ({"a.pkl": items("a", "b")}, STATES, ["question_id,bleurt_score", "a,0.5"]),
    "equal copies": ({"a.pkl": items("a", "b"), "b.pkl": items("a")}, STATES, []),
}


@pytest.mark.parametrize(("files", "layout", "scores"), ACCEPTED.values(), ids=ACCEPTED)
def test_how_a_conversion_joins_rows_and_counts_labels(tmp_path, files, layout, scores):
    words = write(tmp_path / "in", files, layout, scores)

    done = lines_of(convert(*words, "--dry-run"))
    report = json.loads(convert(*words, "--dry-run", "--json").stdout)

    def summary(lines):
        return [
            line for line in lines if line.startswith(("first", "is_correct (", "1 trace with")) or " joined " in line
        ]

    found = summary(lines_of(convert(*words)))
    assert found and found == summary(done) == summary(report["summary"])
    assert found == summary(lines_of(convert(*words, "--dry-run")))  # of a store that has the traces


def test_refused_traces_are_left_out(tmp_path):
    words = write(tmp_path / "in", {"a.pkl": _zero_token(), "t.json": labels(*"abcdef")}, LABELS, [])

    done = convert(*words, "--dry-run", "--skip-bad").stdout

    assert "is_correct: 5 rows of t.json joined by id, 1 without a trace" in done and "token 1 is zero" in done
    assert "is_correct: 5 rows of t.json joined by id, 1 without a trace" in convert(*words, "--skip-bad").stdout


@pytest.mark.parametrize("row", ["x,0.5", "Q1,0.5"])
def test_a_scores_file_of_other_ids_with_skip_bad(tmp_path, row):
    words = write(tmp_path / "in", {"a.pkl": items("q1")}, STATES, ["question_id,bleurt_score", row])

    own = error_of("convert", *words, "--dry-run", "--skip-bad", code=3)

    assert "scores.csv" in own and own == error_of("convert", *words, "--skip-bad", code=3)


def test_a_scores_file_without_a_row_for_new_files_of_a_labeled_store(tmp_path):
    words = write(tmp_path / "in", {"a.pkl": items("a", "b")}, STATES, ["question_id,bleurt_score", "a,0.5", "b,1"])
    convert(*words)
    dump(tmp_path / "in/b.pkl", items("c"))

    assert "2 files, 0 refused" in convert(*words, "--dry-run").stdout

    assert "1 trace added" in convert(*words).stdout


def _other_states():
    return [one | {"hs": one["hs"] * 2} for one in items("a")]


def _named(model):
    return {"provenance.json": {"model": model}}


# By what a store, or the rest of the command, has otherwise: the files of the first conversion, those of the second one,
# and its options. A conversion refuses each.
REFUSED_BY_THE_STORE = {
    "other states of a trace": ({"a.pkl": items("a")}, {"a.pkl": _other_states()}, []),
    "another hidden size": ({"a.pkl": items("a")}, {"b.pkl": [{"id": "b", "hs": states(2, 4, 6)}]}, []),
    "another dtype": ({"a.pkl": items("a")}, {"b.pkl": items("b")}, ["--dtype", "keep"]),
    "another attention": ({"a.pkl": items("a")}, {"b.pkl": items("b")}, ["--attention", "heads"]),
    "another model": ({"a.pkl": items("a")} | _named("m"), {"b.pkl": items("b")} | _named("n"), []),
    "nothing to store": (None, {"a.pkl": _zero_token()[5:]}, ["--skip-bad"]),
    "a folder of other files": (None, {"a.pkl": items("a"), "../s.zarr/b.json": 1}, []),
}


@pytest.mark.parametrize(("before", "after", "options"), REFUSED_BY_THE_STORE.values(), ids=REFUSED_BY_THE_STORE)
def test_what_a_conversion_into_a_store_refuses(tmp_path, before, after, options):
    if before is not None:
        convert(*write(tmp_path / "in", before, STATES, []))
    words = write(tmp_path / "in", after, STATES, [])

    done, own = (convert(*words, *options, *dry, check=None) for dry in ([], ["--dry-run"]))

    assert done.returncode != 0 and own.returncode == done.returncode
    assert own.stderr.splitlines()[-1] == done.stderr.splitlines()[-1]


def test_a_dry_run_from_python(tmp_path):
    write_pickle(tmp_path / "a.pkl", make_traces(2))

    report = tracestore.convert_files(tmp_path / "a.pkl", tmp_path / "s.zarr", dry_run=True)

    assert len(report.parts[0].stored) == 2 and not (tmp_path / "s.zarr").exists()
    with pytest.raises(UsageError, match="a dry run has no tasks"):
        plan_tasks(tmp_path / "a.pkl", tmp_path / "s.zarr", ConvertOptions(dry_run=True))


def test_labels_of_a_scores_file_are_no_conflict(tmp_path):
    path = write_pickle(tmp_path / "a.pkl", [t | {"label": 1} for t in make_traces(3)])
    (tmp_path / "t.csv").write_text("question_id,bleurt,label\n" + "".join(f"q{k},0.5,0\n" for k in range(3)))
    convert(path, tmp_path / "s.zarr", "--scores", tmp_path / "t.csv")
    assert tracestore.open(tmp_path / "s.zarr")[0].label == 0

    assert "1 file, 0 refused" in convert(path, tmp_path / "s.zarr", "--dry-run").stdout

    assert "1 file already in the store" in convert(path, tmp_path / "s.zarr").stdout


@pytest.mark.parametrize("has_commits", [False, True])
def test_a_scores_file_of_other_ids_beside_labels_of_the_layout(tmp_path, monkeypatch, has_commits):
    """The file is of no use here, whether or not labels of this conversion are committed by then."""
    if has_commits:
        monkeypatch.setattr("tracestore.convert.runner.commits_after", lambda k, count: True)
        monkeypatch.setattr(
            "tracestore.convert.runner.cut", lambda sizes, *_: [range(k, k + 1) for k in range(len(sizes))]
        )
    files = {f"{name}.pkl": [one | {"ok": True} for one in items(name)] for name in "ab"}
    words = write(tmp_path / "in", files, LABELED, ["question_id,bleurt_score", "x,0.5"])

    own, done = (convert(*words, *dry, check=3) for dry in (["--dry-run"], []))

    assert own.stderr == done.stderr and "scores.csv: found 1 id" in own.stderr


def test_another_process_replaces_the_store_while_it_is_opened(tmp_path, monkeypatch):
    words = [write_pickle(tmp_path / f"{k}/a.pkl", [make_trace(k)]) for k in range(2)]
    convert(words[0], tmp_path / "s.zarr")
    own = generation.StoreIndex

    def index_late(*arguments):
        monkeypatch.setattr(generation, "StoreIndex", own)
        convert(words[1], tmp_path / "s.zarr", "--overwrite")
        return own(*arguments)

    monkeypatch.setattr(generation, "StoreIndex", index_late)

    assert "1 file, 0 refused" in convert(words[0], tmp_path / "s.zarr", "--dry-run").stdout


def test_texts_of_traces_are_not_kept(tmp_path, monkeypatch):
    """Test that what a dry run holds of a trace does not grow with its tokens and texts."""
    held = []
    close = TrialWriter.close
    monkeypatch.setattr(TrialWriter, "close", lambda self: (held.append(sizes()), close(self)))
    length = 50_000

    def sizes():
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    for count in (1, 8):
        traces = [t | {"generated_answer_clean": t["question_id"] * length} for t in make_traces(count)]
        path = write_pickle(tmp_path / f"{count}/a.pkl", traces)
        del traces
        tracemalloc.start()
        convert(path, tmp_path / "s.zarr", "--dry-run")
        tracemalloc.stop()

    assert held[1] - held[0] < length


def test_known_files_of_one_name_are_no_conflict(tmp_path):
    for k, name in enumerate("xy"):
        write_pickle(tmp_path / name / "a.pkl", [make_trace(k) | {"label": 1}])
    (tmp_path / "t.csv").write_text("question_id,bleurt,label\nq0,0.5,0\nq1,0.5,0\n")
    words = (tmp_path / "x/a.pkl", tmp_path / "y/a.pkl", tmp_path / "s.zarr")
    convert(*words, "--scores", tmp_path / "t.csv")

    assert "2 files, 0 refused" in convert(*words, "--dry-run").stdout

    assert "2 files already in the store" in convert(*words).stdout


def test_the_store_and_its_folder_stay_as_they_are(tmp_path):
    write_pickle(tmp_path / "a.pkl", make_traces(2))
    convert(tmp_path / "a.pkl", tmp_path / "s.zarr")
    write_pickle(tmp_path / "b.pkl", make_traces(4))
    before = {path: path.stat() for path in tmp_path.rglob("*")}

    for words in ([], ["--overwrite"], ["--skip-bad"]):
        convert(tmp_path, tmp_path / "s.zarr", "--dry-run", *words)

    assert [(s.st_mtime_ns, s.st_size) for s in before.values()] == [
        (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*") if p in before
    ]
    assert before.keys() == set(tmp_path.rglob("*"))


def test_equal_states_of_an_export(tmp_path):
    """Marks of copies in ids are those of the store."""
    with tracestore.create(tmp_path / "a.zarr") as writer:
        for name in ("q2", "q2 (1)"):
            writer.append({"question_id": name, "hidden_states": list(states(2, 4, 8))}, score=1)
    command("export", tmp_path / "a.zarr", tmp_path / "in", check=0)

    assert " 0 refused" in convert(tmp_path / "in", tmp_path / "s.zarr", "--dry-run").stdout

    assert "2 traces added" in convert(tmp_path / "in", tmp_path / "s.zarr").stdout


@pytest.mark.parametrize(
    ("shape", "axes", "text"),
    [
        ((4, 4, 6), "L S D", "L and S have"),
        ((4, 6, 4), "S L D", "S and D have"),
        ((4, 6, 4), "L S D", "L and D have"),
        ((4, 4, 4), "L S D", "L, S and D have"),
        ((3, 4, 6), "L S D", None),
        ((1, 1, 6), "L S D", None),
    ],
)
def test_axes_of_equal_size_are_said(shape, axes, text, tmp_path):
    for name in "ab":
        save(tmp_path / f"in/{name}.npy", states(*shape, seed=ord(name)))
    line = "nothing in the files checks their order"
    flags = ("--field", f"hidden_states = {{id}}.npy -> {axes}", "--dry-run")

    printed = convert(tmp_path / "in", tmp_path / "s.zarr", *flags).stdout

    assert printed.count(line) == (text is not None)
    assert text is None or f"{text} the same size in every trace: {line}" in printed
    if shape == (4, 4, 6):
        save(tmp_path / "in/c.npy", states(4, 3, 6))
        assert line not in convert(tmp_path / "in", tmp_path / "s.zarr", *flags).stdout


def test_axes_of_equal_size_that_names_tell_apart(tmp_path):
    for k in range(4):
        save(tmp_path / f"in/q_{k}.npy", states(4, 6, seed=k))
    flags = ("--field", "hidden_states = {id}_{layer}.npy -> S D", "--dry-run")
    assert "same size" not in convert(tmp_path / "in", tmp_path / "s.zarr", *flags).stdout
    write_pickle(tmp_path / "a.pkl", [make_trace(0, tokens=3, layers=3)])
    assert "same size" not in convert(tmp_path / "a.pkl", tmp_path / "t.zarr", "--dry-run").stdout
