"""Test conversions without flags by built-in layouts."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import tracestore
from tests.helpers import (
    as_torch,
    command,
    convert,
    error_of,
    field_flags,
    make_trace,
    make_traces,
    write_pickle,
    write_scores,
)
from tests.tiers import long
from tracestore.errors import InvalidInputError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def test_traces_of_every_container_of_pickles(tmp_path, folder):
    traces = make_traces(9)
    write_pickle(folder / "a.pkl", traces[:3])
    write_pickle(folder / "sub/b.pkl.gz", traces[3:6]) if (folder / "sub").mkdir() is None else None
    torch.save([as_torch(t) for t in traces[6:8]], folder / "c.pt")
    write_pickle(folder / "d.pkl", traces[8])

    convert(folder, tmp_path / "s.zarr", "--attention", "heads")

    store = tracestore.open(tmp_path / "s.zarr")
    assert sorted(store.question_ids) == [f"q{k}" for k in range(9)]
    for trace in traces:
        found = store[store.index_of(trace["question_id"])]
        assert found.hidden_states.tobytes() == np.stack(trace["hidden_states"]).tobytes()
        np.testing.assert_array_equal(found.attention, np.stack(trace["attentions"]))
        assert found.tokens.tolist() == trace["tokens"].tolist() and found.answer == trace["generated_answer_clean"]


def test_several_tools_in_one_folder(tmp_path, folder):
    write_pickle(folder / "a.pkl", [{k: v for k, v in make_trace(4).items() if k != "attentions"}])
    rng = np.random.default_rng(0)
    save_file(
        {"hidden_states": rng.standard_normal((6, 3, 8)).astype("f2"), "token_ids": np.arange(6)},
        folder / "r.safetensors",
    )

    convert(folder, tmp_path / "s.zarr")

    assert tracestore.open(tmp_path / "s.zarr").question_ids == ["q4", "r"]


def test_scores_replace_labels_inside_the_traces_which_become_extras(tmp_path, folder):
    write_pickle(folder / "a.pkl", [trace | {"label": 1, "is_correct": False} for trace in make_traces(3)])
    write_scores(folder / "ground_truth_scores.csv", {"q0": 0.9, "q1": 0.1})

    done = convert(folder, tmp_path / "s.zarr")

    store = tracestore.open(tmp_path / "s.zarr")
    np.testing.assert_array_equal(store.scores, [0.9, 0.1, np.nan])
    assert np.isnan(store.labels).all() and store[0].extras["label"] == 1
    assert "ground_truth_scores.csv" in done.stdout and "1 without a label or score" in done.stdout


def test_labels_and_scores_of_the_traces(tmp_path, folder):
    traces = [trace | {"label": k % 2, "bleurt_score": k / 4} for k, trace in enumerate(make_traces(4))]
    write_pickle(folder / "a.pkl", traces)

    done = convert(folder, tmp_path / "s.zarr")

    store = tracestore.open(tmp_path / "s.zarr")
    assert store.labels.tolist() == [0, 1, 0, 1] and store.scores.tolist() == [0, 0.25, 0.5, 0.75]
    assert store.score_direction == "correct" and "label (high: hallucination): 2 times 1, 2 times 0" in done.stdout


@pytest.mark.parametrize("direction", ["correct", "hallucination"])
def test_a_score_column_inside_the_traces(tmp_path, folder, direction):
    write_pickle(folder / "a.pkl", [trace | {"reward": 0.25} for trace in make_traces(3)])
    assert "a.pkl" in error_of("convert", folder, tmp_path / "s.zarr", code=3)

    convert(folder, tmp_path / "s.zarr", "--score-column", "reward", "--score-direction", direction)

    store = tracestore.open(tmp_path / "s.zarr")
    assert store.scores.tolist() == [0.25] * 3 and store.score_direction == direction


@pytest.mark.parametrize("name", ["a/b", "a, b", "r*", "[0]", "@r", "{r}", "r\\s", "judge score"])
def test_columns_are_names_and_no_patterns(tmp_path, folder, name):
    others = {"rs": 0.5, "b": 0.5}
    more = ({name: 0.25} | others, {f"id {name}": "x"} | others)
    for file, values in zip("ab", more, strict=True):
        write_pickle(folder / f"{file}.pkl", [make_traces(1)[0] | {"question_id": file} | values])
    chosen = "--score-column", name, "--score-direction", "correct"

    convert(folder / "a.pkl", tmp_path / "a.zarr", *chosen)
    convert(folder / "b.pkl", tmp_path / "b.zarr", "--id-column", f"id {name}")

    assert tracestore.open(tmp_path / "a.zarr").scores.tolist() == [0.25]
    assert tracestore.open(tmp_path / "b.zarr").question_ids == ["x"]


def test_an_id_column_inside_the_traces(tmp_path, folder):
    traces = [
        {k: v for k, v in t.items() if k != "question_id"} | {"my_id": f"x{n}"} for n, t in enumerate(make_traces(3))
    ]
    write_pickle(folder / "a.pkl", traces)
    assert "my_id" in convert(folder, tmp_path / "proved.zarr").stdout

    convert(folder, tmp_path / "s.zarr", "--id-column", "my_id")

    assert tracestore.open(tmp_path / "s.zarr").question_ids == ["x0", "x1", "x2"]


@pytest.mark.parametrize("name", ["labels.csv", "questions.jsonl", "attention.npy", "labels.json"])
def test_a_file_next_to_the_traces_that_nothing_describes_is_refused_before_a_commit(tmp_path, folder, name):
    write_pickle(folder / "a.pkl", make_traces(3))
    if name.endswith(".npy"):
        np.save(folder / name, np.ones((3, 2, 4, 4), "f2"))
    else:
        row = {"qid": "q0", "tier": 1}
        (folder / name).write_text("qid,tier\nq0,1\n" if name.endswith("csv") else json.dumps(row) + "\n")

    message = error_of("convert", folder, tmp_path / "s.zarr", code=3)

    assert name in message and "--field lines" in message
    assert not (tmp_path / "s.zarr" / "manifest").exists() or not tracestore.open(tmp_path / "s.zarr")


def test_settings_and_texts_next_to_the_traces_are_skipped(tmp_path, folder):
    write_pickle(folder / "a.pkl", make_traces(3))
    (folder / "config.pkl").write_bytes(pickle.dumps({"model": "x", "layers": 3}))
    (folder / "metrics.json").write_text('{"loss": 0.5}')
    (folder / "README.md").write_text("# Traces")

    done = convert(folder, tmp_path / "s.zarr")

    assert "skipped 2 files without traces (config.pkl, metrics.json): holds no array" in done.stdout
    assert len(tracestore.open(tmp_path / "s.zarr")) == 3


def test_a_named_file_without_a_trace_is_refused(tmp_path, folder):
    (folder / "config.pkl").write_bytes(pickle.dumps({"model": "x"}))
    write_pickle(folder / "a.pkl", make_traces(3))
    convert(folder / "a.pkl", tmp_path / "s.zarr")

    assert "config.pkl" in error_of("convert", folder / "config.pkl", tmp_path / "s.zarr", code=3)


def test_folders_with_files_of_the_same_name(tmp_path):
    for k, name in enumerate(("one", "two")):
        write_pickle(tmp_path / name / "a.pkl", make_traces(4)[2 * k : 2 * k + 2])

    convert(tmp_path / "one", tmp_path / "two", tmp_path / "s.zarr")

    assert tracestore.open(tmp_path / "s.zarr").question_ids == ["q0", "q1", "q2", "q3"]


def test_a_damaged_file_keeps_the_files_before_it(tmp_path, folder):
    write_pickle(folder / "a.pkl", make_traces(2))
    (folder / "b.pkl").write_bytes(b"\x80\x04nonsense")
    write_pickle(folder / "c.pkl", make_traces(4)[2:])

    assert "b.pkl" in error_of("convert", folder, tmp_path / "s.zarr", code=3)
    assert tracestore.open(tmp_path / "s.zarr").question_ids == ["q0", "q1"]
    done = convert(folder, tmp_path / "s.zarr", "--skip-bad")
    assert len(tracestore.open(tmp_path / "s.zarr")) == 4 and "skipped b.pkl" in done.stdout


def test_one_file_of_another_kind_among_many_is_refused_when_it_is_read(tmp_path, folder):
    rng = np.random.default_rng(0)
    for k in range(150):
        shape = (6, 3, 8) if k != 77 else (1, 3, 8)
        states = rng.standard_normal(shape).astype("f2")
        save_file({"hidden_states": states, "token_ids": np.arange(6)}, folder / f"r-{k}.safetensors")

    message = error_of("convert", folder, tmp_path / "s.zarr", code=3)

    assert "r-77.safetensors" in message and "built-in layout vllm" in message


def test_padding_none_states_that_rows_without_a_mask_have_no_padding(tmp_path, folder):
    rng = np.random.default_rng(0)
    passes = [[rng.standard_normal((2, n, 6)).astype("f2") for _ in range(3)] for n in (4, 1, 1)]
    ids = np.array([[5, 6, 7, 8, 9, 2, 2], [5, 6, 7, 8, 9, 10, 11]])
    torch.save(
        {
            "sequences": torch.from_numpy(ids),
            "hidden_states": tuple(tuple(torch.from_numpy(layer) for layer in layers) for layers in passes),
        },
        folder / "out.pt",
    )

    lines = ["hidden_states = out.pt : hidden_states -> P L N S D", "tokens = out.pt : sequences -> N T"]
    flags = field_flags(*lines)

    message = error_of("convert", folder, tmp_path / "s.zarr", *flags, code=3)
    convert(folder, tmp_path / "s.zarr", *flags, "--padding", "none")

    assert "S.pad = 2 if it is padding" in message
    assert [len(trace.tokens) for trace in tracestore.open(tmp_path / "s.zarr")] == [7, 7]


@pytest.mark.parametrize("way", ["field", "layout"])
@pytest.mark.parametrize("origin", ["built-in", "proved"])
def test_ignore_alone_leaves_files_out_of_what_needs_no_layout(tmp_path, folder, origin, way):
    if origin == "built-in":
        write_pickle(folder / "a.pkl", make_traces(3))
    else:
        for k in range(3):
            items = {"hidden_states": np.ones((3, 5 + k, 8), "f2"), "token_ids": np.arange(5 + k)}
            np.savez(folder / f"q{k}.npz", **items, is_correct=k % 2 == 0)
    (folder / "runs").mkdir()
    (folder / "runs/config.json").write_text(json.dumps({"model": "m", "layers": [1, 2], "label": "1 is true"}))
    (tmp_path / "l.toml").write_text('ignore = ["**/config.json"]')
    lines = ["--field", "ignore = **/config.json"] if way == "field" else ["--layout", str(tmp_path / "l.toml")]

    refused = command("convert", folder, tmp_path / "s.zarr", check=3).stderr
    convert(folder, tmp_path / "s.zarr", *lines)
    convert(folder, tmp_path / "t.zarr", *lines, "--workers", "2")

    assert origin == "proved" or "--field 'ignore = runs/config.json' leaves it out" in refused
    assert sorted(tracestore.open(tmp_path / "s.zarr").question_ids) == ["q0", "q1", "q2"]
    assert sorted(tracestore.open(tmp_path / "t.zarr").question_ids) == ["q0", "q1", "q2"]
    convert(folder, tmp_path / "s.zarr", *lines)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [("b.json", 3, "no file is left out by it"), ("a.pkl : []/x", 2, "whole files alone are left out")],
)
def test_ignore_alone_without_effect_is_refused(tmp_path, folder, line, code, words):
    write_pickle(folder / "a.pkl", make_traces(3))

    assert words in error_of("convert", folder, tmp_path / "s.zarr", "--field", f"ignore = {line}", code=code)


def test_ignore_alone_with_equal_names_in_two_folders(tmp_path):
    for k, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        write_pickle(tmp_path / name / "a.pkl", make_traces(3)[k : k + 1])
        np.save(tmp_path / name / "extra.npy", np.ones((2, 3)))

    words = tmp_path / "one", tmp_path / "two", tmp_path / "s.zarr"
    refused = command("convert", *words, check=3).stderr
    convert(*words, "--field", "ignore = extra.npy")

    assert "--field 'ignore = extra.npy' leaves it out" in refused
    assert sorted(tracestore.open(tmp_path / "s.zarr").question_ids) == ["q0", "q1"]


def padded(k, name, *, is_left=False, texts=False):
    """Return a trace of 4 + k tokens and padding up to 8, with its length under a name."""
    own, rest = list(range(5, 9 + k)), [0] * (4 - k)
    ids = rest + own if is_left else own + rest
    trace = {
        "question_id": f"q{k}",
        "hidden_states": list(np.random.default_rng(k).normal(size=(4, 8, 12)).astype("f4")),
    }
    return trace | ({"tokens_decoded": [f"w{i}" for i in ids]} if texts else {"tokens": np.array(ids)}) | {name: 4 + k}


@pytest.mark.parametrize(
    "name",
    ["length", "num_tokens", *long("seq_len", "seq_length", "sequence_length", "n_tokens", "valid_length")],
)
@pytest.mark.parametrize("options", [{}, {"is_left": True}, {"texts": True}], ids=["right", "left", "texts"])
@pytest.mark.parametrize("is_list", [True, False])
def test_padding_by_a_length_next_to_it_is_refused(tmp_path, folder, name, options, is_list):
    traces = [padded(k, name, **options) for k in range(3)]
    if is_list:
        write_pickle(folder / "a.pkl", traces)
    else:
        for trace in traces:
            write_pickle(folder / f"{trace['question_id']}.pkl", trace)
    with pytest.raises(InvalidInputError, match=f"{name}: found 4, and the others of 8 tokens are equal"):
        tracestore.convert_files(folder, tmp_path / "s.zarr")
    tracestore.convert_files(folder, tmp_path / "s.zarr", padding="none")
    assert {trace.num_tokens for trace in tracestore.open(tmp_path / "s.zarr")} == {8}


@pytest.mark.parametrize("has_attention", [False, True])
@pytest.mark.parametrize("is_list", [True, False])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [((5, 6, 7, 8), {"is_left": True}), ((7, 7, 6, 8), {}), ((5, 6, 7, 8), {"texts": True})],
    ids=["left", "right", "texts"],
)
def test_rule_17e_padded_traces_of_one_length(tmp_path, folder, lengths, options, is_list, has_attention):
    """The padding may attend to itself, the last trace has none [padding stored as tokens]."""
    traces = [padded(length - 4, "note", **options) | {"question_id": f"q{k}"} for k, length in enumerate(lengths)]
    for k, trace in enumerate(traces):
        trace |= {"attentions": [np.tril(np.full((2, 8, 8), 0.1, "f4"))] * 4} if has_attention else {}
        write_pickle(folder / f"q{k}.pkl", trace) if not is_list else None
    write_pickle(folder / "a.pkl", traces) if is_list else None

    assert "each trace has 8 tokens, and one has" in error_of("convert", folder, tmp_path / "s.zarr", code=3)
    convert(folder, tmp_path / "s.zarr", "--padding", "none")


@pytest.mark.parametrize("own", [slice(2, 7), slice(5)], ids=["left", "right"])
def test_rule_06b_a_masked_token_of_a_trace(tmp_path, folder, own):
    """[padding stored as tokens]"""
    traces = [make_trace(k, tokens=7 + k) for k in range(2)]
    for layer in traces[0]["attentions"]:
        layer[:, :, : own.start or 0] = layer[:, :, own.stop :] = 0
    write_pickle(folder / "a.pkl", traces)

    assert f"token {0 if own.start else 5} is masked" in error_of("convert", folder, tmp_path / "s.zarr", code=3)


@pytest.mark.parametrize("is_list", [True, False])
def test_traces_of_several_lengths_may_end_with_an_id_twice(tmp_path, folder, is_list):
    traces = [make_trace(k, tokens=5 + k) for k in range(3)]
    for k, trace in enumerate(traces):
        trace["tokens"][-2:] = 13
        write_pickle(folder / f"q{k}.pkl", trace) if not is_list else None
    write_pickle(folder / "a.pkl", traces) if is_list else None

    convert(folder, tmp_path / "s.zarr")
    assert [trace.num_tokens for trace in tracestore.open(tmp_path / "s.zarr")] == [5, 6, 7]


@pytest.mark.parametrize(
    "more", [{"length": 8}, {"length": 3}, {"length": 40}, {"length": "long"}, {"tokens": np.arange(9)}]
)
def test_lengths_that_leave_out_no_padding_are_extras(tmp_path, folder, more):
    write_pickle(folder / "a.pkl", [padded(3, "length") | {"tokens": np.arange(8), "length": 8} | more])
    convert(folder, tmp_path / "s.zarr")
    assert tracestore.open(tmp_path / "s.zarr")[0].num_tokens == 8


@pytest.mark.parametrize(
    ("answers", "is_refused"),
    [
        ({"q1_0": 0, "q1_1": 1, "q2_0": 0, "q2_1": 1}, True),
        ({"q1-00": 0, "q1-01": 1}, True),
        ({"q1_0": 0, "q2_0": 0}, False),
        ({"q1_0": 0, "q1_1": 1, "q1_2": 0}, False),
        ({"q1": 1, "q2": 1}, False),
    ],
)
def test_rule_23_names_that_end_with_the_number_of_the_answer(tmp_path, folder, answers, is_refused):
    """[answers to one question under several ids, in several splits]"""
    for k, (name, sample) in enumerate(answers.items()):
        trace = make_trace(k + 1) | {"sample": sample}
        del trace["question_id"]
        write_pickle(folder / f"{name}.pkl", trace)

    done = command("convert", folder, tmp_path / "s.zarr", check=3 if is_refused else 0)

    assert ("end with the numbers of their answers" in done.stderr) == is_refused
    if "q1_0" in answers and is_refused:
        lines = (
            f"{name} = {{id}}_{{sample}}.pkl : {name} -> {axes}"
            for name, axes in (("hidden_states", "L S D"), ("attentions", "L H S S"), ("tokens", "S"))
        )
        more = ["ignore = {id}_{sample}.pkl : tokens_decoded", "ignore = {id}_{sample}.pkl : sample"]
        convert(folder, tmp_path / "s.zarr", *field_flags(*lines, *more))
        stored = tracestore.open(tmp_path / "s.zarr")
        assert {(t.question_id, t.sample) for t in stored} == {(n[:2], sample) for n, sample in answers.items()}
