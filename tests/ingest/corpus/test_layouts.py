"""Test the layouts of the corpus: each gives the traces that are expected of its kind."""

import pytest

import tracestore
from tests.ingest.corpus import measure
from tests.ingest.corpus.registry import LAYOUTS, load

KINDS = load()
# The kinds of every run; the others are marked long.
EVERY = 20


def test_layouts_are_those_of_kinds():
    assert set(LAYOUTS) <= set(KINDS)
    assert len(LAYOUTS) >= 500


def names():
    """Return the names of the kinds with a layout as parameters."""
    return [pytest.param(name, marks=[pytest.mark.long] if k % EVERY else []) for k, name in enumerate(LAYOUTS)]


@pytest.mark.parametrize("name", names())
def test_a_kind_is_equal_with_its_layout(name, tmp_path):
    kind = KINDS[name]
    if missing := kind.missing():
        pytest.skip(f"{', '.join(missing)} is not installed")
    (tmp_path / "in").mkdir()
    expected = kind.write(tmp_path / "in")

    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", layout=LAYOUTS[name])

    measure.check_store(tmp_path / "s.zarr", expected)
