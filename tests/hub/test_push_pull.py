"""Push and pull, with the real library and a server like the Hugging Face Hub."""

import errno
import json
import os
import stat
import threading

import pytest

import tracestore
from tests.helpers import command, error_of, make_optional, make_traces, read_all, run_cli, tree_bytes, write_store
from tests.hub.server import TOKEN
from tests.tiers import long
from tracestore.hub import data_set, pull, push
from tracestore.store.format import paths

REPO = "user/traces"


@pytest.fixture
def store(tmp_path):
    """Write a store of two segments and several generations, with leftovers of a writer."""
    traces = make_traces(8)
    traces[1] |= make_optional(2)
    path = write_store(
        tmp_path / "store.zarr", traces, score=lambda k: k / 8, commit_after=[3],
        provenance={"model": "org/model|<b>", "layer_ids": [1, 2, 3]},
    )  # fmt: skip
    (path / ".tmp-0123456789abcdef/00000009").mkdir(parents=True)
    (path / ".tmp-0123456789abcdef/00000009/zarr.json").write_text("{}")
    return path


def push_it(store, *options, check=0):
    return command("push", store, REPO, *options, check=check)


def pull_it(dst, *options, check=0):
    return command("pull", REPO, dst, *options, check=check)


def test_a_pushed_store_is_pulled_as_it_was(hub, store, tmp_path):
    push_it(store)
    done = pull_it(tmp_path / "new.zarr")
    assert "8 traces" in done.stdout and "verified" in done.stdout and done.stderr == ""
    with tracestore.open(store) as old, tracestore.open(tmp_path / "new.zarr") as new:
        assert read_all(old) == read_all(new) and old.info() | {"path": ""} == new.info() | {"path": ""}
        newest = paths.manifest(old.generation)
    found, expected = tree_bytes(tmp_path / "new.zarr"), tree_bytes(store)
    assert found == {p: expected[p] for p in found} and newest in found
    assert {p.split("/")[1] for p in found if p.startswith("segments/")} == set(os.listdir(store / "segments"))
    assert "intact" in command("verify", tmp_path / "new.zarr", check=0).stdout
    assert not list(tmp_path.glob(".pull-*"))


def test_pulled_files_are_regular_read_only_and_writers_continue(hub, store, tmp_path):
    push_it(store)
    pull_it(tmp_path / "new.zarr")
    for path in (tmp_path / "new.zarr").rglob("*"):
        mode = path.lstat().st_mode
        assert stat.S_ISDIR(mode) or stat.S_ISREG(mode), path
        assert stat.S_ISDIR(mode) or path.name == "lock" or stat.S_IMODE(mode) == 0o444, path
    with tracestore.create(tmp_path / "new.zarr", append=True) as writer:
        writer.append(make_traces(9)[8])
    assert len(tracestore.open(tmp_path / "new.zarr")) == 9


def test_only_the_committed_generation_is_uploaded(hub, store):
    push_it(store)
    found = hub.files(REPO)
    assert not [p for p in found if "lock" in p or ".tmp-" in p]
    generations = [p for p in found if p.startswith("manifest/0")]
    assert len(generations) == 1 and found["manifest/newest"].decode().strip() == generations[0].removeprefix(
        "manifest/"
    )


def test_a_second_push_replaces_the_generation_and_keeps_other_files(hub, store, tmp_path):
    push_it(store, "--license", "mit")
    hub.replace(REPO, {"notes.txt": b"mine"})
    card = hub.files(REPO)["README.md"].decode()
    mine = (
        card.replace("tags:\n", "tags:\n- my-tag\n").replace(
            "<!-- tracestore: begin", "My words.\n<!-- tracestore: begin"
        )
        + "More."
    )
    hub.replace(REPO, {"README.md": mine.encode()})
    with tracestore.create(store, append=True) as writer:
        writer.append(make_traces(9)[8])
    uploads = sum(n for (method, path), n in hub.requests.items() if method == "PUT")
    push_it(store)
    found = hub.files(REPO)
    assert found["notes.txt"] == b"mine" and len([p for p in found if p.startswith("manifest/0")]) == 1
    assert sum(n for (method, _), n in hub.requests.items() if method == "PUT") - uploads < 12, "old segments stay"
    card = found["README.md"].decode()
    assert card.count("tracestore: begin") == 1 and "My words." in card and card.endswith("More.\n")
    assert "- my-tag" in card and "license: mit" in card and "| traces | 9 |" in card
    done = pull_it(tmp_path / "new.zarr")
    assert "left out 1 file of the data set that the store does not name: notes.txt" in done.stdout
    assert len(tracestore.open(tmp_path / "new.zarr")) == 9
    assert None not in hub.parents, "another commit in between is noticed"


