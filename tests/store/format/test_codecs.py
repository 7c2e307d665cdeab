"""Decompression of damaged and malicious chunks."""

import random
import struct
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers import ROOT
from tracestore.store.format.codecs import ChunkCodec


def test_changed_chunks_are_refused_or_have_the_expected_size():
    """Decoding must not crash, and must not return uninitialized memory: it fails or fills the buffer."""
    rng = random.Random(0)
    values = np.arange(4096, dtype="<u2")
    for name in ("blosc-zstd", "blosc-lz4", "zstd"):
        codec = ChunkCodec(name, 2)
        good = bytes(codec.encode(values.tobytes()))
        assert codec.decode(good, values.nbytes).tobytes() == values.tobytes()
        for size in (0, 1, values.nbytes - 1, values.nbytes + 1, 1 << 40):
            with pytest.raises(ValueError):
                codec.decode(good, min(size, 1 << 20))
        for _ in range(3000):
            data = bytearray(good)
            for _ in range(rng.choice([1, 2, 4])):
                at = rng.randrange(rng.choice([20, len(data)]))
                data[at] = rng.randrange(256)
            try:
                found = codec.decode(bytes(data), values.nbytes)
            except ValueError:
                continue
            assert found.nbytes == values.nbytes


@pytest.mark.parametrize("name", ["blosc-zstd", "blosc-lz4"])
def test_a_chunk_that_is_shorter_than_its_header_states_is_refused(name):
    """The header states that the values follow unpacked. A decoder that trusts it returns memory behind the chunk."""
    values = np.arange(4096, dtype="<u2")
    codec = ChunkCodec(name, 2)
    data = bytearray(codec.encode(values.tobytes()))
    data[2] |= 2
    struct.pack_into("<I", data, 12, values.nbytes + 16)
    for size in (16, 64, len(data)):
        with pytest.raises(ValueError):
            codec.decode(bytes(data[:size]), values.nbytes)


@pytest.mark.long
def test_a_zstd_bomb_takes_no_memory():
    """The size of the content is compared before memory for it is allocated."""
    code = (
        "import resource, numpy as np; from numcodecs import Zstd; "
        "from tracestore.store.format.codecs import ChunkCodec\n"
        "bomb, codec = bytes.fromhex(input()), ChunkCodec('zstd', 2)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    codec.decode(bomb, 65536)\nexcept ValueError:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    from numcodecs import Zstd

    bomb = bytes(Zstd(level=3).encode(np.zeros(1 << 28, "u1")))
    done = subprocess.run(
        [sys.executable, "-c", code], input=bomb.hex(), capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert int(done.stdout) < 16 << 10


def test_a_zstd_bomb_is_refused():
    from numcodecs import Zstd

    bomb = bytes(Zstd(level=3).encode(np.zeros(1 << 28, "u1")))
    with pytest.raises(ValueError, match="expected 65536"):
        ChunkCodec("zstd", 2).decode(bomb, 65536)
    # The same frame without a content size in its header, as streaming compressors write it.
    with pytest.raises(ValueError, match="does not state its size"):
        ChunkCodec("zstd", 2).decode(b"\x28\xb5\x2f\xfd\x00\x58" + bomb[10:], 65536)
