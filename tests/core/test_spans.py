"""Copies of spans of memory against numpy's."""

import gc
import math
import os
import sys

import numpy as np
import pytest
import torch

from tracestore._core.spans import SpanCopies, room_for

SIZES = [0, 1, 7, 63, 64, 65, 4096, 131_071, 131_072, 131_073, 300_001, 1 << 20, 5]


def make_sources(rng, count):
    """Buffers that begin anywhere."""
    sources = []
    for size in rng.choice(SIZES, count).tolist():
        begin = int(rng.integers(0, 64))
        sources.append(rng.integers(0, 256, size + begin, dtype=np.uint8)[begin:])
    return sources


@pytest.fixture
def torch_threads():
    """Torch brings the runtime whose threads copy."""
    had = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(had)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("seed", range(8))
def test_spans_are_numpys_copies(seed, num_threads, torch_threads):
    torch_threads(num_threads)
    torch.zeros(1 << 20).add_(1)
    rng = np.random.default_rng(seed)
    sources = make_sources(rng, int(rng.integers(0, 12)))
    room = np.full(room_for(sources) + 3, 0xEE, np.uint8)[3:]
    item_bytes = [math.gcd(len(source), 8) or 1 for source in sources]
    copies = SpanCopies(sources, item_bytes, room)
    used = np.zeros(len(room), bool)
    for _ in range(2):
        copies.take(num_threads)
        for begin, source in zip(copies.begins, sources, strict=True):
            assert (room.ctypes.data + begin) % 64 == 0
            np.testing.assert_array_equal(room[begin : begin + len(source)], source)
            used[begin : begin + len(source)] = True
            source += 1  # changed in place: the next take sees it
    assert (room[~used] == 0xEE).all()


@pytest.mark.skipif(
    sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info(), reason="needs torch with OpenMP"
)
def test_torchs_threads_copy_and_stay(torch_threads):
    """With all of them, so that the runtime ends none: torch would have to wait for new ones."""
    torch_threads(6)
    values = torch.zeros(1 << 20)
    source = np.zeros(3 * 32_768 * 4, np.uint8)  # for three of them
    copies = SpanCopies([source], [4], np.zeros(room_for([source]), np.uint8))
    values.add_(1)
    threads = set(os.listdir("/proc/self/task"))
    for _ in range(5):
        assert copies.take(6) == 6
        values.add_(1)
    assert set(os.listdir("/proc/self/task")) == threads
    small = SpanCopies([source[:4000]], [4], np.zeros(5000, np.uint8))
    assert small.take(6) == 1


def test_buffers_are_held():
    source, room = np.arange(100, dtype=np.uint8), np.zeros(1000, np.uint8)
    copies = SpanCopies([source[20:]], [4], room)
    del source
    gc.collect()
    copies.take()
    assert room[copies.begins[0] :][:80].tolist() == list(range(20, 100))


@pytest.mark.parametrize("size", [0, 99])
def test_too_little_room_is_refused(size):
    source = np.zeros(100, np.uint8)
    with pytest.raises(ValueError, match=r"room: \d+ bytes where 192 are needed"):
        SpanCopies([source], [1], np.zeros(size, np.uint8))


@pytest.mark.parametrize("item_bytes", [0, 3])
def test_bytes_that_are_no_items_are_refused(item_bytes):
    with pytest.raises(ValueError, match=f"100 bytes are no items of {item_bytes}"):
        SpanCopies([np.zeros(100, np.uint8)], [item_bytes], np.zeros(300, np.uint8))


def test_what_is_no_buffer_is_refused():
    with pytest.raises(TypeError):
        SpanCopies(["text"], [1], np.zeros(1000, np.uint8))
    with pytest.raises((TypeError, BufferError, ValueError)):
        SpanCopies([np.zeros(3, np.uint8)], [1], bytes(200))