def test_the_card_describes_the_store(hub, store):
    push_it(store, "--license", "cc-by-4.0")
    card = hub.files(REPO)["README.md"].decode()
    _, header, text = card.split("---\n", 2)
    assert "license: cc-by-4.0" in header and "- tracestore" in header and "- n<1K" in header
    assert "viewer: false" in header
    for row in (
        "| traces | 8 |",
        "| layers | 3 |",
        "| model | org/model\\|&lt;b&gt; |",
        "| layer\\_ids | \\[1, 2, 3\\] |",
        "| score | correct answer |  |  | yes |",
    ):
        assert row in text, row
    assert "token\\_entropy" in text and f"tracestore pull {REPO} traces.zarr" in text


def test_many_files_are_committed_in_parts_with_the_manifest_last(hub, store, tmp_path, monkeypatch):
    monkeypatch.setattr(push, "_FILES_PER_COMMIT", 3)
    push_it(store)
    assert len(hub.parents) > 3
    *_, before, last = hub.commits.values()
    assert not [p for p in before if p.startswith(("manifest", "index", "columns"))] and "zarr.json" in last
    pull_it(tmp_path / "new.zarr")


def test_an_interrupted_push_continues(hub, store):
    stored = []

    def fault(method, path):
        if method != "PUT":
            return None
        if len(stored) == 5:
            return 403
        stored.append(path)
        return None

    hub.fault = fault
    push_it(store, check=2)
    assert "README.md" not in hub.files(REPO)
    counts = {path: hub.requests["PUT", path] for path in stored}
    hub.fault = lambda *_: None
    push_it(store)
    assert "README.md" in hub.files(REPO)
    assert counts == {path: hub.requests["PUT", path] for path in stored}, "stored files are not uploaded again"


def test_an_interrupted_pull_continues(hub, store, tmp_path):
    push_it(store)
    downloads = []

    def fault(method, path):
        downloads.append(path) if method == "GET" and path.startswith("/large/") else None
        return 403 if len(downloads) > 8 else None

    hub.fault = fault
    pull_it(tmp_path / "new.zarr", check=2)
    assert not (tmp_path / "new.zarr").exists() and (tmp_path / ".pull-new.zarr").is_dir()
    hub.fault, first = lambda *_: None, downloads[:8]
    pull_it(tmp_path / "new.zarr")
    # The manifest is fetched again, and what other threads had not finished.
    assert sum(hub.requests["GET", path] > 1 for path in first) <= 1 + pull._REQUESTS
    assert "intact" in command("verify", tmp_path / "new.zarr", check=0).stdout and not list(tmp_path.glob(".pull-*"))


@pytest.mark.long
def test_a_pull_continues_with_a_newer_commit(hub, store, tmp_path):
    push_it(store)
    hub.fault = lambda method, path: 403 if path.endswith("last_token/c/0/0/0") else None
    pull_it(tmp_path / "new.zarr", check=2)
    hub.fault = lambda *_: None
    with tracestore.create(store, append=True) as writer:
        writer.append(make_traces(9)[8])
    push_it(store)
    pull_it(tmp_path / "new.zarr")
    assert len(tracestore.open(tmp_path / "new.zarr")) == 9
    found = tree_bytes(tmp_path / "new.zarr")
    assert len([p for p in found if p.startswith("manifest/")]) == 1
    report = json.loads(command("verify", tmp_path / "new.zarr", "--json", check=0).stdout)
    assert report["leftovers"] == []


