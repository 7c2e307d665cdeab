"""Test converting several sources in one command by layouts that no line states."""

import re
import shlex

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of
from tests.ingest.execute.folders import dump, states, table

VALUES = {"q0": 1, "q1": 0, "q2": 0, "q3": 1}
LINES = {"hidden_states": "{id}.npz : hs -> L S D", "is_correct": "labels.csv : [id=qid]/is_correct"}


def write(folder, *, is_proved, values=VALUES):
    """Write traces and labels to folders of their own, and return these."""
    (folder / "acts").mkdir(parents=True)
    for k, name in enumerate(values):
        own = {"hidden_states": states(2, 4 + k, 8, seed=k), "tokens": np.arange(4 + k)}
        np.savez(folder / f"acts/{name}.npz", **(own if is_proved else {"hs": own["hidden_states"]}))
    table(folder / "judge/labels.csv", [{"qid": name, "is_correct": value} for name, value in values.items()])
    return [folder / "acts", folder / "judge"]


def labels(store):
    return {trace.question_id: trace.scores["is_correct"] for trace in tracestore.open(store)}


@pytest.mark.parametrize("kind", ["folders", "a file", "files"])
def test_a_table_apart_from_its_traces_is_a_part_of_the_layout(tmp_path, kind):
    acts, judge = write(tmp_path, is_proved=True)
    sources = {
        "folders": [judge, acts],
        "a file": [acts, judge / "labels.csv"],
        "files": [*acts.iterdir(), judge / "labels.csv"],
    }[kind]

    shown = convert(*sources, tmp_path / "s.zarr").stdout

    assert labels(tmp_path / "s.zarr") == VALUES
    assert shown.count("The files prove this layout") == 1
    assert "0 traces added from 0 files" in convert(*sources, tmp_path / "s.zarr").stdout


def test_lines_to_paste_are_for_all_sources(tmp_path):
    sources = write(tmp_path, is_proved=False)

    shown = convert(*sources, tmp_path / "s.zarr", check=3).stdout

    assert "N 4, L 2, S 4 to 7, D 8" in shown
    assert "4 rows of labels.csv joined by id" in shown
    convert(*sources, tmp_path / "s.zarr", *shlex.split(" ".join(re.findall("--field .*", shown))))
    assert labels(tmp_path / "s.zarr") == VALUES


@pytest.mark.parametrize("is_proved", [False, True])
def test_lines_are_said_to_be_for_one_source_if_names_repeat(tmp_path, is_proved):
    one = write(tmp_path / "one", is_proved=is_proved)
    (one[1] / "labels.csv").rename(one[0] / "labels.csv")
    dump(tmp_path / "two/a.pkl", [{"qid": "a", "hs": states(2, 4, 8)}])
    table(tmp_path / "two/labels.csv", [{"qid": "a", "is_correct": 1}])

    refused = error_of("convert", one[0], tmp_path / "two", tmp_path / "s.zarr", code=3)

    assert "and the like: convert them alone" in refused


def test_the_kept_layout_reads_all_sources(tmp_path):
    sources = write(tmp_path, is_proved=False)
    tracestore.convert_files(sources, tmp_path / "s.zarr", layout=LINES)
    np.savez(sources[0] / "q4.npz", hs=states(2, 5, 8, seed=9))
    changed = VALUES | {"q0": 0, "q4": 1}
    table(sources[1] / "labels.csv", [{"qid": name, "is_correct": value} for name, value in changed.items()])

    convert(*sources, tmp_path / "s.zarr")

    assert labels(tmp_path / "s.zarr") == changed


def test_lines_to_paste_are_for_the_files_of_a_tool_too(tmp_path):
    """One file has a text that its tool does not have in files without ids."""
    for k, tokens in enumerate((4, 6, 5)):
        trace = {"hidden_states": states(3, tokens, 8, seed=k), "tokens": np.arange(tokens), "sample": 1}
        dump(tmp_path / f"in/q{k}.pkl", trace | ({"note": "a"} if k == 1 else {}))

    # It does not convert by the layout that all files prove, which leaves out the key sample.
    shown = convert(tmp_path / "in", tmp_path / "s.zarr", check=3).stdout

    convert(tmp_path / "in", tmp_path / "all.zarr", *shlex.split(" ".join(re.findall("--field .*", shown))))
    assert len(tracestore.open(tmp_path / "all.zarr")) == 3


def test_lines_next_to_files_of_a_kept_layout_are_said_to_be_for_others(tmp_path):
    acts = write(tmp_path / "in", is_proved=False)[0]
    tracestore.convert_files(
        [tmp_path / "in"],
        tmp_path / "s.zarr",
        layout=LINES
        | {"hidden_states": "acts/{id}.npz : hs -> L S D", "is_correct": "judge/labels.csv : [id=qid]/is_correct"},
    )
    dump(acts / "p0.pkl", {"other": states(2, 4, 8)})

    assert "and the like: convert them alone" in error_of("convert", tmp_path / "in", tmp_path / "s.zarr", code=3)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", ["a dict per file", "a list"])
def test_a_number_of_an_answer_is_not_left_out(tmp_path, kind, number):
    """Files of a tool were converted without it, as the answer 0, if a table lay next to them."""
    traces = [
        {
            "question_id": name,
            "hidden_states": states(2, 4 + k, 8, seed=k),
            "tokens": np.arange(4 + k),
            "sample": number,
        }
        for k, name in enumerate(VALUES)
    ]
    for k, trace in enumerate(traces) if kind == "a dict per file" else [("all", traces)]:
        dump(tmp_path / f"in/{k}.pkl", trace)
    table(tmp_path / "in/labels.csv", [{"qid": name, "is_correct": value} for name, value in VALUES.items()])

    done = convert(tmp_path / "in", tmp_path / "s.zarr", check=None)

    assert done.returncode == (3 if number else 0)
    assert number == 0 or "sample" in done.stderr
