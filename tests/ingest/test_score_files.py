"""Scores files: formats, names of columns and ids, words of judges, and which files are taken."""

import json
import math

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, make_traces, write_pickle
from tracestore.ingest.score_files import id_column_of, score_columns_of
from tracestore.ingest.scores import read_scores, score_name
from tracestore.store.vocabulary import SCORES as SCORE_DIRECTIONS

SCORES = [0.25, 0.75, 0.5]
IDS = ["q0", "q1", "q2"]


def scores_of(folder, *flags):
    """Convert a folder; return the scores, the direction and the output."""
    done = convert(folder, folder / "s.zarr", *flags)
    with tracestore.open(folder / "s.zarr") as store:
        return store.scores.tolist(), store.score_direction, done.stdout


def rows(**names):
    return [{"question_id": q, **{name: value[k] for name, value in names.items()}} for k, q in enumerate(IDS)]


FORMATS = {
    "my_scores.csv": "question_id,score\nq0,0.25\nq1,0.75\n\nq2,0.5\n",
    "semicolons.csv": "id;score\nq0;0.25\nq1;0.75\nq2;0.5\n",
    "requests.csv": "request_id,score\nq0,0.25\nq1,0.75\nq2,0.5\n",
    "a.tsv": "Question ID\tSCORE\nq0\t0.25\nq1\t0.75\nq2\t0.5\n",
    "a.jsonl": "\n".join(json.dumps(row) for row in rows(score=SCORES)),
    "list.json": json.dumps(rows(score=SCORES)),
    "by_id.json": json.dumps({q: {"score": s} for q, s in zip(IDS, SCORES, strict=True)}),
    "eval_scores.json": json.dumps(dict(zip(IDS, SCORES, strict=True))),
}


@pytest.mark.parametrize("name", FORMATS)
def test_scores_in_every_format(tmp_path, name):
    write_pickle(tmp_path / "t.pkl", make_traces(3))
    (tmp_path / name).write_text(FORMATS[name])
    values, direction, out = scores_of(tmp_path, *([] if name == "my_scores.csv" else ["--scores", tmp_path / name]))
    assert (values, direction) == (SCORES, "correct") and f"{name}, column" in out


def test_arrays_of_scores_and_ids(tmp_path):
    write_pickle(tmp_path / "t.pkl", [t | {"question_id": k} for k, t in enumerate(make_traces(3))])
    np.savez(tmp_path / "ids.npz", score=np.array(SCORES), question_ids=np.array([0, 1, 2]))
    assert scores_of(tmp_path, "--scores", tmp_path / "ids.npz")[0] == SCORES


@pytest.mark.parametrize("name", ["score.npy", "score.json", "scores.npz"])
def test_scores_without_ids_are_refused(tmp_path, name):
    traces, path = tmp_path / "t.pkl", tmp_path / name
    write_pickle(traces, make_traces(3))
    write = {
        "score.npy": lambda: np.save(path, np.array(SCORES)),
        "score.json": lambda: path.write_text(json.dumps(SCORES)),
        "scores.npz": lambda: np.savez(path, score=np.array(SCORES)),
    }
    write[name]()
    expected = {
        "score.npy": "found values without ids; write a table with the columns question_id and score",
        "score.json": "row 0: found float, expected an object",
        "scores.npz": "found columns score, expected question_id among them",
    }[name]
    convert(traces, tmp_path / "t.zarr")

    assert expected in error_of("convert", traces, tmp_path / "s.zarr", "--scores", path, code=3)
    assert expected in error_of("score", tmp_path / "t.zarr", "--scores", path, code=3)


@pytest.mark.parametrize(
    ("column", "values", "stored", "direction"),
    [
        ("rougeL", SCORES, SCORES, "correct"),
        ("Exact Match", [1, 0, 1], [1, 0, 1], "correct"),
        ("hallucinated", ["True", "False", "yes"], [1, 0, 1], "hallucination"),
        ("Halluc Label", [0, 1, 1], [0, 1, 1], "hallucination"),
        ("is_hal", ["no", "YES", "true"], [0, 1, 1], "hallucination"),
        ("is_correct", ["no", "YES", "true"], [0, 1, 1], "correct"),
        ("verdict", ["CORRECT", "incorrect", "Wrong."], [1, 0, 0], "correct"),
        ("is_hallucination", ["hallucinated", "faithful", "1"], [1, 0, 1], "hallucination"),
    ],
)
def test_names_of_columns_and_words_of_judges(tmp_path, column, values, stored, direction):
    write_pickle(tmp_path / "t.pkl", make_traces(3))
    (tmp_path / "judged.csv").write_text("\n".join([f"qid,{column}", *(f"q{k},{v}" for k, v in enumerate(values))]))
    assert scores_of(tmp_path, "--scores", tmp_path / "judged.csv")[:2] == (stored, direction)
    # In a table every value is a text.
    values = [1 if value == "1" else value for value in values]
    traces = [t | {column: v} for t, v in zip(make_traces(3), values, strict=True)]
    folder = tmp_path / "inside"
    folder.mkdir()
    write_pickle(folder / "t.pkl", traces)
    if column != "verdict":  # a key of a trace is a score only if its name states its meaning
        found, found_direction, _ = scores_of(folder)
        known = [np.isnan(f) or f == s for f, s in zip(found, stored, strict=True)]
        assert all(known) and found_direction == direction