def test_branches_and_commits(hub, store, tmp_path):
    report = json.loads(push_it(store, "--revision", "part", "--json").stdout)
    assert "manifest/newest" not in hub.files(REPO) and "manifest/newest" in hub.files(REPO, "part")
    assert hub.branches[REPO]["part"] == report["commit"] and report["url"] == f"{hub.url}/datasets/{REPO}"
    assert "holds no store" in error_of("pull", REPO, tmp_path / "x.zarr", code=2)
    assert not list(tmp_path.glob(".pull-*"))
    for revision in ("part", report["commit"]):
        found = json.loads(pull_it(tmp_path / f"{revision}.zarr", "--revision", revision, "--json").stdout)
        assert found["commit"] == report["commit"] and found["num_traces"] == 8
    assert "no such revision" in error_of("pull", REPO, tmp_path / "y.zarr", "--revision", "nothing", code=2)


def test_private_data_sets(hub, store, tmp_path, monkeypatch):
    push_it(store, "--private")
    assert hub.private[REPO]
    monkeypatch.delenv("HF_TOKEN")
    assert "no access to it; log in" in error_of("pull", REPO, tmp_path / "x.zarr", code=2)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    pull_it(tmp_path / "x.zarr")
    hub.create("user/public")
    assert "exists and is public" in error_of("push", store, "user/public", "--private", code=2)
    assert list(hub.files("user/public")) == [".gitattributes"]


