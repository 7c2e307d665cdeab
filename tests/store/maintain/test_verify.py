"""The commands verify and verify --repair."""

import numpy as np
import pytest

import tracestore
from tracestore.errors import CorruptStoreError
from tracestore.store.maintain.verify import repair_store, verify_store
from tracestore.store.write.writer import StoreWriter


def test_a_flipped_bit_in_any_file_is_found(store_path):
    """One bit of each file is inverted; the report names the file."""
    rng = np.random.default_rng(0)
    files = [p for p in sorted(store_path.rglob("*")) if p.is_file() and p.name != "lock" and p.stat().st_size]
    for path in files:
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        position, bit = int(rng.integers(len(data))), 1 << int(rng.integers(8))
        data[position] ^= bit
        path.write_bytes(data)
        name = path.relative_to(store_path).as_posix()
        assert name in verify_store(store_path).damaged, f"{name} byte {position} bit {bit}"
        data[position] ^= bit
        path.write_bytes(data)
    assert verify_store(store_path).damaged == {}


def test_a_damaged_newest_manifest_is_restored_from_its_copy(store_path):
    newest = max((store_path / "manifest").iterdir())
    whole = len(tracestore.open(store_path))
    newest.chmod(0o644)
    newest.write_bytes(b"")
    with pytest.warns(tracestore.errors.TracestoreWarning, match="reading generation 1"):
        assert len(tracestore.open(store_path)) == 7
    with pytest.raises(CorruptStoreError, match="--repair"):
        StoreWriter(store_path)
    report = repair_store(store_path)
    assert any("restored from its copy" in line for line in report.repaired)
    with StoreWriter(store_path) as writer:
        assert writer.manifest.num_traces == whole
