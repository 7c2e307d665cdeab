"""The results of the detectors that a benchmark has finished, which an interrupted one keeps."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.benchmark.fold_runs import Activity, Job, Measured, measure_all
from tracestore.detectors.registry import registry
from tracestore.detectors.saved import FITTED_VERSION, MODEL_VERSION

_ARRAYS = ("scores", "probabilities", "transfer")


class FinishedResults:
    """A file with one line for each finished detector of each store.

    Parameters
    ----------
    path : Path
        File of lines of JSON.
    resume : bool
        Keep the lines of an earlier run.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path, self._lock = path, threading.Lock()
        self._found: dict[str, dict[str, Any]] = {}
        if not resume:
            path.unlink(missing_ok=True)
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # an empty line, or one that a crash has cut
                found = json.loads(line)
                self._found[found["of"]] = found["result"]

    def measure(self, jobs: Sequence[Job], workers: int, activity: Activity) -> Iterator[Measured]:
        """Yield the result of every job in their order: that of the file, or one that is measured and added to it."""
        of = {job[0]: _identity(*job) for job in jobs}
        # The code of a detector of another package may have changed; a note tells why there is no checkpoint.
        known = {
            name: found
            for name, *_, path in jobs
            if (found := self._find(of[name])) is not None
            and not registry()[name].is_foreign
            and (path is None or path.exists() or found.notes)
        }
        activity.total -= len(known)
        if known:
            activity.log(f"finished before: {', '.join(known)}")
        new = measure_all(
            [job for job in jobs if job[0] not in known],
            workers,
            activity,
            lambda found: self._add(found, of[found.name]),
        )
        for name, *_ in jobs:
            yield known.get(name) or next(new)

    def _find(self, of: str) -> Measured | None:
        found = self._found.get(of)
        if found is None:
            return None
        arrays = {key: {k: np.array(v, np.float64) for k, v in found[key].items()} for key in _ARRAYS}
        return Measured(**{**found, **arrays})

    def _add(self, result: Measured, of: str) -> None:
        """Append a result durably, from any thread."""
        arrays = {key: {k: v.tolist() for k, v in getattr(result, key).items()} for key in _ARRAYS}
        line = json.dumps({"of": of, "result": {**asdict(result), **arrays}})
        with self._lock, self.path.open("a") as file:
            file.write(f"\n{line}")
            file.flush()
            os.fsync(file.fileno())


def _identity(name: str, data: Any, others: Sequence[Any], seed: int, checkpoint: Path | None) -> str:
    """Return a digest of what the result of a job depends on: detector, traces, labels, folds and options."""
    facts = [
        (
            s.name,
            s.store.internals.manifest.to_bytes().decode(),
            s.y.tolist(),
            {k: v.tolist() for k, v in s.folds.items()},
        )
        for s in (data, *others)
    ]
    text = json.dumps([FITTED_VERSION, MODEL_VERSION, name, facts, seed, checkpoint is None])
    return hashlib.sha256(text.encode()).hexdigest()
