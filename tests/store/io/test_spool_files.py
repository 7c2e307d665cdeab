"""Spool files: their rows are appended to a shard by renaming or copying, and errors are reported."""

import errno
import math
import os
import random

import numpy as np
import pytest

from tests.helpers import open_files
from tests.tiers import long
from tracestore._core.kernels import crc32c
from tracestore.store.io import spool_files
from tracestore.store.io.shard_writer import ShardWriter
from tracestore.store.io.spool_files import SpoolArrays


def rows_of(rng, count):
    return [np.frombuffer(rng.randbytes(2 * 3 * rng.randint(0, 5)), "<f2").reshape(-1, 3) for _ in range(count)]


@pytest.mark.parametrize("seed", [*range(20), *long(*range(20, 60))])
def test_spooled_rows_give_the_same_shard_as_rows_in_memory(tmp_path, monkeypatch, seed):
    """Random rows come from memory or files, are skipped, or are rolled back."""
    rng = random.Random(seed)
    monkeypatch.setattr(spool_files, "_COPY_BYTES", 7)
    plain = ShardWriter(tmp_path / "plain", np.dtype("<f2"), (3,), "none", 64)
    mixed = ShardWriter(tmp_path / "mixed", np.dtype("<f2"), (3,), "none", 64)
    for source in range(rng.randint(1, 6)):
        marks = plain.savepoint(), mixed.savepoint()
        is_spooled, is_refused = rng.random() < 0.6, rng.random() < 0.2
        files = SpoolArrays(tmp_path / str(source), rng.choice([30, 1 << 30]))
        kept_share = rng.choice([0.5, 1])
        for k, rows in enumerate(rows_of(rng, rng.randint(1, 6))):
            if is_spooled and rng.random() < 0.1:
                is_spooled = False  # After a write error, for example of a full disk, rows stay in memory.
            written = files.write({"a": [rows]}, rows.nbytes, rows.nbytes)["a"] if is_spooled else None
            if rng.random() < kept_share or k == 0:
                plain.append([rows])
                mixed.append([rows]) if written is None else mixed.append_spooled(written, crc(rows))
        plain.flush(), mixed.flush()
        files.finish()
        if is_refused:
            plain.rollback(marks[0]), mixed.rollback(marks[1])
        files.remove()
    if plain.num_rows:
        assert plain.finish() == mixed.finish()
        assert (tmp_path / "plain").read_bytes() == (tmp_path / "mixed").read_bytes()
    assert mixed.num_rows == plain.num_rows


def crc(rows):
    return crc32c(rows.reshape(-1).view("u1"))


def test_an_error_of_close_reaches_the_writer_that_takes_the_file(tmp_path, monkeypatch):
    """After the error the shard owns the file, so that its rows are not copied onto themselves."""
    values = np.arange(6, dtype="<f2").reshape(2, 3)
    files = SpoolArrays(tmp_path / "ahead", 1 << 30)
    rows = files.write({"a": [values]}, values.nbytes, values.nbytes)["a"]
    files.finish()
    close, free = os.close, spool_files._free_files._value

    def fails(fd):
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    stream = ShardWriter(tmp_path / "taken", values.dtype, (3,), "none", 64)
    with monkeypatch.context() as patch:
        patch.setattr(spool_files.os, "close", fails)
        with pytest.raises(OSError, match="Input/output"):
            stream.append_spooled(rows, crc(values))
    assert rows.file.is_moved and stream._adopted is rows.file and stream.num_rows == 0
    stream.rollback((0, 0, 0, b"", 0))
    files.remove()
    assert spool_files._free_files._value == free + 1
    assert not (tmp_path / "taken").exists() and open_files(tmp_path) == []


def test_a_truncated_spool_file_is_an_error(tmp_path):
    files = SpoolArrays(tmp_path, 1 << 30)
    rows = files.write({"a": [np.arange(6, dtype="<f2").reshape(2, 3)]}, 12, 12)["a"]
    files.finish()
    assert b"".join(p.tobytes() for p in rows.chunks()) == np.arange(6, dtype="<f2").tobytes()
    rows.file.path.write_bytes(b"short")
    with pytest.raises(OSError, match="shorter"):
        list(rows.chunks())
    assert math.prod(rows.shape) == rows.size == 6
    files.remove()
