"""Test `tracestore extract` with a language model of two layers and random weights."""

import contextlib
import csv
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from fractions import Fraction

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import ROOT, command, convert, make_trace, read_all, read_traces
from tracestore.errors import InvalidInputError, UsageError
from tracestore.extract import extraction
from tracestore.extract.extraction import extract_to_folder, plan_batches
from tracestore.extract.judges import containment
from tracestore.extract.questions import FACTS, GENERATED, Question, read_questions, with_samples
from tracestore.store.io.files import LocalFiles


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question_id", "question", "answers", "group"])
        writer.writerows([f"q{k}", f"What is {k}?", f"{k}|number {k}", "numbers"] for k in range(7))
    return path


def extract(model, questions, out, *args, check=0):
    return command(
        "extract", "--model", model, "--questions", questions, "--out", out, "--max-new-tokens", 6, *args, check=check
    )


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
    from transformers import AutoModelForCausalLM

    extract(tiny_model, questions, tmp_path / "out", "--limit", 1)
    record = next(read_traces(tmp_path / "out/traces_batch_0000.pkl", "t"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager").eval()
    with torch.inference_mode():
        out = model(
            torch.from_numpy(record.tokens.astype("i8"))[None], output_hidden_states=True, output_attentions=True
        )
    for layer in range(2):
        expected = out.hidden_states[layer + 1][0].half().numpy()
        np.testing.assert_allclose(record.hidden[layer].astype("f4"), expected.astype("f4"), atol=2e-3)
        np.testing.assert_allclose(record.attention[layer].astype("f4"), out.attentions[layer][0].numpy(), atol=2e-3)


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


def test_interrupted_file_is_written_again(tmp_path):
    batches = extraction.plan_batches([Question(f"q{k}", "?", ("a",)) for k in range(4)], 2)
    calls = []

    def answer(questions):
        [question] = questions
        calls.append(question.question_id)
        if len(calls) == 4:
            raise RuntimeError("power cut")
        return [{"generated_answer_clean": "a", "hidden_states": []}]

    with pytest.raises(RuntimeError):
        list(extraction.extract_to_folder(tmp_path, batches, answer))
    assert sorted(p.name for p in tmp_path.glob("*")) == [".scores", "traces_batch_0000.pkl"]
    list(extraction.extract_to_folder(tmp_path, batches, answer))
    assert calls == ["q0", "q1", "q2", "q3", "q2", "q3"]


def test_scores_of_a_killed_run_never_stand_beside_the_traces_of_another(tmp_path, monkeypatch):
    """The second run answers differently and ends between the file and its scores; the third one writes both."""
    questions = [Question(f"q{k}", "?", ("a",)) for k in range(2)]

    def run(text, judges):
        def answer(questions):
            return [{"generated_answer_clean": text, "hidden_states": []} for _ in questions]

        batches = extraction.plan_batches(questions, 2)
        return list(extraction.extract_to_folder(tmp_path, batches, answer, judges=judges))

    run("a", ("containment",))
    with monkeypatch.context() as patch:
        write = extraction._write_rows
        patch.setattr(extraction, "_write_rows", lambda path, rows: write(path, rows) if not rows else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run("b", ("exact_match",))
    assert run("c", ("exact_match",)) == [False, False]
    assert run("d", ("exact_match",)) == [None, None]


@pytest.mark.parametrize("name", ["scores.csv", "traces_batch_0001.pkl"])
def test_foreign_files_are_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("mine")
    batches = extraction.plan_batches([Question(f"q{k}", "?", ("a",)) for k in range(4)], 2)
    with pytest.raises(UsageError, match=name):
        list(extraction.extract_to_folder(tmp_path, batches, lambda questions: []))
    assert (tmp_path / name).read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_batch_equals_questions_answered_alone(tiny_model, temperature):
    from tracestore.extract.answering import AnswerOptions, answer_questions
    from tracestore.extract.model import load_model

    lm = load_model(str(tiny_model), device="cpu")
    texts = ["?", "What is it that is so very much longer?", "Who?", "What is it that is so very much longer?"]
    questions = [Question(f"q{k}", text, ("a",)) for k, text in enumerate(texts)]
    options = AnswerOptions("Say it", 12, temperature=temperature, top_logprobs=3)
    together = answer_questions(lm, questions, options)
    alone = [answer_questions(lm, [question], options)[0] for question in questions]
    assert len({len(t["tokens"]) for t in alone}) > 1
    for one, other in zip(together, alone, strict=True):
        assert one.keys() == other.keys()
        close = {"token_logprob", "token_entropy", "top_logprobs"}
        for name in one.keys() - {"hidden_states", "attentions", *close}:
            assert np.array_equal(one[name], other[name]), name
        for name in close:
            assert np.allclose(one[name], other[name], atol=1e-5, equal_nan=True), name
        for name in ("hidden_states", "attentions"):
            for a, b in zip(one[name], other[name], strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype == np.float16
                assert np.allclose(a, b, rtol=2e-3, atol=2e-3)


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


def test_extracts_into_a_store_and_resumes(tiny_model, questions, tmp_path):
    extract(tiny_model, questions, tmp_path / "run.zarr", "--limit", 3)
    extract(tiny_model, questions, tmp_path / "run.zarr")
    store = tracestore.open(tmp_path / "run.zarr")
    assert store.question_ids == [f"q{k}" for k in range(7)] and not np.isnan(store.scores).any()


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
        assert next(csv.reader(file)) == [
            "question_id", "sample", "score", "containment", "token_f1", "template", "answer",
        ]  # fmt: skip


def test_shards_of_stores_merge(tiny_model, questions, tmp_path):
    parts = [tmp_path / f"part{k}.zarr" for k in range(2)]
    for k, part in enumerate(parts):
        extract(tiny_model, questions, part, "--shard", f"{k}/2")
    command("merge", *parts, tmp_path / "all.zarr", check=0)
    with tracestore.open(tmp_path / "all.zarr") as store:
        assert sorted(store.question_ids) == [f"q{k}" for k in range(7)] and not np.isnan(store.scores).any()


@pytest.mark.long
def test_two_extractions_into_one_store_of_which_one_is_killed_and_repeated(tiny_model, tmp_path):
    """Every question is in the store once. A third process answers a shard at the same time."""
    questions, store = tmp_path / "questions.jsonl", tmp_path / "run.zarr"
    ids = [f"q{k}" for k in range(60)]
    questions.write_text("".join(json.dumps({"question_id": i, "question": i, "answers": [i]}) + "\n" for i in ids))
    words = [sys.executable, "tools/extract.py", "--model", tiny_model, "--questions", questions, "--out", store]
    words += ["--max-new-tokens", "6", "--commit-interval", "0"]

    def start(rank):
        ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | ranks)

    def found():
        with contextlib.suppress(UsageError), tracestore.open(store) as opened:
            return {int(i[1:]) % 2 for i in opened.question_ids}
        return set()

    killed, other = start(0), start(1)
    while 0 not in found() and killed.poll() is None:
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    repeated, twice = start(0), start(0)
    assert [process.wait() for process in (other, repeated, twice)] == [0, 0, 0]
    with tracestore.open(store) as opened:
        assert sorted(opened.question_ids) == sorted(ids) and not np.isnan(opened.scores).any()
    command("verify", store, check=0)


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


def test_an_answer_that_another_process_has_committed_first_stays(tmp_path):
    asked = [Question(f"q{k}", "?", ("a",)) for k in range(3)]

    def answer(number):
        def answer(chosen):
            if number == 1:
                list(extraction.extract_to_store(tmp_path / "run.zarr", asked[1:], answer_of(2), attention="mean"))
            return answer_of(number)(chosen)

        return answer

    def answer_of(number):
        return lambda chosen: [make_trace(number) | {"generated_answer_clean": f"a {number}"} for _ in chosen]

    done = list(extraction.extract_to_store(tmp_path / "run.zarr", asked, answer(1), attention="mean", batch_size=3))
    assert len(done) == 3
    with tracestore.open(tmp_path / "run.zarr") as store:
        assert {t.question_id: t.answer for t in store} == {"q0": "a 1", "q1": "a 2", "q2": "a 2"}


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
    }
    for out in outs:
        done = extract(tiny_model, questions, out, "--dtype", "bfloat16", check=2)
        assert done.stderr.count("\n") == 1 and "compute_dtype: found bfloat16, expected float32" in done.stderr
        done = extract(tiny_model, questions, out, "--instruction", "Lie.", check=2)
        assert "prompt_sha256" in done.stderr and "--allow-mixed-provenance" in done.stderr
        extract(tiny_model, questions, out, "--dtype", "bfloat16", "--allow-mixed-provenance")
    kept = json.loads((outs[0] / "provenance.json").read_text())
    assert kept["compute_dtype"] is None and kept["layer_ids"] == [1, 2] and kept["model"] == tiny_model.name
    with tracestore.open(outs[1]) as store:
        assert [t.provenance.compute_dtype for t in store] == ["float32"] + ["bfloat16"] * 6


def test_the_revision_of_a_local_model_depends_on_its_weights(tiny_model, tmp_path):
    from tracestore.extract.model import load_model

    copy = tmp_path / tiny_model.name
    shutil.copytree(tiny_model, copy)
    one, two = load_model(str(tiny_model)), load_model(str(copy))
    assert (one.name, one.revision) == (two.name, two.revision)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert load_model(str(copy)).revision != one.revision


def test_errors_are_one_line(tiny_model, questions, tmp_path):
    (tmp_path / "bad.csv").write_text("question_id,question\nq,what?\n")
    for args, code, words in (
        ((tiny_model, tmp_path / "none.csv", tmp_path / "o"), 2, "no such file"),
        ((tiny_model, tmp_path / "bad.csv", tmp_path / "o"), 3, "answers"),
        ((tmp_path / "nomodel.gguf", questions, tmp_path / "o"), 2, "no such file"),
        (("package:not_a_package", questions, tmp_path / "o"), 2, "not installed"),
        ((tiny_model, questions, tmp_path / "o", "--shard", "3/2"), 2, "I/N"),
        ((tiny_model, questions, tmp_path / "o", "--samples", 2), 2, "--temperature above 0"),
        ((tiny_model, questions, tmp_path / "o", "--temperature", -1), 2, "at least 0"),
        ((tiny_model, questions, tmp_path / "o", "--layers", "0"), 2, "expected numbers"),
        ((tiny_model, questions, tmp_path / "o", "--layers", "0-3"), 2, "expected numbers"),
        ((tiny_model, questions, tmp_path / "o", "--layers", "a"), 2, "expected numbers"),
        ((tiny_model, questions, tmp_path / "o", "--layers=1-3"), 2, "expected 1 to 2"),
        ((tiny_model, questions, tmp_path / "o", "--positions", "0"), 2, "all, answer"),
        ((tiny_model, questions, tmp_path / "o", "--judge", "me"), 2, "rouge_l"),
        ((tiny_model, questions, tmp_path / "o", "--prompt-template", tmp_path / "no.txt"), 2, "no prompt template"),
    ):
        done = extract(*args, check=code)
        assert words in done.stderr and done.stderr.count("\n") == 1


def test_questions_of_several_turns(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question_id": 1, "question": ["Who?", "When?"], "answers": ["a"], "group": "g"}))
    assert read_questions(path) == [Question("1", "When?", ("a",), "g", ("Who?",))]
    path.write_text("[1]")
    with pytest.raises(InvalidInputError, match="expected an object"):
        read_questions(path)


def test_facts_are_unique_questions():
    questions = read_questions(FACTS)
    assert len(questions) >= 800 and len({q.template for q in questions}) >= 5
    assert len({q.text for q in questions}) == len(questions)
    with pytest.raises(InvalidInputError):
        read_questions(ROOT / "LICENSE")


DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


def by_formula(question):
    """Return the answer to a generated question, from the numbers and names in its text."""
    template, text = question.template, question.text
    n = [int(number) for number in re.findall(r"\d+", text)]
    days = [d for d in DAYS if d in text]
    months = [m for m in MONTHS if m in text]
    units = {"minutes": 60, "hours": 24, "days": 7, "meters": 1000, "inches": 12}
    if template in units:
        return str(n[0] * units[template])
    numbers = {
        "add": sum,
        "add_tens": sum,
        "add_three": sum,
        "year": sum,
        "subtract": lambda n: n[0] - n[1],
        "subtract_tens": lambda n: n[0] - n[1],
        "multiply": math.prod,
        "multiply_teens": math.prod,
        "divide": lambda n: Fraction(n[0], n[1]),
        "half": lambda n: Fraction(n[0], 2),
        "square": lambda n: n[0] ** 2,
        "percent": lambda n: Fraction(n[0] * n[1], 100),
        "remainder": lambda n: divmod(*n)[1],
    }
    if template in numbers:
        return str(numbers[template](n))
    if template in ("weekday", "weekday_before"):
        return DAYS[(DAYS.index(days[0]) + (n[0] if template == "weekday" else -n[0])) % 7]
    if template == "month":
        return MONTHS[(MONTHS.index(months[0]) + n[0]) % 12]
    if template == "time":
        end = datetime(2000, 1, 1, n[1], n[2]) + timedelta(minutes=n[0])
        return f"{end.hour}:{end.minute:02}"
    first = np.datetime64(f"{n[-1]}-{MONTHS.index(months[0]) + 1:02}")
    if template == "month_length":
        return str(((first + 1).astype("M8[D]") - first.astype("M8[D]")).astype(int))
    # 1970-01-01 was a Thursday.
    return DAYS[((first.astype("M8[D]") - np.datetime64("1970-01-01")).astype(int) + n[0] - 1 + 3) % 7]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_questions_have_exact_answers(name):
    questions = read_questions(name)
    assert len(questions) == 600 and len({q.text for q in questions}) == len({q.question_id for q in questions}) == 600
    assert [q.template for q in questions[:12]] == list(GENERATED[name])
    for question in questions:
        assert question.answers[0] == by_formula(question), question
        assert containment(question.text, question.answers) == 0
    assert ("4000", "4,000") in {q.answers for q in read_questions("package:dates:3")} or name != "package:dates"


def test_generated_questions_are_a_function_of_the_seed():
    first = read_questions("package:arithmetic")
    assert first == read_questions("package:arithmetic:0") and first[0].question_id == "arithmetic-0-add-0"
    assert not {q.question_id for q in first} & {q.question_id for q in read_questions("package:arithmetic:1")}
    content = json.dumps([[q.question_id, q.text, q.answers] for name in GENERATED for q in read_questions(name)])
    assert hashlib.sha256(content.encode()).hexdigest()[:12] == "ce33609fcebb"
    for unknown in ("package:math", "package:dates:x"):
        with pytest.raises(UsageError, match="expected package:facts, package:arithmetic, package:dates; a seed may"):
            read_questions(unknown)


@pytest.mark.long
def test_killed_and_resumed_run_makes_the_same_store(tiny_model, tmp_path):
    """Kill the run at random times (50 in `make torture`), and resume it each time."""
    kills = int(os.environ.get("TRACESTORE_EXTRACT_KILLS", "3"))
    count = 20 + 20 * kills
    questions, store = tmp_path / "questions.csv", tmp_path / "killed.zarr"
    with questions.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question_id", "question", "answers", "group"])
        writer.writerows([f"q{k}", f"What is {k}?", f"{k}|number {k}", "numbers"] for k in range(count))
    extract(tiny_model, questions, tmp_path / "whole.zarr")
    words = [sys.executable, "tools/extract.py", "--model", tiny_model, "--questions", questions, "--out", store]
    words += ["--max-new-tokens", "6", "--commit-interval", "0"]
    rng, generation = random.Random(0), 0
    for _ in range(kills):
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            # Importing libraries takes longest: kill only after the first new commit.
            while process.poll() is None and LocalFiles(store).generations()[:1] <= [generation]:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.3))
            process.kill()
            assert process.wait() in (0, -signal.SIGKILL), process.stderr.read()
        command("verify", store, check=0)
        generation = LocalFiles(store).generations()[0]
    extract(tiny_model, questions, store)
    with tracestore.open(tmp_path / "whole.zarr") as whole, tracestore.open(store) as killed:
        assert len(whole) == count and read_all(whole) == read_all(killed)


@pytest.mark.long
def test_a_killed_run_leaves_whole_files_and_goes_on(tiny_model, tmp_path):
    """Kill the run at random times (50 in `make torture`): each file in the folder is intact, and scores come last."""
    kills = int(os.environ.get("TRACESTORE_EXTRACT_KILLS", "3"))
    count = 6 + 4 * kills
    questions, folder = tmp_path / "questions.csv", tmp_path / "killed"
    with questions.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question_id", "question", "answers"])
        writer.writerows([f"q{k}", f"What is {k}?", f"{k}|number {k}"] for k in range(count))
    flags = ["--traces-per-file", "2", "--max-new-tokens", "6"]
    extract(tiny_model, questions, tmp_path / "whole", *flags)
    words = [sys.executable, "tools/extract.py", "--model", tiny_model, "--questions", questions, "--out", folder]
    rng, files = random.Random(0), 0
    for _ in range(kills):
        with subprocess.Popen([*words, *flags], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            while process.poll() is None and len(list(folder.glob("*.pkl"))) <= files:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.1))
            process.kill()
            assert process.wait() in (0, -signal.SIGKILL), process.stderr.read()
        found = list(folder.glob("*.pkl"))
        files = len(found)
        assert files == count // 2 or not (folder / "scores.csv").exists()
        assert all(path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes() for path in found)
    extract(tiny_model, questions, folder, *flags)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir() if path.is_file()
    }