@pytest.mark.parametrize("content", ["question_id,label\nq0,1\n", "question_id,verdict\nq0,yes\n"])
def test_a_column_that_may_mean_either_proposes_two_flags(tmp_path, content):
    write_pickle(tmp_path / "t.pkl", make_traces(3))
    (tmp_path / "judge_scores.csv").write_text(content)
    message = error_of("convert", tmp_path, tmp_path / "s.zarr", code=2)
    assert "--score-direction correct or --score-direction hallucination" in message
    assert scores_of(tmp_path, "--score-direction", "hallucination")[0][0] == 1


def test_several_columns_propose_a_flag_for_each(tmp_path):
    write_pickle(tmp_path / "t.pkl", make_traces(3))
    (tmp_path / "scores.csv").write_text("question_id,f1,em\nq0,0.5,1\n")
    message = error_of("convert", tmp_path, tmp_path / "s.zarr", code=2)
    assert "--score-column em or --score-column f1" in message


def test_each_folder_may_have_a_file(tmp_path):
    for k, name in enumerate(("train", "test")):
        (tmp_path / name).mkdir()
        write_pickle(tmp_path / name / "t.pkl", make_traces(2 * k + 2)[2 * k :])
        (tmp_path / name / "scores.csv").write_text(f"question_id,score\nq{2 * k},0.5\nq{2 * k + 1},1\n")
    done = convert(tmp_path, tmp_path / "s.zarr", "--json")
    assert {0.5, 1.0} == set(tracestore.open(tmp_path / "s.zarr").scores.tolist())
    assert json.loads(done.stdout)["scores_file"].count("scores.csv") == 2
    (tmp_path / "test" / "scores.csv").write_text("question_id,hallucination_score\nq2,0.5\n")
    assert "hallucination" in error_of("convert", tmp_path, tmp_path / "t.zarr", code=2)


def test_several_files_of_a_folder_are_listed(tmp_path):
    write_pickle(tmp_path / "t.pkl", make_traces(3))
    for name in ("a_scores.csv", "b_scores.csv"):
        (tmp_path / name).write_text("question_id,correct\nq0,1\n")
    message = error_of("convert", tmp_path, tmp_path / "s.zarr", code=2)
    assert f"--scores {tmp_path / 'a_scores.csv'} or --scores {tmp_path / 'b_scores.csv'}" in message


def test_predictions_are_no_scores_and_other_tables_are_refused(tmp_path):
    write_pickle(tmp_path / "t.pkl", make_traces(3))
    header = "question_id,sample,trace_index,split,fold,seed,label,hallucination_score"
    (tmp_path / "predictions.csv").write_text(f"{header}\nq0,0,0,test,0,42,1,0.5\n")
    values, _, out = scores_of(tmp_path)
    assert np.isnan(values).all() and "scores:" not in out and "not read: predictions.csv" in out
    (tmp_path / "judged.csv").write_text("question_id,accuracy\nx0,1\n")
    assert "judged.csv" in error_of("convert", tmp_path, tmp_path / "t.zarr", code=3)


def test_the_name_of_a_file_is_an_id_by_a_layout_alone(tmp_path):
    for name in ("q0", "q1"):
        traces = [{k: v for k, v in t.items() if k != "question_id"} for t in make_traces(1)]
        write_pickle(tmp_path / f"{name}.pkl", traces)
    (tmp_path / "scores.csv").write_text("question_id,score\nq0,0.25\nq1,0.75\n")
    message = error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)
    assert "found 2 ids such as 'q0', and none of them in the traces, which have ids such as 'q0.pkl:0'" in message

    flags = ["--field", "records = {id}.pkl : []", "--scores", tmp_path / "scores.csv"]
    convert(tmp_path, tmp_path / "s.zarr", *flags)

    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.question_ids == ["q0", "q1"] and store.scores.tolist() == [0.25, 0.75]


