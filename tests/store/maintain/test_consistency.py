"""Stores whose checksums are correct but whose values contradict each other."""

import json
import struct

import numpy as np
import pytest

import tracestore
from tests.helpers import command, error_of, segment_of
from tests.malicious_inputs.stores import Store, valid_stores
from tracestore.errors import CorruptStoreError, TracestoreError
from tracestore.store.format import schema
from tracestore.store.maintain.verify import verify_store


@pytest.mark.long
def test_edges_that_leave_their_graph_are_refused(tmp_path):
    (edges,) = (p for p in valid_stores(tmp_path) if p.stem == "edges")
    store = Store(edges)
    name = f"{segment_of(edges)}/edge_index/c/0/0"
    data = bytearray((edges / name).read_bytes())
    struct.pack_into("<i", data, 0, 10**6)
    store.write(name, bytes(data))
    store.reseal()
    store.seal()
    with tracestore.open(edges) as opened:
        with pytest.raises(CorruptStoreError, match="edge leaves its graph"):
            list(tracestore.TraceLoader(opened, view="graph", batch_size=2))
        with pytest.raises(CorruptStoreError):
            _ = opened[0].attention
    assert "edge_index: row 0: an edge leaves its graph" in command("verify", edges, check=3).stderr
    error_of("export", edges, tmp_path / "out", "--format", "pt-gnn", code=3)
    error_of("merge", edges, tmp_path / "merged.zarr", code=3)


def test_invalid_values_of_the_manifest_are_refused(single_generation):
    """Replace numbers by extreme values, and values by values of other types."""
    original = Store(single_generation).manifest
    for name in ("num_traces", "num_tokens", "generation", "num_scored", "index", "columns", "fields", "attributes"):
        for value in (-1, 2**63, 10**400, 0.5, None, "x", [], [[]], {}):
            if value == original[name] or (name, value) == ("fields", []):
                continue
            store = Store(single_generation)
            store.manifest = original | {name: value}
            store.seal()
            with pytest.raises(TracestoreError):
                tracestore.open(single_generation).close()
                assert verify_store(single_generation).damaged
                raise CorruptStoreError("found by verify")
    store.manifest = original
    store.seal()
    assert not verify_store(single_generation).damaged


@pytest.mark.long
def test_invalid_values_of_the_index_are_refused(single_generation):
    """Replace the first number of each array of the index by extreme values; no command has an unexpected error."""
    original = Store(single_generation)
    path = original.manifest["index"][0]["path"]
    part = (single_generation / path).read_bytes()
    arrays = original.part(0)
    for name in (name for name, array in arrays.items() if array.size and array.dtype.kind in "iu"):
        limits = np.iinfo(arrays[name].dtype)
        for value in (limits.max, max(limits.min, -2)):
            store = Store(single_generation)
            changed = {key: array.copy() for key, array in arrays.items()}
            changed[name].reshape(-1)[0] = value
            store.set_part(0, changed)
            store.seal()
            for words in (["info"], ["verify"], ["lint"], ["view", "0"]):
                done = command(words[0], single_generation, *words[1:])
                expected = (0, 1, 3) if words == ["lint"] else (0, 3)
                assert done.returncode in expected, (name, value, words, done.stderr)
                assert "unexpected" not in done.stderr, (name, value, words, done.stderr)
    original.write(path, part)
    original.seal()
    assert not verify_store(single_generation).damaged


@pytest.mark.parametrize("twice", ["hidden_states/zarr.json", "rows.zip"])
def test_a_file_that_a_segment_lists_twice_is_refused(single_generation, twice):
    """The small arrays, which list the other files, are not among them."""
    store, segment = Store(single_generation), segment_of(single_generation)
    path = f"{segment}/rows.zip"
    attributes = store.group(path, schema.ROW_DTYPES).attributes()
    attributes["tracestore"]["files"].append([twice, 1, 1])
    store.set_rows(segment, store.arrays(path, schema.ROW_DTYPES), attributes)
    store.reseal()
    store.seal()
    with tracestore.open(single_generation) as opened, pytest.raises(CorruptStoreError, match="listed twice"):
        _ = opened[0].hidden_states
    assert path in verify_store(single_generation).damaged


def test_zarr_json_is_compared_as_a_document(single_generation):
    """The order of keys and white space do not matter; any other difference is an error."""
    store, name = Store(single_generation), f"{segment_of(single_generation)}/hidden_states/zarr.json"
    document = json.loads((single_generation / name).read_text())
    store.write(name, json.dumps(dict(reversed(document.items()))).encode())
    store.reseal()
    store.seal()
    assert not verify_store(single_generation).damaged
    for change in ({"data_type": "object"}, {"fill_value": 7}, {"shape": [2**40, 8]}, {"more": 1}):
        store.write(name, json.dumps(document | change).encode())
        store.reseal()
        store.seal()
        with (
            tracestore.open(single_generation) as opened,
            pytest.raises(CorruptStoreError, match=r"hidden_states/zarr\.json"),
        ):
            _ = opened[0].hidden_states
        assert list(verify_store(single_generation).damaged) == [name]
