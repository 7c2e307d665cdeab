"""Errors of a damaged file name the store that it lies in."""

import contextlib

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import command, make_graphs, make_trace, make_traces, segment_of, write_store
from tests.malicious_inputs.stores import Store
from tests.tiers import long
from tracestore.errors import CorruptStoreError
from tracestore.store.format import schema


def cut(path):
    """Return a damage that leaves half of a file, which still fits its map where it is mapped."""

    def damage(store):
        file = store.path / path.format(segment=segment_of(store.path))
        store.write(file.relative_to(store.path), file.read_bytes()[: file.stat().st_size // 2])

    return damage


def rewrite(kind, change):
    """Return a damage that changes the arrays of rows.zip or of the index, with correct checksums."""

    def damage(store):
        if kind == "rows":
            arrays = store.arrays(f"{segment_of(store.path)}/rows.zip", schema.ROW_DTYPES)
            change(arrays)
            store.set_rows(segment_of(store.path), arrays)
            store.reseal()
        else:
            arrays = store.part(0)
            change(arrays)
            store.set_part(0, arrays)
        store.seal()

    return damage


def set_to(name, value, at=0):
    def change(arrays):
        arrays[name][at] = value

    return change


def remove(path):
    return lambda store: (store.path / path.format(segment=segment_of(store.path))).unlink()


def bad_edge(store):
    path = f"{segment_of(store.path)}/edge_index/c/0/0"
    data = bytearray((store.path / path).read_bytes())
    data[:4] = np.int32(1 << 20).tobytes()
    store.write(path, bytes(data))


DAMAGES = {
    "rows.zip cut": cut("{segment}/rows.zip"),
    "rows.zip gone": remove("{segment}/rows.zip"),
    "hidden states cut": cut("{segment}/hidden_states/c/0/0"),
    "hidden states gone": remove("{segment}/hidden_states/c/0/0"),
    "their metadata": cut("{segment}/hidden_states/zarr.json"),
    "attention cut": cut("{segment}/attention/c/0"),
    "attention gone": remove("{segment}/attention/zarr.json"),
    "last token gone": remove("{segment}/last_token/c/0/0/0"),
    "number of tokens": rewrite("rows", set_to("num_tokens", -1)),
    "last token row": rewrite("rows", set_to("last_token_row", 1 << 20)),
    "offsets of tokens": rewrite("rows", set_to("tokens_offsets", 1 << 40, 1)),
    "segment in the index": rewrite("index", set_to("graph_segment", 7)),
    "row in the index": rewrite("index", set_to("graph_row", 1 << 20)),
    "tokens in the index": rewrite("index", set_to("num_tokens", 1 << 19)),
    "offsets of ids": rewrite("index", set_to("id_offsets", 1 << 40, 1)),
    "provenance of a source": rewrite("index", set_to("source_provenance", 9)),
    "bytes of scores": lambda store: cut(store.manifest["columns"][0]["path"])(store),
    "no index": lambda store: remove(store.manifest["index"][0]["path"])(store),
    "no manifest": lambda store: cut(f"manifest/{store.generation:010d}")(store),
}


def read_everything(paths, view="graph"):
    """Return the errors of reading two stores as one in several ways."""
    errors = []
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(tracestore.open(paths))
        except CorruptStoreError as error:
            return [error]

        def loaded(name):
            return lambda: list(tracestore.TraceLoader(store, name, batch_size=3, as_pyg=False))

        def traces():
            return [(t.copy(), t.tokens, t.source, t.provenance) for t in store]

        for read in (
            loaded(view),
            loaded("sequence"),
            loaded("tokens"),
            traces,
            lambda: store.question_ids.take(store.indices),
        ):
            try:
                read()
            except CorruptStoreError as error:
                errors.append(error)
    return errors


@pytest.mark.filterwarnings("ignore::tracestore.errors.TracestoreWarning")
@pytest.mark.parametrize("which", [1, *long(0)])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_an_error_names_the_store(tmp_path, damage, which):
    traces = [make_trace(k, tokens=2 + k) | {"tokens": np.arange(2 + k)} for k in range(10)]
    paths = [
        write_store(tmp_path / "a.zarr", traces[:5], score=0.5),
        write_store(tmp_path / "b.zarr", traces[5:], score=0.25),
    ]
    damage(Store(paths[which]))
    errors = read_everything(paths)
    assert errors
    for error in errors:
        assert str(paths[which]) in str(error) and str(paths[1 - which]) not in str(error)


def test_an_error_of_an_edge_and_of_a_chunk_names_the_store(tmp_path):
    traces = make_traces(8, tokens=4)
    for part in ("a", "b"):
        own = traces[:4] if part == "a" else traces[4:]
        graphs = {"graphs": [make_graphs(t) for t in own], "question_ids": [t["question_id"] for t in own]}
        torch.save(graphs, tmp_path / f"{part}.pt")
        command("convert", tmp_path / f"{part}.pt", tmp_path / f"{part}.zarr", check=0)
        write_store(tmp_path / f"zstd-{part}.zarr", own, codec="zstd")
    paths = [tmp_path / "a.zarr", tmp_path / "b.zarr"]
    bad_edge(Store(paths[1]))
    coded = [tmp_path / "zstd-a.zarr", tmp_path / "zstd-b.zarr"]
    path = f"{segment_of(coded[1])}/hidden_states/c/0/0"
    data = bytearray((coded[1] / path).read_bytes())
    data[:4] = bytes(4)
    Store(coded[1]).write(path, bytes(data))
    for stores in (paths, coded):
        errors = read_everything(stores)
        assert errors
        for error in errors:
            assert str(stores[1]) in str(error) and str(stores[0]) not in str(error)


def test_a_command_names_the_store(tmp_path):
    paths = [write_store(tmp_path / name, make_traces(8), score=lambda k: k % 2) for name in ("a.zarr", "b.zarr")]
    cut("{segment}/hidden_states/c/0/0")(Store(paths[1]))
    words = ["--store", paths[0], "--store", paths[1], "--output-dir", tmp_path / "out", "--epochs", "1"]
    result = command("train", *words)
    assert result.returncode == 3 and str(paths[1]) in result.stderr.splitlines()[-1]
