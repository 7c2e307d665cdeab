"""Checks of a built-in layout that only its author needs, and example files."""

import gzip
import json
import pickle

import numpy as np
import torch
from safetensors.numpy import save_file

from tracestore.ingest.builtin.library import Builtin


def check_builtin(builtin: Builtin) -> None:
    """Parse all of a layout, and assert that its lines and its signatures name the same files."""
    signatures = {text for text, pattern in builtin.patterns.items() if pattern.parts and builtin.signatures[text]}
    if builtin.reader is None:
        found = set(builtin.plan.files)
        assert found == signatures, (
            f"FILES of lines alone {found - signatures}, of signatures alone {signatures - found}"
        )


def write(path, value):
    """Write a value in the container of the path's suffix; a text is written unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, str):
        path.write_text(value)
    else:
        WRITERS[path.suffix](path, value)


def _write_pickle(path, value):
    with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
        pickle.dump(value, file)


WRITERS = {
    ".safetensors": lambda path, value: save_file(value, path),
    **dict.fromkeys((".pt", ".ckpt"), lambda path, value: torch.save(value, path)),
    ".npy": np.save,
    ".npz": lambda path, value: np.savez(path, **value),
    ".json": lambda path, value: path.write_text(json.dumps(value)),
    ".jsonl": lambda path, value: path.write_text("".join(json.dumps(row) + "\n" for row in value)),
    **dict.fromkeys((".pkl", ".gz"), _write_pickle),
}
