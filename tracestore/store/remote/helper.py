"""Fetching files for forked processes.

The client of a server has threads, which do not survive a fork. A forked process starts this module as a process of
its own and sends it requests over a pipe.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from tracestore import errors
from tracestore.store.format.entries import FileEntry
from tracestore.store.remote.disk_cache import DiskCache
from tracestore.store.remote.object_store import ObjectStore


class Helper:
    """A process that fetches files into a cache and ends with this one. Safe to use from threads."""

    def __init__(self, address: str, cache: DiskCache) -> None:
        self._pid = os.getpid()
        words = [sys.executable, "-m", __name__, address, str(cache.folder), str(cache.max_bytes)]
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )
        self._lock = threading.Lock()

    @property
    def is_of_this_process(self) -> bool:
        """True if this process started the helper and the helper still runs."""
        return self._pid == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """End the helper."""
        if self._pid == os.getpid():
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()

    def fetch(self, entry: FileEntry) -> None:
        """Fetch a file into the cache; errors are those of DiskCache.get."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(asdict(entry)) + "\n")
                answer = json.loads(self._process.stdout.readline() or "null")
            except (OSError, ValueError):
                answer = None
        if answer is None:
            raise errors.RemoteError(f"{entry.path}: the process that fetches for this one has ended")
        if answer["error"]:
            raise getattr(errors, answer["error"])(answer["message"])


def serve(address: str, folder: str, max_bytes: str) -> None:
    """Answer requests, one a line, until the pipe is closed."""
    object_store, cache = ObjectStore(address), DiskCache(folder, int(max_bytes))
    for line in sys.stdin:
        answer = {"error": "", "message": ""}
        try:
            cache.get(object_store, FileEntry(**json.loads(line)))
        except errors.TracestoreError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # The caller reports it on one line.
            answer = {"error": "RemoteError", "message": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is for the process that sends the requests.
        serve(*sys.argv[1:])
