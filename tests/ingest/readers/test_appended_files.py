"""Test files behind one another in one file, as a script that opens it to append leaves them: all are read, or none."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
from functools import partial

import numpy as np
import pytest

from tests.ingest.corpus.samples import tensor
from tests.ingest.readers.trees import read_tree, refusal

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def written(write, value):
    """Return the bytes that a function writes of a value."""
    out = io.BytesIO()
    write(out, value)
    return out.getvalue()


def rows(number):
    return pa.table({"id": [f"q{number}{k}" for k in range(3)], "h": [[float(number), k + 0.5] for k in range(3)]})


def ipc(new, number):
    table = rows(number)

    def write(out, table):
        with new(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)

    return written(write, table)


def parquet(number, **options):
    return written(lambda out, table: pq.write_table(table, out, **options), rows(number))


def safetensors(number):
    header = json.dumps({f"a{number}": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


def torch_file(number):
    torch = pytest.importorskip("torch")
    return written(lambda out, value: torch.save(value, out), {f"a{number}": tensor(np.ones(2, "f4"))})


def line(number):
    return json.dumps({"id": number}).encode() + b"\n"


ONE_FILE = {
    "a stream of Arrow": ("x.arrow", partial(ipc, pa.ipc.new_stream)),
    "a file of Arrow": ("x.arrow", partial(ipc, pa.ipc.new_file)),
    "feather": ("x.feather", partial(ipc, pa.ipc.new_file)),
    "Parquet": ("x.parquet", parquet),
    "Parquet with indexes of pages": ("x.parquet", partial(parquet, write_page_index=True, compression="none")),
    "Parquet in groups": ("x.parquet", partial(parquet, row_group_size=1, use_dictionary=False)),
    "npz": ("x.npz", lambda number: written(lambda out, a: np.savez(out, **a), {f"a{number}": np.ones(3)})),
    "packed npz": ("x.npz", lambda k: written(lambda out, a: np.savez_compressed(out, **a), {f"a{k}": np.ones(3)})),
    "npy": ("x.npy", lambda number: written(np.save, np.full(3, number + 0.5))),
    "safetensors": ("x.safetensors", safetensors),
    "torch": ("x.pt", torch_file),
    "JSON": ("x.json", line),
}
MANY = {
    "pickles": ("x.pkl", lambda number: pickle.dumps({"id": number})),
    "JSON Lines": ("x.jsonl", line),
    "gzip": ("x.jsonl.gz", lambda number: gzip.compress(line(number))),
    "bzip2": ("x.jsonl.bz2", lambda number: bz2.compress(line(number))),
    "xz": ("x.jsonl.xz", lambda number: lzma.compress(line(number))),
    "pickles in gzip": ("x.pkl.gz", lambda number: gzip.compress(pickle.dumps({"id": number}))),
}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", ONE_FILE)
def test_a_file_behind_another_one_is_refused(tmp_path, kind, count):
    """[a resumed run whose traces are left out]"""
    name, content = ONE_FILE[kind]
    path = tmp_path / name
    path.write_bytes(content(0))
    assert len(read_tree(path))

    path.write_bytes(b"".join(content(k) for k in range(count)))

    assert refusal(path)


@pytest.mark.parametrize("kind", MANY)
def test_values_behind_one_another_are_read(tmp_path, kind):
    name, content = MANY[kind]
    (tmp_path / name).write_bytes(b"".join(content(k) for k in range(3)))

    assert [item["id"] for item in read_tree(tmp_path / name)] == [0, 1, 2]


def test_a_file_of_arrow_without_its_end_is_refused(tmp_path):
    """[an interrupted run]"""
    content = ipc(pa.ipc.new_file, 0)
    (tmp_path / "x.arrow").write_bytes(content[: content.index(b"\xff\xff\xff\xff\0\0\0\0")])

    assert "no footer" in refusal(tmp_path / "x.arrow")
