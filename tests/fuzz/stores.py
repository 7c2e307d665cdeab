"""Fuzzing of opening and batching stores: the input chooses the changes of a valid store.

The first byte chooses the store. The other bytes answer the random choices of
`tests.malicious_inputs.stores`, so that a fuzzer that changes one byte changes one decision.
"""

import atexit
import contextlib
import functools
import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

import tracestore
from tests.malicious_inputs.stores import Store, change_store, valid_stores
from tracestore.errors import MissingFieldError, TracestoreError, UsageError
from tracestore.store.maintain import verify

MAX_CHANGES = 4
# verify reads every file, which takes as long as all the rest, so it runs for a quarter of the inputs.
_VERIFIED_FROM = b"\xc0"
_FIELDS = ("hidden_states", "last_token", "attention", "tokens", "tokens_decoded", "question", "answer", "extras",
           "score", "label", "group", "source", "question_id")  # fmt: skip
_VIEWS = (("sequence", {}), ("graph", {"as_pyg": False}), ("graph", {"as_pyg": False, "edge_format": "packed"}))


class ByteRandom(random.Random):
    """A random number generator that takes its bits from `data`, followed by zeros."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._position = data, 0

    @property
    def is_exhausted(self) -> bool:
        return self._position >= len(self._data)

    def getrandbits(self, k: int, /) -> int:
        size = -(-k // 8)
        chunk = self._data[self._position : self._position + size].ljust(size, b"\0")
        self._position += size
        return int.from_bytes(chunk, "little") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(16) / (1 << 16)


@functools.cache
def _folder() -> tuple[Path, list[Path]]:
    """Return a temporary folder and the valid stores in it. libFuzzer does not remove it from TMPDIR."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-stores-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.set_num_threads(1)
    return folder, valid_stores(folder)


def _attempt(use: object, *args: object, **options: object) -> bool:
    """Call `use` and return whether it succeeded; raise unless an error is one printable line."""
    try:
        use(*args, **options)  # type: ignore[operator]
    except TracestoreError as error:
        text = str(error)
        if not text or "\n" in text or len(text) > 1500 or not text.isprintable():
            raise RuntimeError(f"not one printable line: {text!r}") from None
        if error.exit_code not in (2, 3):
            raise
        return False
    return True


def _batches(store: tracestore.TraceStore, view: str, options: dict[str, object]) -> None:
    for batch in tracestore.TraceLoader(store, view, batch_size=3, num_threads=1, **options):  # type: ignore[arg-type]
        tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
        # Read every byte, so that a sanitizer detects memory outside the batch.
        for tensor in tensors:
            tensor.contiguous().view(torch.uint8).sum() if tensor.numel() else None
        if view == "graph" and options.get("edge_format", "coo") == "coo" and batch.edge_index.numel():
            assert 0 <= int(batch.edge_index.min()) <= int(batch.edge_index.max()) < len(batch.x)


def _fields(trace: object) -> None:
    for name in _FIELDS:
        try:
            value = getattr(trace, name)
        except (MissingFieldError, UsageError):
            continue
        if isinstance(value, np.ndarray) and value.size:
            np.ascontiguousarray(value).view("u1").sum()


def _use(path: Path) -> bool:
    with tracestore.open(path) as store:
        sound = [_attempt(_fields, trace) for trace in store]
        sound += [_attempt(_batches, store, view, options) for view, options in _VIEWS]
        for k in range(len(store)):
            with contextlib.suppress(KeyError):
                store.index_of(f"q{k}")
        return all(sound)


def read_store(data: bytes) -> bool:
    """Make the store that `data` describes; open, verify and batch it. Return whether it could be opened."""
    folder, sources = _folder()
    work = Path(tempfile.mkdtemp(dir=folder))
    try:
        rng = ByteRandom(data[1:])
        path = work / "store.zarr"
        (work / "canary").mkdir()
        source = sources[(data[0] if data else 0) % len(sources)]
        # Changes replace files and never write to them, so links are sufficient.
        shutil.copytree(source, path, copy_function=os.link)
        store = Store(path)
        for _ in range(MAX_CHANGES):
            with contextlib.suppress(Exception):  # an earlier change may have made the store unreadable
                if change_store(rng, store) == "change_file":
                    break  # a later change would read the device or FIFO
            if rng.is_exhausted:
                break
        opened = _attempt(_use, path)
        if data[:1] >= _VERIFIED_FROM:
            _attempt(verify.verify_store, path)
        return opened
    finally:
        shutil.rmtree(work, ignore_errors=True)
