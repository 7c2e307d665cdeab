"""Files of real libraries are accepted, and the records equal the input."""

import math

import numpy as np
import pytest
import torch

from tests.golden.library_inputs import expected_traces
from tests.helpers import ROOT, read_traces
from tests.ingest.readers.trees import read_tree
from tests.valid_inputs.corpus import KINDS, graph_files, pickles, raw, sequence_files
from tracestore.store.format.schema import BFLOAT16

LIBRARIES = sorted((ROOT / "tests/golden/libraries").glob("*.pkl*"))


def fields_of(record, keys):
    """Return the fields of a record under the names of the expected ones."""
    out = {"question_id": record.question_id, "label": record.label}
    if record.hidden is not None:
        out["hidden"] = [bits(h) for h in record.hidden]
    if record.attention is not None:
        out["attention"] = [bits(a) for a in record.attention]
    if record.edges is not None:
        out["edges"] = [(bits(index), bits(weight)) for index, weight in record.edges]
    if record.last_token is not None:
        out["last_token"] = bits(record.last_token)
    if record.tokens is not None:
        assert record.tokens.dtype == np.dtype("<i4")
        out["tokens"] = record.tokens.tolist()
    out["decoded"] = record.tokens_decoded
    out["rest"] = dict(record.extras) | record.strings
    if record.prompt_length is not None:
        out["rest"]["prompt_length"] = record.prompt_length
    return {k: out[k] for k in keys}


def bits(array):
    """Return the same as corpus.raw, also for the reader's bfloat16."""
    if array.dtype == BFLOAT16:
        return "bfloat16", array.shape, np.ascontiguousarray(array).tobytes()
    return raw(array)


def same(a, b):
    """Return whether two values are equal; tuples equal lists, and dtypes and signs of zero count."""
    if isinstance(a, np.ndarray | np.generic | torch.Tensor) or isinstance(b, np.ndarray | np.generic | torch.Tensor):
        if isinstance(a, list) or isinstance(b, list):
            return same(list(a), list(b))
        return np.asarray(a).dtype == np.asarray(b).dtype and np.array_equal(np.asarray(a), np.asarray(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return type(a) is type(b) and a == b


def compare(path, valid, faults):
    """Append the differences between a file's records and the expected ones to `faults`."""
    path.write_bytes(valid.data)
    try:
        records = list(read_traces(path, path.name))
    except Exception as error:
        faults.append(f"{valid.name}: {type(error).__name__}: {error}")
        return
    if len(records) != len(valid.expected):
        faults.append(f"{valid.name}: {len(records)} traces")
        return
    for record, expected in zip(records, valid.expected, strict=True):
        got = fields_of(record, expected)
        for key, value in expected.items():
            if not same(got[key], value):
                faults.append(f"{valid.name}, {record.question_id}, {key}: {got[key]!r:.300} != {value!r:.300}")


def assert_expected_records(folder, files):
    """Assert that all files give the expected records."""
    faults, count = [], 0
    for valid in files:
        path = folder / ("file" + valid.name[valid.name.rindex(".p") :].replace(".members", ""))
        compare(path, valid, faults)
        path.unlink()
        count += 1
    assert count and not faults, f"{len(faults)} faults in {count} files:\n" + "\n".join(faults[:20])


@pytest.mark.long
@pytest.mark.parametrize("dtype,kind", KINDS)
def test_pickles_give_the_expected_records(tmp_path, dtype, kind):
    assert_expected_records(tmp_path, pickles(dtype, kind))


@pytest.mark.long
def test_sequences_give_the_expected_records(tmp_path):
    assert_expected_records(tmp_path, sequence_files())


@pytest.mark.long
def test_graphs_give_the_expected_records(tmp_path):
    assert_expected_records(tmp_path, graph_files())


def of_tree(value):
    """Return a value as a tree holds it: numbers and texts of Python, arrays in native byte order."""
    if isinstance(value, dict):
        return {key: of_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(of_tree, value))
    if isinstance(value, np.ndarray):
        is_array = value.dtype.kind not in "SUO"
        return value.astype(value.dtype.newbyteorder("=")) if is_array else of_tree(value.tolist())
    value = value.item() if isinstance(value, np.generic) else value
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda p: p.name)
def test_files_of_other_numpy_versions_give_the_expected_values(path):
    found = read_tree(path)
    traces = of_tree(expected_traces()[:1] if "bare" in path.name else expected_traces())
    found = [found] if isinstance(found, dict) else found
    assert [trace.keys() for trace in found] == [trace.keys() for trace in traces]
    assert [key for a, b in zip(found, traces, strict=True) for key in a if not same(a[key], b[key])] == []


def test_files_of_numpy_1_and_2_exist():
    names = {p.name.split("-")[1].split(".")[0] for p in LIBRARIES}
    assert names == {"1", "2"} and len(LIBRARIES) >= 14
