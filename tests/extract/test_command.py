"""Test `tracestore extract` with a language model of two layers and random weights."""

import csv
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tracestore
from tests.helpers import command, convert, read_traces


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.csv"
    rows = "".join(f"q{k},What is {k}?,{k}|number {k},numbers\n" for k in range(7))
    path.write_text(f"question_id,question,answers,group\n{rows}")
    return path


def extract(model, questions, out, *args, check=0):
    words = ("--model", model, "--questions", questions, "--out", out, "--max-new-tokens", 6)
    return command("extract", *words, *args, check=check)


def test_files_follow_the_schema_and_convert(tiny_model, questions, tmp_path):
    done = extract(tiny_model, questions, tmp_path / "out", "--traces-per-file", 3, "--json")
    assert json.loads(done.stdout)["made"] == 7
    provenance = json.loads((tmp_path / "out/provenance.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.pkl"))
    assert files == [f"traces_batch_000{k}.pkl" for k in range(3)]
    with (tmp_path / "out/scores.csv").open() as file:
        assert [row["question_id"] for row in csv.DictReader(file)] == [f"q{k}" for k in range(7)]
    record = next(read_traces(tmp_path / "out" / files[0], files[0]))
    assert len(record.hidden) == 2 and record.hidden[0].dtype == np.float16 and record.hidden[0].shape[1] == 16
    assert record.attention[0].shape == (4, record.num_tokens, record.num_tokens)
    np.testing.assert_allclose(record.attention[0].astype("f4").sum(-1), 1, atol=0.01)
    assert len(record.tokens) == len(record.tokens_decoded) == record.num_tokens > record.prompt_length
    convert(tmp_path / "out", tmp_path / "s.zarr")
    store = tracestore.open(tmp_path / "s.zarr")
    assert len(store) == 7 and not np.isnan(store.scores).any() and store.attention_layout == "causal"
    assert store[0].question == "What is 0?"
    assert [p.to_json() for p in store.provenance] == [provenance] and store[6].provenance == store.provenance[0]


