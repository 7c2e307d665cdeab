"""Web servers that lie: every command ends soon, with bounded memory and disk, and an error of one line."""

import json

import pytest

from tests.helpers import command, make_traces, write_store
from tests.hub.lies import LIES, bomb, disk_bytes, tell
from tests.machine import bounded
from tests.store.remote.test_malicious_server import FolderServer, send_all
from tests.tiers import long

_BLOCK_BYTES = 1 << 20
# The suite of every day has one of each kind.
_SHORT = {
    "endless_chunks_behind_the_right_length", "stall_in_the_body", "slow_headers", "endless_redirects",
    "broken_without_end",
}  # fmt: skip
NAMES = {lie.__name__: lie for lie in LIES}
ALL = [name for name in NAMES if name in _SHORT] + long(*(name for name in NAMES if name not in _SHORT))


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "local.zarr", make_traces(4, layers=2, tokens=24, dim=64))


@pytest.fixture
def serve(store, tmp_path, monkeypatch):
    """Return a function that starts a server, which lies about paths that contain a text."""
    monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / "cache"))
    servers = []

    def start(lie, part):
        def answer(handler, data):
            tell(lie, handler, data) if part in handler.path else send_all(handler, data)

        servers.append(FolderServer(store, answer))
        return servers[-1].url

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def impatient(monkeypatch):
    """Let a request fail soon."""
    bomb()
    monkeypatch.setenv("TRACESTORE_REMOTE_TIMEOUT", "0.2")
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "0.3")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_a_lie_about_a_file_of_the_store(serve, store, tmp_path, name):
    url = serve(NAMES[name], "/hidden_states/c/")
    with bounded():
        done = command("verify", url)
    assert done.returncode in LIES[NAMES[name]], done.stdout + done.stderr
    assert done.stderr.count("\n") == (done.returncode != 0)
    with bounded():
        done = command("report", url, "--output", tmp_path / "page.html")
    assert disk_bytes(tmp_path / "cache") <= disk_bytes(store) + _BLOCK_BYTES


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("impatient")
def test_a_lie_about_the_manifest(serve, tmp_path, name):
    """Its size is not known; 4 MiB are the limit."""
    url = serve(NAMES[name], "/manifest/0")
    for words in (["info", url], ["verify", url]):
        with bounded():
            done = command(*words)
        expected = LIES[NAMES[name]] | {2, 3} - {0}
        assert done.returncode in expected and done.stderr.count("\n") <= 1, done.stdout + done.stderr
    assert disk_bytes(tmp_path / "cache") < _BLOCK_BYTES


@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("impatient")
def test_a_lie_about_the_listing(serve, tmp_path, name):
    url = serve(NAMES[name], "/manifest/")
    with bounded():
        done = command("info", url)
    assert done.returncode in (0, 1, 2, 3) and done.stderr.count("\n") == (done.returncode != 0)


def test_a_listing_of_many_names_is_cut(serve, store, tmp_path):
    page = b"".join(b'<a href="%010d">' % k for k in range(1 << 19))
    url = serve(lambda handler, data: send_all(handler, page), "/manifest/")
    with bounded():
        done = command("info", url)
    assert done.returncode == 3 and "expected at most 4194304" in done.stderr


def test_chunked_answers_are_read(serve, store):
    """A server may state no length at all."""

    def chunked(handler, data):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        pieces = [data[k : k + 1000] for k in range(0, len(data), 1000)]
        handler.wfile.write(b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n")

    done = command("verify", serve(chunked, "/"), "--json", check=0)
    assert json.loads(done.stdout)["damaged"] == {}


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_cut_transfer_continues(serve, store, has_ranges):
    ranges, cut = [], set()

    def answer(handler, data):
        wanted = handler.headers.get("Range")
        ranges.append(wanted)
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and has_ranges else 0
        handler.send_response(206 if begin else 200)
        if begin:
            handler.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - begin))
        handler.end_headers()
        handler.close_connection = True
        end = len(data) if handler.path in cut else len(data) // 2
        cut.add(handler.path)
        handler.wfile.write(data[begin:end])

    done = command("verify", serve(answer, "/hidden_states/c/"), check=0)
    assert "intact" in done.stdout and any(ranges)


def test_a_login_is_sent_to_its_server_only(serve, store, monkeypatch):
    seen, elsewhere = [], []
    other = serve(
        lambda handler, data: (elsewhere.append(handler.headers["Authorization"]), send_all(handler, data)), "/"
    )

    def redirect(handler, data):
        seen.append(handler.headers["Authorization"])
        name = handler.path.rsplit("store.zarr", 1)[-1]
        handler.send_response(302)
        # To a server of another name, except for the listing.
        target = handler.path.replace("/store.zarr", "/store.zarr/.") if name == "/zarr.json" else f"{other}{name}"
        handler.send_header("Location", target)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    url = serve(redirect, "/").replace("http://", "http://user:p%40ss@")
    command("info", url, check=0)
    assert set(seen) == {"Basic dXNlcjpwQHNz"} and elsewhere and set(elsewhere) == {None}
