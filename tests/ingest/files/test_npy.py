"""Test the headers of arrays in the format .npy."""

import gc
import io
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tracestore.ingest.files.npy import read_npy_header


class Cycle:
    """An object that only the collector frees, and that lets another thread run then."""

    def __init__(self):
        self.own = self

    def __del__(self):
        time.sleep(0)


def test_threads_read_headers_together():
    """[CPython 3.11 counts the depth of the expressions of all threads together]"""
    file = io.BytesIO()
    np.save(file, np.zeros((2, 3), "f4"))

    def read(_):
        Cycle()
        return read_npy_header(io.BytesIO(file.getvalue()), "a")

    found, threshold = set(), gc.get_threshold()
    gc.set_threshold(5)
    try:
        for _ in range(30):  # without a lock, two of three pools fail in their first calls
            with ThreadPoolExecutor(4) as pool:
                found.update(pool.map(read, range(50)))
    finally:
        gc.set_threshold(*threshold)

    assert found == {((2, 3), False, np.dtype("f4"))}
