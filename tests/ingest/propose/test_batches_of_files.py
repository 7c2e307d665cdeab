"""Test files whose names end in the number of a batch, or of its first row, without a word for it."""

import json

import numpy as np
import pytest

import tracestore
from tests.ingest.execute.folders import save, states, table
from tests.ingest.propose.folders import check_candidates, proposal_of, refuse

ROWS = 11
# Rows of each batch, and the numbers in the names of the files.
CUTS = {
    "first rows": ([4, 4, 3], [0, 4, 8]),
    "first rows of unequal batches": ([2, 5, 4], [0, 2, 7]),
    "counted": ([4, 4, 3], [0, 1, 2]),
    "counted full": ([4, 4, 4], [0, 1, 2]),
    "many first rows": ([2] * 20 + [1], range(0, 41, 2)),
    "many counted": ([2] * 20 + [1], range(21)),
}
TABLE = ["csv", "jsonl", "npy"]


def write(folder, sizes, numbers, container="csv", *, rows=None, names="layer_{}_{}", shape=(8,)):
    """Write states of each batch and layer, and a table with a row per trace."""
    firsts = np.cumsum([0, *sizes])
    for layer in range(3):
        array = states(sum(sizes), *shape, seed=layer)
        for first, size, number in zip(firsts, sizes, numbers, strict=False):
            save(folder / f"acts/{names.format(layer, number)}.npy", array[first : first + size])
    found = [{"statement": f"It is {k}.", "is_correct": k % 2} for k in range(rows or sum(sizes))]
    if container == "npy":
        save(folder / "is_correct.npy", np.array([row["is_correct"] for row in found]))
    elif container == "jsonl":
        (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    else:
        table(folder / "t.csv", found)


@pytest.mark.parametrize("container", TABLE)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("names", ["layer_{}_{}", "l{}_{:04d}", "block.{}.{}"])
def test_numbers_of_batches_are_candidates(tmp_path, names, cut, container):
    sizes, numbers = CUTS[cut]
    write(tmp_path / "in", sizes, numbers, container, names=names)
    proposal = refuse(tmp_path, "the files may be traces and their rows tokens")
    assert "{chunk}" in proposal.candidates[0].layout.to_entries()["last_token"]
    (_, path), *_ = check_candidates(tmp_path, proposal)
    with tracestore.open(path) as store:
        expected = np.stack([states(sum(sizes), 8, seed=layer) for layer in range(3)])
        for k, trace in enumerate(store):
            np.testing.assert_allclose(trace.last_token, expected[:, k], rtol=2e-3, atol=1e-3)
            assert trace.score == k % 2 and trace.question in (None, f"It is {k}.")


@pytest.mark.parametrize("cut", ["first rows", "counted"])
@pytest.mark.parametrize("rows", [3, 10, 12])
def test_a_table_with_another_number_of_rows_is_that_of_no_batches(tmp_path, cut, rows):
    """[a file per question, whose rows are tokens]"""
    write(tmp_path / "in", *CUTS[cut], rows=rows)
    proposal = refuse(tmp_path)
    assert not any(
        "{chunk}" in str(one.layout.to_entries()) and " : []" in str(one.layout.to_entries())
        for one in proposal.candidates
    )


@pytest.mark.parametrize("numbers", [[0, 3, 8], [1, 5, 9], [0, 4, 9], [3, 1, 2]])
@pytest.mark.parametrize("has_table", [True, False])
def test_numbers_that_are_neither_rows_nor_counts_are_those_of_traces(tmp_path, numbers, has_table):
    write(tmp_path / "in", [4, 4, 3], numbers)
    if not has_table:
        (tmp_path / "in/t.csv").unlink()
    check_candidates(tmp_path, proposal_of(tmp_path))
    assert not any("{chunk}" in str(one.layout.to_entries()) for one in proposal_of(tmp_path).candidates)


@pytest.mark.parametrize("column", ["question_id", "id"])
def test_a_table_with_the_numbers_of_files_as_ids(tmp_path, column):
    """Next to a layout that ids prove, no batches are proposed."""
    for k in range(3):
        for layer in range(2):
            save(tmp_path / f"in/layer_{layer}_{k}.npy", states(4 + k, 8, seed=9 * k + layer))
    table(tmp_path / "in/t.csv", [{column: k, "is_correct": k % 2} for k in range(3)])
    layout = proposal_of(tmp_path).layout
    assert layout is not None and layout.to_entries()["is_correct"] == f"t.csv : [id={column}]/is_correct"


@pytest.mark.parametrize("names", ["acts_{1}_{0}", "acts_{1}"])
@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_first_rows_in_other_names(tmp_path, names, shape):
    write(tmp_path / "in", *CUTS["first rows"], names=names, shape=shape)
    check_candidates(tmp_path, refuse(tmp_path))


def test_a_number_per_file_has_no_rows(tmp_path):
    """A file per layer and value: d0.npy, d4.npy."""
    for k in (0, 4):
        for layer in range(2):
            for dim in range(4):
                save(tmp_path / f"in/layer_{layer}_d{dim}_{k}.npy", states(4, seed=9 * k + layer))
    check_candidates(tmp_path, proposal_of(tmp_path))
