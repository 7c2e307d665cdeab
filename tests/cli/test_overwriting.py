"""No command writes over something else: files of a store, of another command's run, of the input, or of the user."""

import csv
import os
import shutil

import pytest

import tracestore
from tests.helpers import command, convert, error_of, make_traces, tree_digest, write_pickle, write_store
from tests.train.runs import FAST, ONLY, write_labeled
from tracestore.cli import COMMANDS, command_parser
from tracestore.pages.document import PAGE_MARK

SUFFIXES = {"report": ".html", "compare": ".html", "predict": ".csv", "view": ".svg", "inspect": ".toml"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with a store, two runs on it, a benchmark of it, and an export of it."""
    folder = tmp_path_factory.mktemp("overwriting")
    store = write_labeled(folder / "s.zarr")
    flags = ["--store", store, *FAST, *ONLY["lstm_solo"], "--no-probe", "--epochs", 1]
    for name in ("r1", "r2"):
        command("train", *flags, "--output-dir", folder / name, check=0)
    command("export", store, folder / "traces", check=0)
    words = ("--detectors", "probe_last", "--folds", 2, "--workers", 1, "--output-dir", folder / "b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACESTORE_CACHE_DIR", str(folder / "cache"))
        command("benchmark", store, *words, check=0)
    return folder


@pytest.fixture
def work(made, tmp_path):
    """Return a copy of the folder that a test may change."""
    shutil.copytree(made, tmp_path / "w", dirs_exist_ok=True)
    return tmp_path / "w"


def words_of(name, work, output):
    """Return a command that writes one file, and the file that it reads."""
    store, checkpoint = work / "s.zarr", work / "r1/lstm_solo/best.pt"
    return {
        "report": (["report", store, "--no-lint", "--output", output], store / "zarr.json"),
        "compare": (["compare", work / "r1", work / "r2", "--output", output], work / "r1/results.json"),
        "predict": (["predict", "--checkpoint", checkpoint, "--store", store, "--output", output], checkpoint),
        "view": (["view", store, "0", "--save", output], store / "zarr.json"),
        "inspect": (["inspect", work / "traces", "--output", output], work / "traces/traces.jsonl"),
    }[name]


def hard_link(path, target):
    os.link(target, path)
    return path


def symbolic_link(path, target):
    path.symlink_to(target)
    return path


# Destinations that are refused also with --overwrite, by their suffix.
BAD = {
    "file of a store": lambda w, s: w / "s.zarr/zarr.json",
    "new file in a store": lambda w, s: w / f"s.zarr/new{s}",
    "new file deep in a store": lambda w, s: w / f"s.zarr/segments/new{s}",
    "store through ..": lambda w, s: w / f"r1/../s.zarr/new{s}",
    "store through a linked folder": lambda w, s: symbolic_link(w / "link", w / "s.zarr") / f"new{s}",
    "link to a file of a store": lambda w, s: symbolic_link(w / f"x{s}", w / "s.zarr/zarr.json"),
    "damaged store": lambda w, s: (w / "s.zarr/zarr.json").write_text("{") and w / f"s.zarr/new{s}",
    "file of a run": lambda w, s: (
        w / {".html": "r1/report.html", ".csv": "r1/predictions.csv", ".svg": "r1/roc.svg"}.get(s, "r1/split.json")
    ),
    "link to a file of a run": lambda w, s: symbolic_link(
        w / f"x{s}",
        w / {".html": "r1/report.html", ".csv": "r2/predictions.csv", ".svg": "r1/loss.svg"}.get(s, "r1/split.json"),
    ),
    "results of a run": lambda w, s: w / "r1/results.json",
    "checkpoint": lambda w, s: w / "r1/lstm_solo/best.pt",
    "file of a benchmark": lambda w, s: w / {".html": "b/report.html", ".csv": "b/scores.csv"}.get(s, "b/table.txt"),
    "wrong suffix": lambda w, s: w / "thesis.txt",
    "no suffix": lambda w, s: w / "thesis",
    "folder": lambda w, s: w / "traces",
    "no parent folder": lambda w, s: w / f"none/x{s}",
    "pipe": lambda w, s: os.mkfifo(w / f"x{s}") or w / f"x{s}",
    "loop of links": lambda w, s: symbolic_link(w / f"x{s}", f"x{s}") and w / f"x{s}/y{s}",
    "device": lambda w, s: symbolic_link(w / f"x{s}", "/dev/null"),
}


@pytest.mark.parametrize("bad", [*BAD, "hard link to the input", "link to the input"])
@pytest.mark.parametrize("name", SUFFIXES)
def test_bad_destinations_are_refused_also_with_overwrite(name, bad, work):
    suffix = SUFFIXES[name]
    if bad in BAD:
        output = BAD[bad](work, suffix)
    else:
        link = hard_link if bad.startswith("hard") else symbolic_link
        output = link(work / f"x{suffix}", words_of(name, work, "")[1])
    before = tree_digest(work)
    error = error_of(*words_of(name, work, output)[0], "--overwrite", code=2)
    assert str(output) in error or "no such" in error, error
    assert tree_digest(work) == before


@pytest.mark.parametrize("name", SUFFIXES)
def test_a_file_of_the_user_is_replaced_with_overwrite_only(name, work):
    output = work / f"mine{SUFFIXES[name]}"
    output.write_text("mine")
    words, _ = words_of(name, work, output)
    assert "exists; choose another name, or replace it with --overwrite" in error_of(*words, code=2)
    assert output.read_text() == "mine"
    command(*words, "--overwrite", check=0)
    assert output.read_text() != "mine"


@pytest.mark.parametrize("name", ["report", "compare"])
def test_a_page_of_tracestore_is_replaced(name, work):
    output = work / "page.html"
    output.write_text(f"<html><head>{PAGE_MARK}")
    command(*words_of(name, work, output)[0], check=0)
    assert output.stat().st_size > 1000 and PAGE_MARK in output.read_text()[:1000]
    command(*words_of(name, work, output)[0], check=0)
    output.write_text("<html>my own page")
    error_of(*words_of(name, work, output)[0], code=2)


def test_a_layout_that_was_edited_stays(tmp_path, monkeypatch):
    """The layout of inspect is edited by hand: a second look at the files does not replace it."""
    write_pickle(tmp_path / "in/a.pkl", make_traces(3))
    monkeypatch.chdir(tmp_path)
    command("inspect", "in", "--output", "in/layout.toml", check=0)
    (tmp_path / "in/layout.toml").write_text("edited")
    assert "in/layout.toml: exists; choose" in error_of("inspect", "in", "--output", "in/layout.toml", code=2)
    (tmp_path / "link.toml").symlink_to("in/a.pkl")
    for source in ("in", "in/a.pkl"):
        words = ("inspect", source, "--output", "link.toml", "--overwrite")
        assert "link.toml: " in error_of(*words, code=2)
    assert (tmp_path / "in/layout.toml").read_text() == "edited"


def test_a_file_that_inspect_reads_is_not_replaced_through_a_link(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/judged.jsonl").write_text('{"id": "q0"}\n')
    (tmp_path / "link.toml").symlink_to("in/judged.jsonl")
    words = ("inspect", tmp_path / "in", "--output", tmp_path / "link.toml", "--overwrite")
    assert "link.toml: a file that this command reads; choose another name" in error_of(*words, code=2)
    assert (tmp_path / "link.toml").is_symlink()


def test_each_command_with_an_output_file_is_tested():
    actions = {name: command_parser(name)._actions for name in COMMANDS}
    files = {name for name, found in actions.items() if any(a.dest == "output" and "FILE" in a.metavar for a in found)}
    assert files == SUFFIXES.keys()


def test_files_of_a_run_are_known_by_their_names(made):
    """Each file that train and benchmark write and that a command may be told to write is refused."""
    for folder in ("r1", "b"):
        found = [p for p in (made / folder).iterdir() if p.suffix in SUFFIXES.values()]
        assert len(found) >= 2
        for path in found:
            name = next(n for n, s in SUFFIXES.items() if s == path.suffix)
            error = error_of(*words_of(name, made, path)[0], "--overwrite", code=2)
            assert "belongs to a run of tracestore " in error


def folder_words(name, work, destination):
    """Return a command that writes a folder."""
    store = work / "s.zarr"
    return {
        "export": ["export", store, destination],
        "train": ["train", "--store", store, "--output-dir", destination, *FAST],
        "benchmark": ["benchmark", store, "--output-dir", destination],
        "folds": ["benchmark", store, "--output-dir", work / "new", "--folds-dir", destination],
        "extract": ["extract", "--model", "none", "--questions", "package:facts", "--out", destination],
        "extract to a store": [
            "extract",
            "--model",
            "none",
            "--questions",
            "package:facts",
            "--out",
            f"{destination}.zarr",
        ],
        "merge": ["merge", store, destination],
        "subset": ["subset", store, destination, "--segments", "0"],
        "convert": ["convert", work / "traces", destination],
        "pull": ["pull", "a/b", destination],
    }[name]


@pytest.mark.parametrize("where", ["inside", "deep", "linked", "dots"])
@pytest.mark.parametrize(
    "name",
    ["export", "train", "benchmark", "folds", "extract", "extract to a store", "merge", "subset", "convert", "pull"],
)
def test_no_folder_is_made_in_a_store(name, where, work):
    store = work / "s.zarr"
    destination = {
        "inside": store / "new",
        "deep": store / "segments/new",
        "linked": work / "link/new",
        "dots": work / "r1/../s.zarr/new",
    }[where]
    (work / "link").symlink_to(store)
    if name == "folds":
        destination.mkdir()
    before = tree_digest(work)
    assert "is a store; choose a place outside of it" in error_of(*folder_words(name, work, destination), code=2)
    assert tree_digest(work) == before


@pytest.mark.parametrize("name", ["export", "train", "benchmark"])
def test_a_store_is_no_output_folder(name, work):
    before = tree_digest(work)
    error = error_of(*folder_words(name, work, work / "s.zarr"), *(["--overwrite"] if name != "export" else []), code=2)
    assert "is a store" in error and tree_digest(work) == before


@pytest.mark.parametrize(
    ("name", "folder", "is_mine"),
    [
        ("train", "b", False),
        ("benchmark", "r1", False),
        ("benchmark", "traces", False),
        *((name, f"mine/{file}", True) for name, file in (
            ("train", "report.html"), ("train", "predictions.csv"), ("train", "auroc.svg"), ("benchmark", "scores.csv"),
            ("benchmark", "table.txt"), ("benchmark", "report.html"))),
    ],
)  # fmt: skip
def test_an_output_folder_keeps_files_of_others(name, folder, is_mine, work):
    path = work / folder
    if is_mine:
        path.parent.mkdir()
        path.write_text("mine")
        path = path.parent
    before, had_lock = tree_digest(path), (path / ".lock").exists()
    words = folder_words(name, work, path)
    for flags in [["--overwrite"], *([[]] if is_mine else [])]:
        message = "a file in a folder without" if is_mine else "belongs to"
        assert message in error_of(*words, *flags, code=2)
    if not had_lock:
        (path / ".lock").unlink()
    assert tree_digest(path) == before


def test_an_output_folder_keeps_the_input(work):
    """Scores that a benchmark reads lie in its output folder."""
    out = work / "mine"
    out.mkdir()
    rows = [f"q{k},{k % 2}" for k in range(64)]
    (out / "scores.csv").write_text("\n".join(["question_id,hallucination_score", *rows, ""]))
    before = (out / "scores.csv").read_bytes()
    words = ["benchmark", work / "s.zarr", "--output-dir", out, "--scores", f"judge={out / 'scores.csv'}"]
    words += ["--overwrite"]
    assert "a file that this command reads" in error_of(*words, code=2)
    assert (out / "scores.csv").read_bytes() == before


def test_predictions_are_never_ground_truth(work, monkeypatch):
    """In an export folder predict writes predictions.csv, and the next conversion reads the scores as before."""
    traces = work / "traces"
    monkeypatch.chdir(traces)
    before = (traces / "scores.csv").read_bytes()
    words = ["predict", "--checkpoint", work / "r1/lstm_solo/best.pt", "--store", work / "s.zarr"]
    command(*words, check=0)
    assert (traces / "predictions.csv").exists() and (traces / "scores.csv").read_bytes() == before
    assert "exists; choose another name" in error_of(*words, code=2)
    assert "belongs to trace files" in error_of(*words, "--output", "scores.csv", "--overwrite", code=2)
    convert(traces, work / "again.zarr")
    with tracestore.open(work / "s.zarr") as one, tracestore.open(work / "again.zarr") as two:
        assert one.targets().tolist()[:60] == two.targets().tolist()[:60]


@pytest.mark.parametrize("name", ["scores.csv", "my_scores_2.csv", "predictions.csv", "judged.csv"])
@pytest.mark.parametrize("kind", ["predict", "train", "benchmark"])
def test_convert_takes_no_predictions_for_scores(name, kind, made, tmp_path):
    folder = tmp_path / "t"
    write_pickle(folder / "a.pkl", make_traces(6))
    if kind == "predict":
        words = ["predict", "--checkpoint", made / "r1/lstm_solo/best.pt", "--store", made / "s.zarr"]
        command(*words, "--output", tmp_path / "p.csv", check=0)
        shutil.copy(tmp_path / "p.csv", folder / name)
    else:
        shutil.copy(made / {"train": "r1/predictions.csv", "benchmark": "b/scores.csv"}[kind], folder / name)
    convert(folder, tmp_path / "s.zarr")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.score_fields == {} and store.info()["num_labeled"] == 0


def test_what_is_written_is_read_again(tmp_path):
    """Ids above the default limit of the csv module, and with lone surrogates."""
    traces = make_traces(4, tokens=3)
    for trace, question in zip(traces, ("a" * 300_000, "b\udcff", 'c"\n,', "d"), strict=True):
        trace["question_id"] = question
    store = write_store(tmp_path / "s.zarr", traces, score=lambda k: k / 4)
    command("export", store, tmp_path / "out", check=0)
    csv.field_size_limit(131_072)
    convert(tmp_path / "out", tmp_path / "again.zarr")
    with tracestore.open(store) as one, tracestore.open(tmp_path / "again.zarr") as two:
        assert {q: one[q].score for q in one.question_ids} == {q: two[q].score for q in two.question_ids}
    csv.field_size_limit(131_072)
    command("score", store, "--scores", tmp_path / "out/scores.csv", "--name", "again", check=0)
    with tracestore.open(store) as opened:
        assert opened.named_scores("again").tolist() == opened.named_scores("score").tolist()
        assert opened.to_pandas()["question_id"].tolist() == list(opened.question_ids)
