"""A score inside of a trace file changes, and the same command runs again: the new value counts and is reported."""

import itertools

import pytest

import tracestore
from tests.helpers import convert, make_traces, write_pickle

BUILTIN = ("--score-column", "quality", "--score-direction", "correct")
FIELDS = {
    "hidden_states": "[]/hidden_states -> L S D",
    "attentions": "[]/attentions -> L H S S",
    "question_id": "[]/question_id",
    "correctness.quality": "[]/quality",
}
STATED = [word for name, path in FIELDS.items() for word in ("--field", f"{name} = *.pkl : {path}")]
STATED += ["--field", 'records = ["*.pkl : []"]']
CHOICES = ("error", "keep-first", "keep-last")


def write(folder, score, answer="an answer", name="a.pkl"):
    traces = [{**trace, "quality": 0.75, "generated_answer_clean": answer} for trace in make_traces(3)]
    if score is None:
        del traces[0]["quality"]
    else:
        traces[0]["quality"] = score
    write_pickle(folder / name, traces)


@pytest.mark.parametrize(("score", "choice"), list(itertools.product([0.125, None], CHOICES)))
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("flags", [BUILTIN, STATED], ids=["built-in layout", "stated layout"])
def test_a_changed_score_replaces_the_stored_one(tmp_path, flags, workers, score, choice):
    (folder := tmp_path / "data").mkdir()
    write(folder, score)
    convert(folder, tmp_path / "s.zarr", *flags)

    write(folder, 0.875)
    done = convert(folder, tmp_path / "s.zarr", *flags, "--on-conflict", choice, "--workers", workers)

    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0.875, 0.75, 0.75]
    assert ("1 stored label replaced by changed ones" in done.stdout) == (score is not None)


@pytest.mark.parametrize("flags", [BUILTIN, STATED], ids=["built-in layout", "stated layout"])
def test_a_replaced_trace_has_the_score_of_its_file(tmp_path, flags):
    (folder := tmp_path / "data").mkdir()
    write(folder, 0.125)
    convert(folder, tmp_path / "s.zarr", *flags)

    write(folder, 0.875, answer="another answer")
    convert(folder, tmp_path / "s.zarr", *flags, "--on-conflict", "keep-last")

    store = tracestore.open(tmp_path / "s.zarr")
    assert store[0].answer == "another answer" and store.scores.tolist() == [0.875, 0.75, 0.75]


@pytest.mark.parametrize("flags", [BUILTIN, STATED], ids=["built-in layout", "stated layout"])
def test_copies_of_one_run_with_two_scores_are_refused(tmp_path, flags):
    (folder := tmp_path / "data").mkdir()
    write(folder, 0.125)
    write(folder, 0.875, name="b.pkl")

    done = convert(folder, tmp_path / "s.zarr", *flags, check=3)

    assert "found 0.125 and 0.875 for q0, sample 0: copies of a trace have one label" in done.stderr
