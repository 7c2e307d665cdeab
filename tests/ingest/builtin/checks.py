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
    signatures = {text: builtin.signatures[text] for text, pattern in builtin.patterns.items() if pattern.parts}
    assert builtin.reader is not None or set(builtin.plan.files) == signatures.keys()


def write(path, value):
    """Write a value in the container of the path's suffix; a text becomes a text file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, str):
        path.write_text(value)
    elif path.suffix == ".safetensors":
        save_file(value, path)
    elif path.suffix in (".pt", ".ckpt"):
        torch.save(value, path)
    elif path.suffix == ".npy":
        np.save(path, value)
    elif path.suffix == ".json":
        path.write_text(json.dumps(value))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in value))
    else:
        with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
            pickle.dump(value, file)
