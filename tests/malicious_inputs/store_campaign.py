"""Run every operation on malicious stores, each in a fork of one process.

    python -m tests.malicious_inputs.store_campaign FOLDER FIRST COUNT [--remote]

Tests the stores of the seeds FIRST to FIRST + COUNT - 1. Standard output is one JSON document
per fault, standard error a summary. With --remote each store is on an object server, which
holds the regular files of the folder.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.helpers import tree_digest
from tests.machine import peak_bytes
from tests.malicious_inputs.runner import in_fork
from tests.malicious_inputs.stores import malicious_store, valid_stores

MAX_SECONDS = 5.0
MAX_BYTES = 64 << 20
_CANARY_BYTES = b"must not change\n"


def _cli(*words: object) -> tuple[int, str]:
    from tracestore import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(word) for word in words])
    return code, err.getvalue()


def _library(use: Callable[[], object]) -> tuple[int, str]:
    """Return exit code and error text as a command would."""
    from tracestore.errors import TracestoreError

    try:
        use()
    except TracestoreError as error:
        return error.exit_code, f"{error}\n"
    return 0, ""


def _batches(store: Path | str, view: str, **options: object) -> tuple[int, str]:
    import tracestore

    def use() -> None:
        with tracestore.open(store) as opened:
            for batch in tracestore.TraceLoader(opened, view=view, batch_size=3, **options):
                if view == "graph" and options.get("edge_format", "coo") == "coo":
                    index, count = batch.edge_index, batch.x.shape[0]
                    assert index.numel() == 0 or (int(index.min()) >= 0 and int(index.max()) < count)

    return _library(use)


def _fields(store: Path) -> tuple[int, str]:
    """Read every field of every trace; continue after an error and raise the first one."""
    import tracestore
    from tracestore.errors import MissingFieldError, TracestoreError

    def use() -> None:
        first: TracestoreError | None = None
        with tracestore.open(store) as opened:
            for trace in opened:
                for name in ("hidden_states", "last_token", "attention", "tokens", "tokens_decoded", "question", "answer",
                             "optional_fields", "extras", "score", "label", "group", "source", "question_id"):  # fmt: skip
                    try:
                        getattr(trace, name)
                    except MissingFieldError:
                        pass
                    except TracestoreError as error:
                        first = first or error
            try:
                if opened.lens is not None:
                    assert opened.lens.logits(np.ones((2, opened.hidden_dim), "f4")).shape[0] == 2
            except TracestoreError as error:
                first = first or error
            for index in range(len(opened)):
                with contextlib.suppress(KeyError):
                    opened.index_of(f"q{index}")
        if first is not None:
            raise first

    return _library(use)


def _serve(store: Path) -> tuple[int, str]:
    import tracestore
    from tracestore.serve.search import Query, TraceSearch

    def use() -> None:
        with tracestore.open(store) as opened:
            TraceSearch(opened).find(Query(words="why"))

    return _library(use)


def operations(more: Path) -> dict[str, Callable[[Path, Path], tuple[int, str]]]:
    """Return the operations by name; each takes a store and an output folder."""
    return {
        "info": lambda s, out: _cli("info", s),
        "verify": lambda s, out: _cli("verify", s),
        "verify --quick": lambda s, out: _cli("verify", s, "--quick"),
        "lint": lambda s, out: _cli("lint", s),
        "view": lambda s, out: _cli("view", s, "0"),
        "fields": lambda s, out: _fields(s),
        "sequences": lambda s, out: _batches(s, "sequence"),
        "graphs": lambda s, out: _batches(s, "graph"),
        "packed": lambda s, out: _batches(s, "graph", edge_format="packed"),
        "tokens": lambda s, out: _batches(s, "tokens", layers=0),
        "export": lambda s, out: _cli("export", s, out / "pkl"),
        "export pt-gnn": lambda s, out: _cli("export", s, out / "gnn", "--format", "pt-gnn"),
        "merge": lambda s, out: _cli("merge", s, out / "merged.zarr"),
        "serve": lambda s, out: _serve(s),
        "verify --repair": lambda s, out: _cli("verify", s, "--repair"),
        "score": lambda s, out: _cli("score", s, "--scores", out / "scores.csv"),
        "convert": lambda s, out: _cli("convert", more, s),
        "convert --overwrite": lambda s, out: _cli("convert", more, s, "--overwrite"),
    }


READERS = ("fields", "sequences", "graphs", "serve", "merge")
# These operations write to the store, one after the other in this order.
WRITERS = ("verify --repair", "score", "convert", "convert --overwrite")
ALLOWED = {0, 2, 3}


def forked(action: Callable[[], tuple[int, str]], max_seconds: float = MAX_SECONDS) -> dict[str, object]:
    """Return how an action ended in a fork of this process, with its seconds of processor time.

    The fork is killed after a time that is far beyond what a busy machine takes for `max_seconds`.
    """

    def work() -> dict[str, object]:
        signal.alarm(10 * int(max_seconds))
        before, began = peak_bytes(), time.process_time()
        try:
            code, text = action()
        except BaseException as error:
            code, text = -1, f"{type(error).__name__}: {error}"
        return {
            "code": code,
            "text": text[:10_000],
            "seconds": time.process_time() - began,
            "bytes": peak_bytes() - before,
        }

    found = in_fork(work)
    return {"code": None, "text": found, "seconds": 0.0, "bytes": 0} if isinstance(found, str) else found


def fault_of(name: str, result: dict[str, object], expected_bytes: int, max_seconds: float) -> str | None:
    """Return the fault of a result, or None."""
    code, text = result["code"], str(result["text"])
    allowed = ALLOWED | ({1} if name == "lint" else set())
    if code not in allowed:
        return f"ended with {code}"
    lines = [line for line in text.splitlines() if not line.startswith("warning: ")]
    # verify prints one line per damaged file.
    is_list = bool(lines) and all(line.startswith("damaged: ") for line in lines)
    if code not in (0, 1) and ((len(lines) != 1 and not is_list) or not all(map(str.isprintable, lines))):
        return "not one printable line"
    if float(result["seconds"]) > max_seconds:  # type: ignore[arg-type]
        return f"{result['seconds']:.1f} s"
    if int(result["bytes"]) > expected_bytes + MAX_BYTES:  # type: ignore[call-overload]
        return f"{int(result['bytes']) >> 20} MiB, expected about {expected_bytes >> 20}"  # type: ignore[call-overload]
    return None


class ObjectServer:
    """Uploads stores to an S3 server with plain requests, so that the forked process holds no client."""

    # The Python server needs a millisecond or more for each of about a hundred objects.
    max_seconds = 20.0

    def __init__(self, url: str, cache: Path) -> None:
        from tests.store.remote.server import BUCKET

        self._bucket, self._url, self._cache, self._count = BUCKET, f"{url}/{BUCKET}", cache, 0
        os.environ |= {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "TRACESTORE_CACHE_DIR": str(cache),
            "TRACESTORE_REMOTE_TIMEOUT": "2",
            "TRACESTORE_REMOTE_RETRY_TIMEOUT": "4",
        }

    def put(self, store: Path) -> str:
        """Upload the regular files of a store without its lock; return the URL."""
        shutil.rmtree(self._cache, ignore_errors=True)
        self._count += 1
        for path in store.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.name != "lock":
                name = f"{self._url}/{self._count}/store.zarr/{path.relative_to(store).as_posix()}"
                headers = {"Content-Type": "application/octet-stream"}  # by default the server expects a form
                urllib.request.urlopen(urllib.request.Request(name, path.read_bytes(), headers, method="PUT")).close()
        return f"s3://{self._bucket}/{self._count}/store.zarr"


def campaign(
    folder: Path, first: int, count: int, server: ObjectServer | None = None
) -> tuple[list[dict[str, object]], Counter[str]]:
    """Return the faults, and the count of each result."""
    max_seconds = MAX_SECONDS if server is None else server.max_seconds
    sources = valid_stores(folder)
    actions = operations(folder / "more.pkl")
    work = folder / "work"

    def fresh() -> tuple[Path, Path]:
        shutil.rmtree(work, ignore_errors=True)
        (work / "canary").mkdir(parents=True)
        (work / "canary" / "file.txt").write_bytes(_CANARY_BYTES)
        out = work / "out"
        out.mkdir()
        (out / "scores.csv").write_text("question_id,score\nq1,0.25\n")
        return work / "store.zarr", out

    usual_bytes: dict[tuple[str, str], int] = {}
    for store in sources:
        for name, action in actions.items():
            path, out = fresh()
            shutil.copytree(store, path)
            location = path if server is None else server.put(path)
            result = forked(lambda a=action, p=location, o=out: a(p, o), max_seconds)  # type: ignore[misc]
            usual_bytes[store.name, name] = int(result["bytes"])  # type: ignore[call-overload]
            # Some operations fail on a valid store: graphs without attention, a pickle in a store of edges.
            assert result["code"] in (0, 1, 2, 3), (store.name, name, result)
    faults: list[dict[str, object]] = []
    endings: Counter[str] = Counter()
    for seed in range(first, first + count):
        path, out = fresh()
        change = malicious_store(sources, seed, path)
        canary = tree_digest(work / "canary")
        elsewhere = tree_digest(work / "elsewhere") if (work / "elsewhere").exists() else ""
        codes: dict[str, object] = {}
        location = path if server is None else server.put(path)
        for name, action in actions.items():
            expected = usual_bytes[sources[seed % len(sources)].name, name]
            result = forked(lambda a=action: a(location, out), max_seconds)  # type: ignore[misc]
            endings[f"{name}: {result['code']}"] += 1
            codes[name] = result["code"]
            fault = fault_of(name, result, expected, max_seconds)
            if fault is None and name in READERS and result["code"] == 3 and codes["verify"] == 0:
                fault = "verify found no damage"
            if fault is None and tree_digest(work / "canary") != canary:
                fault = "the canary was changed"
            if fault is None and elsewhere and tree_digest(work / "elsewhere") != elsewhere:
                fault = "the target of a link was changed"
            expected = {"canary", "elsewhere", "out", "store.zarr", ".tmp-store.zarr", "cache"}
            if fault is None and set(os.listdir(work)) - expected:
                fault = f"left {sorted(os.listdir(work))}"
            if fault is not None:
                faults.append(
                    {
                        "seed": seed,
                        "change": change,
                        "operation": name,
                        "fault": fault,
                        "text": str(result["text"])[:300],
                    }
                )
    return faults, endings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--remote", action="store_true")
    args = parser.parse_args()
    import torch

    import tracestore.convert
    import tracestore.export.exporter

    torch.set_num_threads(1)
    if args.remote:
        import tracestore.store.remote.publish  # noqa: F401
        from tests.store.remote.server import s3_server

        with s3_server() as url:
            server = ObjectServer(url, args.folder / "work" / "cache")
            faults, endings = campaign(args.folder, args.first, args.count, server)
    else:
        faults, endings = campaign(args.folder, args.first, args.count)
    for fault in faults:
        print(json.dumps(fault))
    print(f"{args.count} stores, {sum(endings.values())} operations, {len(faults)} faults", file=sys.stderr)
    print(json.dumps(dict(sorted(endings.items()))), file=sys.stderr)


if __name__ == "__main__":
    main()
