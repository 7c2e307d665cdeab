"""A Hub that lies: pull ends soon, with bounded memory and disk, and an error of one line."""

import itertools
import json

import pytest

from tests.helpers import command, make_traces, write_store
from tests.hub.lies import LIES, bomb, disk_bytes
from tests.hub.server import TOKEN
from tests.machine import bounded
from tests.store.remote.test_lying_servers import ALL, NAMES
from tests.tiers import long
from tracestore.hub import data_set

REPO = "user/traces"
_BLOCK_BYTES = 1 << 20


@pytest.fixture
def pushed(hub, tmp_path, monkeypatch):
    """Push a store, and return its folder."""
    path = write_store(tmp_path / "store.zarr", make_traces(4, layers=2, tokens=24, dim=64))
    command("push", path, REPO, check=0)
    monkeypatch.setenv("TRACESTORE_REMOTE_TIMEOUT", "0.4")
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "0.8")
    return path


@pytest.fixture
def impatient(pushed, monkeypatch):
    """Let a request fail soon. Return a function that gives requests the time of those of a user."""
    bomb()
    monkeypatch.setenv("TRACESTORE_REMOTE_TIMEOUT", "0.2")
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "0.3")
    return lambda: [monkeypatch.delenv(f"TRACESTORE_REMOTE_{name}TIMEOUT") for name in ("", "RETRY_")]


def pull(tmp_path, **limits):
    with bounded(**limits):
        done = command("pull", REPO, tmp_path / "new.zarr")
    assert done.stderr.count("\n") == (done.returncode != 0) and (tmp_path / "new.zarr").exists() == (
        done.returncode == 0
    )
    return done


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_a_lie_about_a_file(hub, pushed, impatient, tmp_path, name):
    largest = max(hub.large, key=lambda digest: len(hub.large[digest]))
    hub.lie = lambda method, path: NAMES[name] if path == f"/large/{largest}" else None
    assert pull(tmp_path).returncode in LIES[NAMES[name]]
    assert sum(map(disk_bytes, (*tmp_path.glob(".pull-*"), tmp_path / "new.zarr"))) <= disk_bytes(pushed) + _BLOCK_BYTES
    hub.lie = lambda method, path: None
    impatient()
    if not (tmp_path / "new.zarr").exists():
        assert pull(tmp_path).returncode == 0
    assert "intact" in command("verify", tmp_path / "new.zarr", check=0).stdout


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("part", ["/revision/", *long("/tree/")])
@pytest.mark.usefixtures("impatient")
def test_a_lie_about_the_data_set(hub, tmp_path, name, part):
    """Answers without a known size: short JSON is accepted."""
    hub.lie = lambda method, path: NAMES[name] if part in path else None
    assert pull(tmp_path).returncode in {1, 2, 3}
    assert not list(tmp_path.glob(".pull-*"))


def page(entries, link=None):
    """Return an answer with a page of the list of files."""

    def send(handler, data):
        handler.answer(entries, **({"Link": f'<{link}>; rel="next"'} if link else {}))

    return send


def files(begin):
    return [{"type": "file", "path": f"segments/{k:08d}/rows.zip", "size": 1} for k in range(begin, begin + 1000)]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    ["endless pages", "the same page", *long("a ring", "empty pages", "deep", "no list", "long names", "numbers")],
)
def test_a_list_of_files_without_end(hub, pushed, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(data_set, "MAX_LIST_BYTES", 4 << 20)
    count = itertools.count()

    def lie(method, path):
        if "/tree/" not in path:
            return None
        k = next(count)
        here = f"{hub.url}{path}?recursive=true&cursor="
        entries, following = {
            "endless pages": (lambda: files(1000 * k), k),
            "the same page": (lambda: files(0), 1),
            "a ring": (lambda: files(0), k % 5),
            "empty pages": (list, k),
            "deep": (lambda: b"[" * (4 << 20), None),
            "no list": (lambda: {"error": "?"}, None),
            "long names": (lambda: [{"type": "file", "path": "x" * (2 << 20), "size": 1}], k),
            "numbers": (lambda: [1, None, {"type": "file"}, {"type": "file", "path": 1, "size": "?"}] * 1000, k),
        }[kind]
        return page(entries(), None if following is None else f"{here}{following}")

    hub.lie = lie
    done = pull(tmp_path)
    assert done.returncode == (2 if kind == "no list" else 1), done.stderr
    if kind not in ("deep", "no list"):
        assert "the list of files has no end" in done.stderr and hub.requests.total() < 5000


def test_the_token_is_sent_to_the_hub_only(hub, pushed, tmp_path):
    tokens = []

    def lie(method, path):
        if path.startswith("/large/"):
            return lambda handler, data: (tokens.append(handler.headers["Authorization"]), handler.answer(data))
        if "/tree/" in path and not tokens:
            tokens.append(None)
            return page([], f"{hub.url.replace('127.0.0.1', 'localhost')}{path}?cursor=1")
        return None

    hub.lie = lie
    assert "no end" in pull(tmp_path).stderr, "a next page of another server"
    assert pull(tmp_path).returncode == 0 and len(tokens) > 5 and set(tokens) == {None} and TOKEN


@pytest.mark.long
def test_a_partial_file_is_continued(hub, pushed, tmp_path):
    largest = max(hub.large, key=lambda digest: len(hub.large[digest]))
    data, ranges = hub.large[largest], []

    def half(handler, _):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2])

    def rest(handler, _):
        ranges.append(handler.headers["Range"])
        begin = int((handler.headers["Range"] or "bytes=0-")[6:-1])
        headers = {"Content_Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
        handler.answer(data[begin:], 206 if begin else 200, **headers)

    for answer in (half, rest):
        hub.lie = lambda method, path, answer=answer: answer if path == f"/large/{largest}" else None
        done = pull(tmp_path)
    assert done.returncode == 0 and ranges == [f"bytes={len(data) // 2}-"]


def test_a_partial_file_of_other_bytes_is_fetched_anew(hub, pushed, tmp_path):
    folder = tmp_path / ".pull-new.zarr" / ".partial"
    folder.mkdir(parents=True)
    path = next(p for p in hub.files(REPO) if "hidden_states/c" in p)
    (folder / path.replace("/", "-")).write_bytes(b"x" * 100)
    assert pull(tmp_path).returncode == 0
    assert json.loads(command("verify", tmp_path / "new.zarr", "--json", check=0).stdout)["damaged"] == {}
