"""The command lint: each kind of issue, clean stores, exit codes, --json."""

import itertools
import json
import shutil

import numpy as np
import pytest

import tracestore
from tests.helpers import ROOT, command, make_trace, segment_of, write_store
from tracestore.store.maintain.lint import KINDS, MAX_EXAMPLES, lint_store, lint_traces, row_tolerance


def softmax_trace(k, tokens=None, dtype="f2", causal=True, layers=2, heads=3):
    """Return a trace whose attention is the output of a softmax."""
    trace = make_trace(k, tokens=tokens or 8 + k % 7, layers=layers, heads=heads)
    rng = np.random.default_rng([9, k])
    n = len(trace["tokens"])
    logits = rng.standard_normal((layers, heads, n, n)) * 3
    if causal:
        logits = np.where(np.tril(np.ones((n, n), bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    trace["attentions"] = list((weights / weights.sum(-1, keepdims=True)).astype(dtype))
    return trace


def store_of(path, traces, scores=None, **options):
    return write_store(path, traces, score=lambda k: k % 2 * 0.9 if scores is None else scores[k], **options)


def counts(path, **options):
    return lint_store(path, **options).counts


@pytest.mark.parametrize("options", [{}, {"attention": "heads"}, {"codec": "zstd"}, {"dtype": "keep"}])
def test_a_clean_store_has_no_issues(tmp_path, options):
    dtype = "f4" if "dtype" in options else "f2"
    store = store_of(tmp_path / "s.zarr", [softmax_trace(k, dtype=dtype) for k in range(20)], **options)
    assert counts(store) == {}
    done = command("lint", store, check=0)
    assert done.stdout == "clean: 20 traces\n" and done.stderr == ""
    report = json.loads(command("lint", store, "--json", check=0).stdout)
    assert report == {"num_traces": 20, "counts": {}, "findings": []}


def test_long_rows_of_small_weights_are_within_the_tolerance(tmp_path):
    """The rows are uniform over up to 700 tokens, and have bfloat16 precision before they are stored as float16."""
    n = 700
    trace = softmax_trace(0, tokens=n, layers=1, heads=1)
    rows = np.tril(np.ones((n, n), "f4")) / np.arange(1, n + 1, dtype="f4")[:, None]
    coarse = ((rows.view("u4") + 0x8000) & 0xFFFF0000).view("f4")
    trace["attentions"] = [coarse[None].astype("f2")]
    store = store_of(tmp_path / "s.zarr", [trace], [0.9])
    assert set(counts(store)) <= {"rare_class"}
    off = np.abs(tracestore.open(store)[0].attention.astype("f8").sum(-1) - 1)
    assert 2.0**-11 < off.max() < row_tolerance(n) < 0.01


def spoil(name):
    """Return twelve traces, of which trace 3 has the issue, and their scores."""
    traces = [softmax_trace(k) for k in range(12)]
    scores = [k % 2 * 0.9 for k in range(12)]
    bad = traces[3]
    if name == "nan":
        bad["hidden_states"][1][2, 3] = np.nan
    elif name == "infinite":
        bad["hidden_states"][0][0, 0] = -np.inf
    elif name == "row_sums":
        bad["attentions"][1] = bad["attentions"][1] * np.float16(0.5)
    elif name == "negative_weight":
        bad["attentions"][0][:, 4, 1] = -0.25
    elif name == "large_weight":
        bad["attentions"][0][:, 4, 1] = 1.5
    elif name == "not_causal":
        traces[3] = softmax_trace(3, causal=False)
    elif name == "empty_answer":
        bad["generated_answer_clean"] = "  \n"
    elif name == "missing_score":
        scores[3] = None
    elif name == "outlier_length":
        traces[3] = softmax_trace(3, tokens=200)
    elif name == "one_token":
        traces[3] = softmax_trace(3, tokens=1)
    elif name in ("conflicting_scores", "repeated_score"):
        bad.update(question_id="q2", sample=1)
        if name == "conflicting_scores":
            bad["generated_answer_clean"] = traces[2]["generated_answer_clean"]
        else:
            scores[2] = scores[3] = 0.625
    return traces, scores


FAULTS = ["nan", "infinite", "row_sums", "negative_weight", "large_weight", "not_causal", "empty_answer"]
FAULTS += ["missing_score", "outlier_length", "one_token", "conflicting_scores", "repeated_score"]


@pytest.mark.parametrize("kind", FAULTS)
def test_each_kind_of_issue_is_found(tmp_path, kind):
    traces, scores = spoil(kind)
    report = lint_store(store_of(tmp_path / "s.zarr", traces, scores))
    also = {"negative_weight": {"row_sums"}, "large_weight": {"row_sums"}}.get(kind, set())
    assert set(report.counts) == {kind} | also
    found = [f for f in report.findings if f.kind == kind]
    assert [f.index for f in found] == [3] and found[0].question_id == traces[3]["question_id"]
    assert (found[0].severity, found[0].advice) == KINDS[kind] and found[0].found


def test_a_trace_with_nan_in_several_arrays_is_counted_once(tmp_path):
    traces, scores = spoil("nan")
    bad = traces[3]["attentions"]
    bad[0][:, 3, 1], bad[1][:, 3, 1], bad[1][:, 4, 2] = np.nan, 1.5, np.inf
    report = lint_store(store_of(tmp_path / "s.zarr", traces, scores))
    assert report.counts == {"nan": 1, "infinite": 1, "large_weight": 1, "row_sums": 1}
    found = {f.kind: f.found for f in report.findings}
    assert "values of hidden_states, 1 of" in found["nan"] and "values of attention" in found["nan"]
    assert found["large_weight"] == "1 attention weights above 1, the largest 1.5"


def test_a_last_token_of_its_own_is_checked(tmp_path):
    """Batches of view "sequence" have it, not that of the hidden states."""
    trace = softmax_trace(0)
    last = np.stack([states[-1] for states in trace["hidden_states"]])
    last[1, 2], last[0, 0] = np.nan, np.inf
    report = lint_store(store_of(tmp_path / "s.zarr", [trace | {"last_token": last}, softmax_trace(1)]))
    assert report.counts == {"nan": 1, "infinite": 1}
    assert {f.kind: f.found.partition(" values of ")[2] for f in report.findings} == dict.fromkeys(
        ("nan", "infinite"), "last_token"
    )


@pytest.mark.parametrize("direction", ["correct", "hallucination"])
def test_labels_that_differ_from_their_scores_are_listed(tmp_path, direction):
    labels = [0.0, 1.0, None, 0.0, 1.0] * 4
    scores = [0.9, 0.9, 0.9, 0.1, None] * 4
    traces = [softmax_trace(k) for k in range(20)]
    path = write_store(
        tmp_path / "s.zarr", traces, label=labels.__getitem__, score=scores.__getitem__, score_direction=direction
    )
    report = lint_store(path)
    expected = [k for k in range(20) if k % 5 in ((1, 3) if direction == "correct" else (0,))]
    assert [f.index for f in report.findings if f.kind == "label_differs"] == expected
    assert report.counts["label_differs"] == len(expected)


def test_rare_classes_depend_on_the_threshold(tmp_path):
    traces = [softmax_trace(k) for k in range(30)]
    store = store_of(tmp_path / "s.zarr", traces, [0.9] * 29 + [0.1])
    assert counts(store) == {"rare_class": 1} and counts(store, score_threshold=0.95) == {"rare_class": 1}
    alone = lint_store(store, score_threshold=0.05).findings
    assert [f.index for f in alone] == [None] and "0 of 30" in alone[0].found


def test_edges_are_checked(tmp_path):
    store = tmp_path / "s.zarr"
    shutil.copytree(ROOT / "tests" / "golden" / "v1_edges.zarr", store)
    assert set(counts(store)) <= {"missing_score", "rare_class", "one_token", "empty_answer", "outlier_length"}
    segment = next((store / "segments").glob("*/edge_index")).parent
    for name, position, value in (("edge_weight/c/0", 0, np.float16(1.5)), ("edge_index/c/0/0", 24, np.int32(1))):
        file = segment / name
        file.chmod(0o644)
        data = bytearray(file.read_bytes())
        data[position : position + value.nbytes] = value.tobytes()
        file.write_bytes(data)
    found = counts(store)
    assert found["large_weight"] == 1 and "not_causal" in found


def test_issues_are_printed_in_one_line_per_kind(tmp_path):
    store = store_of(tmp_path / "s.zarr", [make_trace(k) for k in range(MAX_EXAMPLES + 30)])
    done = command("lint", store, check=1)
    lines = done.stdout.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == list(counts(store))
    assert len(lines) <= len(KINDS) and "130 traces, the first 0 (q0), 1 (q1)" in done.stdout
    report = json.loads(command("lint", store, "--json", check=1).stdout)
    sums = [f for f in report["findings"] if f["kind"] == "row_sums"]
    assert report["counts"]["row_sums"] > len(sums) == MAX_EXAMPLES
    assert set(sums[0]) == {"kind", "severity", "index", "question_id", "found", "advice"}


def test_missing_and_damaged_stores_are_errors(tmp_path):
    assert "no such store" in command("lint", tmp_path / "none.zarr", check=2).stderr
    store = store_of(tmp_path / "s.zarr", [softmax_trace(k) for k in range(4)])
    name = f"{segment_of(store)}/attention/c/0"
    file = store / name
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])
    done = command("lint", store, check=3)
    assert name in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("samples", "answers", "scores", "found"), [
    ((1, 2), ("same", "same"), (0.0, 1.0), {"conflicting_scores": 4}),
    ((0, 1, 2), ("other", "same", "same"), (1.0, 0.0, 1.0), {"conflicting_scores": 4}),
    ((0, 1, 2), ("x", "y", "z"), (0.7, 0.3, 0.3), {"repeated_score": 4}),
    ((0, 1), ("x", "y"), (1.0, 0.0), {}),
])  # fmt: skip
def test_samples_are_compared_with_those_of_their_question_and_store(tmp_path, samples, answers, scores, found):
    paths = [tmp_path / "clean.zarr", tmp_path / "s.zarr"]
    for path, numbers, texts, values in zip(
        paths, ((0, 3), samples), (("same", "x"), answers), ((0.0, 1.0), scores), strict=True
    ):
        with tracestore.create(path) as writer:
            for q, (sample, text, value) in itertools.product(range(4), zip(numbers, texts, values, strict=True)):
                trace = softmax_trace(100 * q + sample + (path == paths[0]) * 50)
                trace |= {"question_id": f"q{q}", "sample": sample, "generated_answer_clean": text}
                writer.append(trace, score=value)
    assert counts(paths[1]) == found and counts(paths[0]) == {}
    for order in (paths, paths[::-1]):
        with tracestore.open(order) as store:
            assert lint_traces(store).counts == found
