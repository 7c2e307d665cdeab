"""Verification of the bytes of a store. Repairs are tested in tests/fault_injection."""

import numpy as np

from tracestore.store.maintain.verify import verify_store


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
