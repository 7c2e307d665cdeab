"""Compressed pickles, their limits, and files of joblib."""

import bz2
import gzip
import importlib
import io
import lzma
import pickle
import zlib

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of, make_trace, make_traces
from tests.ingest.readers.trees import read_tree, refusal
from tests.tiers import long


def zstd(data):
    for name in ("compression.zstd", "backports.zstd"):
        try:
            library = importlib.import_module(name)
            return library.compress(data, options={library.CompressionParameter.checksum_flag: 1})
        except ModuleNotFoundError:
            continue
    pytest.skip("no library for zstd")


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd, ".zlib": zlib.compress}
DATA = pickle.dumps(make_traces(4, tokens=20, dim=32), 4)


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_pickles_give_the_same_store(tmp_path, suffix):
    pack = PACK[suffix]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/a.pkl").write_bytes(DATA)
    convert(tmp_path / "plain/a.pkl", tmp_path / "plain.zarr", "--attention", "heads")
    third = len(DATA) // 3
    forms = {"whole": pack(DATA)}
    if suffix != ".zlib":
        forms["streams"] = b"".join(map(pack, (DATA[:third], DATA[third : 2 * third], DATA[2 * third :])))
    for form, data in forms.items():
        path = tmp_path / f"{form}.pkl{suffix}"
        path.write_bytes(data)
        convert(path, tmp_path / f"{form}.zarr", "--attention", "heads")
        one, other = (tracestore.open(tmp_path / name) for name in ("plain.zarr", f"{form}.zarr"))
        for trace, expected in zip(one, other, strict=True):
            np.testing.assert_array_equal(trace.hidden_states, expected.hidden_states)
            np.testing.assert_array_equal(trace.attention, expected.attention)


@pytest.mark.parametrize("suffix", PACK)
def test_damaged_streams_are_refused(tmp_path, suffix):
    data = PACK[suffix](DATA)
    middle = len(data) // 2
    damaged = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
    for name, content in {
        "cut": data[:middle],
        "one byte": data[:-1],
        "garbage": data + b"garbage",
        "damaged": damaged,
        "checksum": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        "head": data[:6],
    }.items():
        path = tmp_path / f"{name}.pkl{suffix}"
        path.write_bytes(content)
        text = refusal(path)
        assert text and "\n" not in text
        assert name == "garbage" or "truncated" in text or "damaged" in text or "pickle" in text, text


@pytest.mark.parametrize("suffix", [".gz", ".zst", *long(*(s for s in PACK if s not in (".gz", ".zst")))])
@pytest.mark.long
def test_bombs_are_refused(tmp_path, suffix):
    """A stream that inflates to far more than its size is refused before it is inflated."""
    bomb = b"\x80\x04\x8e" + (900 << 20).to_bytes(8, "little") + bytes(160 << 20)
    path = tmp_path / f"bomb.pkl{suffix}"
    path.write_bytes(PACK[suffix](bomb) if suffix != ".xz" else lzma.compress(bomb, preset=0))
    assert "inflates to more than" in refusal(path)


def test_a_stream_whose_dictionary_is_large_is_refused(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29, "mode": lzma.MODE_FAST, "mf": lzma.MF_HC3}]
    data = bytearray(lzma.compress(DATA, filters=[filters[0] | {"dict_size": 1 << 20}]))
    # The size of the dictionary is one byte of the header of the block, whose checksum follows.
    begin = data.index(b"\x21\x01") + 2
    data[begin] = 37  # 1 GiB
    header = 12
    size = (data[header] + 1) * 4
    data[header + size - 4 : header + size] = zlib.crc32(data[header : header + size - 4]).to_bytes(4, "little")
    (tmp_path / "a.pkl.xz").write_bytes(data)
    assert "damaged xz: Memory usage limit" in refusal(tmp_path / "a.pkl.xz")


