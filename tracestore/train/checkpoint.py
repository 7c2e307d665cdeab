"""Checkpoints: written atomically, loaded without running code."""

import io
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from tracestore.errors import UsageError
from tracestore.oom.guard import OOMGuard
from tracestore.oom.micro_batch import MicroBatchPolicy
from tracestore.oom.oom_errors import is_out_of_memory
from tracestore.oom.snapshot import get_random_state, restore_random_state
from tracestore.store.format.provenance import Provenance, require_compatible
from tracestore.store.io import fsio
from tracestore.train.batches import BatchFeed
from tracestore.train.config import TrainState

BEST, LAST = CHECKPOINTS = ("best.pt", "last.pt")
CHECKPOINT_VERSION = 7
# Entries of the identity of a run that are digests of its data.
_OF_STORE = {
    "traces": "other traces of the same questions",
    "answers": "other positions of the answers",
    "split_and_labels": "another split or other labels",
}


@dataclass(frozen=True)
class CheckpointedRun:
    """The objects whose state last.pt holds.

    `identity` holds the options that must not change when the run resumes. `provenance` is that of the store; one that
    conflicts with it is refused unless `allow_mixed_provenance` is true.
    """

    name: str
    guard: OOMGuard
    feed: BatchFeed
    identity: dict[str, Any]
    provenance: tuple[Provenance, ...] = ()
    allow_mixed_provenance: bool = False

    def state_dict(self, state: TrainState, result: dict[str, Any] | None, *, did_not_fit: bool) -> dict[str, Any]:
        """Return the state between two steps, random states included.

        `result` is the entry of results.json of a finished run. If `did_not_fit`, the run ended because
        one trace alone did not fit into memory.
        """
        scaler = self.guard.scaler
        return {
            "version": CHECKPOINT_VERSION,
            "name": self.name,
            "model": self.guard.model.state_dict(),
            "optimizer": self.guard.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "progress": asdict(state),
            "loader": self.feed.state_dict(state.epoch, state.batch),
            "random": get_random_state(),
            "guard": self.guard.state_dict(),
            "did_not_fit": did_not_fit,
            "config": self.identity,
            "provenance": [p.to_json() for p in self.provenance],
            "result": result,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> TrainState:
        """Restore what `state_dict` returned.

        Raises
        ------
        UsageError
            If the checkpoint is of another version or another run, or damaged. Out-of-memory errors propagate unchanged.
        """
        try:
            return self._restore(saved)
        except Exception as error:
            if isinstance(error, UsageError) or is_out_of_memory(error):
                raise
            raise UsageError(f"is not complete: {type(error).__name__}; train without --resume") from None

    def _restore(self, saved: dict[str, Any]) -> TrainState:
        # An option that another version added or removed changes the keys.
        if saved.get("version") != CHECKPOINT_VERSION or saved["config"].keys() != self.identity.keys():
            raise UsageError("is of another version of tracestore; train without --resume")
        for key, value in self.identity.items():
            if saved["config"][key] != value:
                if key in _OF_STORE:
                    raise UsageError(f"was trained on {_OF_STORE[key]}; continue with the store of the run")
                flag = key.removeprefix("model_").replace("_", "-")
                raise UsageError(f"was trained with {flag} {saved['config'][key]}, not {value}")
        if not self.allow_mixed_provenance:
            known = [Provenance.from_json(p) for p in saved["provenance"]]
            require_compatible(known, self.provenance, "is of another store")
        state = TrainState.from_dict(saved["progress"])
        steps, events = saved["guard"]["num_steps"], saved["guard"]["events"]
        if (
            type(steps) is not int
            or steps < 0
            or any(not isinstance(event, dict) or type(event["epoch"]) is not int for event in events)
        ):
            raise ValueError("not the state of a guard")
        _check_optimizer(saved["optimizer"], self.guard.optimizer)
        self.guard.model.load_state_dict(saved["model"])
        self.guard.optimizer.load_state_dict(saved["optimizer"])
        if self.guard.scaler is not None:
            self.guard.scaler.load_state_dict(saved["scaler"])
        planned = MicroBatchPolicy(self.guard.micro_batch)
        self.guard.load_state_dict(saved["guard"])
        if saved["did_not_fit"]:
            # The user has freed memory since, so the sizes of the checkpoint no longer apply.
            self.guard.policy = planned
        self.feed.loader.load_state_dict(saved["loader"])
        restore_random_state(saved["random"])
        return state


def _check_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless a state has the options and the shapes of the optimizer, which does not check them."""
    for mine, found in zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True):
        # Another version of torch may have more options.
        if any(found.get(name, value) != value for name, value in mine.items()):
            raise ValueError("other options")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shapes = {k: {"step": torch.Size(), "exp_avg": p.shape, "exp_avg_sq": p.shape} for k, p in enumerate(parameters)}
    for number, values in saved["state"].items():
        if {name: value.shape for name, value in values.items()} != shapes[number]:
            raise ValueError("other shapes")


def save_checkpoint(path: Path, value: dict[str, Any]) -> None:
    """Save tensors and plain values, atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    fsio.write_atomic(path, buffer.getbuffer())


def _require_uncompressed(file: BinaryIO) -> None:
    """Raise ValueError if the archive is compressed: torch.save does not compress, and the size is unbounded."""
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    stored = sum(entry.file_size for entry in entries)
    if stored > size or any(e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size for e in entries):
        raise ValueError("compressed")
    file.seek(0)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU, in no more memory than the file has bytes.

    Raises
    ------
    UsageError
        If the file is not a checkpoint. Out-of-memory errors propagate unchanged.
    """
    if path.is_dir():
        raise UsageError(f"{path}: a folder; the detector of a run is its file {path / BEST}")
    try:
        with fsio.open_regular(path) as file:
            _require_uncompressed(file)
            value = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such checkpoint") from None
    except Exception as error:
        if isinstance(error, UsageError) or is_out_of_memory(error):
            raise
        raise UsageError(f"{path}: not a checkpoint of this program: {type(error).__name__}") from None
    if not isinstance(value, dict) or "model" not in value:
        raise UsageError(f"{path}: not a checkpoint of this program")
    return value


# What a result takes from best.pt, by its name in the result.
_BEST = {"threshold": "threshold", "temperature": "temperature", "best_epoch": "epoch", "best_val_auroc": "val_auroc"}


def finished_test(saved: dict[str, Any], num_traces: int) -> tuple[dict[str, Any], np.ndarray]:
    """Return what `load_best` returned and the logits (num_traces,) of the test, from last.pt of a finished run.

    UsageError if the result in the checkpoint is damaged.
    """
    try:
        best = {entry: saved["result"][name] for name, entry in _BEST.items()}
        logits = np.array(saved["result"]["test_scores"]["logit"], np.float64)
        if not _is_best(best) or logits.shape != (num_traces,) or not np.isfinite(logits).all():
            raise ValueError
    except (KeyError, OverflowError, TypeError, ValueError):
        raise UsageError("holds no valid result; train without --resume") from None
    return best, logits


def _is_best(values: Mapping[str, Any]) -> bool:
    """Return whether the values have the names and types that `Trainer` gives them in best.pt."""
    floats = [values.get(name) for name in ("threshold", "temperature", "val_auroc")]
    if not all(type(value) is float and math.isfinite(value) for value in floats):
        return False
    return values["temperature"] > 0 and type(values.get("epoch")) is int


def load_best(path: Path, model: torch.nn.Module) -> dict[str, Any]:
    """Load best.pt of a run.

    Raises
    ------
    UsageError
        If it is not a checkpoint of `model` with what the test needs. Out-of-memory errors propagate unchanged.
    """
    best, expected = load_checkpoint(path), model.state_dict()
    weights = best["model"] if isinstance(best["model"], dict) else {}
    shapes = {name: getattr(value, "shape", None) for name, value in weights.items()}
    if not _is_best(best) or shapes != {n: v.shape for n, v in expected.items()}:
        raise UsageError(f"{path}: not the best epoch of this run; train again, with --overwrite")
    return best
