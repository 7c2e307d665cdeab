"""Test `tracestore view`: text, JSON and pictures."""

import json
import math

import numpy as np
import pytest

import tracestore
from tests.helpers import ROOT, as_torch, command, make_optional, make_trace, make_traces, write_store
from tracestore.trace_view import View, render_lines


def view(*args, check=0, **options):
    return command("view", *args, check=check, **options)


@pytest.fixture
def store(tmp_path):
    with tracestore.create(tmp_path / "s.zarr", attention="heads") as writer:
        for k in range(5):
            trace = make_trace(k, tokens=2 + k) | {"question": f"why {k}?", "prompt_length": 1}
            writer.append(trace, score=0.25 * k, group="g")
        malicious = {
            "question": "\x1b[2J\u202eevil\n$x^",
            "question_id": "7",
            "tokens_decoded": ["\x1b]0;t\x07", "\ud800"],
        }
        writer.append(make_trace(9, tokens=2) | malicious)
        nan = make_trace(11, tokens=3)
        nan["hidden_states"][0][1, 1], nan["attentions"][1][0, 1, 0] = np.nan, np.inf
        writer.append(nan)
    return tmp_path / "s.zarr"


def test_text_shows_the_trace(store):
    out = view(store, "q3").stdout
    assert "trace 3: q3, sample 0" in out and "why 3?" in out and "answer 3 ✓" in out and "score 0.75" in out
    assert "5, 1 of them in the prompt" in out and "mean over the heads" in out and "\x1b" not in out
    assert view(store, "3").stdout == out
    # A number is an id if a trace has that id, else an index.
    assert "trace 5: 7, sample 0" in view(store, "7").stdout
    assert "head 1" in view(store, "q3", "--layer", 0, "--head", 1).stdout
    assert "NaN or infinite" in view(store, "q11").stdout


