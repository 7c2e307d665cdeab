"""Tables and scores files whose ids are those of no trace, or others by spelling."""

import json

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, field_flags, make_traces, write_pickle, write_scores
from tracestore.convert import cutting
from tracestore.convert.scoring import Scoring
from tracestore.ingest.execute.join import texts_agree
from tracestore.store.write.keys import KeyResolver

BOTH = "such as 'x0', and none of them in the traces, which have ids such as 'q0'"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_table_next_to_the_traces_that_no_line_names_is_refused(tmp_path):
    write_pickle(tmp_path / "t.pkl", make_traces(4))
    write_rows(tmp_path / "judged.jsonl", [{"id": f"q{k}", "score": k % 2} for k in range(4)])
    message = error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)
    assert f"--scores {tmp_path / 'judged.jsonl'} takes the scores of this table" in message
    convert(tmp_path, tmp_path / "s.zarr", "--scores", tmp_path / "judged.jsonl")
    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("ids", [[f"x{k}" for k in range(4)], ["", "", "", ""], [5, 6, 7, 8]])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize("way", ["ids", "names"])
def test_the_scores_of_a_table_without_an_id_of_the_traces_are_no_advice(tmp_path, ids, suffix, way):
    names = [f"q{k}" for k in range(4)]
    for is_of_traces in (False, True):
        rows = [{"id": name, "score": k % 2} for k, name in enumerate(names if is_of_traces else ids)]
        for name, trace in zip(names, make_traces(4), strict=True):
            if way == "names":
                (tmp_path / "in").mkdir(exist_ok=True)
                np.savez(tmp_path / f"in/{name}.npz", a=trace["hidden_states"])
        if way == "ids":
            write_pickle(tmp_path / "in/t.pkl", make_traces(4))
        if suffix == "jsonl":
            write_rows(tmp_path / "in/judged.jsonl", rows)
        else:
            lines = ["id,score", *(f"{row['id']},{row['score']}" for row in rows)]
            (tmp_path / "in/judged.csv").write_text("\n".join(lines) + "\n")
        message = error_of("convert", tmp_path / "in", tmp_path / "s.zarr", code=3)
        assert ("takes the scores of this table by id" in message) == is_of_traces


def test_rows_of_a_stated_table_without_an_id_of_the_traces_are_refused(tmp_path):
    """Rule 12c: no match at all."""
    write_pickle(tmp_path / "t.pkl", make_traces(4))
    write_rows(tmp_path / "labels.jsonl", [{"id": f"x{k}", "y": k % 2} for k in range(4)])
    lines = ["hidden_states = t.pkl : []/hidden_states -> L S D", "question_id = t.pkl : []/question_id"]
    lines += ["attentions = t.pkl : []/attentions -> L H S S", "tokens = t.pkl : []/tokens -> T"]
    lines += ["tokens_decoded = t.pkl : []/tokens_decoded -> T", "is_correct = labels.jsonl : [id=id]/y"]
    lines += ["ignore = t.pkl : []/generated_answer_clean"]
    flags = field_flags(*lines)
    assert "labels.jsonl" in error_of("convert", tmp_path, tmp_path / "s.zarr", *flags, code=3)
    assert not (tmp_path / "s.zarr").exists() or np.isnan(tracestore.open(tmp_path / "s.zarr").scores).all()


def test_a_scores_file_without_an_id_of_the_traces_is_refused(tmp_path):
    write_pickle(tmp_path / "t.pkl", make_traces(4))
    rows = [f"x{k},q{k},{k / 4}" for k in range(4)]
    (tmp_path / "scores.csv").write_text("\n".join(["question_id,ref,score", *rows]))
    message = error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)
    assert f"scores.csv: found 4 ids {BOTH}; its column ref has them: --id-column ref" in message
    convert(tmp_path, tmp_path / "s.zarr", "--id-column", "ref")
    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0, 0.25, 0.5, 0.75]


