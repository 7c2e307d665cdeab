"""Checkpoints: written whole or not at all, loaded as data."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from tracestore.errors import UsageError
from tracestore.oom.errors import is_out_of_memory
from tracestore.store.io import fsio

BEST, LAST = CHECKPOINTS = ("best.pt", "last.pt")


def pack_random_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of `get_random_state` in types that ``torch.load(weights_only=True)`` accepts."""
    version, internal, gauss = state["python"]
    numpy_state = state["numpy"]
    packed = {
        "torch": state["torch"],
        "python": [version, list(internal), gauss],
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }
    if "cuda" in state:
        packed["cuda"] = list(state["cuda"])
    return packed


def unpack_random_state(packed: dict[str, Any]) -> dict[str, Any]:
    version, internal, gauss = packed["python"]
    state = {
        "torch": packed["torch"],
        "python": (version, tuple(internal), gauss),
        "numpy": {
            "bit_generator": "MT19937",
            "state": {"key": packed["numpy"]["key"].numpy().astype(np.uint32), "pos": packed["numpy"]["pos"]},
            "has_gauss": packed["numpy"]["has_gauss"],
            "gauss": packed["numpy"]["gauss"],
        },
    }
    if "cuda" in packed:
        state["cuda"] = packed["cuda"]
    return state


def save_checkpoint(path: Path, value: dict[str, Any]) -> None:
    """Saves tensors and plain values, atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with fsio.atomic_write(path) as file:
        file.write(buffer.getbuffer())


def _require_uncompressed(file: BinaryIO) -> None:
    """ValueError unless the file is an archive as torch.save writes it: what is compressed may be of any size."""
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    stored = sum(entry.file_size for entry in entries)
    if stored > size or any(e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size for e in entries):
        raise ValueError("compressed")
    file.seek(0)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """UsageError where the file is not a checkpoint; what ran out of memory is raised as it is. Loading
    takes no more memory than the file has bytes."""
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
