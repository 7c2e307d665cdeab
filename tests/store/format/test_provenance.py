"""Provenance: values, conflicts, and the attribute and index column that store it."""

import json

import numpy as np
import pytest

import tracestore
from tests.helpers import command, error_of, make_trace, make_traces, tree_bytes, write_store
from tests.malicious_inputs.stores import Store
from tests.store.second_reader import read_store
from tracestore import Provenance
from tracestore.errors import CorruptStoreError, InvalidInputError, UsageError
from tracestore.store.format.provenance import MAX_PROVENANCES, require_compatible
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write.writer import StoreWriter

FULL = {
    "model": "org/model",
    "model_revision": "0123abc",
    "tokenizer": "org/model",
    "prompt_sha256": "0f" * 32,
    "layer_ids": [1, 2, 3],
    "hidden_states_at": "block output",
    "final_norm": True,
    "attention_kind": "softmax",
    "compute_dtype": "float32",
    "sampling": {"do_sample": True, "temperature": 0.7, "stop": ["\n"]},
    "tool": "tracestore 0.1.0",
    "positions": "answer",
}


def append(path, k, provenance=None, **options):
    with tracestore.create(path, append=True, provenance=provenance, **options) as writer:
        writer.append(make_trace(k))
    assert verify_store(path).damaged == {}


def test_each_trace_has_the_provenance_of_its_source(tmp_path):
    path = tmp_path / "s.zarr"
    for k, known in enumerate((FULL, None, {"model": "org/model"}, FULL)):
        append(path, k, known)
    with tracestore.open(path) as store:
        full, short = Provenance.from_json(FULL), Provenance(model="org/model")
        assert store.provenance == (full, short) and full.layer_ids == (1, 2, 3)
        assert [t.provenance for t in store] == [full, None, short, full] == [t.copy().provenance for t in store]
        assert store.info()["provenance"] == [full.to_json(), short.to_json()] and full.to_json() == FULL
        expected = [None if t.provenance is None else t.provenance.to_json() for t in store]
    assert [t["provenance"] for t in read_store(path)] == expected
    assert json.loads((path / "zarr.json").read_text())["attributes"]["tracestore"]["provenance"][0] == FULL
    shown = command("info", path, check=0).stdout
    assert "provenance        model org/model, model_revision 0123abc" in shown and '"temperature": 0.7' in shown
    assert json.loads(command("info", path, "--json", check=0).stdout)["provenance"] == store.info()["provenance"]


def test_info_without_provenance(store_path):
    assert "provenance        unknown" in command("info", store_path, check=0).stdout


@pytest.mark.parametrize(
    "bad",
    [
        [],
        None,
        {"name": "m"},
        {"model": ""},
        {"model": "m" * 1025},
        {"model": 1},
        {"prompt_sha256": "0F" * 32},
        {"prompt_sha256": "0f" * 32 + "\n"},
        {"layer_ids": []},
        {"layer_ids": [True]},
        {"layer_ids": [0.0]},
        {"layer_ids": [-1]},
        {"layer_ids": [1 << 20]},
        {"layer_ids": list(range(5000))},
        {"final_norm": 1},
        {"positions": 16},
        {"sampling": []},
        {"sampling": {"t": float("nan")}},
        {"sampling": {"t": {}}},
        {"sampling": {"t": [[1]]}},
        {"sampling": {"t": "x" * 4096}},
        {"sampling": {"t": object()}},
    ],
)
def test_invalid_values_are_refused(tmp_path, bad):
    with pytest.raises(ValueError, match="provenance"):
        Provenance.from_json(bad)
    if bad is not None:
        with pytest.raises(UsageError, match="provenance"):
            tracestore.create(tmp_path / "s.zarr", provenance=bad)
        assert not (tmp_path / "s.zarr").exists()


