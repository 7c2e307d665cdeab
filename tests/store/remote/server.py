"""An S3 server in a separate process, and a proxy that injects faults."""

import atexit
import functools
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from tests.hub.http_servers import Handler, Server

BUCKET = "bucket"
# moto lists its modules at each request, which takes half of its time.
MOTO = """
from moto import backends, server
names = {*backends.list_of_moto_modules()}
backends.list_of_moto_modules = lambda: names
server.main()
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_until_it_answers(url, method="GET"):
    return wait_until(lambda: urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5), OSError)


def wait_until(call, *errors):
    """Call a function until it does not raise one of these errors, and return its result."""
    for _ in range(1500):
        try:
            return call()
        except errors:
            time.sleep(0.02)
    raise RuntimeError("the server does not answer")


def seaweedfs(program, folder, port):
    """Return the command of a SeaweedFS server whose data are in a folder."""
    user = {"name": "user", "credentials": [{"accessKey": "user", "secretKey": "secret"}], "actions": ["Admin"]}
    (folder / "users.json").write_text(json.dumps({"identities": [user]}))
    ports = {"master": free_port(), "volume": free_port(), "filer": free_port(), "s3": port}
    grpc = {f"{name}.port.grpc": free_port() for name in ports}
    options = {f"{name}.port": found for name, found in ports.items()} | grpc
    options |= {"s3.port.iceberg": 0, "s3.port.lance": 0, "dir": folder, "ip": "127.0.0.1", "volume.max": 20}
    options |= {"s3.config": folder / "users.json", "master.volumeSizeLimitMB": 256}
    return [program, "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())]


@contextmanager
def s3_server():
    """Start moto, or the `weed` that TRACESTORE_WEED names, with an empty bucket, and yield the URL."""
    port, weed = free_port(), os.environ.get("TRACESTORE_WEED")
    words = [sys.executable, "-c", MOTO, "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        if weed is not None:
            words = seaweedfs(weed, Path(folder), port)
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            if weed is None:
                wait_until_it_answers(f"{url}/{BUCKET}", "PUT")
            else:
                keys = {"aws_access_key_id": "user", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
                client = import_module("boto3").client("s3", endpoint_url=url, **keys)
                wait_until(lambda: client.create_bucket(Bucket=BUCKET), Exception)
            yield url
        finally:
            process.kill()
            process.wait()


@functools.cache
def shared_server():
    """Return the URL of the server for all tests of this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(s3_server())


class Proxy:
    """Forwards requests to a server and injects faults.

    `fault(count, method, path)` returns the fault of a request, which is counted from 0: None; "503", "403" or
    "400"; "cut" (the body ends in the middle); "stall" (no more bytes in the middle of the body); "lost" (the server
    carries out the request, but the response does not arrive); "flip" (one bit of the body is inverted); "no range"
    (the whole object is returned, whichever range was requested); "short", "long", "misplaced" or "other place" (an
    answer to a request for a range has fewer or more bytes than it states, states another place, or has the bytes of
    another place); or a delay in seconds (a float).
    `requests` counts the requests by (method, path); `sent` the bytes of bodies, `large` those of large arrays.
    """

    def __init__(self, server):
        self.fault = lambda count, method, path: None
        self.requests = Counter()
        self.count = self.sent = self.large = 0
        self._lock = threading.Lock()
        host, port = server.removeprefix("http://").split(":")
        proxy = self

        class Forwarding(Handler):
            def handle_one_request(self):
                try:
                    super().handle_one_request()
                except (ConnectionError, TimeoutError):
                    self.close_connection = True

            def answer(self):
                fault = proxy.next_fault(self.command, self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if isinstance(fault, float):
                    time.sleep(fault)
                if fault in ("503", "403", "400"):
                    self.send_response(int(fault))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                connection = http.client.HTTPConnection(host, int(port), timeout=60)
                left_out = ["connection", "content-length"] + ["range"] * (fault == "no range")
                headers = {k: v for k, v in self.headers.items() if k.lower() not in left_out}
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                data = bytearray(answer.read())
                connection.close()
                place = answer.getheader("Content-Range", "")
                proxy.sent += len(data)
                proxy.large += len(data) if "/c/0" in self.path and "last_token" not in self.path else 0
                if place and fault == "short":
                    data = data[: len(data) // 2]
                if place and fault == "long":
                    data += data
                if place and fault == "other place":
                    data = data[::-1]
                if fault == "lost":
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                        is_moved = fault == "misplaced" and name == "Content-Range"
                        self.send_header(name, "bytes 7-70" + value[value.index("/") :] if is_moved else value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if fault == "flip" and data:
                    data[len(data) // 2] ^= 1
                end = len(data) // 2 if fault in ("cut", "stall") else len(data)
                self.wfile.write(data[:end])
                if fault == "stall":
                    self.wfile.flush()
                    proxy.ended.wait(30)
                if fault in ("cut", "stall"):
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        self.ended = threading.Event()
        self._server = Server(Forwarding)
        self.url = self._server.url

    def next_fault(self, method, path):
        with self._lock:
            self.requests[method, path.split("?")[0]] += 1
            self.count += 1
            return self.fault(self.count - 1, method, path)

    def gets(self, ending=""):
        """Return the number of GET requests for paths with this ending."""
        return sum(n for (method, path), n in self.requests.items() if method == "GET" and path.endswith(ending))

    def close(self):
        self.ended.set()
        self._server.close()
