"""`tracestore score` and stored values: what the file lacks, ids of other traces, and columns that mean something else."""

import json
import math

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, make_traces, write_pickle

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N = 6
OLD = [k / 10 for k in range(N)]
REMOVES, KEEPS = ["--on-conflict", "keep-last"], ["--on-conflict", "keep-first"]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A store with a score and a group of every trace."""
    folder = tmp_path_factory.mktemp("scored")
    write_pickle(folder / "a.pkl", make_traces(N))
    rows = [f"q{k},{value},g{k % 2}" for k, value in enumerate(OLD)]
    (folder / "scores.csv").write_text("\n".join(["question_id,score,group", *rows]))
    convert(folder, folder / "s.zarr")
    return folder / "s.zarr"


@pytest.fixture
def store(scored, tmp_path):
    command("merge", scored, tmp_path / "s.zarr", check=0)
    return tmp_path / "s.zarr"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """A store of two questions with three samples each, without scores."""
    folder = tmp_path_factory.mktemp("samples")
    traces = [t | {"question_id": f"q{k // 3}", "sample": k % 3} for k, t in enumerate(make_traces(6))]
    convert(write_pickle(folder / "a.pkl", traces), folder / "s.zarr")
    return folder / "s.zarr"


def values(path, name="score"):
    with tracestore.open(path) as opened:
        return opened.internals.columns.score(name).tolist()


def groups(path):
    with tracestore.open(path) as opened:
        return [trace.group for trace in opened]


def score(path, text, *flags, check=0, name="new.csv"):
    file = path.parent / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return command("score", path, "--scores", file, *flags, check=check)


def refused(path, text, *flags, code=3, name="new.csv"):
    """Return the message of a file that changes nothing."""
    before = values(path)
    done = score(path, text, *flags, check=code, name=name)
    assert done.stderr.count("\n") == 1
    np.testing.assert_equal(values(path), before)
    return done.stderr


def empty_cells(folder):
    """Return files without a value of q1, by what stands in its place."""
    pq.write_table(pa.table({"question_id": ["q0", "q1"], "score": [0.9, None]}), folder / "x.parquet")
    rows = [{"question_id": "q0", "score": 0.9}, {"question_id": "q1"}]
    null = [rows[0], rows[1] | {"score": None}]
    texts = {
        word: ("x.csv", f"question_id,score\nq0,0.9\nq1,{word}\n".encode())
        for word in ("", " ", "nan", "NA", "-", "null")
    }
    return texts | {
        "no key": ("x.json", json.dumps(rows).encode()),
        "null in JSON": ("x.json", json.dumps(null).encode()),
        "null in JSON Lines": ("x.jsonl", "\n".join(map(json.dumps, null)).encode()),
        "null by id": ("scores.json", b'{"q0": 0.9, "q1": null}'),
        "semicolons": ("x.csv", "\ufeffquestion_id;score\nq0;0.9\nq1;\n".encode()),
        "Parquet": ("x.parquet", (folder / "x.parquet").read_bytes()),
    }  # fmt: skip


CELLS = ["", " ", "nan", "NA", "-", "null", "no key", "null in JSON", "null in JSON Lines", "null by id", "semicolons", "Parquet"]  # fmt: skip


@pytest.mark.parametrize("cell", CELLS)
def test_an_empty_cell_removes_a_score_only_if_the_user_chooses(tmp_path, store, cell):
    name, text = empty_cells(tmp_path)[cell]
    message = refused(store, text, name=name)
    assert "1 stored trace such as q1" in message and "keep-last removes it, keep-first keeps it" in message

    done = score(store, text, *KEEPS, name=name)
    assert values(store) == [0.9, *OLD[1:]] and "1 stored trace with a score" in done.stdout

    done = score(store, text, *REMOVES, "--json", name=name)
    np.testing.assert_equal(values(store), [0.9, math.nan, *OLD[2:]])
    report = json.loads(done.stdout)
    assert (report["num_removed"], report["num_updated"], report["num_scored"]) == (1, 1, N - 1)


@pytest.mark.parametrize("cell", ["", "nan", "NA"])
def test_an_empty_group_is_a_conflict_and_a_file_without_groups_keeps_them(store, cell):
    score(store, "question_id,score\nq0,0.5\n")
    assert groups(store) == ["g0", "g1"] * 3
    refused(store, f"question_id,score,group\nq0,0.5,a\nq1,0.1,{cell}\n")
    score(store, f"question_id,score,group\nq0,0.5,a\nq1,0.1,{cell}\n", *REMOVES)
    assert groups(store)[:3] == ["a", "", "g0"]
    refused(store, "question_id,score,group\nq0,0.5,\n")  # no cell has a group
    score(store, "question_id,score,group\nq0,0.5,\n", *REMOVES)
    assert groups(store)[:3] == ["", "", "g0"]


def test_traces_without_a_row_keep_their_score_and_are_counted(store):
    done = score(store, "question_id,score\nq0,0.9\nq3,0.8\nother,1\n")
    assert values(store) == [0.9, 0.1, 0.2, 0.8, 0.4, 0.5]
    assert "4 stored traces without a row in new.csv: the score score stays" in done.stdout
    assert "1 score without a trace" in done.stdout


def test_a_conversion_counts_traces_without_a_row(tmp_path):
    write_pickle(tmp_path / "a.pkl", make_traces(4))
    (tmp_path / "scores.csv").write_text("question_id,score\nq0,1\nq1,1\nq2,0\nq3,0\n")
    convert(tmp_path, tmp_path / "s.zarr")
    (tmp_path / "scores.csv").write_text("question_id,score\nq0,1\nq1,0\nq2,0\n")
    done = convert(tmp_path, tmp_path / "s.zarr")
    assert "1 stored trace without a row in scores.csv: the score score stays" in done.stdout
    assert values(tmp_path / "s.zarr") == [1, 0, 0, 0]


@pytest.mark.parametrize("way", ["convert", "tasks", "file by file", "score", "stated"])
@pytest.mark.parametrize("numbers", [(0, 1, 9), (1, 2), (0, 2), (3,), (5, 0)])
def test_a_changed_score_is_of_every_sample_whatever_their_numbers(tmp_path, numbers, way):
    """Samples that are converted later, greedy answers that are sample 9, and samples that were removed leave gaps."""
    folder, store, flags = tmp_path / "in", tmp_path / "s.zarr", ["--workers", 2] if way == "tasks" else []
    table = folder / "scores.csv" if way == "convert" else tmp_path / "scores.csv"
    if way == "stated":
        flags = ["--field", "hidden_states = {id}_{sample}.npy -> L S D"]

    def write(judged):
        """Write scores with groups, also of a question without a trace; convert or score, return the report."""
        table.write_text("\n".join(["question_id,score,group", *(f"q{k},{v},g{v}" for k, v in enumerate(judged))]))
        if way == "score":
            return json.loads(command("score", store, "--scores", table, "--json", check=0).stdout)
        return json.loads(convert(folder, store, "--scores", table, *flags, "--json").stdout)

    for k, trace in enumerate(make_traces(2 * len(numbers))):
        key = {"question_id": f"q{k % 2}", "sample": numbers[k // 2]}
        if way == "stated":
            folder.mkdir(exist_ok=True)
            np.save(folder / f"{key['question_id']}_{key['sample']}.npy", np.stack(trace["hidden_states"]))
        else:
            write_pickle(folder / f"{k}.pkl", [trace | key])
        if way == "file by file":
            write([0.25, 0.5])
    if way == "score":
        convert(folder, store)
    for judged in ([0.25, 0.5], [0.75, 0], [0.75, 0, 1]):
        assert write(judged)["num_scores_without_trace"] == len(judged) - 2
        with tracestore.open(store) as opened:
            found = [(t.question_id, t.score, t.group) for t in opened]
        assert sorted(found) == [(f"q{k}", v, f"g{v}") for k, v in enumerate(judged[:2]) for _ in numbers]
    if way != "score":
        assert "without a row" not in convert(folder, store, "--scores", table, *flags).stdout


@pytest.mark.parametrize("numbers", [(0, 9), (1, 2)])
def test_ids_of_a_file_without_samples_are_those_of_traces_with_any_sample(tmp_path, numbers):
    """A later run adds a trace without a row: the ids are known although the store has no sample 0 of them."""
    for sample in numbers:
        write_pickle(tmp_path / f"in/{sample}.pkl", [t | {"sample": sample} for t in make_traces(2)])
    (tmp_path / "s.csv").write_text("question_id,score\nq0,1\nq1,0\n")
    convert(tmp_path / "in", tmp_path / "s.zarr")
    write_pickle(tmp_path / "in/late.pkl", [make_traces(1)[0] | {"question_id": "x"}])

    convert(tmp_path / "in", tmp_path / "s.zarr", "--scores", tmp_path / "s.csv")

    np.testing.assert_equal(values(tmp_path / "s.zarr"), [1, 0, 1, 0, math.nan])


SPELLINGS = [" q0", "q0 ", "Q0", "q00", "q0.0", "ｑ0"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_ids_that_differ_by_spelling_are_refused(store, spelling):
    assert "differ in spelling only" in refused(store, f"question_id,score\n{spelling},0.9\nq1,0.8\n")


def test_ids_of_another_store_are_refused(store, samples):
    for path in (store, samples):
        message = refused(path, "question_id,score\na,0.5\nb,0.5\n")
        assert "found 2 ids such as 'a', and none of them in the traces, which have ids such as 'q0'" in message
    assert "--id-column ref" in refused(store, "question_id,ref,score\na,q0,0.5\n")


@pytest.mark.parametrize("first", [1, 3])
def test_ids_that_count_from_one_are_refused(store, first):
    text = "question_id,score\n" + "".join(f"q{k},0.5\n" for k in range(1, N + (first == 1)))
    assert "numbered from 0 and from 1" in refused(store, text)


@pytest.mark.parametrize("words", [["score"], ["convert"]])
def test_samples_that_count_from_one_are_refused(tmp_path, samples, words):
    file = tmp_path / "scores.csv"
    file.write_text("question_id,sample,score\n" + "".join(f"q{k // 3},{1 + k % 3},0.5\n" for k in range(6)))
    source = [samples.parent / "a.pkl", tmp_path / "s.zarr"] if words == ["convert"] else [samples]
    done = command(*words, *source, "--scores", file, check=3)
    assert "sample: the row '3' and the trace '0' are left over: numbered from 0 and from 1" in done.stderr


@pytest.mark.parametrize("name", ["sample", "Sample", "SAMPLE", " sample"])
def test_a_column_of_samples_has_one_name(tmp_path, samples, name):
    command("merge", samples, tmp_path / "s.zarr", check=0)
    score(tmp_path / "s.zarr", f"question_id,{name},score\nq0,1,0.25\nq1,2,0.75\n")
    np.testing.assert_equal(values(tmp_path / "s.zarr"), [math.nan, 0.25, *[math.nan] * 3, 0.75])


@pytest.mark.parametrize("name", ["sample_idx", "sample_index", "answer_idx", "row", "choice"])
def test_numbers_of_rows_and_choices_are_no_samples(store, name):
    score(store, f"{name},question_id,score\n" + "".join(f"{k + 1},q{k},{k / 8}\n" for k in range(6)))
    np.testing.assert_equal(values(store)[:6], [k / 8 for k in range(6)])


@pytest.mark.parametrize("names", [["q1"], ["q3"], ["q1", "q2"], ["q1", "q2", "q3"], ["q2", "q4"], ["q0"]])
def test_a_file_may_score_some_of_the_traces(store, names):
    before = values(store)
    score(store, "question_id,score\n" + "".join(f"{name},0.125\n" for name in names), "--name", "score")
    expected = [0.125 if f"q{k}" in names else value for k, value in enumerate(before)]
    np.testing.assert_equal(values(store), expected)


@pytest.mark.parametrize("rows", [[{}, {"sample": 1}], [{"sample": 1}, {}], [{}] * 150 + [{"sample": 1}]])
def test_rows_with_and_without_a_sample_are_refused(samples, rows):
    rows = [{"question_id": f"x{k}", "score": 0.5} | row for k, row in enumerate(rows)]
    assert "sample" in refused(samples, "\n".join(map(json.dumps, rows)), name="x.jsonl")


def test_a_label_that_only_later_rows_have_is_refused(store):
    rows = [{"question_id": f"x{k}", "score": 0.5} for k in range(150)] + [
        {"question_id": "q0", "score": 1, "label": 0}
    ]
    assert "row 150: found label" in refused(store, "\n".join(map(json.dumps, rows)), name="x.jsonl")


def test_a_file_without_a_value_is_refused(store, samples):
    message = "no row of a trace has a score"
    assert message in refused(samples, "question_id,score\nq0,\n")
    assert message in refused(store, "question_id,score\nq0,\n", "--name", "judge", "--default")
    assert message in refused(store, "question_id,score,group\nq0,,a\n", "--name", "judge", "--default")


def test_another_column_replaces_the_default_score_under_its_name_alone(store):
    some, every = "question_id,rouge_l\nq0,0.9\n", "question_id,rouge_l\n" + "".join(f"q{k},0.5\n" for k in range(N))
    for text in (some, every):
        assert "--name rouge_l adds it as another score, --name score replaces" in refused(store, text, code=2)
    score(store, some, "--name", "rouge_l")
    assert values(store) == OLD and values(store, "rouge_l")[0] == 0.9
    score(store, some, "--name", "score")
    assert values(store) == [0.9, *OLD[1:]]
    score(store, every, "--name", "score")
    assert values(store) == [0.5] * N


TRAINED = "question_id,sample,trace_index,split,fold,seed,label"
# Columns of a file, and which one is taken or may be for a name of the score: None is no column's.
COLUMNS = {
    "question_id,score,judge": {None: "score", "judge": ["score", "judge"], "score": "score", "other": "score"},
    "question_id,bleurt_score,rouge_l": {"rouge_l": ["bleurt_score", "rouge_l"], "bleurt_score": "bleurt_score"},
    "question_id,score,ROUGE-L": {"rouge_l": ["score", "ROUGE-L"], "ROUGE-L": ["score", "ROUGE-L"]},
    "question_id,label,m:question": {"m_question": ["label", "m:question"]},
    "question_id,sample,hallucination_score,predicted": {
        None: "hallucination_score",
        "predicted": ["hallucination_score", "predicted"],
    },
    TRAINED: {None: "label", "mine": "label"},
    f"{TRAINED},m": {name: ["label", "m"] for name in (None, "m", "label", "mine")},
    f"{TRAINED},m,n,store": {name: ["label", "m", "n"] for name in (None, "m", "mine")},
}


@pytest.mark.parametrize(("header", "name"), [(header, name) for header, of in COLUMNS.items() for name in of])
def test_the_name_of_a_score_is_no_other_column(store, header, name):
    expected, columns, name = COLUMNS[header][name], header.split(","), name or "x"
    cells = {column: k / 16 for k, column in enumerate(columns)} | {"sample": 0}
    text = header + "\n" + "".join(f"q{k},{','.join(str(cells[c]) for c in columns[1:])}\n" for k in range(N))
    choices = [f"--score-column {column}" for column in expected] if isinstance(expected, list) else []
    if choices:
        assert f"choose {' or '.join(choices)}\n" in refused(store, text, "--name", name, code=2)
    for flags in [choice.split() for choice in choices] or [[]]:
        column = flags[-1] if flags else expected
        is_known = column not in ("judge", "m:question", "predicted") and (
            column != "label" or columns[2] == "trace_index"
        )
        done = score(store, text, "--name", name, *flags, *([] if is_known else ["--score-direction", "correct"]))
        assert f"new.csv, column {column}\n" in done.stdout and values(store, name) == [cells[column]] * N
        with tracestore.open(store, score=name) as opened:
            is_prediction = is_known and "sample" in columns
            assert opened.score_direction == ("hallucination" if is_prediction else "correct")


def test_groups_are_counted(store):
    done = score(store, "question_id,score,group\n" + "".join(f"q{k},{value},{k % 2}\n" for k, value in enumerate(OLD)))
    assert f"2 groups of {N} traces: a split keeps each group together" in done.stdout
    assert "groups of" not in score(store, "question_id,rouge_l\nq0,1\n", "--name", "rouge_l").stdout
    with tracestore.open(store) as opened:
        assert f"2 groups of {N} traces" in opened.describe_labels()[-1]


def test_equal_values_with_the_opposite_meaning_are_stored_and_reported(store):
    text = "question_id,hallucination\n" + "".join(f"q{k},{value}\n" for k, value in enumerate(OLD))
    done = score(store, text, "--name", "score")
    assert "a high score means a hallucinated answer now, and meant the opposite before" in done.stdout
    with tracestore.open(store) as opened:
        assert opened.score_direction == "hallucination" and opened.scores.tolist() == OLD
        assert opened.targets().tolist() == [float(value >= 0.5) for value in OLD]
    assert "opposite" not in score(store, text, "--name", "score").stdout


def test_equal_values_become_the_default(store):
    text = "question_id,score\n" + "".join(f"q{k},{value}\n" for k, value in enumerate(OLD))
    score(store, text, "--name", "judge")
    score(store, text, "--name", "judge", "--default")
    with tracestore.open(store) as opened:
        assert opened.score_name == "judge"


@pytest.mark.parametrize("cell", ["inf", "-inf", "1e999", "0,5", "50%", "good", "0.5 0.6", "1_0", "0x1", "½"])
def test_cells_that_are_no_numbers_are_refused(store, cell):
    refused(store, f"question_id;score\nq0;{cell}\n")