def test_hidden_states_and_attention_match_the_model(tiny_model, questions, tmp_path):
    extract(tiny_model, questions, tmp_path / "out", "--limit", 1)
    record = next(read_traces(tmp_path / "out/traces_batch_0000.pkl", "t"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager").eval()
    with torch.inference_mode():
        ids = torch.from_numpy(record.tokens.astype("i8"))[None]
        out = model(ids, output_hidden_states=True, output_attentions=True)
    for layer in range(2):
        expected = out.hidden_states[layer + 1][0].half().numpy()
        np.testing.assert_allclose(record.hidden[layer].astype("f4"), expected.astype("f4"), atol=2e-3)
        np.testing.assert_allclose(record.attention[layer].astype("f4"), out.attentions[layer][0].numpy(), atol=2e-3)


@pytest.mark.long
def test_shards_and_resumed_runs_write_the_same_files(tiny_model, questions, tmp_path):
    extract(tiny_model, questions, tmp_path / "whole", "--traces-per-file", 2)
    for shard in ("1/2", "0/2"):
        extract(tiny_model, questions, tmp_path / "parts", "--traces-per-file", 2, "--shard", shard)
    for path in sorted((tmp_path / "whole").iterdir()):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes(), path.name
    (tmp_path / "parts/traces_batch_0001.pkl").unlink()
    untouched = (tmp_path / "parts/traces_batch_0000.pkl").stat().st_mtime_ns
    done = json.loads(extract(tiny_model, questions, tmp_path / "parts", "--traces-per-file", 2, "--json").stdout)
    assert done["made"] == 2 and done["already_there"] == 5
    assert (tmp_path / "parts/traces_batch_0000.pkl").stat().st_mtime_ns == untouched


@pytest.mark.long
@pytest.mark.parametrize("out", ["folder", "run.zarr"])
def test_batch_size_does_not_change_the_store(tiny_model, questions, tmp_path, out):
    extract(tiny_model, questions, tmp_path / "alone.zarr")
    extract(tiny_model, questions, tmp_path / out, "--limit", 2, "--batch-size", 3)
    done = json.loads(extract(tiny_model, questions, tmp_path / out, "--batch-size", 3, "--json").stdout)
    assert done["made"] + done["already_there"] == 7
    if out == "folder":
        convert(tmp_path / out, tmp_path / "run.zarr")
    with tracestore.open(tmp_path / "alone.zarr") as one, tracestore.open(tmp_path / "run.zarr") as other:
        assert list(one.question_ids) == list(other.question_ids)
        assert np.array_equal(one.scores, other.scores)
        for a, b in zip(one, other, strict=True):
            assert a.answer == b.answer and np.array_equal(a.tokens, b.tokens)


@pytest.mark.long
def test_samples_are_traces_of_one_question(tiny_model, questions, tmp_path):
    sampling = ("--samples", 3, "--temperature", 0.8, "--seed", 7, "--top-logprobs", 2, "--limit", 2)
    judges = ("--judge", "exact_match", "--judge", "rouge_l")
    extract(tiny_model, questions, tmp_path / "run.zarr", *sampling, *judges, "--batch-size", 4)
    done = extract(tiny_model, questions, tmp_path / "run.zarr", *sampling, *judges, "--json")
    assert json.loads(done.stdout)["already_there"] == 6
    extract(tiny_model, questions, tmp_path / "out", *sampling, *judges)
    convert(tmp_path / "out", tmp_path / "converted.zarr")
    for path, default in (("run.zarr", "exact_match"), ("converted.zarr", "score")):
        with tracestore.open(tmp_path / path) as store:
            assert [(t.question_id, t.sample) for t in store] == [(f"q{q}", k) for q in range(2) for k in range(3)]
            assert len({t.seed for t in store}) == 6 and {t.temperature for t in store} == {np.float32(0.8)}
            assert all(t.top_ids.shape[1] == 2 for t in store)
            assert store.internals.manifest.attributes.default_score == default and not np.isnan(store.scores).any()
            assert store.provenance[0].sampling == {"do_sample": True, "max_new_tokens": 6, "temperature": 0.8}
    with tracestore.open(tmp_path / "run.zarr") as one, tracestore.open(tmp_path / "converted.zarr") as other:
        assert sorted(one.score_fields) == ["exact_match", "rouge_l"]
        assert [t.answer for t in one] == [t.answer for t in other]
        assert one.score_fields["rouge_l"].source == "tracestore extract, judge rouge_l"


def test_selected_layers_and_positions_are_stored(tiny_model, questions, tmp_path):
    options = ("--layers=-1", "--positions", "answer", "--limit", 2)
    extract(tiny_model, questions, tmp_path / "run.zarr", *options)
    extract(tiny_model, questions, tmp_path / "out", *options)
    convert(tmp_path / "out", tmp_path / "converted.zarr")
    for path in ("run.zarr", "converted.zarr"):
        with tracestore.open(tmp_path / path) as store:
            assert store.num_layers == 1 and store.num_heads == 4 and store.provenance[0].layer_ids == (2,)
            for trace in store:
                assert trace.num_tokens == len(trace.tokens) <= 6 and trace.answer_span == (0, trace.num_tokens)


def test_default_judges_are_named_scores(tiny_model, questions, tmp_path):
    extract(tiny_model, questions, tmp_path / "run.zarr", "--limit", 2)
    with tracestore.open(tmp_path / "run.zarr") as store:
        assert sorted(store.score_fields) == ["containment", "containment_f1", "token_f1"]
        assert np.array_equal(store.scores, store.named_scores("containment_f1"))
    extract(tiny_model, questions, tmp_path / "out", "--limit", 2)
    with (tmp_path / "out/scores.csv").open() as file:
        assert file.readline() == "question_id,sample,score,containment,token_f1,template,answer\n"


def test_scores_that_are_replaced_or_missing_are_counted(tiny_model, questions, tmp_path):
    extract(tiny_model, questions, tmp_path / "run.zarr", "--limit", 2)
    with tracestore.open(tmp_path / "run.zarr") as store:
        text = questions.read_text().replace("0|number 0", store[0].answer.translate({ord(c): None for c in ',|"'}))
    questions.write_text(text)
    (tmp_path / "mine.csv").write_text("question_id,score\nq0,1\nq1,0\n")
    command("score", tmp_path / "run.zarr", "--scores", tmp_path / "mine.csv", "--name", "mine", "--default", check=0)
    done = extract(tiny_model, questions, tmp_path / "run.zarr", "--limit", 3)
    assert "1 new trace, 2 existing traces (1 with other scores than before)" in done.stdout
    assert "1 trace without a label or the score mine: --score containment gives 1" in done.stdout
    done = json.loads(extract(tiny_model, questions, tmp_path / "run.zarr", "--limit", 3, "--json").stdout)
    assert (done["made"], done["already_there"], done["rejudged"]) == (0, 3, 0)


@pytest.mark.long
def test_shards_write_to_one_store(tiny_model, questions, tmp_path, monkeypatch):
    """A shard is stated, or that of a rank; an answer that another process has given differently is left out."""
    extract(tiny_model, questions, tmp_path / "run.zarr", "--shard", "0/3")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in ("1", "2"):
        monkeypatch.setenv("RANK", rank)
        extract(tiny_model, questions, tmp_path / "run.zarr")
    with tracestore.open(tmp_path / "run.zarr") as store:
        assert list(store.question_ids) == ["q0", "q3", "q6", "q1", "q4", "q2", "q5"]
    monkeypatch.setenv("RANK", "3")
    assert "found '3/3', expected I/N" in extract(tiny_model, questions, tmp_path / "run.zarr", check=2).stderr


@pytest.mark.long
def test_provenance_is_complete_and_conflicts_are_refused(tiny_model, questions, tmp_path):
    outs = (tmp_path / "out", tmp_path / "run.zarr")
    for out in outs:
        extract(tiny_model, questions, out, "--limit", 1)
    with tracestore.open(outs[1]) as store:
        known = store.provenance[0].to_json()
    assert known == json.loads((outs[0] / "provenance.json").read_text())
    assert known.pop("model_revision").startswith("files:") and len(known.pop("prompt_sha256")) == 64
    assert known == {
        "model": tiny_model.name,
        "tokenizer": tiny_model.name,
        "layer_ids": [1, 2],
        "hidden_states_at": "block output",
        "final_norm": True,
        "attention_kind": "softmax",
        "compute_dtype": "float32",
        "sampling": {"do_sample": False, "max_new_tokens": 6},
        "tool": f"tracestore {tracestore.__version__}",
        "positions": "all",
    }
    for out in outs:
        done = extract(tiny_model, questions, out, "--positions", "answer", check=2)
        assert done.stderr.count("\n") == 1 and "positions: found answer, expected all" in done.stderr
        done = extract(tiny_model, questions, out, "--dtype", "bfloat16", check=2)
        assert done.stderr.count("\n") == 1 and "compute_dtype: found bfloat16, expected float32" in done.stderr
        done = extract(tiny_model, questions, out, "--instruction", "Lie.", check=2)
        assert "prompt_sha256" in done.stderr and "--allow-mixed-provenance" in done.stderr
        extract(tiny_model, questions, out, "--dtype", "bfloat16", "--allow-mixed-provenance")
    kept = json.loads((outs[0] / "provenance.json").read_text())
    assert kept["compute_dtype"] is None and kept["layer_ids"] == [1, 2] and kept["model"] == tiny_model.name
    with tracestore.open(outs[1]) as store:
        assert [t.provenance.compute_dtype for t in store] == ["float32"] + ["bfloat16"] * 6


def test_errors_are_one_line(tiny_model, questions, tmp_path):
    files = (
        (tiny_model, tmp_path / "none.csv", "no such file"),
        (tmp_path / "nomodel.gguf", questions, "no such file"),
        ("package:not_a_package", questions, "not installed"),
    )
    options = (
        ("--shard", "3/2", "I/N"),
        ("--samples", 2, "--temperature above 0"),
        ("--temperature", -1, "at least 0"),
        ("--layers", "0", "expected numbers"),
        ("--layers", "0-3", "expected numbers"),
        ("--layers", "a", "expected numbers"),
        ("--layers", "1-3", "expected 1 to 2"),
        ("--positions", "0", "all, answer"),
        ("--judge", "me", "rouge_l"),
        ("--prompt-template", tmp_path / "no.txt", "no prompt template"),
    )
    cases = [*files, *((tiny_model, questions, *option) for option in options)]
    for model, path, *args, words in cases:
        done = extract(model, path, tmp_path / "o", *args, check=2)
        assert words in done.stderr and done.stderr.count("\n") == 1
    done = extract(tiny_model, questions, "s3://bucket/traces", check=2)
    assert done.stderr.count("\n") == 1 and "ends with .zarr" in done.stderr


def test_resumes_after_a_kill_before_the_first_commit(tiny_model, questions, tmp_path):
    (tmp_path / "run.zarr").mkdir()
    (tmp_path / "run.zarr" / "lock").touch()
    extract(tiny_model, questions, tmp_path / "run.zarr", "--limit", 2)
    with tracestore.open(tmp_path / "run.zarr") as store:
        assert len(store) == 2