def test_where_a_trace_was_refused_a_scores_file_without_an_id_of_the_traces_is_reported(tmp_path):
    write_pickle(tmp_path / "t.pkl", [*make_traces(4), {"question_id": "q4"}])
    write_scores(tmp_path / "scores.csv", {f"x{k}": k / 4 for k in range(4)})
    assert BOTH in convert(tmp_path, tmp_path / "s.zarr", "--skip-bad").stdout


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (["q1", "q2", "q3", "q4"], "numbered from 0 and from 1"),
        (["q00", "q1", "q2", "q3"], "differ in spelling only"),
        (["Q0", "q1", "q2", "q3"], "differ in spelling only"),
        ([" q0 ", "q1", "q2", "q3"], "the row ' q0 ' and the trace 'q0' differ in spelling only"),
        (["q\uff10", "q1", "q2", "q3"], "the row 'q\\uff10' and the trace 'q0' differ in spelling only"),
    ],
)
def test_rule_12b_scores_that_would_match_in_another_spelling_or_shifted_by_one_are_refused(tmp_path, ids, text):
    write_pickle(tmp_path / "t.pkl", make_traces(4))
    write_scores(tmp_path / "scores.csv", dict.fromkeys(ids, 0.5))
    assert text in error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)
    assert not (tmp_path / "s.zarr").exists()


@pytest.mark.parametrize("ids", [["Q0", "q1", "q2"], ["q0", "q1", "Q2"], ["q1", "q2", "q3"], ["x0", "x1", "x2"]])
@pytest.mark.parametrize("is_later", [False, True])
def test_refused_ids_stay_refused_when_the_command_is_repeated(tmp_path, monkeypatch, ids, is_later):
    """Each file is a run, which is committed before the ids are refused; or the scores file comes later."""
    monkeypatch.setattr(cutting, "MIN_BYTES", 1)
    for k, trace in enumerate(make_traces(3)):
        write_pickle(tmp_path / f"{k}.pkl", [trace])
    if is_later:
        convert(tmp_path, tmp_path / "s.zarr")
    write_scores(tmp_path / "scores.csv", {name: k / 4 for k, name in enumerate(ids)})
    messages = {error_of("convert", tmp_path, tmp_path / "s.zarr", code=3) for _ in range(3)}
    assert len(messages) == 1
    write_scores(tmp_path / "scores.csv", {f"q{k}": k / 4 for k in range(3)})
    convert(tmp_path, tmp_path / "s.zarr")
    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0, 0.25, 0.5]


def test_a_trace_without_a_score_is_kept(tmp_path):
    write_pickle(tmp_path / "t.pkl", make_traces(4))
    write_scores(tmp_path / "scores.csv", {"q0": 0.5, "q3": 1, "other": 0})
    done = convert(tmp_path, tmp_path / "s.zarr")
    assert "1 score without a trace" in done.stdout and "2 without a label or score" in done.stdout


def test_ids_of_a_scores_file_may_be_in_the_store_already(tmp_path):
    for k, name in enumerate("ab"):
        write_pickle(tmp_path / name / "t.pkl", make_traces(2 * k + 2)[2 * k :])
        (tmp_path / name / "scores.csv").write_text("question_id,score\nq0,0.5\n")
        done = convert(tmp_path / name, tmp_path / "s.zarr")
        assert "none of them" not in done.stdout


def test_scores_files_below_the_chosen_one_and_predictions_are_named(tmp_path):
    write_pickle(tmp_path / "t.pkl", make_traces(4))
    (tmp_path / "old").mkdir()
    write_scores(tmp_path / "scores.csv", {"q0": 0.5})
    write_scores(tmp_path / "old" / "scores.csv", {"q0": 1})
    header = "question_id,sample,trace_index,split,fold,seed,label,hallucination_score"
    (tmp_path / "predictions.csv").write_text(f"{header}\nq0,0,0,test,0,42,1,0.5\n")
    done = convert(tmp_path, tmp_path / "s.zarr")
    assert "not read: scores.csv, predictions.csv" in done.stdout
    assert tracestore.open(tmp_path / "s.zarr").scores[0] == 0.5


def test_a_label_of_a_stated_layout_and_another_one_in_the_scores_file_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", h=np.ones((2, 3, 4), "f2"), label=np.array(1))
    (tmp_path / "scores.csv").write_text("question_id,label,score\na,0,0.5\n")
    flags = ["--field", "hidden_states = {id}.npz : h -> L S D", "--field", "is_hallucinated = {id}.npz : label"]
    flags += ["--scores", tmp_path / "scores.csv"]
    assert "both judge" in error_of("convert", tmp_path, tmp_path / "s.zarr", *flags, code=2)

    convert(tmp_path, tmp_path / "s.zarr", *flags, "--score-column", "score")

    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store[0].scores == {"is_hallucinated": 1, "score": 0.5} and store.targets().tolist() == [1]


