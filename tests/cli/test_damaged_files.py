"""Damaged results, checkpoints, splits, ids and cards: exit code 0 or 2 and one line, never an unexpected error.

TRACESTORE_MUTATIONS sets the number of random changes of each file.
"""

import json
import os
import random
import shutil

import pytest

import tracestore
from tests.cli.mutations import mutated
from tests.helpers import command, error_of, make_traces, write_store
from tests.train.runs import FAST, ONLY, write_labeled
from tracestore.errors import UsageError
from tracestore.serve.results import Results
from tracestore.store.io import fsio
from tracestore.store.maintain import selection
from tracestore.train.checkpoint import load_checkpoint, save_checkpoint

COUNT = int(os.environ.get("TRACESTORE_MUTATIONS", "25"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with a store, runs of one and of several trainings, and a benchmark with saved detectors."""
    folder = tmp_path_factory.mktemp("damaged")
    store = write_labeled(folder / "s.zarr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACESTORE_CACHE_DIR", str(folder / "cache"))
        flags = ["--store", store, *FAST, *ONLY["lstm_solo"], "--epochs", 1]
        command("train", *flags, "--output-dir", folder / "one", check=0)
        command("train", *flags, "--output-dir", folder / "many", "--folds", 2, "--seeds", 2, check=0)
        words = ("--detectors", "probe_last", "--folds", 2, "--workers", 1, "--output-dir", folder / "b")
        command("benchmark", store, *words, "--save-detectors", check=0)
    return folder


def run(*words):
    """Run a command that must succeed, or report one line."""
    done = command(*words)
    assert done.returncode in (0, 2), (words, done.stderr)
    assert "unexpected" not in done.stderr and "no such id" not in done.stderr, done.stderr
    if done.returncode:
        assert done.stderr.count("\n") == 1, done.stderr
    return done


@pytest.mark.long
@pytest.mark.parametrize("name", ["one", "many"])
def test_mutated_results(name, made, tmp_path):
    results, rng = json.loads((made / name / "results.json").read_text()), random.Random(name)
    shutil.copytree(made / name, tmp_path / "r")
    codes, store = [], tracestore.open(made / "s.zarr")
    for _ in range(COUNT):
        (tmp_path / "r/results.json").write_text(json.dumps(mutated(results, rng)))
        folders = [made / name, tmp_path / "r"]
        rng.shuffle(folders)
        codes.append(run("compare", *folders, "--output", tmp_path / "page.html").returncode)
        try:
            Results.read([tmp_path / "r"], store)
        except UsageError as error:
            assert "\n" not in str(error)
    assert {*codes} == {0, 2}


@pytest.mark.long
def test_a_full_disk_has_its_exit_code(made, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fsio.os, "fsync", full)
    done = command("compare", made / "one", made / "many", "--output", tmp_path / "page.html")
    assert done.returncode == 2
    shutil.copytree(made / "one", tmp_path / "r")
    done = command("compare", made / "one", tmp_path / "r", "--output", tmp_path / "page.html", check=4)
    assert "no space left" in done.stderr and not (tmp_path / "page.html").exists()


@pytest.mark.long
@pytest.mark.parametrize("path", ["one/lstm_solo/best.pt", "b/checkpoints/probe_last.pt"])
def test_mutated_detectors(path, made, tmp_path):
    saved, rng = load_checkpoint(made / path), random.Random(path)
    codes = []
    for _ in range(2 * COUNT):
        save_checkpoint(tmp_path / "c.pt", mutated(saved, rng))
        words = ["--checkpoint", tmp_path / "c.pt", "--store", made / "s.zarr", "--num-threads", 1]
        codes.append(run("predict", *words, "--output", tmp_path / "p.csv", "--overwrite").returncode)
    assert {*codes} == {0, 2}


@pytest.mark.parametrize("key", ["threshold", "slope", "store"])
@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), 10**400, None, "x", [], {}, -1, True], ids=lambda v: f"{v!r:.9}"
)
def test_values_of_a_saved_detector_are_checked(key, value, made, tmp_path):
    saved = load_checkpoint(made / "b/checkpoints/probe_last.pt")
    saved |= {key: saved["store"] | {"shape": [value, value]} if key == "store" else value}
    save_checkpoint(tmp_path / "c.pt", saved)
    words = ["--checkpoint", tmp_path / "c.pt", "--store", made / "s.zarr", "--output", tmp_path / "p.csv"]
    done = run("predict", *words)
    is_number = value in (-1, True) and key != "store"
    assert done.returncode == (0 if is_number else 2), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("epochs", [1, 2])
def test_mutated_checkpoints_of_a_run(epochs, made, tmp_path):
    """A finished training is kept or refused; one that continues may also find a damaged best epoch."""
    shutil.copytree(made / "one", tmp_path / "r", ignore=shutil.ignore_patterns("results.json"))  # which has a probe
    rng = random.Random(epochs)
    files = {name: load_checkpoint(made / f"one/lstm_solo/{name}") for name in ("last.pt", "best.pt")}
    words = ["train", "--store", made / "s.zarr", *FAST, *ONLY["lstm_solo"], "--epochs", epochs, "--no-probe"]
    codes = []
    for _ in range(COUNT):
        for name, saved in files.items():
            save_checkpoint(tmp_path / f"r/lstm_solo/{name}", mutated(saved, rng) if name == "last.pt" else saved)
        if epochs == 2 and rng.random() < 0.3:
            save_checkpoint(tmp_path / "r/lstm_solo/best.pt", mutated(files["best.pt"], rng))
        codes.append(run(*words, "--output-dir", tmp_path / "r", "--resume").returncode)
    assert {*codes} == {0, 2}


@pytest.mark.parametrize("name", ["one", "many"])
def test_mutated_splits(name, made, tmp_path):
    shutil.copytree(made / name, tmp_path / "r", ignore=shutil.ignore_patterns("results.json"))  # which has a probe
    path = tmp_path / "r" / ("split.json" if name == "one" else "folds.json")
    saved, rng = json.loads(path.read_text()), random.Random(name)
    words = ["train", "--store", made / "s.zarr", *FAST, *ONLY["lstm_solo"], "--epochs", 1, "--no-probe"]
    words += ["--folds", 2, "--seeds", 2] if name == "many" else []
    codes = []
    for _ in range(COUNT):
        path.write_text(json.dumps(mutated(saved, rng)))
        codes.append(run(*words, "--output-dir", tmp_path / "r", "--resume").returncode)
    assert 2 in codes


def test_files_of_ids(made, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "_MAX_IDS_BYTES", 1 << 20)
    os.mkfifo(tmp_path / "pipe")
    rng = random.Random(1)
    contents = {
        "empty": b"",
        "blank": b" \n\t\r\n",
        "binary": rng.randbytes(10_000),
        "nul": b"\0" * 1000,
        "large": b"q" * (2 << 20),
        "many": b"q1\n" * (1 << 19),
        "unknown": b"nobody\n",
        "utf16": "q1\n".encode("utf-16"),
        "long id": b"q" * 500_000,
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    special = ["/dev/zero", "/dev/null", "/dev/urandom", tmp_path, tmp_path / "pipe", tmp_path / "none"]
    for path in [*special, *(tmp_path / name for name in contents)]:
        error_of("subset", made / "s.zarr", tmp_path / "d.zarr", "--ids", path, code=2)
        assert not (tmp_path / "d.zarr").exists(), path
    (tmp_path / "ids").write_bytes(b"\xef\xbb\xbfq1\r\nq2\n\n")
    run("subset", made / "s.zarr", tmp_path / "d.zarr", "--ids", tmp_path / "ids")
    assert list(tracestore.open(tmp_path / "d.zarr").question_ids) == ["q1", "q2"]


@pytest.mark.parametrize(
    "words",
    [
        ("score", "S", "--scores", "F"),
        ("predict", "--checkpoint", "F", "--store", "S", "--output", "O"),
        ("benchmark", "S", "--scores", "a=F", "--output-dir", "O"),
        ("convert", "T", "O", "--provenance", "F"),
        ("convert", "T", "O", "--scores", "F"),
        ("extract", "--model", "none", "--questions", "F", "--out", "O"),
        ("serve", "S", "--results", "F"),
    ],
    ids=" ".join,
)
def test_a_device_is_no_input(words, made, tmp_path):
    (tmp_path / "t.pkl").write_bytes(b"")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    places = {"S": made / "s.zarr", "O": tmp_path / "o.csv", "T": tmp_path / "t.pkl"}
    places |= {"F": tmp_path / "zero.csv", "a=F": f"a={tmp_path / 'zero.csv'}"}
    assert run(*(places.get(word, word) for word in words)).returncode == 2


def test_lint_reports_an_issue_of_the_whole_store(tmp_path):
    """One class, scores and no label: an issue that belongs to no trace."""
    traces = make_traces(6, tokens=4)
    for trace in traces:
        trace["attentions"] = [(a / a.sum(-1, keepdims=True)).astype("f2") for a in trace["attentions"]]
    store = write_store(tmp_path / "s.zarr", traces, score=0.9)
    done = command("lint", store, check=1)
    assert "rare_class: class 1 (hallucination): 0 of 6 at threshold 0.5" in done.stdout and done.stderr == ""


YAML = (
    "---\nlicense: mit\ntags:\n- a\nsize_categories:\n- n<1K\nconfigs:\n- config_name: b\n  data_files: x\n---\n# T\n"
)
BAD_CARDS = [
    "---\nx: [\n---\n", "---\n- a\n---\n", "---\na: b: c\n---\n", "---\na: !!python/object:os.system x\n---\n",
    f"---\n{'[' * 3000}\n---\n", "---\ntags: 3\n---\n", "---\ntags: {a: 1}\n---\n", "---\n\x00\n---\n", "---\n&a [*a]\n---\n",
    "---\n\tx: 1\n---\n", "---\n'\n---\n",
]  # fmt: skip


@pytest.mark.long
def test_cards(made):
    from tracestore.hub.card import make_card

    rng = random.Random(3)
    found = list(BAD_CARDS)
    for _ in range(4 * COUNT):
        text = list(YAML)
        for _ in range(rng.randint(1, 6)):
            text[rng.randrange(len(text))] = rng.choice([*"\t:[]{}-&*!'\"\n\x00?|%", "", "---\n"])
        found.append("".join(text))
    with tracestore.open(made / "s.zarr") as store:
        for k, text in enumerate(found):
            try:
                assert "tracestore: begin" in make_card(store, "a/b", None, text) and k >= len(BAD_CARDS)
            except UsageError as error:
                assert "a/b: README.md: the metadata is not valid: " in str(error) and "\n" not in str(error)
