"""Test the tree of .safetensors files."""

import gzip
import json
import struct

import numpy as np
import pytest

from tests.ingest.readers.trees import check_mutations, check_time, read_tree, refusal, refusal_in_child
from tracestore.ingest.readers.opening import open_tree


def safetensors(tensors, metadata=None):
    """Return a file of (dtype, array) by name."""
    header, data = {"__metadata__": metadata} if metadata else {}, bytearray()
    for name, (dtype, array) in tensors.items():
        body = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(body)]}
        data += body
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


STATES = np.arange(24, dtype="<f2").reshape(2, 3, 4)
TENSORS = {
    "q0/hidden": ("F16", STATES),
    "q0/ids": ("I64", np.arange(3)),
    "bf": ("BF16", np.array([0x3FC0, 0x4000], "<u2")),
    "model.layers.3": ("F32", np.ones((1, 2), "<f4")),
    "n": ("I32", np.array(5, "<i4")),
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_tensors_are_lazy_arrays(tmp_path, suffix):
    path = tmp_path / f"a.safetensors{suffix}"
    data = safetensors(TENSORS, {"model": "m", "prompt_length": "3"})
    path.write_bytes(gzip.compress(data) if suffix else data)
    with open_tree(path) as root:
        assert root.attributes == {"model": "m", "prompt_length": "3"}
        assert list(root) == ["q0", "bf", "model.layers.3", "n"] and list(root["q0"]) == ["hidden", "ids"]
        hidden = root["q0"]["hidden"]
        assert hidden.dtype == "float16" and hidden.read((1, slice(0, 2))).tolist() == STATES[1, :2].tolist()
        assert root["bf"].dtype == "bfloat16" and root["bf"].read()["bfloat16"].tolist() == [0x3FC0, 0x4000]
        assert root["n"] == 5


def test_floats_of_8_bits_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors({"h": ("F8_E4M3", np.array([[0x38, 0x40]], "u1"))}))
    assert "F8_E4M3, which is not supported" in refusal(path)


@pytest.mark.parametrize("cut", [1, 7, 9, 60, 200])
def test_damaged_files_are_refused(tmp_path, cut):
    path = tmp_path / "a.safetensors"
    data = safetensors(TENSORS)
    path.write_bytes(data[:-cut])
    assert refusal(path)
    path.write_bytes(data + bytes(cut))
    assert "trailing bytes" in refusal(path)


def test_changed_files_are_read_or_refused(tmp_path):
    assert check_mutations(safetensors(TENSORS, {"a": "b"}), tmp_path / "a.safetensors", 200) > 60


@pytest.mark.parametrize("flags", [0x01, 0x5E, 0x9C, 0xDA])
def test_the_length_of_a_header_may_begin_like_a_compressed_file(tmp_path, flags):
    """The first bytes of a zlib stream are 0x78 and `flags`."""
    wanted = 0x78 | flags << 8
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"x": entry, "__metadata__": {"note": ""}})
    header = header.replace('"note": ""', f'"note": "{"n" * (wanted - len(header))}"')
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", wanted) + header.encode() + np.array([1, 2], "<f4").tobytes())

    assert path.read_bytes()[:2] == bytes((0x78, flags))
    with open_tree(path) as root:
        assert root["x"].read().tolist() == [1, 2]


@pytest.mark.long
def test_a_header_of_many_names_ends(tmp_path):
    path = tmp_path / "a.safetensors"
    entry = b'"dtype":"F16","shape":[0],"data_offsets":[0,0]}'
    text = b"{" + b",".join(b'"%x":{' % k + entry for k in range(600_000)) + b"}"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    refusal_in_child(path)
    text = b"{" + b",".join(b'"%x":{' % k + entry for k in range(20_000)) + b"}"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert refusal_in_child(path) == ""


@pytest.mark.long
def test_four_times_the_input_takes_four_times_as_long(tmp_path):
    paths = []
    for count in (10_000, 40_000):
        path = tmp_path / f"{count}.safetensors"
        path.write_bytes(safetensors({f"q{k}/h": ("F16", STATES) for k in range(count)}))
        paths.append(path)
    check_time(*paths)


def test_the_tree_is_read_whole(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors(TENSORS))
    assert read_tree(path)["q0"]["hidden"].tolist() == STATES.tolist()