@pytest.mark.parametrize(
    ("own", "row", "is_refused"),
    [
        (1000, "1e3", True),
        (1234567890123456, "1.23457E+15", True),
        (12, "+12", True),
        ("1e3", "1000", False),
        (1234567890123456, "1.23457E+14", False),
        (123456, "12e345", False),
    ],
)
@pytest.mark.parametrize("is_table", [False, True])
def test_rule_12b_numbers_that_a_spreadsheet_shortened(tmp_path, own, row, is_refused, is_table):
    traces = [trace | {"question_id": name} for trace, name in zip(make_traces(2), (own, 7), strict=True)]
    write_pickle(tmp_path / "in/t.pkl", traces)
    table = tmp_path / ("in/t.csv" if is_table else "t.csv")
    table.write_text(f"id,is_correct\n{row},1\n7,1\n")
    lines = [
        "hidden_states = t.pkl : [id=question_id]/hidden_states -> L S D",
        "is_correct = t.csv : [id=id]/is_correct",
        "ignore = t.pkl : [id=question_id]/*",
    ]
    words = "convert", tmp_path / "in", tmp_path / "s.zarr", *(field_flags(*lines) if is_table else ["--scores", table])
    if is_refused:
        assert "differ in spelling only" in error_of(*words, code=3)
    else:
        command(*words, check=0)


@pytest.mark.parametrize(("dtype", "first"), [("f2", 2**11), ("f4", 2**24), ("f8", 2**53)])
@pytest.mark.parametrize("line", ["question_id = t.npz : ids -> N", "is_correct = l.npz : [id=ids]/ok"])
def test_ids_that_a_float_has_rounded_are_refused(tmp_path, dtype, first, line):
    """An id is that of its neighbor [the label of another trace]."""
    ids, folder = np.arange(first - 2, first), tmp_path / "in"
    folder.mkdir()
    is_table = line.startswith("is_correct")
    states = "hidden_states = t.npz : hs -> N L S D", "S.padding = none"
    lines = *states, *(["question_id = t.npz : ids -> N"] if is_table else []), line
    for k, shift in enumerate((0, 4)):
        hidden = np.random.default_rng(0).standard_normal((2, 2, 3, 8)).astype("f4")
        np.savez(folder / "t.npz", hs=hidden, ids=(ids + shift).astype("i8" if is_table else dtype))
        if is_table:
            np.savez(folder / "l.npz", ids=(ids + shift).astype(dtype), ok=np.array([0, 1]))
        done = command("convert", folder, tmp_path / f"s{k}.zarr", *field_flags(*lines), check=3 if shift else 0)
    assert f"found {first + 2:g} as" in done.stderr and "which a float of this size rounds" in done.stderr


OWN = [f"What is {k}?" for k in range(4)]


@pytest.mark.parametrize(
    ("column", "texts", "is_refused"),
    [
        ("question", OWN, False),
        ("Question", [f"q:  what IS {k}? A:" for k in range(4)], False),
        ("prompt", ["few-shot", "zero-shot"] * 2, False),
        ("question", ["few-shot"] * 4, False),
        ("question", [text.replace("What", "\uff37hat") for text in OWN], False),
        ("question", list("3210"), False),
        ("question", ["nan", "N/A", "?", "None"], False),
        ("question", ["", *OWN[1:]], False),
        ("topic", OWN[::-1], False),
        ("question", OWN[::-1], True),
        ("question", [*OWN[:3], "Who was 3?"], True),
        ("Question", [f"Who was {k}?" for k in range(4)], True),
    ],
)
@pytest.mark.parametrize("way", ["convert", "tasks", "dry run", "converted before", "dry run after", "score"])
def test_rule_13b_questions_of_a_scores_file_are_those_of_the_traces(tmp_path, column, texts, is_refused, way):
    """Two data sets number their questions from 0 [labels of other questions]."""
    write_pickle(tmp_path / "t.pkl", [t | {"question_id": k, "question": OWN[k]} for k, t in enumerate(make_traces(4))])
    rows = "".join(f'{k},"{text}",0.{k}\n' for k, text in enumerate(texts))
    (tmp_path / "o.csv").write_text(f"question_id,{column},score\n{rows}")
    store, source = tmp_path / "s.zarr", [] if way == "score" else [tmp_path / "t.pkl"]
    if way in ("converted before", "dry run after", "score"):
        convert(tmp_path / "t.pkl", store)
    words = ["score" if way == "score" else "convert", *source, store, "--scores", tmp_path / "o.csv"]
    words += ["--dry-run"] * way.startswith("dry") + ["--workers", "2"] * (way == "tasks")
    if is_refused:
        assert "--id-column question_id if not" in error_of(*words, code=3)
        if store.exists():
            assert np.isnan(tracestore.open(store).scores).all()
        words += ["--id-column", "question_id"]
    command(*words, check=0)
    if not way.startswith("dry"):
        assert tracestore.open(store).scores.tolist() == [0, 0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("columns", "rows", "flags"),
    [
        ("question_id,question,score", ["0,What is 0?,0", "0,Reworded,0", "1,What is 1?,0"], []),
        ("question_id,question,score", ["0,Reworded,0", "0,What is 0?,0", "1,What is 1?,0"], []),
        ("question_id,question,score", ["0,hard,0", "1,easy,0"], ["--group-column", "question"]),
        ("query,question,score", ["0,a of b,0", "1,c of d,0"], ["--id-column", "query"]),
    ],
)
def test_texts_of_a_scores_file_that_are_no_questions_of_traces(tmp_path, columns, rows, flags):
    write_pickle(tmp_path / "t.pkl", [t | {"question_id": k, "question": OWN[k]} for k, t in enumerate(make_traces(2))])
    (tmp_path / "o.csv").write_text("\n".join([columns, *rows]) + "\n")
    convert(tmp_path / "t.pkl", tmp_path / "s.zarr", "--scores", tmp_path / "o.csv", *flags)
    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0, 0]