def test_the_score_command_reads_the_same_formats(tmp_path):
    convert(write_pickle(tmp_path / "t.pkl", make_traces(3)), tmp_path / "s.zarr")
    (tmp_path / "x.jsonl").write_text(FORMATS["a.jsonl"])
    done = command("score", tmp_path / "s.zarr", "--scores", tmp_path / "x.jsonl", "--json", check=0)
    assert json.loads(done.stdout)["num_scored"] == 3


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            "question_id,score,is_hallucinated\nq0,0.9,1\n",
            "choose --score-column is_hallucinated or --score-column score",
        ),
        ("question_id,score,Hallucinated\nq0,0.9,1\n", "choose --score-column score or --score-column Hallucinated"),
        ("question_id,score,llm_correct\nq0,0.9,1\n", "choose --score-column score or --score-column llm_correct"),
        ("question_id,score,correct_prediction\nq0,0.9,1\n", "or --score-column correct_prediction"),
        ("question_id,score,is_wrong,f1\nq0,0.9,1,1\n", "choose --score-column score or --score-column is_wrong"),
        ("question_id,score,Label\nq0,0.9,7\n", "found '7' in Label, expected 1"),
        ('{"question_id": "q0", "score": 1}\n{"question_id": "q1", "Score": 0}\n', "found Score, which the first rows"),
        ('{"question_id": "q0", "score": [1, 0]}\n', "found 2 items, expected one value per trace"),
        ('{"question_id": "q0", "score": 1, "group": ["a"]}\n', "found 1 items, expected one value per trace"),
    ],
)
def test_a_second_judgment_of_a_row_is_not_left_out(tmp_path, monkeypatch, table, words):
    monkeypatch.setattr("tracestore.ingest.score_files._MAX_HEADER_ROWS", 1)
    write_pickle(tmp_path / "in/t.pkl", make_traces(3))
    path = tmp_path / f"t.{'json' * table.startswith('{')}{'l' if table[0] == '{' else 'csv'}"
    path.write_text(table)
    done = convert(tmp_path / "in", tmp_path / "s.zarr", "--scores", path, check=None)
    assert done.returncode in (2, 3) and words in done.stderr


@pytest.mark.parametrize("names", [("Label", "label"), ("label", "Label")])
def test_a_column_that_is_spelled_like_its_name_counts_before_another(tmp_path, names):
    write_pickle(tmp_path / "t.pkl", make_traces(3))
    table = rows(score=SCORES, **{name: [1, 0, 0] if name == "label" else [0, 1, 1] for name in names})
    (tmp_path / "x.json").write_text(json.dumps(table))
    convert(tmp_path / "t.pkl", tmp_path / "s.zarr", "--scores", tmp_path / "x.json")
    assert tracestore.open(tmp_path / "s.zarr").labels.tolist() == [1, 0, 0]


def test_columns_in_two_spellings():
    header = ["Score", "Question_ID", "question_id", "score"]
    assert (score_columns_of(header), id_column_of(header)) == (["score"], "question_id")


def group_files(column):
    """Return files with the group a of q1 and q2 in a column, and its name in a late row."""
    table = [{"question_id": q, "score": 0.5, column: "a"} for q in IDS[1:]]
    bare = [{"question_id": "q0", "score": 0.5}]
    return {
        "x.csv": "\n".join([f"question_id,score,{column}", "q0,0.5,", "q1,0.5,a", "q2,0.5,a"]),
        "x.jsonl": "\n".join(json.dumps(row) for row in [bare[0] | {column: None}, *table]),
        "late.jsonl": "\n".join(json.dumps(row) for row in bare + table),
    }


@pytest.mark.parametrize("way", ["convert", "converted before", "score", "tasks"])
@pytest.mark.parametrize("column", ["group", "Group", "GROUP", " Group "])
@pytest.mark.parametrize("name", group_files(""))
def test_a_column_of_groups_in_another_spelling_has_the_groups(tmp_path, monkeypatch, name, column, way):
    if name == "late.jsonl":
        monkeypatch.setattr("tracestore.ingest.score_files._MAX_HEADER_ROWS", 1)
    (tmp_path / name).write_text(group_files(column)[name])
    source, store = write_pickle(tmp_path / "in/t.pkl", make_traces(3)), tmp_path / "s.zarr"
    if way in ("converted before", "score"):
        convert(source, store)
    words = ["score", store] if way == "score" else ["convert", source, store]
    words += ["--scores", tmp_path / name, *(["--workers", 2] if way == "tasks" else [])]
    if name == "late.jsonl" and column.strip() != "group":
        assert f"found {column.strip()}, which the first rows do not have" in error_of(*words, code=3)
        return
    command(*words, check=0)
    with tracestore.open(store) as opened:
        assert [trace.group for trace in opened] == ["", "a", "a"]


