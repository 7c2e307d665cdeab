"""Test the headers of arrays in the format .npy."""

import gc
import io
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.npy import check_array, read_npy_header


class Cycle:
    """An object that only the collector frees, and that lets another thread run then."""

    def __init__(self):
        self.own = self

    def __del__(self):
        time.sleep(0)


@pytest.mark.long
def test_threads_read_headers_together():
    """[CPython 3.11 counts the depth of the expressions of all threads together]"""
    file = io.BytesIO()
    np.save(file, np.zeros((2, 3), "f4"))

    def read(_):
        Cycle()
        return read_npy_header(file.getvalue(), "a")

    found, threshold = set(), gc.get_threshold()
    gc.set_threshold(5)
    try:
        for _ in range(30):  # without a lock, two of three pools fail in their first calls
            with ThreadPoolExecutor(4) as pool:
                found.update(pool.map(read, range(50)))
    finally:
        gc.set_threshold(*threshold)

    assert found == {((2, 3), False, np.dtype("f4"), 128)}


HEADERS = [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)",
    "{'descr': (",
    "  {'descr': '<f4'}",
    "(" * 3000,
    "[" * 200 + "]" * 200,
    "{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': [2]}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (2.0,)}",
    "{'descr': 'a wrong one', 'fortran_order': False, 'shape': (2,)}",
    "{'descr': [('a', '<f4'), 7], 'fortran_order': False, 'shape': (2,)}",
    "{'descr': [('a', [('b', '<f4')])], 'fortran_order': False, 'shape': (2,)}",
    "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (2,)}",
    "{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (2,)}",
    "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (2,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (9" + "0" * 40 + ",)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}" + " " * 11_000,
]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:Reading")
def test_a_wrong_header_is_refused(header, version):
    text = header.encode()
    data = b"\x93NUMPY" + bytes((version, 0)) + len(text).to_bytes(2 if version == 1 else 4, "little") + text
    with pytest.raises(InvalidInputError):
        shape, _, dtype, _ = read_npy_header(data, "a")
        check_array("a", shape, dtype, 8)


def test_a_header_of_version_3(tmp_path):
    """NumPy writes it for names of fields beyond latin1; they are read as latin1."""
    with open(tmp_path / "a.npy", "wb") as file:
        np.lib.format.write_array(file, np.arange(6, dtype="<f4").reshape(2, 3), version=(3, 0))
    shape, _, dtype, _ = read_npy_header((tmp_path / "a.npy").read_bytes(), "a")
    assert (shape, dtype) == ((2, 3), np.dtype("<f4"))
