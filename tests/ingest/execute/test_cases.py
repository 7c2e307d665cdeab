"""Test folders that were once converted wrongly with exit code 0: each is right by a layout, or refused."""

import gzip

import numpy as np
import pytest

import tracestore
from tests.helpers import command
from tests.ingest.execute.folders import convert, dump, refuse, save, states, table
from tests.ingest.execute.test_rules import passes
from tracestore.convert.described import DescribedRun


def test_one_answer_with_labels_per_token(tmp_path):
    """States (S, D) and token_labels (S,) are one answer, not S answers with a label each."""
    dump(
        tmp_path / "in/q0.pkl",
        {"hs": states(6, 8), "attn": np.tril(np.ones((1, 6, 6), "f4")), "token_labels": [0, 1, 0, 0, 1, 0]},
    )
    layout = {"hidden_states": "{id}.pkl : hs -> S D", "attentions": "{id}.pkl : attn -> H S S"}
    refuse(tmp_path, layout, "token_labels: no line of the layout")
    refuse(tmp_path, layout | {"is_hallucinated": "{id}.pkl : token_labels"}, "is_hallucinated: found")

    traces = convert(tmp_path, layout | {"ignore": ["{id}.pkl : token_labels"]})

    assert traces["q0", 0].num_tokens == 6
    assert traces["q0", 0].attention.shape[-1] == 6


def test_ranks_that_number_their_rows_from_0(tmp_path):
    for rank in range(2):
        dump(tmp_path / f"in/rank{rank}.pkl", [{"idx": k, "hs": states(2, 4, 8, seed=9 * rank + k)} for k in range(3)])
    table(tmp_path / "in/labels.csv", [{"idx": k, "ok": k % 2} for k in range(6)])

    for files in ("rank*.pkl", "rank{rank}.pkl"):
        layout = {"hidden_states": f"{files} : [id=idx]/hs -> L S D", "is_correct": "labels.csv : [id=idx]/ok"}
        refuse(tmp_path, layout, "serves several traces|the id '0'|found two|different content")


def test_padded_rows_without_a_mask(tmp_path):
    ids = np.array([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 5, 8), "input_ids": ids})
    layout = {"hidden_states": "a.pkl : hs -> N S D", "tokens": "a.pkl : input_ids -> N S"}
    refuse(tmp_path, layout, "S.mask, S.lengths or S.padding")

    traces = list(convert(tmp_path, layout | {"S.padding": 0}).values())

    assert [trace.tokens.tolist() for trace in traces] == [[5, 6, 7, 8, 9], [5, 6, 7]]


def test_layers_taken_for_tokens(tmp_path):
    """(N, L, D) with a table of N rows is N traces of last tokens, whatever the sizes are."""
    save(tmp_path / "in/h.npy", states(6, 3, 8))
    table(tmp_path / "in/t.csv", [{"id": f"q{k}", "ok": k % 2} for k in range(6)])
    layout = {"last_token": "h.npy -> N L D", "question_id": "t.csv : []/id", "is_correct": "t.csv : []/ok"}

    traces = convert(tmp_path, layout)

    assert traces["q5", 0].last_token.shape == (3, 8)
    assert [traces[f"q{k}", 0].score for k in range(6)] == [0, 1, 0, 1, 0, 1]
    table(tmp_path / "in/t.csv", [{"id": f"q{k}", "ok": k % 2} for k in range(24)])
    refuse(tmp_path, layout, "24 rows", overwrite=True)


def test_passes_without_a_cache(tmp_path):
    dump(tmp_path / "in/a.pkl", {"hs": passes(2, 3, 4, 5, 6, 7, 8, 9), "ids": ["a", "b"]})
    layout = {"hidden_states": "a.pkl : hs -> P L N S D", "question_id": "a.pkl : ids -> N"}
    refuse(tmp_path, layout, "do later ones repeat earlier tokens")

    assert [trace.num_tokens for trace in convert(tmp_path, layout | {"P.repeats": True}).values()] == [9, 9]


