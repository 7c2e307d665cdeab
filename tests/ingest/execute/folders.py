"""Small folders of dumps, and their conversion by a layout."""

import csv
import json
import pickle

import numpy as np
import pytest

import tracestore
from tracestore.errors import InvalidInputError


def states(*shape, seed=0):
    """Return random values of a shape, float32."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype("f4")


def dump(path, value):
    """Pickle a value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        pickle.dump(value, file)


def save(path, array):
    """Save an array as npy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


def table(path, rows):
    """Write dicts as CSV, or as JSON by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        return
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def convert(tmp_path, layout, **options):
    """Convert tmp_path/in by a layout; return the traces by (id, sample)."""
    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", layout=layout, **options)
    return {(trace.question_id, trace.sample): trace for trace in tracestore.open(tmp_path / "s.zarr")}


def refuse(tmp_path, layout, words, **options):
    """Assert that the conversion is refused with exit code 3 and a message that matches `words`."""
    with pytest.raises(InvalidInputError, match=words) as caught:
        tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", layout=layout, **options)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
