"""Malicious servers: no file outside the cache, bounded time and memory, errors of one line."""

import os
import time
import urllib.request

import numpy as np
import pytest

import tracestore
from tests.helpers import command, make_traces, write_pickle, write_store
from tests.hub.http_servers import Handler, Server
from tests.machine import bounded
from tests.malicious_inputs.stores import Store
from tests.store.remote.stores import upload
from tests.tiers import long
from tracestore._core.kernels import crc32c
from tracestore.store.format.ragged import encode_strings


@pytest.fixture
def local_store(tmp_path):
    """A store of one generation."""
    path = tmp_path / "local.zarr"
    return write_store(path, make_traces(4, layers=2))


class FolderServer:
    """A web server for a folder. `answer(handler, data)` sends the response for a file or a listing."""

    def __init__(self, root, answer):
        class OfFolder(Handler):
            def do_GET(self):
                path = root / self.path.partition("?")[0].lstrip("/").split("/", 1)[-1]
                if path.is_dir():
                    names = "".join(f'<a href="{name}">' for name in sorted(os.listdir(path)))
                    data = names.encode()
                elif path.is_file():
                    data = path.read_bytes()
                else:
                    self.send_error(404)
                    return
                try:
                    answer(self, data)
                except OSError:
                    self.close_connection = True

            def do_HEAD(self):
                self.send_response(200 if (root / self.path.lstrip("/").split("/", 1)[-1]).is_file() else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

        server = Server(OfFolder)
        self.url, self.close = f"{server.url}/store.zarr", server.close


@pytest.fixture
def serve(local_store, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRACESTORE_REMOTE_TIMEOUT", "0.5")
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "0.6")
    servers = []

    def start(answer):
        servers.append(FolderServer(local_store, answer))
        return servers[-1].url

    yield start
    for server in servers:
        server.close()


def send_all(handler, data, length=None):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)


def test_a_valid_server_is_accepted(serve):
    assert "4" in command("info", serve(send_all), check=0).stdout


@pytest.mark.long
@pytest.mark.parametrize("part", ["everything", *long("manifest", "index")])
def test_a_slow_server_is_an_error(serve, part):
    """A server that sends five bytes per second makes no progress, whichever object it sends."""

    sent_whole = []

    def answer(handler, data):
        if part != "everything" and f"/{part}" not in handler.path:
            return send_all(handler, data)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        for k in range(len(data)):
            handler.wfile.write(data[k : k + 1])
            handler.wfile.flush()
            time.sleep(0.2)
        sent_whole.append(handler.path)
        return None

    done = command("info", serve(answer))
    assert done.returncode in (1, 2) and done.stderr.count("\n") == 1
    assert sent_whole == []


def test_an_endless_manifest_is_refused(serve):
    def answer(handler, data):
        if "/manifest/0" not in handler.path:
            return send_all(handler, data)
        send_all(handler, b"", 1 << 40)
        while True:
            handler.wfile.write(bytes(1 << 16))

    with bounded():
        done = command("info", serve(answer))
    assert done.returncode == 3 and "expected at most" in done.stderr and done.stderr.count("\n") == 1


def test_unexpected_names_in_a_listing_are_ignored(serve):
    """Only files whose names are those of manifests are requested."""

    def answer(handler, data):
        if handler.path.rstrip("/").endswith("manifest"):
            data = b'<a href="../../../etc/passwd"><a href="/etc/passwd"><a href="x"><a href="00000000001">' + data
        send_all(handler, data)

    assert command("info", serve(answer)).returncode == 0


@pytest.mark.parametrize("name", ["../../../evil.pth", *long("/tmp/evil.pth", "segments/00000000/../../../evil.pth")])
def test_paths_in_a_manifest_cannot_leave_the_cache(local_store, remote, tmp_path, name):
    """A conversion into the store fetches the files that its manifest names."""
    target = tmp_path / "evil.pth"
    name = str(target) if name.startswith("/") else name
    store = Store(local_store)
    store.manifest["columns"][0]["path"] = name
    store.seal()
    upload(local_store, remote)
    source = write_pickle(tmp_path / "a.pkl", make_traces(1))
    for words in (
        ["convert", source, remote],
        ["info", remote],
        ["verify", remote],
        ["score", remote, "--scores", source],
    ):
        done = command(*words)
        assert done.returncode in (2, 3) and not target.exists(), words
    assert not list(tmp_path.rglob("evil*"))


def test_an_absolute_path_is_neither_requested_nor_written(local_store, server, remote, proxy, tmp_path):
    """The server has an object for the path in the manifest, with the size and the checksum that the manifest states."""
    target, data = tmp_path / "evil.pth", b"import os"
    store = Store(local_store)
    store.manifest["columns"][0] |= {"path": str(target), "size": len(data), "crc32c": crc32c(data)}
    store.seal()
    upload(local_store, remote)
    requested = []

    def create_object(count, method, path):
        if path.endswith(target.name):
            requested.append(path)
            headers = {"Content-Type": "application/octet-stream"}
            urllib.request.urlopen(urllib.request.Request(server + path, data=data, method="PUT", headers=headers))

    proxy.fault = create_object
    command("convert", write_pickle(tmp_path / "a.pkl", make_traces(1)), remote, check=3)
    assert not target.exists() and not requested


def test_paths_in_the_index_cannot_leave_the_cache(local_store, remote, tmp_path):
    store = Store(local_store)
    arrays = store.part(0)
    names = [str(tmp_path / "evil.pth")] * len(arrays["segment_size"])
    arrays["segment_name"], arrays["segment_name_offsets"] = encode_strings(names)
    store.set_part(0, arrays)
    store.seal()
    upload(local_store, remote)
    with (
        tracestore.open(remote) as opened,
        pytest.raises(tracestore.errors.CorruptStoreError, match="not a valid path"),
    ):
        np.asarray(opened[0].hidden_states)
    assert not list(tmp_path.rglob("evil*"))