def test_fewer_states_than_ids_of_a_cached_prefix(tmp_path):
    dump(tmp_path / "in/a.pkl", [{"id": "q", "hs": states(2, 4, 8), "output_ids": np.arange(9)}])
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D"}

    for axes in ("S", "T"):
        refuse(tmp_path, layout | {"tokens": f"a.pkl : [id=id]/output_ids -> {axes}"}, "found 9 ids, expected .* for 4")


def test_layers_with_lists_of_samples(tmp_path):
    found = {k: [{"sample_idx": i, "activation": states(8, seed=10 * k + i)} for i in range(3)] for k in (4, 8)}
    dump(tmp_path / "in/a.pkl", found)

    traces = convert(tmp_path, {"last_token": "a.pkl : {layer}/[id=sample_idx]/activation -> D"})

    assert set(traces) == {(str(k), 0) for k in range(3)}
    np.testing.assert_allclose(traces["2", 0].last_token[1], found[8][2]["activation"], atol=2e-3)


@pytest.mark.parametrize(("field", "scores"), [("is_correct", [1, 0, 1]), ("is_hallucinated", [1, 0, 1])])
def test_statements_with_a_file_per_layer(tmp_path, field, scores):
    """The field gives the meaning of 1; the files are layers of the same statements."""
    for layer in (8, 16):
        save(tmp_path / f"in/layer_{layer}.npy", states(3, 8, seed=layer))
    table(tmp_path / "in/t.csv", [{"statement": f"s{k}", "label": v} for k, v in enumerate(scores)])
    layout = {"last_token": "layer_{layer}.npy -> N D", "question": "t.csv : []/statement"}
    refuse(tmp_path, layout, "label: no line of the layout names what may be a label")

    traces = convert(tmp_path, layout | {field: "t.csv : []/label"})

    found = {trace.question: trace.score for trace in traces.values()}
    assert found == {"s0": 1, "s1": 0, "s2": 1}
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.score_direction == ("correct" if field == "is_correct" else "hallucination")
        assert len(store) == 3


def write_labels(tmp_path, values):
    save(tmp_path / "in/h.npy", states(3, 2, 8))
    table(tmp_path / "in/t.csv", [{"id": f"q{k}", "label": v} for k, v in enumerate(values)])
    (tmp_path / "l.toml").write_text(
        'last_token = "h.npy -> N L D"\nquestion_id = "t.csv : []/id"\nis_correct = "t.csv : []/label"\n'
    )