@pytest.mark.long
def test_errors_are_one_line(hub, store, tmp_path, monkeypatch):
    new = tmp_path / "new.zarr"
    assert "no such data set" in error_of("pull", REPO, new, code=2)
    assert "not the id of a data set" in error_of("pull", "a/b/c", new, code=2)
    assert "no permission" in error_of("push", store, "others/traces", code=2)
    assert "no such store" in error_of("push", tmp_path / "nowhere", REPO, code=2)
    assert "push needs a folder" in error_of("push", "s3://bucket/s.zarr", REPO, code=2)
    assert "pull to a folder" in error_of("pull", REPO, "s3://bucket/s.zarr", code=2)
    assert "found license 'My License'" in error_of("push", store, REPO, "--license", "My License", code=2)
    assert '"license" must be one of' in error_of("push", store, REPO, "--license", "wrong", code=2)
    assert "exists already" in error_of("pull", REPO, store, code=2)
    hub.fault = lambda method, path: 500
    assert "500" in error_of("pull", REPO, new, code=1)
    hub.fault = lambda *_: None
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "no access to it; log in" in error_of("push", store, REPO, code=2)
    monkeypatch.setattr(data_set.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "Connection refused" in error_of("pull", REPO, new, code=1)
    assert not new.exists() and not list(tmp_path.glob(".pull-*"))


def test_a_damaged_store_is_not_pushed(hub, store):
    path = next(p for p in store.rglob("c/0/0") if "hidden_states" in str(p))
    os.chmod(path, 0o644)
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    assert "hidden_states/c/0/0: checksum mismatch" in error_of("push", store, REPO, code=3)
    assert REPO not in hub.branches


def test_a_damaged_file_is_refused_and_fetched_again(hub, store, tmp_path):
    push_it(store)
    path = next(p for p in hub.files(REPO) if "hidden_states/c" in p)
    good = hub.files(REPO)[path]
    hub.replace(REPO, {path: bytes([good[0] ^ 1]) + good[1:]})
    error = error_of("pull", REPO, tmp_path / "new.zarr", code=3)
    assert f"{path}: checksum mismatch" in error and not (tmp_path / "new.zarr").exists()
    hub.replace(REPO, {path: good})
    pull_it(tmp_path / "new.zarr")
    assert len(tracestore.open(tmp_path / "new.zarr")) == 8


@pytest.mark.parametrize("kind", ["manifest", *long("longer", "missing", "large manifest", "index")])
def test_a_data_set_that_contradicts_its_manifest_is_refused(hub, store, tmp_path, kind):
    push_it(store)
    files = hub.files(REPO)
    data = next(p for p in files if "hidden_states/c" in p)
    manifest = next(p for p in files if p.startswith("manifest/0"))
    index = next(p for p in files if p.startswith("index/") and p.endswith(".zip"))
    changed, message = {
        "longer": ({data: files[data] + b"x" * 1000}, f"{data}: found {len(files[data]) + 1000} bytes"),
        "missing": ({data: None}, f"{data}: missing in the data set"),
        "manifest": ({manifest: files[manifest][:-9] + b"00000000\n"}, f"{manifest}: checksum mismatch"),
        "large manifest": ({manifest: b" " * (5 << 20)}, f"{manifest}: found 5,242,880 bytes"),
        "index": ({index: bytes(len(files[index]))}, f"{index}: "),
    }[kind]
    hub.replace(REPO, changed)
    assert message.replace(",", "") in error_of("pull", REPO, tmp_path / "new.zarr", code=3).replace(",", "")
    assert not (tmp_path / "new.zarr").exists()
    if kind == "longer":
        assert not [p for (method, p), n in hub.requests.items() if p.endswith(data)], "it is not downloaded"


def test_strange_names_are_not_requested(hub, store, tmp_path):
    push_it(store)
    names = ["../escape", "/etc/passwd", "segments/../../x", "segments/00000000/run.py", "a\nb", "evil.pkl", "lock/x"]
    hub.replace(REPO, dict.fromkeys(names, b"strange"))
    done = pull_it(tmp_path / "new.zarr")
    assert f"{len(names)} files of the data set" in done.stdout and done.stdout.count("\n") == 2
    assert not [p for (_, p), n in hub.requests.items() for name in names if p.endswith(f"main/{name}")]
    assert not list(tmp_path.rglob("*escape*")) and not list((tmp_path / "new.zarr").rglob("run.py"))


def test_a_pull_does_not_use_a_folder_of_others(hub, store, tmp_path):
    push_it(store)
    folder = tmp_path / ".pull-new.zarr"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    assert "contains 'mine.txt'" in error_of("pull", REPO, tmp_path / "new.zarr", code=2)
    assert (folder / "mine.txt").read_text() == "mine"


def test_two_pulls_to_one_folder(hub, store, tmp_path):
    push_it(store)
    reached, done = threading.Event(), threading.Event()

    def show(*_):
        reached.set()
        done.wait(20)

    first = threading.Thread(target=pull.pull_store, args=(REPO, tmp_path / "new.zarr"), kwargs={"progress": show})
    first.start()
    assert reached.wait(20)
    assert "another writer holds" in error_of("pull", REPO, tmp_path / "new.zarr", code=5)
    done.set()
    first.join()
    assert len(tracestore.open(tmp_path / "new.zarr")) == 8


def test_too_little_space_is_reported_before_the_download(hub, store, tmp_path, monkeypatch):
    push_it(store)
    monkeypatch.setattr(pull.fsio, "free_bytes", lambda _: 1000)
    assert "the store needs at least " in error_of("pull", REPO, tmp_path / "new.zarr", code=4)


def test_a_full_disk_is_reported(hub, store, tmp_path, monkeypatch):
    push_it(store)

    def fail(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(pull.fsio, "pwritev_all", fail)
    assert "no space left on" in error_of("pull", REPO, tmp_path / "new.zarr", code=4)


@pytest.mark.long
def test_the_commands_in_processes_of_their_own(hub, store, tmp_path):
    run_cli("-m", "tracestore", "push", store, REPO, check=0)
    done = run_cli("-m", "tracestore", "pull", REPO, tmp_path / "new.zarr", check=0)
    assert done.stderr == "" and len(tracestore.open(tmp_path / "new.zarr")) == 8


def test_a_pushed_store_opens_over_http(hub, store, tmp_path, monkeypatch):
    pytest.importorskip("obstore")
    monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / "cache"))
    push_it(store)
    with tracestore.open(f"{hub.url}/datasets/{REPO}/resolve/main") as found, tracestore.open(store) as old:
        assert read_all(found) == read_all(old)