def test_only_known_and_different_values_conflict():
    known = Provenance.from_json(FULL)
    for name, value in FULL.items():
        require_compatible([known], [Provenance.from_json({name: value}), Provenance()], "x")
    for name, other in (
        ("model", "m"),
        ("layer_ids", (0, 1, 2)),
        ("final_norm", False),
        ("sampling", {}),
        ("positions", "all"),
    ):
        new = Provenance(**{name: other})
        with pytest.raises(UsageError, match=f"x: other provenance: {name}: found .*, expected .*--allow-mixed"):
            require_compatible([known], [new], "x")
        assert new.differences(known).keys() == {name} and getattr(known.agreement(new), name) is None
    require_compatible([known], [Provenance(tool="other 2.0")], "x")
    a, b = Provenance(model="a"), Provenance(model="b")
    with pytest.raises(UsageError):
        require_compatible([], [a, b], "x")
    require_compatible([a, b], [b, a], "x")


def test_a_conflict_needs_permission(tmp_path):
    path = tmp_path / "s.zarr"
    append(path, 0, {"model": "a"})
    before = tree_bytes(path)
    with pytest.raises(UsageError, match="model: found b, expected a; allow_mixed_provenance=True permits it"):
        append(path, 1, {"model": "b"})
    assert tree_bytes(path) == before
    with StoreWriter(path) as writer:
        with pytest.raises(UsageError, match="model"):
            writer.begin_source("x", 0, "", Provenance(model="b"))
        writer.begin_source("x", 0, "", Provenance(model="a", tokenizer="t"))
        writer.abort_source()
        assert writer.attributes.provenance == (Provenance(model="a"),)
    append(path, 1, Provenance(model="b"), allow_mixed_provenance=True)
    append(path, 2, {"model": "b"})  # The store is mixed already.
    with tracestore.open(path) as store:
        assert [t.provenance.model for t in store] == ["a", "b", "b"] and len(store.provenance) == 2


def test_layer_ids_have_one_value_per_layer(tmp_path):
    with tracestore.create(tmp_path / "s.zarr", provenance={"layer_ids": [1, 2]}) as writer:
        with pytest.raises(InvalidInputError, match="2 layer_ids, expected 3"):
            writer.append(make_trace(0))
        writer.append(make_trace(0, layers=2))


def test_the_number_of_provenances_is_limited(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for k in range(MAX_PROVENANCES + 1):
            writer._provenance = Provenance(tool=f"t {k}", model="é" * 600)
            if k < MAX_PROVENANCES:
                writer.append(make_trace(k))
        with pytest.raises(UsageError, match="another store"):
            writer.append(make_trace(k))
    assert len(tracestore.open(tmp_path / "s.zarr")) == MAX_PROVENANCES


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {},
        [{}],
        [FULL | {"model": 3}],
        [FULL | {"more": 1}],
        [FULL | {"positions": None}],
        [FULL, FULL],
        [FULL | {"layer_ids": [1]}],
        [FULL | {"layer_ids": None, "model": "m" * 1025}],
        [FULL] * (MAX_PROVENANCES + 1),
    ],
)
def test_a_malformed_attribute_is_corruption(tmp_path, bad):
    path = write_store(tmp_path / "s.zarr", make_traces(2), provenance=FULL)
    store = Store(path)
    store.manifest["attributes"]["provenance"] = bad
    store.seal()
    with pytest.raises(CorruptStoreError, match=r"manifest/0000000001: (attributes: )?provenance"):
        tracestore.open(path)
    assert "manifest/0000000001" in verify_store(path).damaged
    assert "provenance" in error_of("info", path, code=3)


@pytest.mark.parametrize("value", [-2, 1, 2**31 - 1])
def test_a_source_without_its_provenance_is_corruption(tmp_path, value):
    path = write_store(tmp_path / "s.zarr", make_traces(2), provenance=FULL)
    store = Store(path)
    arrays = store.part(0)
    arrays["source_provenance"] = np.array([0, value], "<i4")
    store.set_part(0, arrays)
    store.seal()
    with (
        tracestore.open(path) as opened,
        pytest.raises(CorruptStoreError, match=r"index/0000000001-\w{8}\.zip: source_provenance: found"),
    ):
        _ = opened[1].provenance
    assert "source_provenance" in error_of("verify", path, code=3)
    for words in (("merge", path, tmp_path / "m.zarr"), ("report", path, "--output", tmp_path / "r.html")):
        assert "source_provenance" in error_of(*words, code=3)