def test_folders_are_searched_for_these_suffixes(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    names = ["a.p", "b.pickle", "c.pkl.bz2", "d.pkl.xz", "e.joblib", "f.pkl.gz"]
    for k, name in enumerate(names):
        data = pickle.dumps([make_trace(k)])
        (folder / name).write_bytes(PACK[f".{name.rsplit('.')[-1]}"](data) if name.count(".") > 1 else data)
    convert(folder, tmp_path / "s.zarr")
    assert tracestore.open(tmp_path / "s.zarr").question_ids == [f"q{k}" for k in range(len(names))]


@pytest.mark.parametrize("compress", [0, True, ("zlib", 3), ("gzip", 3), ("bz2", 3), ("xz", 3)], ids=str)
def test_files_of_joblib(tmp_path, compress):
    joblib = pytest.importorskip("joblib")
    traces = make_traces(4, tokens=9, dim=64)
    traces[1]["hidden_states"] = [np.asfortranarray(h) for h in traces[1]["hidden_states"]]
    traces[2]["names"] = np.array(["a", "bc"])
    traces[3]["empty"] = np.zeros((0, 3), "f4")
    joblib.dump(traces, tmp_path / "a.joblib", compress=compress)
    for trace, expected in zip(read_tree(tmp_path / "a.joblib"), traces, strict=True):
        assert trace.keys() == expected.keys()
        for name, value in trace.items():
            np.testing.assert_array_equal(value, expected[name])


def test_damaged_files_of_joblib_are_refused(tmp_path):
    joblib = pytest.importorskip("joblib")
    path = tmp_path / "a.joblib"
    joblib.dump([make_trace(1, tokens=9, dim=64)], path)
    data = path.read_bytes()
    objects = tmp_path / "objects.joblib"
    joblib.dump([make_trace(1) | {"x": np.array([{}], dtype=object)}], objects)
    error_of("convert", objects, tmp_path / "s.zarr", code=3)
    shape = b"K\tK@\x86"
    assert data.count(shape) >= 3
    for content in (
        *(data[:at] for at in range(1, len(data), len(data) // 60)),
        data.replace(shape, b"K\tKA\x86", 1),
        data.replace(shape, b"K\tJ\xff\xff\xff\x7f\x86", 1),
        data.replace(b"numpy_array_alignment_bytes\x94K\x10", b"numpy_array_alignment_bytes\x94K\xff", 1)[:900],
        data.replace(b"\x8c\x01C", b"\x8c\x01X", 1),
        data.replace(b"allow_mmap", b"allow_mmaq").replace(b"subclass", b"subclasz", 1),
    ):
        path.write_bytes(content)
        assert "a.joblib" in error_of("convert", path, tmp_path / "s.zarr", code=3)
    assert not (tmp_path / "s.zarr").exists()


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_compressed_torch_files(tmp_path, suffix, is_zip):
    torch = pytest.importorskip("torch")
    states = torch.randn(3, 4, 8).half()
    buffer = io.BytesIO()
    torch.save({"question_id": "q7", "hidden_states": states}, buffer, _use_new_zipfile_serialization=is_zip)
    data = PACK[suffix](buffer.getvalue())
    (tmp_path / "in").mkdir()
    (tmp_path / f"in/a.pt{suffix}").write_bytes(data)
    lines = (f"hidden_states = a.pt{suffix} : hidden_states -> L S D", f"question_id = a.pt{suffix} : question_id")
    convert(tmp_path / "in", tmp_path / "s.zarr", *(word for line in lines for word in ("--field", line)))
    with tracestore.open(tmp_path / "s.zarr") as store:
        np.testing.assert_array_equal(store["q7"].hidden_states, states.numpy())
    (tmp_path / f"in/a.pt{suffix}").write_bytes(data[: len(data) // 2])
    assert "a.pt" in error_of("convert", tmp_path / "in", tmp_path / "t.zarr", "--attention", "none", code=3)