@pytest.mark.long
def test_malicious_text_is_escaped(store, tmp_path):
    out = view(store, "5").stdout
    assert "\\x1b[2J\\u202eevil $x^" in out and "\x1b" not in out and "\u202e" not in out
    view(store, "5", "--save", tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_json_holds_the_values(store):
    found = json.loads(view(store, "q2", "--json", "--layer", 1, "--head", 0).stdout)
    trace = tracestore.open(store)[2]
    np.testing.assert_allclose(found["attention"], trace.attention[1, 0].astype("f4"))
    norms = np.linalg.norm(trace.hidden_states.astype("f8"), axis=2)
    np.testing.assert_allclose(found["hidden_norms"], norms, rtol=1e-5)
    assert found["tokens"] == trace.tokens.tolist() and found["score"] == 0.5 and found["label"] is None
    # JSON has no NaN.
    found = json.loads(view(store, "q11", "--json").stdout, parse_constant=lambda c: pytest.fail(c))
    assert found["hidden_norms"][0][1] is None and found["has_nonfinite"]


def test_optional_fields_and_named_scores_are_shown(tmp_path):
    trace = make_trace(0, tokens=4) | make_optional(4)
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for name in ("bleurt", "judge"):
            writer.define_score(name, direction="correct")
        writer.append(trace, scores={"bleurt": 0.25, "judge": 1.0})
        writer.append(make_trace(1))
    out = view(tmp_path / "s.zarr", "0").stdout
    assert "bleurt 0.25, judge 1, temperature 0.75, seed 1099511627776" in out
    assert (
        "answer: tokens [0, 4)" in out and "start 1, end 4, meta {'a': [None, 1.5, inf]}, type Evident Conflict" in out
    )
    values = trace["token_logprob"][1:]
    assert f"token_logprob, tokens across: {values.min():.3g} to {values.max():.3g}" in out
    assert "token_" not in view(tmp_path / "s.zarr", "1").stdout
    found = json.loads(view(tmp_path / "s.zarr", "0", "--json").stdout)
    assert found["top_ids"] == trace["top_ids"].tolist() and found["token_logprob"][0] is None
    assert found["scores"] == {"bleurt": 0.25, "judge": 1.0} and found["answer_span"] == [0, 4]


def test_an_unknown_label_of_a_token_is_no_number(tmp_path):
    path = write_store(tmp_path / "s.zarr", [make_trace(0, tokens=4) | {"token_label": [-1, 1, 0, -1]}])
    assert "token_label, tokens across: 0 to 1" in view(path, "0").stdout


def test_an_unknown_or_impossible_token_is_not_drawn_as_the_most_likely_one(tmp_path):
    for k, value in enumerate((math.nan, -math.inf)):
        trace = make_trace(0, tokens=4) | {"token_logprob": [value, -1.0, -2.0, -9.0]}
        path = write_store(tmp_path / f"{k}.zarr", [trace])
        lines = view(path, "0").stdout.splitlines()
        drawn = next(lines[n + 1] for n, line in enumerate(lines) if line.startswith("token_logprob"))
        assert drawn[2:6] == "  @@"


def test_every_kind_of_store_can_be_viewed(tmp_path):
    import torch

    for name in ("v1_heads", "v1_edges", "v1_bfloat16"):
        assert "attention, layer 1" in view(ROOT / "tests" / "golden" / f"{name}.zarr", "0").stdout
    bfloat16 = [as_torch(make_trace(3, dtype="f4"), torch.bfloat16)]
    opened = tracestore.open(write_store(tmp_path / "b.zarr", bfloat16, attention="heads", dtype="keep"))
    found = View.read(opened, opened[0])
    assert 0 < found.attention.max() < 1 and 0 < found.norms.max() < 100
    traces = [{k: v for k, v in make_trace(3).items() if k != "attentions"}]
    write_store(tmp_path / "n.zarr", traces, attention="none")
    assert "attention," not in view(tmp_path / "n.zarr", "0").stdout


@pytest.mark.long
def test_long_traces_fit_the_width(tmp_path):
    traces = [make_trace(0, tokens=700, layers=60) | {"question": "x" * 5000}]
    store = tracestore.open(write_store(tmp_path / "s.zarr", traces))
    for width in (40, 80, 200):
        for colors in (False, True):
            out = render_lines(View.read(store, store[0]), width=width, colors=colors)
            assert len(out) < 240
            assert all(
                len(line) <= width or "\x1b" in line or line.startswith(("attention,", "norm", "trace")) for line in out
            )


@pytest.mark.long
def test_pictures_of_zeros_and_nan(tmp_path):
    traces = make_traces(2, tokens=3)
    for trace, factor in zip(traces, (0, np.float16("nan")), strict=True):
        trace["hidden_states"] = [h * factor for h in trace["hidden_states"]]
    write_store(tmp_path / "s.zarr", traces)
    for k in range(2):
        view(tmp_path / "s.zarr", k, "--save", tmp_path / f"{k}.svg")
        assert view(tmp_path / "s.zarr", k).stdout


def test_usage_errors_are_one_line(store, tmp_path):
    for args, message in (
        ((store, "q99"), "no such id: q99"),
        ((store, "99"), "no such id: 99"),
        ((store, "q1", "--sample", 1), "no such id: q1, sample 1"),
        ((store, "q1", "--sample", 99999999999), "expected a whole number from 0"),
        ((store, "q1", "--layer", 3), "expected 0 to 2"),
        ((store, "q1", "--head", 2), "expected 0 to 1"),
        ((store, "q1", "--save", tmp_path / "x.gif"), "expected one of .png"),
        ((store, "q1", "--save", tmp_path / "nowhere" / "x.png"), "does not exist"),
        ((tmp_path / "nowhere.zarr", "0"), "no such store"),
    ):
        done = view(*args, check=2)
        assert message in done.stderr and done.stderr.count("\n") == 1, (args, done.stderr)
    assert not math.isnan(tracestore.open(store)[0].score)


@pytest.mark.long
def test_a_picture_shows_the_structure_of_attention_beside_a_sink(tmp_path):
    """Nearly all attention goes to the first token. On a linear scale the other weights are black."""
    image = pytest.importorskip("matplotlib.image")
    num_tokens = 60
    logits = np.random.default_rng(0).normal(0, 1.5, (2, num_tokens, num_tokens))
    logits[:, :, 0] += 6
    weights = np.tril(np.exp(logits))
    trace = make_trace(0, tokens=num_tokens, layers=1) | {
        "attentions": [(weights / weights.sum(-1, keepdims=True)).astype("f2")]
    }
    path = write_store(tmp_path / "s.zarr", [trace])
    view(path, "0", "--save", tmp_path / "t.png")
    pixels = image.imread(tmp_path / "t.png")[..., :3]
    # The lower half of the left panel: the rows of tokens that attend to many others.
    height, width = pixels.shape[:2]
    panel = pixels[height // 2 : int(height * 0.85), int(width * 0.08) : int(width * 0.25)]
    brightness = panel @ [0.2126, 0.7152, 0.0722]
    assert (brightness > 0.1).mean() > 0.8 and brightness.std() > 0.1
