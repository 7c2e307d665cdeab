"""Checkpoints: written atomically, loaded without running code."""

import io
import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tracestore.errors import UsageError
from tracestore.oom.errors import is_out_of_memory
from tracestore.oom.guard import OOMGuard
from tracestore.oom.micro_batch import MicroBatchPolicy
from tracestore.oom.snapshot import get_random_state, restore_random_state
from tracestore.store.format.provenance import Provenance, require_compatible
from tracestore.store.io import fsio
from tracestore.train.batches import BatchFeed
from tracestore.train.config import TrainState

BEST, LAST = CHECKPOINTS = ("best.pt", "last.pt")
CHECKPOINT_VERSION = 6


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
            If the checkpoint is of another version or another run.
        """
        if saved.get("version") != CHECKPOINT_VERSION:
            raise UsageError("is of another version of tracestore; train without --resume")
        for key, value in self.identity.items():
            if saved["config"].get(key) != value:
                flag = key.removeprefix("model_").replace("_", "-")
                raise UsageError(f"was trained with {flag} {saved['config'].get(key)}, not {value}")
        if not self.allow_mixed_provenance:
            try:
                known = [Provenance.from_json(p) for p in saved["provenance"]]
            except (KeyError, TypeError, ValueError):
                raise UsageError("holds no valid provenance") from None
            require_compatible(known, self.provenance, "is of another store")
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
        return TrainState(**saved["progress"])


def save_checkpoint(path: Path, value: dict[str, Any]) -> None:
    """Save tensors and plain values, atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with fsio.atomic_write(path) as file:
        file.write(buffer.getbuffer())


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
    try:
        with fsio.open_regular(path) as file:
            _require_uncompressed(file)
            value = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such checkpoint") from None
    except UsageError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(f"{path}: not a checkpoint of this program: {type(error).__name__}") from None
    if not isinstance(value, dict) or "model" not in value:
        raise UsageError(f"{path}: not a checkpoint of this program")
    return value