def test_changed_labels_and_the_same_command_again(tmp_path):
    write_labels(tmp_path, [1, 0, 1])
    flags = ("--layout", tmp_path / "l.toml")
    first = command("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, check=0).stdout
    again = command("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, check=0).stdout
    write_labels(tmp_path, [1, 1, 1])

    changed = command("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, check=0).stdout

    assert "is_correct (high: correct): 2 times 1, 1 times 0, 0 missing" in first
    assert "1 file already in the store" in again and "times 1" not in again
    assert "scores, labels or groups of 1 stored trace have changed and were replaced" in changed
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.scores.tolist() == [1, 1, 1]


def test_lines_of_the_command(tmp_path):
    write_labels(tmp_path, [1, 0, 1])
    lines = ("last_token = h.npy -> N L D", "question_id = t.csv : []/id", "is_correct = t.csv : []/label")
    flags = [part for line in lines for part in ("--field", line)]

    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, check=0)

    assert "first trace: q0, is_correct 1, L 2, last token, D 8, median norm" in done.stdout
    assert "question_id: 3 rows of t.csv joined in order: the first q0 of row 0, the last q2 of row 2" in done.stdout
    assert "is_correct: 3 rows of t.csv joined in order: the first 1 of q0, the last 1 of q2" in done.stdout


def test_a_line_of_the_command_counts_traces_that_lengths_cut(tmp_path):
    save(tmp_path / "in/h.npy", states(9, 2, 8))
    save(tmp_path / "in/t.npy", np.arange(9))
    table(tmp_path / "in/t.csv", [{"id": f"q{k}", "n": n} for k, n in enumerate((2, 4, 3))])
    lines = ("hidden_states = h.npy -> (N S) L D", "tokens = t.npy -> (N S)", "S.lengths = t.csv : []/n")
    flags = [part for line in (*lines, "question_id = t.csv : []/id") for part in ("--field", line)]

    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, check=0)

    assert "tokens: 3 rows of t.npy joined in order: the first q0, the last q2" in done.stdout


def write_split(tmp_path, split):
    """Write a stack of a split, and its labels in another file."""
    save(tmp_path / f"in/{split}_h.npy", states(3, 2, 4, 8, seed=len(split)))
    table(tmp_path / f"in/{split}_y.csv", [{"ok": int(split == "train")} for _ in range(3)])


def write_arrays(tmp_path):
    """Write arrays of a stack and its labels behind each other in one file."""
    dump(tmp_path / "in/a.pkl", {"hs": states(6, 2, 4, 8), "ok": [0, 0, 0, 1, 1, 1]})


@pytest.mark.parametrize("is_split", [True, False])
def test_a_line_of_the_command_for_each_join_in_order(tmp_path, is_split):
    """Also where no table for all traces is joined [rows in another order, which nothing shows]."""
    if is_split:
        write_split(tmp_path, "test")
        write_split(tmp_path, "train")
        lines, files = (
            ("hidden_states = {split}_h.npy -> N L S D", "is_correct = {split}_y.csv : []/ok"),
            "{split}_y.csv",
        )
    else:
        write_arrays(tmp_path)
        lines, files = ("hidden_states = a.pkl : hs -> N L S D", "is_correct = a.pkl : ok -> N"), "a.pkl"
    flags = [part for line in lines for part in ("--field", line)]

    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, check=0)

    assert f"is_correct: 6 rows of {files} joined in order: the first 0 of row 0, the last 1 of row" in done.stdout


@pytest.mark.parametrize("suffix", [".pkl", ".pkl.gz", ".pt"])
def test_lines_that_read_the_items_of_a_list_more_than_once(tmp_path, suffix):
    """Each line reads all items [labels that the line before has used up]."""
    hidden = [states(2, 4, 8, seed=k) for k in range(3)]

    def write(path, value):
        if suffix == ".pt":
            path.parent.mkdir(parents=True, exist_ok=True)
            pytest.importorskip("torch").save(value, path)
            return
        dump(path, value)
        if suffix == ".pkl.gz":
            path.write_bytes(gzip.compress(path.read_bytes()))

    for k in range(3):
        parts = {"h": hidden[k]}, {"ok": k % 2, "note": f"n{k}"}
        write(tmp_path / f"a/in/q{k}{suffix}", parts if k == 2 else list(parts))
    write(
        tmp_path / f"b/in/b{suffix}",
        [{"id": f"q{k}", "h": hidden[k], "of": f"q{2 - k}", "ok": k // 2} for k in range(3)],
    )
    files = f"{{id}}{suffix} : "
    members = {"hidden_states": f"{files}0/h -> L S D", "is_correct": f"{files}1/ok", "records": f"{files}1"}
    brackets = {"hidden_states": f"b{suffix} : [id=id]/h -> L S D", "is_correct": f"b{suffix} : [id=of]/ok"}

    found = convert(tmp_path / "a", members)
    others = convert(tmp_path / "b", brackets)

    assert [found[f"q{k}", 0].scores["is_correct"] for k in range(3)] == [0, 1, 0]
    assert found["q1", 0].extras == {"note": "n1"}
    assert [others[f"q{k}", 0].scores["is_correct"] for k in range(3)] == [1, 0, 0]
    assert np.array_equal(others["q2", 0].hidden_states, hidden[2].astype("f2"))


@pytest.mark.parametrize("workers", [1, 2])
def test_values_of_the_file_of_the_states_without_a_trace_are_counted(tmp_path, workers):
    """Count them like the rows of a table [a label of a trace that was not captured]."""
    for part in range(2):
        hidden = {f"q{part}{k}": states(2, 4, 8, seed=k) for k in range(2)}
        dump(tmp_path / f"in/{part}.pkl", {"h": hidden, "ok": {f"q{part}{k}": k % 2 for k in range(3)}})
    lines = ("hidden_states = {part}.pkl : h/{id} -> L S D", "is_correct = {part}.pkl : ok/{id}")
    flags = [part for line in lines for part in ("--field", line)]

    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, "--workers", workers, check=0)

    assert "is_correct = {part}.pkl : ok/{id}: 2 without a trace, such as id q02, part 0" in done.stdout


@pytest.mark.parametrize(
    "flags",
    [
        ("--field", "hidden_state = a.npy"),
        ("--field", "tokens = a.npy"),
        ("--layout", "none.toml"),
        ("--field", "hidden_states = h.npy", "--map", "hidden_states=h"),
    ],
)
def test_wrong_layouts_are_wrong_usage(tmp_path, flags):
    write_labels(tmp_path, [1, 0, 1])

    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, check=2)

    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "s.zarr").exists()


