"""Paths of files in manifests and index parts cannot name anything outside the store."""

import pytest

import tracestore
from tests.helpers import command
from tests.malicious_inputs.stores import Store
from tracestore.errors import CorruptStoreError
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.ragged import encode_strings


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "segments/../../x", "segments/00000000/evil.pth", "index/0000000001.zip\n", "segments/../x/rows.zip", "segments/.x/rows.zip", "zarr.json", "",
     "segments/00000000/hidden_states/c/0/0/0/0", "segments/0/num_tokens/c/0", "segments/A/rows.zip", None, 7],
)  # fmt: skip
def test_paths_outside_the_format_are_rejected(path):
    with pytest.raises(CorruptStoreError, match="not a valid path"):
        FileEntry(path, 1, 1)


def test_a_path_in_the_index_cannot_leave_the_store(single_generation, tmp_path):
    store = Store(single_generation)
    arrays = store.part(0)
    count = len(arrays["segment_size"])
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    arrays["segment_name"], arrays["segment_name_offsets"] = encode_strings([str(outside)] * count)
    store.set_part(0, arrays)
    store.seal()
    with tracestore.open(single_generation) as opened, pytest.raises(CorruptStoreError, match="not a valid path"):
        _ = opened[0].hidden_states
    assert "not a valid path" in command("verify", single_generation, check=3).stderr
