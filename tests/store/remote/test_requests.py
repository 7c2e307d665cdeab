"""Number of requests of a commit, and faults at each of them."""

import threading

import pytest

import tracestore
from tests.helpers import make_traces
from tests.hub.http_servers import Handler, Server
from tests.store.remote.stores import committed_files
from tests.tiers import long
from tracestore.store.maintain.verify import verify_store
from tracestore.store.remote import object_store
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.remote.publish import RemoteTarget

FAULTS = ["lost", "503", "cut"]


@pytest.mark.long
def test_a_small_commit_sends_at_most_15_requests(remote, proxy, tmp_path, monkeypatch):
    """Opening with an empty cache included, the files of the segment left out."""
    for k, trace in enumerate(make_traces(6)):
        monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / f"cache{k}"))
        proxy.requests.clear()
        with tracestore.create(remote, append=True) as writer:
            writer.append(trace, score=0.5)
        sent = {r: n for r, n in proxy.requests.items() if "/segments/" not in r[1]}
        assert sum(sent.values()) <= 15, sent
    with tracestore.open(remote) as store:
        assert len(store) == 6 and {e.path for e in committed_files(store)} <= set(
            ObjectStore(remote).list_recursive("")
        )


class Sink:
    """An S3 server that counts requests and keeps no byte."""

    def __init__(self):
        self.requests, self.num_bytes, lock = [], 0, threading.Lock()
        sink = self

        class Counting(Handler):
            def answer(self):
                left = int(self.headers.get("Content-Length") or 0)
                with lock:
                    sink.requests.append(f"{self.command} {self.path}")
                    sink.num_bytes += left
                while left:
                    left -= len(self.rfile.read(min(left, 1 << 20)))
                name = "CompleteMultipartUploadResult" if "uploadId" in self.path else "InitiateMultipartUploadResult"
                fields = "<Bucket>b</Bucket><Key>k</Key><UploadId>u</UploadId><ETag>e</ETag><Location>l</Location>"
                body = f"<{name}>{fields}</{name}>".encode() if self.command == "POST" else b""
                self.send_response(200)
                self.send_header("ETag", '"e"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_POST = do_GET = do_HEAD = answer

        server = Server(Counting)
        self.url, self.close = server.url, server.close


@pytest.mark.parametrize("share", [1.0, *long(0.6)])
@pytest.mark.long
def test_a_segment_of_1_gib_takes_at_most_30_requests(remote, tmp_path, monkeypatch, share):
    """`share` of it are hidden states, and the rest attention."""
    sink = Sink()
    monkeypatch.setenv("AWS_ENDPOINT_URL", sink.url)
    sizes = {"hidden_states/c/0/0": int(share * (1 << 30)), "attention/c/0": int((1 - share) * (1 << 30))}
    sizes |= dict.fromkeys(
        ("hidden_states/zarr.json", "attention/zarr.json", "last_token/zarr.json", "last_token/c/0/0/0"), 1000
    )
    files = [(path, size, 0) for path, size in (sizes | {"zarr.json": 100, "rows.zip": 100_000}).items()]
    for path, size, _ in files:
        (tmp_path / "segment" / path).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / "segment" / path).open("wb") as file:
            file.truncate(size)
    RemoteTarget(remote, overwrite=False, exist_ok=True).add_segment(tmp_path / "segment", "0" * 32, files)
    sink.close()
    assert len(sink.requests) <= 30, sink.requests
    assert sink.num_bytes >= sum(size for _, size, _ in files) and "rows.zip" in sink.requests[-1]


@pytest.mark.parametrize("fault", long(*FAULTS))
def test_a_fault_at_each_request_of_a_commit(remote, proxy, fault):
    """Opening included, with uploads, the look at other generations and removals."""
    traces, most = make_traces(30), 0
    for k, trace in enumerate(traces):
        sent = []

        def at(count, method, path, sent=sent, k=k):
            sent.append(path)
            return (
                fault
                if len(sent) == k + 1 or ("/manifest/" in path and method == "PUT" and sent.count(path) == 1)
                else None
            )

        proxy.fault = at
        with tracestore.create(remote, append=True) as writer:
            writer.append(trace)
        proxy.fault = lambda *_: None
        most = max(most, len(sent))
        if k == most:  # all requests have had the fault
            break
    assert 15 < most < len(traces) - 1
    with tracestore.open(remote) as store:
        assert list(store.question_ids) == [t["question_id"] for t in traces[: k + 1]] and store.generation == k + 1
    assert verify_store(remote).damaged == {}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.long
def test_a_fault_at_each_request_of_an_upload_in_parts(remote, proxy, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 << 20)
    path, data = tmp_path / "large", bytes(range(256)) * (12 << 12)
    path.write_bytes(data)
    objects = ObjectStore(remote)
    for k in range(8):
        count = proxy.count
        proxy.fault = lambda number, *_, at=count + k: fault if number == at else None
        objects.put(f"large{k}", path)
        assert objects.read(f"large{k}", 1 << 30) == data