@pytest.mark.parametrize("header", [["Group", "group"], ["group", "Group"]])
def test_the_group_that_is_spelled_like_its_name_counts(tmp_path, header):
    (tmp_path / "x.csv").write_text(f"question_id,score,{','.join(header)}\nq0,1,{header[0]},{header[1]}\n")
    (row,) = read_scores(tmp_path / "x.csv").rows.values()
    assert row.group == "group"
    (row,) = read_scores(tmp_path / "x.csv", group_column="Group").rows.values()
    assert row.group == "Group"


MISSING = [math.nan, "nan", "NaN", "NA", "n/a", "None", "null", "-", " ", "", None]


@pytest.mark.parametrize("group", [*MISSING, 1.0, 1, "1", "nano"])
@pytest.mark.parametrize("way", ["table", "JSON", "score", "inside", "stated", "joined"])
def test_a_missing_group_is_none(tmp_path, way, group):
    """pandas writes nan for an empty cell [questions of no template are kept together in a split]."""
    traces, table = make_traces(3), rows(score=SCORES, group=["a", "b", group])
    flags = ["--field", "hidden_states = t.pkl : []/x -> L S D", "--field", "question_id = t.pkl : []/id"]
    if way in ("stated", "joined"):
        flags += ["--field", f"group = {'t.pkl : []/group' if way == 'stated' else 'in.json : [id=question_id]/group'}"]
        traces = [{"id": q, "x": np.stack(t["hidden_states"])} for q, t in zip(IDS, traces, strict=True)]
    if way in ("inside", "stated"):
        traces = [trace | {"group": row["group"]} for trace, row in zip(traces, table, strict=True)]
    source, store = write_pickle(tmp_path / "in/t.pkl", traces), tmp_path / "s.zarr"
    path = tmp_path / ("in/in.json" if way == "joined" else "x.csv" if way == "table" else "x.json")
    lines = ["question_id,score,group", *(",".join(map(str, row.values())) for row in table)]
    table = [{"question_id": row["question_id"], "group": row["group"]} for row in table] if way == "joined" else table
    path.write_text("\n".join(lines) if way == "table" else json.dumps(table))
    scores = ["--scores", path]
    convert(source.parent, store, *{"table": scores, "JSON": scores, "stated": flags, "joined": flags}.get(way, []))
    if way == "score":
        command("score", store, *scores, check=0)
    with tracestore.open(store) as opened:
        expected = "" if group in MISSING else "1" if group == 1 and way != "table" else str(group)
        assert [trace.group for trace in opened] == ["a", "b", expected]


UNKNOWN = (
    *("not_correct", "NotCorrect", "no-hallucination", "non_hallucinated", "is_not_hallucinated", "num_correct", "without hallucination"),
    *("in_correct", "un_faithful", "counter_factual", "anti_hallucination", "p_no_hallucination_score", "wrong_f1", "number_of_correct"),
    *("semantic_entropy_scores", "uncertainty_score", "perplexity-scores", "hallucination_risk_score", "selfcheckgpt_scores", "no.hallucination"),
)  # fmt: skip
KNOWN = {
    **dict.fromkeys(("score", "eval_scores", "my_test_score", "answer_scores", "2024-all-scores"), "score"),
    **{"triviaqa_correct": "correct", "llama-2 bleurt_scores": "bleurt_score", "dev_F1": "f1", "x.bleurt": "bleurt"},
    **{"llama_hallucination": "hallucination", "hallucination_labels": "hallucination_label", "2_em": "em"},
}


@pytest.mark.parametrize("stem", [*UNKNOWN, *KNOWN])
@pytest.mark.parametrize("way", ["convert", "score", "tasks"])
def test_the_name_of_a_file_of_values_by_id_tells_the_direction_only_if_no_word_changes_it(tmp_path, stem, way):
    source, store, path = write_pickle(tmp_path / "in/t.pkl", make_traces(3)), tmp_path / "s.zarr", tmp_path / "x"
    path = tmp_path / f"{stem}.json"
    path.write_text(json.dumps(dict(zip(IDS, (0, 1, 1), strict=True))))
    if way == "score":
        convert(source, store)
    words = ["score", store] if way == "score" else ["convert", source, store]
    words += ["--scores", path, *(["--workers", 2] if way == "tasks" else [])]
    if stem in KNOWN:
        command(*words, check=0)
    else:
        assert f"{path.name}: found columns {stem}, question_id" in error_of(*words, code=3)
        words += ["--score-column", stem]
        assert "--score-direction hallucination" in error_of(*words, code=2)
        command(*words, "--score-direction", "hallucination", check=0)
    with tracestore.open(store) as opened:
        assert opened.scores.tolist() == [0, 1, 1]
        (name,) = opened.score_fields
        assert name == KNOWN.get(stem, score_name(stem))
        assert opened.score_direction == SCORE_DIRECTIONS.get(name, "hallucination")