def questions_and_scores(folder, questions):
    traces = [t | {"question_id": k, "question": questions[k]} for k, t in enumerate(make_traces(4))]
    write_pickle(folder / "in/t.pkl", traces)
    rows = "".join(f'{k},"{text}",0.{k}\n' for k, text in enumerate(questions))
    (folder / "in/scores.csv").write_text(f"question_id,question,score\n{rows}")
    return folder / "in"


def test_corrected_questions_replace_stored_ones_together_with_those_of_the_scores_file(tmp_path):
    convert(questions_and_scores(tmp_path, OWN), tmp_path / "s.zarr")
    convert(questions_and_scores(tmp_path, OWN[::-1]), tmp_path / "s.zarr", "--on-conflict", "keep-last")
    assert [trace.question for trace in tracestore.open(tmp_path / "s.zarr")] == OWN[::-1]


def test_a_continued_overwrite_does_not_compare_the_questions_of_the_replaced_store(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    convert(questions_and_scores(tmp_path, OWN), tmp_path / "s.zarr")
    folder = questions_and_scores(tmp_path, [f"Who was {k}?" for k in range(4)])
    with monkeypatch.context() as patched:
        patched.setattr(Scoring, "fill", interrupt)
        command("convert", folder, tmp_path / "s.zarr", "--overwrite", check=130)
    done = convert(folder, tmp_path / "s.zarr", "--overwrite")
    assert "4 traces" in done.stdout
    assert tracestore.open(tmp_path / "s.zarr")[3].question == "Who was 3?"


@pytest.mark.parametrize("way", ["score", "convert"])
def test_only_questions_of_traces_with_another_value_are_read(tmp_path, monkeypatch, way):
    folder, read, question_of = questions_and_scores(tmp_path, OWN), [], KeyResolver.question_of
    convert(folder, tmp_path / "s.zarr")
    monkeypatch.setattr(KeyResolver, "question_of", lambda self, k: read.append(k) or question_of(self, k))
    path = folder / "scores.csv"
    words = ["score", tmp_path / "s.zarr", "--scores", path] if way == "score" else [way, folder, tmp_path / "s.zarr"]
    command(*words, check=0)
    assert not read
    path.write_text(path.read_text().replace("0.2", "0.7"))
    command(*words, check=0)
    assert read == [2] and tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0, 0.1, 0.7, 0.3]
    path.write_text(path.read_text().replace("0.3", "0.9").replace(OWN[3], "Who was 3?"))
    assert "--id-column question_id if not" in error_of(*words, code=3)


@pytest.mark.parametrize(
    ("one", "two"), [("Who is Zo\u00eb?", "Who is Zoe\u0308?"), ("the \u201cB\u2019s\u201d", 'The "b\'s"')]
)
def test_forms_of_a_character_are_no_difference_of_texts(one, two):
    assert texts_agree(one, two) and not texts_agree(one, two[1:] + "!")