def test_resumes_after_a_kill_before_the_first_commit(tiny_model, questions, tmp_path):
    (tmp_path / "run.zarr").mkdir()
    (tmp_path / "run.zarr" / "lock").touch()
    extract(tiny_model, questions, tmp_path / "run.zarr", "--limit", 2)
    with tracestore.open(tmp_path / "run.zarr") as store:
        assert len(store) == 2


def test_remote_folder_of_files_is_a_usage_error(tiny_model, questions):
    done = extract(tiny_model, questions, "s3://bucket/traces", check=2)
    assert done.stderr.count("\n") == 1 and "ends with .zarr" in done.stderr


@pytest.mark.parametrize("limit", range(1, 11))
def test_a_lower_limit_keeps_the_traces(tmp_path, limit):
    """No question is answered again, and no file of the longer run is replaced by a shorter one."""
    questions = [Question(f"q{k}", f"What is {k}?", ("answer",)) for k in range(10)]

    def answer(chosen):
        return [make_trace(int(question.question_id[1:])) for question in chosen]

    assert len(list(extract_to_folder(tmp_path, plan_batches(questions, 4), answer))) == 10
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert list(extract_to_folder(tmp_path, plan_batches(questions[:limit], 4), answer)) == [None] * limit
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 2}, "traces_batch_0000.pkl: has an answer to 'q2', sample 0"),
        ({"per_file": 3}, "traces_batch_0001.pkl: has an answer to 'q6', sample 0"),
        ({"per_file": 1}, "traces_batch_0001.pkl: has an answer to 'q4', sample 0"),
        ({"first": 1}, "traces_batch_0000.pkl: has an answer to 'q0', sample 0"),
        ({"first": 9}, "traces_batch_0000.pkl: has an answer to 'q0', sample 0"),
        ({"reverse": True}, "traces_batch_0000.pkl: has an answer to 'q0', sample 0"),
        ({"limit": 2, "judges": ("rouge_l",)}, "traces_batch_0000.pkl: has an answer to 'q2', sample 0"),
        (
            {"limit": 4, "judges": ("rouge_l",)},
            "traces_batch_0001.pkl: has scores of the judge containment_f1, not rouge_l",
        ),
        ({"shard": (0, 2), "judges": ("rouge_l",)}, "traces_batch_0001.pkl: has scores of the judge containment_f1"),
        ({"judges": ("token_f1", "containment_f1"), "limit": 8}, "traces_batch_0002.pkl: has scores of the judge"),
    ],
)
def test_another_run_in_the_folder_loses_no_answer(tmp_path, options, message):
    """It mixes no scores of two judges in one column either; the folder is unchanged, and no question is answered."""
    questions = [Question(f"q{k}", f"What is {k}?", ("answer",)) for k in range(10)]

    def answer(chosen):
        return [make_trace(int(question.question_id[1:])) for question in chosen]

    assert len(list(extract_to_folder(tmp_path, plan_batches(questions, 4), answer))) == 10
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    chosen = questions[options.get("first", 0) : options.get("limit", 10)][:: -1 if options.get("reverse") else 1]
    batches = plan_batches(
        with_samples(chosen, options.get("samples", 1)), options.get("per_file", 4), options.get("shard", (0, 1))
    )
    judges = {"judges": options["judges"]} if "judges" in options else {}
    with pytest.raises(UsageError, match=re.escape(message)):
        list(extract_to_folder(tmp_path, batches, lambda _: 1 / 0, **judges))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_more_questions_and_other_judges_in_the_folder(tmp_path):
    questions = [Question(f"q{k}", f"What is {k}?", ("answer",)) for k in range(10)]

    def answer(chosen):
        return [make_trace(int(question.question_id[1:])) for question in chosen]

    for limit, judges, made in ((6, ("rouge_l",), 6), (10, ("rouge_l",), 6), (10, ("token_f1", "rouge_l"), 10)):
        done = list(extract_to_folder(tmp_path, plan_batches(questions[:limit], 4), answer, judges=judges))
        assert sum(is_correct is not None for is_correct in done) == made
    with (tmp_path / "scores.csv").open() as file:
        assert [[*row][2:4] for row in csv.DictReader(file)] == [["score", "rouge_l"]] * 10


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answers": {"text": ["Paris"], "answer_start": [3]}}, "answers: found .*, expected a text"),
        ({"answers": [["Paris", "paris"]]}, "answers: found"),
        ({"answers": [{"aliases": ["Paris"]}]}, "answers: found"),
        ({"answers": ["Paris", None]}, "answers: found None"),
        ({"question": [{"role": "user", "content": "Where?"}]}, "question: found"),
        ({"question": {"text": "Where?"}}, "question: found"),
        ({"question": ["Where?", None]}, "question: found None"),
        ({"question": [["Where?"]]}, "question: found"),
        ({"question_id": ["q"]}, "question_id: found"),
        ({"question_id": {"id": 1}}, "question_id: found"),
        ({"group": ["a", "b"]}, "group: found"),
        ({"group": {"name": "a"}}, "group: found"),
        ({"answers": []}, "missing answers"),
        ({"question": ""}, "missing question"),
        ({"question_id": None}, "missing question_id"),
    ],
)
def test_values_of_questions_are_texts(tmp_path, row, message):
    """An object or a nested list would become a text of Python, which no answer contains and no user asks."""
    (tmp_path / "q.jsonl").write_text(
        json.dumps({"question_id": "q", "question": "Where?", "answers": ["Paris"]} | row)
    )
    with pytest.raises(InvalidInputError, match=f"question 0: {message}"):
        read_questions(tmp_path / "q.jsonl")


