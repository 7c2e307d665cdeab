"""Test that a file of many traces is never held whole."""

import gzip
import json
import pickle
import tracemalloc

import numpy as np
import pytest

from tracestore.ingest.execute.claims import list_files
from tracestore.ingest.execute.execution import Execution
from tracestore.ingest.layout.language import parse_layout
from tracestore.ingest.layout.places import plan_of
from tracestore.store.io.scratch import Scratch

COUNT, SHAPE = 400, (4, 64, 256)  # 256 KiB a trace, 100 MiB in all
TRACE_BYTES = 4 * int(np.prod(SHAPE))


def ramp(k):
    """Return states whose tokens differ."""
    return np.full(SHAPE, k + 1, "f4") + np.arange(SHAPE[1], dtype="f4")[:, None]


def write_pickle(folder):
    with gzip.open(folder / "a.pkl.gz", "wb", compresslevel=1) as file:
        pickle.dump([{"id": f"q{k}", "hs": np.full(SHAPE, k + 1, "f4")} for k in range(COUNT)], file)
    return "a.pkl.gz : [id=id]/hs -> L S D"


def write_lines(folder):
    with open(folder / "a.jsonl", "w") as file:
        for k in range(COUNT // 20):
            file.write(json.dumps({"id": f"q{k}", "hs": np.full(SHAPE, k + 0.5).tolist()}) + "\n")
    return "a.jsonl : [id=id]/hs -> L S D"


def write_stack(folder):
    np.save(folder / "a.npy", np.stack([ramp(k) for k in range(COUNT)]))
    return "a.npy -> N L S D"


def write_layers(folder):
    for layer in range(SHAPE[0]):
        np.save(folder / f"{layer}.npy", np.stack([ramp(k)[layer] for k in range(COUNT)]))
    return "{layer}.npy -> N S D"


# The memo of a pickle holds up to 32 MiB of earlier traces; numbers of Python take several times the bytes of arrays.
@pytest.mark.parametrize(
    ("write", "limit"),
    [(write_pickle, 48 << 20), (write_lines, 24 << 20), (write_stack, 4 << 20), (write_layers, 4 << 20)],
)
@pytest.mark.long
def test_traces_are_read_one_by_one(write, limit, tmp_path):
    line = write(tmp_path)
    execution = Execution(plan_of(parse_layout({"hidden_states": line})), list_files([tmp_path], tmp_path / "s.zarr"))
    tracemalloc.start()
    try:
        count = 0
        for group in execution.groups:
            for record in execution.read(group, False, Scratch(max_memory=4 * TRACE_BYTES)):
                count += 1
                del record
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert count == (COUNT // 20 if write is write_lines else COUNT)
    assert peak < limit


@pytest.mark.long
def test_rows_that_wait_for_their_traces_do_not_keep_the_batches_of_the_reader(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [(k, layer) for layer in range(SHAPE[0]) for k in range(COUNT)]
    states = np.concatenate([np.full(SHAPE[1:], k + 1, "f4").ravel() for k, _ in rows])
    for size in reversed(SHAPE[1:]):
        states = pa.FixedSizeListArray.from_arrays(states, size)
    table = pa.table({"id": [k for k, _ in rows], "layer": [layer for _, layer in rows], "hs": states})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=64, compression="none", use_dictionary=False)
    del table, states
    layout = parse_layout({"hidden_states": "a.parquet : [id=id, layer=layer]/hs -> S D"})
    execution = Execution(plan_of(layout), list_files([tmp_path], tmp_path / "s.zarr"))
    (group,) = execution.groups

    records = execution.read(group, False, Scratch(max_memory=4 * TRACE_BYTES))
    first = next(records)

    assert pa.total_allocated_bytes() < 48 << 20
    assert [layer[0, 0] for layer in first.hidden] == [1] * SHAPE[0]
    assert sum(1 for _ in records) == COUNT - 1
