"""File mappings as buffers."""

import numpy as np
import pytest

from tracestore._core.mapping import MappedFile


def test_a_view_keeps_its_mapping_alive(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    view = np.frombuffer(MappedFile(path, 10), "u1")
    path.unlink()
    assert view.tobytes() == b"0123456789"
    with pytest.raises(ValueError):
        view[0] = 0
    with pytest.raises(FileNotFoundError):
        MappedFile(path)


def test_an_unexpected_size_is_rejected(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with pytest.raises(ValueError, match="expected 11 bytes, found 10"):
        MappedFile(path, 11)
