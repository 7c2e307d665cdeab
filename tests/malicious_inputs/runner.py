"""Read files in processes of their own, and report how each one ended.

    python -m tests.malicious_inputs.runner read|convert|unpickle [STORE]

Standard input holds one path per line, optionally followed by a tab and the working folder.
Standard output is one JSON document per line. The package is imported once. Each file gets a
fork of this process, so that signals, time and memory are measured per file.
"""

import contextlib
import hashlib
import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.machine import peak_bytes

# Safety limits, far beyond those that the tests assert.
_CPU_LIMIT_S = 20
_MEMORY_LIMIT_BYTES = 4 << 30
_STANDARD_ERROR = 2


def _read(path: Path, _store: str) -> dict[str, object]:
    from tracestore.errors import InvalidInputError
    from tracestore.ingest.builtin.parts import find_sources
    from tracestore.ingest.sources import read_traces
    from tracestore.store.write.pack import pack_record

    count = 0
    try:
        (source,) = find_sources([path], path.parent)
        for record in read_traces(source):
            pack_record(record, attention="heads", keep_dtype=False)
            count += 1
    except InvalidInputError as error:
        return {"ended": "refused", "text": str(error.with_location(source=path.name, position=count))}
    except BaseException as error:
        return {"ended": type(error).__name__, "text": str(error)[:500]}
    return {"ended": "accepted", "text": f"{count} traces"}


def _convert(path: Path, store: str) -> dict[str, object]:
    from tracestore import cli

    # Replace the descriptor, not sys.stderr, to capture the output of libraries too.
    caught = os.memfd_create("stderr")
    os.dup2(caught, _STANDARD_ERROR)
    sys.stdout = io.StringIO()
    code = cli.main(["convert", str(path), store, "--attention", "heads"])
    sys.stderr.flush()
    return {"ended": f"exit {code}", "text": os.pread(caught, 1 << 20, 0).decode()}


def _unpickle(path: Path, _store: str) -> dict[str, object]:
    """Unpickle a file, which the readers never do, to show that it would run its code."""
    import pickle

    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    try:
        pickle.loads(path.read_bytes())
    except BaseException as error:
        return {"ended": type(error).__name__, "text": str(error)[:200]}
    return {"ended": "loaded", "text": ""}


def _digest(store: Path) -> str:
    """Return a digest of all files of a store except the lock."""
    digest = hashlib.blake2b()
    for path in sorted(store.rglob("*")):
        if path.is_file() and path.name != "lock":
            digest.update(f"{path.relative_to(store)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def in_fork(work: Callable[[], dict[str, object]]) -> dict[str, object] | str:
    """Return the result of `work` in a fork of this process, or a text if the fork died."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.write(write_end, json.dumps(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) or not data:
        return "death: " + (signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}")
    return json.loads(data)  # type: ignore[no-any-return]


def _child(action, path: Path, store: str) -> dict[str, object]:  # type: ignore[no-untyped-def]
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_LIMIT_S, _CPU_LIMIT_S + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    before_bytes, before_s = peak_bytes(), time.process_time()
    result = action(path, store)
    return result | {"seconds": time.process_time() - before_s, "bytes": peak_bytes() - before_bytes}


def run_one(action, path: Path, store: str) -> dict[str, object]:  # type: ignore[no-untyped-def]
    """Return how an action on `path` ended in a fork."""
    found = in_fork(lambda: _child(action, path, store))
    return {"ended": found, "text": "", "seconds": 0.0, "bytes": 0} if isinstance(found, str) else found


def main() -> None:
    actions = {"read": _read, "convert": _convert, "unpickle": _unpickle}
    action, store = actions[sys.argv[1]], sys.argv[2] if len(sys.argv) > 2 else ""
    if sys.argv[1] == "read":
        import tracestore.ingest.builtin.parts
        import tracestore.ingest.sources
        import tracestore.store.write.pack
    elif sys.argv[1] == "convert":
        import tracestore.convert  # noqa: F401
    else:
        # Many files name functions of torch, which each fork would import.
        with contextlib.suppress(ModuleNotFoundError):
            import torch  # noqa: F401
    for line in sys.stdin:
        name, _, folder = line.rstrip("\n").partition("\t")
        if folder:
            os.chdir(folder)
        result = run_one(action, Path(name), store) | {"path": name}
        if store:
            result["store"] = _digest(Path(store))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
