"""Stores of every kind: a reader written from docs/format.md, and Zarr libraries, read what tracestore reads."""

import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tracestore
from tests.helpers import ROOT, make_traces
from tests.store import second_reader
from tests.store.format.store_kinds import KINDS, SIMILAR, assert_same, expected
from tests.store.format.zarr_libraries import compare_large_arrays, compare_small_arrays
from tests.store.maintain.test_transfer import assert_equal, merge_by_copying
from tests.store.second_reader import find, key_hash
from tests.tiers import long
from tracestore.store.maintain.merge import merge_stores
from tracestore.store.maintain.verify import verify_store


class Kind(NamedTuple):
    """A store, and what tracestore reads from it."""

    path: Path
    expected: list[dict[str, Any]]


@pytest.fixture(
    scope="module", params=[*(name for name in KINDS if name not in SIMILAR.split()), *long(*SIMILAR.split())]
)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    """A store of each kind."""
    path = tmp_path_factory.mktemp("kind") / "s.zarr"
    KINDS[request.param](path)
    return Kind(path, expected(path))


def test_a_reader_written_from_the_docs_and_zarr_libraries_read_every_value(store, monkeypatch):
    # One reading of the archives by zarr-python is enough.
    read_zip = cache(second_reader.read_zip)
    monkeypatch.setattr(second_reader, "read_zip", read_zip)
    assert compare_large_arrays(store.path) >= 1 and compare_small_arrays(store.path, read_zip) >= 3
    found = second_reader.read_store(store.path)
    assert len(found) == len(store.expected) > 0
    for k, (mine, theirs) in enumerate(zip(store.expected, found, strict=True)):
        assert theirs.keys() <= mine.keys(), "add the field to OptionalFields of tracestore/store/read/trace.py"
        for name, value in mine.items():
            # The reader finds the names of optional fields in each segment.
            assert_same(theirs.get(name), value, f"trace {k}, {name}")


def test_a_reader_written_from_the_docs_finds_traces(store):
    positions = {(trace["question_id"], trace["sample"]): k for k, trace in enumerate(store.expected)}
    last = list(positions)[-1]
    for key in (last, (last[0], 5), (f"{last[0]}x", 0)):
        assert find(store.path, *key) == positions.get(key, -1), key


def test_a_reader_written_from_the_docs_reads_the_lens(store):
    found = second_reader.read_lens(store.path)
    with tracestore.open(store.path) as opened:
        assert (found is None) == (opened.lens is None)
        if opened.lens is not None:
            matrix = opened.lens.unembedding
            small = {
                "final_norm_weight": opened.lens.norm_weight,
                "final_norm_bias": opened.lens.norm_bias,
                "unembedding_bias": opened.lens.bias,
                "unembedding": matrix.astype("f4") if opened.lens.dtype == "bfloat16" else matrix,
            }
            assert_same(found, {name: value for name, value in small.items() if value is not None}, "lens")


def test_the_store_is_intact(store):
    report = verify_store(store.path)
    assert report.damaged == {} and report.num_files > 3


def test_a_store_equals_its_copy(store, tmp_path):
    """The command merge takes over whole segments, and the result equals that of copying."""
    with tracestore.open(store.path) as opened:
        codec = opened.internals.attributes.options["codec"]
    options = {"codec": codec, "allow_mixed_provenance": True}
    reports = [
        merge([store.path], tmp_path / name, **options)
        for merge, name in ((merge_stores, "taken.zarr"), (merge_by_copying, "copied.zarr"))
    ]
    assert reports[0] == reports[1]
    assert_equal(tmp_path / "taken.zarr", tmp_path / "copied.zarr")


def test_the_hash_of_the_docs_finds_the_traces(tmp_path):
    for row in re.findall(r"\| (\S+) \| (\d) \| ([0-9a-f]{16}) \|", (ROOT / "docs/format.md").read_text()):
        assert f"{key_hash(row[0].encode(), int(row[1])):016x}" == row[2]
    traces, samples = make_traces(40, tokens=2), (0, 3)
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for trace, sample in product(traces, samples):
            writer.append(trace | {"sample": sample})
    (part,) = (tmp_path / "s.zarr/index").glob("*.zip")
    assert len(second_reader.read_zip(part)["key_table"]) == 256
    for k, (trace, sample) in enumerate(product(traces, samples)):
        assert find(tmp_path / "s.zarr", trace["question_id"], sample) == k
