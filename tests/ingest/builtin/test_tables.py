"""Test tables next to files of a built-in layout: their lines join its traces, or the folder is refused."""

import csv
import json
import pickle

import pytest

import tracestore
from tests.helpers import make_traces
from tracestore.errors import InvalidInputError


def write(tmp_path, **tables):
    """Write four traces of the family, and tables by their names, `_DOT_` for the dot; return the folder."""
    folder = tmp_path / "in"
    folder.mkdir()
    traces = make_traces(4)
    for k, trace in enumerate(traces):
        trace["question_id"] = f"q{k}"
    (folder / "traces.pkl").write_bytes(pickle.dumps(traces))
    for name, rows in tables.items():
        path = folder / name.replace("_DOT_", ".")
        with path.open("w", newline="") as file:
            if path.suffix == ".csv":
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
            else:
                json.dump(rows, file)
    return folder


def convert(tmp_path, folder):
    tracestore.convert_files(folder, tmp_path / "s.zarr")
    return {trace.question_id: trace for trace in tracestore.open(tmp_path / "s.zarr")}


ROWS = [{"qid": f"q{k}", "correct": k % 2 == 0} for k in (2, 0, 3, 1)]


@pytest.mark.parametrize("name", ["labels_DOT_csv", "labels_DOT_json"])
def test_labels_by_id_join_the_traces(tmp_path, name):
    traces = convert(tmp_path, write(tmp_path, **{name: ROWS}))

    assert {key: trace.score for key, trace in traces.items()} == {"q0": 1, "q1": 0, "q2": 1, "q3": 0}


TRAPS = {
    "a column without a meaning": [{"qid": f"q{k}", "label": k % 2} for k in range(4)],
    "ids of other traces": [{"qid": f"p{k}", "correct": True} for k in range(4)],
    "an id twice": [{"qid": "q0", "correct": False}, *ROWS],
    "labels in order": [{"correct": True}] * 4,
    "two columns that disagree": [row | {"is_hallucinated": row["correct"]} for row in ROWS],
}


@pytest.mark.parametrize("trap", TRAPS)
def test_tables_that_prove_nothing_are_refused(tmp_path, trap):
    folder = write(tmp_path, labels_DOT_json=TRAPS[trap])

    with pytest.raises(InvalidInputError, match=r"labels\.json"):
        tracestore.convert_files(folder, tmp_path / "s.zarr")


def test_an_answer_that_the_family_has_not_leaves_the_file_to_a_proposal(tmp_path):
    traces = [trace | {"answer": "Paris"} for trace in make_traces(3)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.pkl").write_bytes(
        pickle.dumps([{k: v for k, v in t.items() if k != "generated_answer_clean"} for t in traces])
    )

    assert {trace.answer for trace in convert(tmp_path, tmp_path / "in").values()} == {"Paris"}
