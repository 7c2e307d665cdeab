"""Containers that the layouts do not name: other archives, databases and array files."""

import functools
import io
import json
import sqlite3
import tarfile
import zipfile

import numpy as np

from tests.ingest.corpus import registry
from tests.ingest.corpus.samples import tensor, write_json

kind = functools.partial(registry.kind, register=registry.OUTSIDE)


def npy_bytes(array):
    """Return an array as the bytes of an npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@kind("zarr", expect="id answer")
def zarr_group_per_question(folder, samples):
    """Write a Zarr store that another program made: a group per question with hidden_states and attributes."""
    import zarr

    root = zarr.open_group(str(folder / "acts.zarr"), mode="w")
    for s in samples:
        group = root.create_group(s.question_id)
        group.create_array("hidden_states", data=s.hidden)
        group.attrs["answer"] = s.answer


@kind("scipy", expect="id")
def matlab_cells(folder, samples):
    """Write a .mat file with cell arrays of hidden states and ids (scipy.io.savemat)."""
    from scipy.io import savemat

    cells, ids = np.empty(3, object), np.empty(3, object)
    for i, s in enumerate(samples):
        cells[i], ids[i] = s.hidden, s.question_id
    savemat(folder / "hidden_states.mat", {"hidden_states": cells, "question_ids": ids})


@kind(expect="id attention question answer")
def webdataset_tar(folder, samples):
    """Write a tar shard of WebDataset: q0.hidden_states.npy, q0.attentions.npy and q0.json per key."""
    with tarfile.open(folder / "shard-000000.tar", "w") as tar:
        for s in samples:
            meta = {"question": s.question, "answer": s.answer}
            files = {
                "hidden_states.npy": npy_bytes(s.hidden),
                "attentions.npy": npy_bytes(s.attention),
                "json": json.dumps(meta).encode(),
            }
            for suffix, data in files.items():
                info = tarfile.TarInfo(f"{s.question_id}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


@kind(expect="id answer")
def zip_of_arrays(folder, samples):
    """Write a zip archive with acts/q0.npy ... and acts/index.csv."""
    with zipfile.ZipFile(folder / "acts.zip", "w") as archive:
        for s in samples:
            archive.writestr(f"acts/{s.question_id}.npy", npy_bytes(s.hidden))
        archive.writestr("acts/index.csv", "id,answer\n" + "".join(f"{s.question_id},{s.answer}\n" for s in samples))


@kind(expect="id")
def sqlite_blobs(folder, samples):
    """Write a SQLite table with a row per question and layer: float32 blobs and their shapes."""
    connection = sqlite3.connect(folder / "activations.db")
    connection.execute("create table activations (question_id text, layer integer, shape text, data blob)")
    for s in samples:
        for k, h in enumerate(s.hidden):
            row = (s.question_id, k, json.dumps(h.shape), h.tobytes())
            connection.execute("insert into activations values (?, ?, ?, ?)", row)
    connection.commit()
    connection.close()


@kind(expect="id")
def raw_floats_with_index(folder, samples):
    """Write hidden_states.bin (array.tofile) and index.json with dtype, and offset and shape per id."""
    index, offset = {}, 0
    with open(folder / "hidden_states.bin", "wb") as file:
        for s in samples:
            s.hidden.astype("f2").tofile(file)
            index[s.question_id] = {"offset": offset, "shape": s.hidden.shape}
            offset += s.hidden.size * 2
    write_json(folder / "index.json", {"dtype": "float16", "file": "hidden_states.bin", "entries": index})


@kind("tensordict", count=4, lengths=(6,), expect="tokens")
def tensordict_memmap(folder, samples):
    """Write TensorDict.memmap: a folder of memory-mapped tensors of equal lengths and meta.json."""
    from tensordict import TensorDict

    fields = {
        "hidden_states": tensor(np.stack([s.hidden for s in samples])),
        "tokens": tensor(np.stack([s.tokens for s in samples])),
    }
    TensorDict(fields, batch_size=[4]).memmap(folder / "td")