def test_labels_are_not_stored_if_the_accounts_do_not_close(tmp_path):
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k)} for k in range(3)])
    table(tmp_path / "in/t.csv", [{"id": f"Q{k}", "ok": 1} for k in range(3)])
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "is_correct": "t.csv : [id=id]/ok"}

    refuse(tmp_path, layout, "differ in spelling only")

    assert not (tmp_path / "s.zarr/manifest").exists()


def test_bad_traces_are_dropped_and_counted(tmp_path):
    rows = [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k), "ok": k % 2} for k in range(4)]
    rows[2]["hs"] = states(4, 8)
    dump(tmp_path / "in/a.pkl", rows)
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "is_correct": "a.pkl : [id=id]/ok"}
    refuse(tmp_path, layout, "a.pkl, trace 2, hidden_states: found the shape")

    traces = convert(tmp_path, layout, skip_bad=True)

    assert {key: trace.score for key, trace in traces.items()} == {("q0", 0): 0, ("q1", 0): 1, ("q3", 0): 1}


def test_labels_after_an_interrupted_run(tmp_path, monkeypatch):
    """The traces are committed, the labels of the table are not: the same command reads the sources again."""
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k)} for k in range(3)])
    table(tmp_path / "in/t.csv", [{"id": f"q{k}", "ok": k % 2} for k in range(3)])
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "is_correct": "t.csv : [id=id]/ok"}

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DescribedRun, "fill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path, layout)

    assert [trace.score for trace in convert(tmp_path, layout).values()] == [0, 1, 0]


def test_another_layout_of_the_same_files(tmp_path):
    dump(tmp_path / "in/a.pkl", [{"id": "q", "hs": states(4, 4, 8), "other": states(4, 4, 8, seed=1)}])
    line = "a.pkl : [id=id]/{} -> L S D"
    first = {"hidden_states": line.format("hs"), "ignore": [line.format("other")]}
    convert(tmp_path, first)
    second = {"hidden_states": line.format("other"), "ignore": [line.format("hs")]}

    refuse(tmp_path, second, "different|content")


def test_a_scores_file_with_a_layout(tmp_path):
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k)} for k in range(3)])
    table(tmp_path / "in/scores.csv", [{"question_id": f"q{k}", "bleurt_score": 0.25 * k} for k in range(3)])
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D"}
    refuse(tmp_path, layout, "no line of the layout names scores.csv")

    traces = convert(tmp_path, layout, scores=str(tmp_path / "in/scores.csv"))

    assert [traces[f"q{k}", 0].score for k in range(3)] == [0, 0.25, 0.5]
