"""Containers as plain Python values: read, changed and written again."""

import csv
import io
import json
import pickle

import numpy as np

from tests.ingest.corpus.samples import open_binary


class Opaque(bytes):
    """The bytes of a file that is copied unchanged."""


def read_file(path):
    """Return a file as dicts, lists, arrays and tensors, or as bytes if it cannot be written again."""
    data = path.read_bytes()
    reader = READERS.get(path.suffix)
    try:
        return Opaque(data) if reader is None else reader(path, data)
    except Exception:
        return Opaque(data)


def write_file(path, value):
    """Write a value in the container of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, Opaque):
        path.write_bytes(value)
    else:
        WRITERS[path.suffix](path, value)


def _read_pickle(path, data):
    file = io.BytesIO(data)
    value = pickle.load(file)
    return Opaque(data) if file.read(1) else value


def _write_pickle(path, value):
    with open(path, "wb") as file:
        pickle.dump(value, file, protocol=4)


def _read_torch(path, data):
    import torch

    return torch.load(path, weights_only=False)


def _write_torch(path, value):
    import torch

    torch.save(_leaves(value, lambda array: torch.from_numpy(np.ascontiguousarray(array))), path)


def _read_npy(path, data):
    array = np.load(path, allow_pickle=True)
    return Opaque(data) if array.dtype.kind in "OV" else array


def _read_npz(path, data):
    found = dict(np.load(path, allow_pickle=True))
    return Opaque(data) if any(array.dtype.kind in "OV" for array in found.values()) else found


def _read_safetensors(path, data):
    from safetensors import safe_open
    from safetensors.torch import load

    with safe_open(path, "pt") as file:
        return Opaque(data) if file.metadata() else load(data)


def _write_safetensors(path, value):
    import torch
    from safetensors.torch import save_file

    # Tensors of one file share no memory.
    save_file(_leaves(value, lambda array: torch.from_numpy(np.array(array, order="C"))), path)


def _read_hdf5(path, data):
    import h5py

    def opened(item):
        if len(item.attrs):
            raise ValueError("attributes")
        if isinstance(item, h5py.Group):
            return {key: opened(item[key]) for key in item}
        value = item[()]
        if isinstance(value, bytes):
            return value.decode()
        return [text.decode() for text in value] if value.dtype == object else value

    with h5py.File(path) as file:
        return opened(file)


def _write_hdf5(path, value):
    import h5py

    def add(group, items):
        for key, item in items.items():
            if isinstance(item, dict):
                add(group.create_group(str(key)), item)
            else:
                group[str(key)] = item

    with h5py.File(path, "w") as file:
        add(file, value)


def _read_csv(path, data):
    rows = list(csv.DictReader(io.StringIO(data.decode())))
    return Opaque(data) if not rows or None in rows[0] or (len(rows[0]) == 1 and "\t" in str(rows[0])) else rows


def _write_csv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def _write_lines(path, rows):
    with open_binary(path) as file:
        file.writelines(json.dumps(_plain(row)).encode() + b"\n" for row in rows)


def _read_parquet(path, data):
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return Opaque(data) if table.schema.metadata else table.to_pylist()


def _write_parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(pa.Table.from_pylist([dict.fromkeys(names) | _plain(row) for row in rows]), path)


def _leaves(value, change):
    """Return a tree with its arrays of numbers changed."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return change(value)
    if type(value) is dict:
        return {key: _leaves(item, change) for key, item in value.items()}
    return type(value)(_leaves(item, change) for item in value) if type(value) in (list, tuple) else value


def _plain(value):
    """Return a tree with arrays as nested lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


READERS = {
    **dict.fromkeys((".pkl", ".pickle"), _read_pickle),
    **dict.fromkeys((".pt", ".pth"), _read_torch),
    **dict.fromkeys((".h5", ".hdf5"), _read_hdf5),
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".csv": _read_csv,
    ".json": lambda path, data: json.loads(data),
    ".jsonl": lambda path, data: [json.loads(line) for line in data.splitlines() if line.strip()],
    ".parquet": _read_parquet,
}
WRITERS = {
    **dict.fromkeys((".pkl", ".pickle"), _write_pickle),
    **dict.fromkeys((".pt", ".pth"), _write_torch),
    **dict.fromkeys((".h5", ".hdf5"), _write_hdf5),
    ".npy": lambda path, value: np.save(path, value),
    ".npz": lambda path, value: np.savez(path, **value),
    ".safetensors": _write_safetensors,
    ".csv": _write_csv,
    ".json": lambda path, value: path.write_text(json.dumps(_plain(value))),
    ".jsonl": _write_lines,
    ".parquet": _write_parquet,
}
