"""Archives of small arrays, compared with those of the module zipfile."""

import io
import random
import zipfile

import numpy as np
import pytest

from tracestore.store.format import zip_group
from tracestore.store.format.zarr_json import group_metadata, small_array_metadata
from tracestore.store.format.zip_group import pack_group


def archive_of_zipfile(arrays, attributes):
    """Return the archive of a group as zipfile writes it."""
    files = {"zarr.json": group_metadata(attributes)}
    for name, array in arrays.items():
        files[f"{name}/zarr.json"] = small_array_metadata(array.size, array.dtype)
        if array.size:
            files[f"{name}/c/0"] = array.astype(array.dtype.newbyteorder("<")).tobytes()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", allowZip64=False) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            padding = -(out.tell() + 30 + len(name) + 8) % 64 + 4
            info.extra = (0xD935).to_bytes(2, "little") + padding.to_bytes(2, "little") + bytes(padding)
            info.external_attr = 0o444 << 16
            archive.writestr(info, data)
    return out.getvalue()


def test_the_bytes_are_those_of_zipfile():
    rng = random.Random(0)
    for _ in range(100):
        names = [f"{'x' * rng.randrange(70)}_{k}" for k in range(rng.randrange(30))]
        arrays = {
            name: np.arange(rng.choice([0, 1, 3, 100, 5000])).astype(rng.choice(["<i8", "u1", ">i4", "<f4", "?"]))
            for name in names
        }
        attributes = rng.choice([{}, {"tracestore": {"num_traces": rng.randrange(100), "text": "ä"}}])
        packed = pack_group(arrays, attributes)
        assert packed == archive_of_zipfile(arrays, attributes)
        assert zipfile.ZipFile(io.BytesIO(packed)).testzip() is None


def test_an_archive_of_more_than_4_gib_is_refused(monkeypatch):
    arrays = {"a": np.zeros(1000, "u1")}
    monkeypatch.setattr(zip_group, "_MAX_OFFSET", len(pack_group({}, {})) + 1000)
    with pytest.raises(ValueError, match="more than 4 GiB"):
        pack_group(arrays, {})
