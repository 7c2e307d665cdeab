"""The checksums of each layer of each row, by which a layer is read alone."""

import numpy as np
import pytest

import tracestore
from tests.helpers import command, make_trace, segment_of, write_store
from tests.malicious_inputs.stores import Store
from tests.store.second_reader import Segment, read_store
from tracestore.errors import CorruptStoreError
from tracestore.store.format import schema
from tracestore.store.maintain.lint import lint_store
from tracestore.store.maintain.verify import verify_store
from tracestore.store.read.array_reader import ArrayReader


def small_arrays(path):
    store = Store(path)
    return store, store.arrays(f"{segment_of(path)}/rows.zip", schema.ROW_DTYPES)


def layers_of(path, tokens, *, dim=256, **options):
    traces = [make_trace(k, tokens=count, layers=3, heads=2, dim=dim) for k, count in enumerate(tokens)]
    return write_store(path, traces, **options)


@pytest.mark.parametrize(
    ("tokens", "is_present"),
    [
        ([31], False),
        ([32], True),
        ([33], True),
        ([1], False),
        ([1, 62], False),
        ([1, 63], True),
        ([63, 1], True),
        ([64, 1, 1], False),
        ([94, 1, 1], True),
        ([1, 1, 1, 1], False),
        ([40, 40, 40], True),
    ],
)
def test_a_segment_has_them_if_its_layers_have_16_kib_on_average(tmp_path, tokens, is_present):
    path = layers_of(tmp_path / "s.zarr", tokens)
    _, rows = small_arrays(path)
    assert ("hidden_states_crc32c" in rows) == is_present
    assert "attention_crc32c" not in rows
    assert not is_present or len(rows["hidden_states_crc32c"]) == 3 * len(tokens)
    assert not verify_store(path).damaged
    read_store(path)  # compares every layer with its checksum


@pytest.mark.parametrize("codec", ["zstd", "blosc-lz4"])
def test_a_compressed_segment_has_none(tmp_path, codec):
    _, rows = small_arrays(layers_of(tmp_path / "s.zarr", [80], codec=codec))
    assert rows.keys().isdisjoint(schema.LAYER_CRCS.values())


def test_a_copy_of_traces_without_them_has_them(tmp_path):
    """A part of a segment is copied trace by trace; a whole segment would be taken over unchanged."""
    (tmp_path / "ids").write_text("q0\nq2\n")
    path = layers_of(tmp_path / "old.zarr", [80, 2, 90])
    command("subset", path, tmp_path / "expected.zarr", "--ids", tmp_path / "ids", check=0)
    store, rows = small_arrays(path)
    kept = {name: array for name, array in rows.items() if name not in schema.LAYER_CRCS.values()}
    assert len(kept) < len(rows)
    store.set_rows(segment_of(path), kept)
    store.reseal()
    store.seal()
    assert not verify_store(path).damaged
    command("subset", path, tmp_path / "new.zarr", "--ids", tmp_path / "ids", check=0)
    assert segment_of(tmp_path / "new.zarr") == segment_of(tmp_path / "expected.zarr")
    assert "hidden_states_crc32c" in small_arrays(tmp_path / "new.zarr")[1]


@pytest.mark.parametrize("change", ["value", "shorter", "longer", "of an array without rows"])
def test_wrong_ones_are_found(tmp_path, change):
    path = layers_of(tmp_path / "s.zarr", [80, 70], attention="none")
    store, rows = small_arrays(path)
    crcs = rows["hidden_states_crc32c"].copy()
    crcs[4] ^= change == "value"
    crcs = {"shorter": crcs[:-1], "longer": np.append(crcs, crcs[:1])}.get(change, crcs)
    more = {"attention_crc32c": crcs} if change.startswith("of") else {}
    store.set_rows(segment_of(path), rows | {"hidden_states_crc32c": crcs} | more)
    store.reseal()
    store.seal()
    assert "crc32c" in " ".join(verify_store(path).damaged.values())
    with pytest.raises(CorruptStoreError, match="crc32c"):
        lint_store(path)
    assert tracestore.open(path)[0].hidden_states.shape == (3, 80, 256)  # local files have checksums of their own


@pytest.mark.parametrize("bit", range(0, 6 * 32, 17))
def test_a_flipped_bit_of_a_checksum_is_found_without_reading_the_array(tmp_path, bit, monkeypatch):
    path = layers_of(tmp_path / "s.zarr", [80, 70], attention="none")
    store, rows = small_arrays(path)
    rows["hidden_states_crc32c"].view("u1")[bit // 8] ^= 1 << bit % 8
    store.set_rows(segment_of(path), rows)
    store.reseal()
    store.seal()
    expected = f"hidden_states_crc32c: layer {bit // 32}: not its checksum"
    assert verify_store(path).damaged == {f"{segment_of(path)}/rows.zip": expected}
    with pytest.raises(CorruptStoreError, match=expected):
        lint_store(path)
    other = layers_of(tmp_path / "intact.zarr", [80, 70, 3, 1], attention="none")
    monkeypatch.setattr(ArrayReader, "copy", lambda *_: pytest.fail("an intact array is read again"))
    assert not verify_store(other).damaged


def test_the_second_reader_compares_them(tmp_path, monkeypatch):
    path = layers_of(tmp_path / "s.zarr", [80])
    monkeypatch.setattr("tests.store.second_reader.crc32c", lambda data: 0)
    facts = {"num_layers": 3, "num_heads": 2, "attention": "mean"}
    with pytest.raises(ValueError, match="differs from its checksum"):
        Segment(path / segment_of(path), facts)
