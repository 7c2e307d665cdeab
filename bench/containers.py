"""Write large containers that are not pickles, for `python bench/ingest.py containers`."""

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LAYERS, TOKENS, DIM = 16, 100, 1024


def states(count: int) -> Iterator[np.ndarray]:
    """Yield hidden states (L, S, D) float16 of traces."""
    block = np.random.default_rng(0).standard_normal((LAYERS, TOKENS, DIM), "f4").astype("f2")
    for k in range(count):
        block[:, :, 0] = k % 1024
        yield block


def npz(folder: Path, count: int) -> None:
    """Write one archive with an array per trace."""
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for k, hidden in enumerate(states(count)):
            data = io.BytesIO()
            np.save(data, hidden)
            archive.writestr(f"q{k}/hidden_states.npy", data.getvalue())


def npy(folder: Path, count: int) -> None:
    """Write one array (N, L, S, D) and a table with a line per trace."""
    shape = (count, LAYERS, TOKENS, DIM)
    array = np.lib.format.open_memmap(folder / "hidden_states.npy", "w+", "<f2", shape)
    for k, hidden in enumerate(states(count)):
        array[k] = hidden
    _write_lines(folder / "metadata.jsonl", [{"question_id": f"q{k}", "question": "why"} for k in range(count)])


def npy_files(folder: Path, count: int) -> None:
    """Write a file per trace, and a table that names them."""
    for k, hidden in enumerate(states(count)):
        np.save(folder / f"h_{k}.npy", hidden)
    _write_lines(folder / "metadata.jsonl", [{"id": f"q{k}", "path": f"h_{k}.npy"} for k in range(count)])


def safetensors(folder: Path, count: int) -> None:
    """Write one file with an array per trace and layer."""
    size = TOKENS * DIM * 2
    names = [f"q{k}.layer.{n}" for k in range(count) for n in range(LAYERS)]
    spans = {
        name: {"dtype": "F16", "shape": [TOKENS, DIM], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    header = json.dumps(spans).encode()
    with open(folder / "a.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for hidden in states(count):
            file.write(hidden.data)


def hdf5(folder: Path, count: int) -> None:
    """Write a group per trace, below splits."""
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        for k, hidden in enumerate(states(count)):
            file[f"{'train' if k % 2 else 'test'}/q{k}/hidden_states"] = hidden


def parquet(folder: Path, count: int) -> None:
    """Write a row per trace and layer, the layers of a trace behind each other."""
    _parquet(folder, [(k, n) for k in range(count) for n in range(LAYERS)])


def parquet_by_layer(folder: Path, count: int) -> None:
    """Write a row per trace and layer, all traces of a layer behind each other."""
    _parquet(folder, [(k, n) for n in range(LAYERS) for k in range(count)])


def _parquet(folder: Path, rows: list[tuple[int, int]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.array(next(states(1))[0].reshape(-1).astype("f4"))
    cell = pa.list_(pa.list_(pa.float32(), DIM), TOKENS)
    schema = pa.schema([("sample_idx", pa.int64()), ("layer", pa.int32()), ("states", cell)])
    flat = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(values, DIM), TOKENS)
    with pq.ParquetWriter(folder / "a.parquet", schema, use_dictionary=False, compression="none") as writer:
        for begin in range(0, len(rows), 64):
            part = rows[begin : begin + 64]
            columns = [pa.array([k for k, _ in part], pa.int64()), pa.array([n for _, n in part], pa.int32())]
            writer.write_table(pa.table([*columns, pa.concat_arrays([flat] * len(part))], schema=schema))


def arrow(folder: Path, count: int) -> None:
    """Write a stream with a row per trace: an id and nested lists of fixed size."""
    import pyarrow as pa

    kind = pa.list_(pa.list_(pa.list_(pa.float16(), DIM), TOKENS), LAYERS)
    schema = pa.schema([("id", pa.string()), ("hidden_states", kind)])
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for k, hidden in enumerate(states(count)):
            values = pa.array(hidden.reshape(-1))
            for size in (DIM, TOKENS, LAYERS):
                values = pa.FixedSizeListArray.from_arrays(values, size)
            writer.write_batch(pa.record_batch([pa.array([f"q{k}"]), values], schema=schema))


def _write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


_ROWS = ["hidden_states = a.parquet : [id=sample_idx, layer=layer]/states -> S D"]
# The lines of the layout of each container.
LAYOUTS = {
    "npz": ["hidden_states = a.npz : {id}/hidden_states -> L S D"],
    "npy": ["hidden_states = hidden_states.npy -> N L S D", "records = metadata.jsonl : []", "S.padding = none"],
    "npy_files": ["hidden_states = h_{n:d}.npy -> L S D", "question_id = metadata.jsonl : [file=path]/id"],
    "safetensors": ["hidden_states = a.safetensors : {id}.layer.{layer} -> S D"],
    "hdf5": ["hidden_states = a.h5 : {split}/{id}/hidden_states -> L S D"],
    "parquet": _ROWS,
    "parquet_by_layer": _ROWS,
    "arrow": ["hidden_states = a.arrow : [id=id]/hidden_states -> L S D"],
}
WRITERS = {f.__name__: f for f in (npz, npy, npy_files, safetensors, hdf5, parquet, parquet_by_layer, arrow)}


def write(name: str, folder: Path, gigabytes: float) -> None:
    """Write a container of about this size into an empty folder."""
    item = 4 if name.startswith("parquet") else 2
    WRITERS[name](folder, max(2, round(gigabytes * 1e9 / (LAYERS * TOKENS * DIM * item))))