def test_cells_without_a_column_are_refused(tmp_path):
    """A comma in a text without quotes would move the answers."""
    path = tmp_path / "q.csv"
    path.write_text("question_id,question,answers\nq0,Where is Rome?,Italy\nq1,Where is Paris, France?,Europe\n")
    with pytest.raises(InvalidInputError, match="question 1: more cells than columns"):
        read_questions(path)


def test_numbers_of_questions_are_texts(tmp_path):
    rows = [{"question_id": 0, "question": "How many?", "answers": [4, 4.5, "four"], "group": 3},
            {"question_id": 1, "question": ["How many?", 7], "answers": 8}]  # fmt: skip
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_questions(tmp_path / "q.jsonl") == [
        Question("0", "How many?", ("4", "4.5", "four"), "3"),
        Question("1", "7", ("8",), earlier=("How many?",)),
    ]


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        ("It is 2.5.", "5", 0),
        ("It is 2.5.", "2.5", 1),
        ("2,5", "2.5", 1),
        ("Born:1990,1991", "1991", 1),
        ("1,500", "500", 0),
        ("The result is 1,500.", "1500", 1),
        ("1500", "1,500", 1),
        ("1,234,567 people", "234", 0),
        ("1,234.5", "234", 0),
        ("1,234.5", "1234.5", 1),
        ("0.25", "25", 0),
        ("$12.50", "12", 0),
        ("12.50 dollars", "12.50", 1),
        ("5, 6 and 7", "6", 1),
        ("1,2,3", "2", 1),
        ("born on 12.5.1990", "1990", 1),
        ("in 1990.", "1990", 1),
        ("1914-1918", "1914", 1),
        ("at 10:45", "10:45", 1),
        ("30,000 to 40,000", "40000", 1),
        ("Paris,France", "France", 1),
        ("3.11.2", "11", 1),
    ],
)
def test_containment_takes_a_number_as_one_word(answer, accepted, expected):
    """A part of a number, such as its decimals, is another number."""
    assert containment(answer, (accepted,)) == expected
