"""Test `tracestore report`: contents of the page, and that text of the store is never interpreted."""

import json
import re

import numpy as np
import pytest

import tracestore
from tests.helpers import command, make_trace, write_store


def report(*args, check=0):
    return command("report", *args, check=check)


@pytest.fixture
def store(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for k in range(30):
            score = None if k % 10 == 0 else k / 30
            writer.append(make_trace(k) | {"question": f"question {k}?"}, score=score)
        malicious = "</td><script>alert(1)</script><img src=http://evil.example/x>&"
        bad = make_trace(40, tokens=4) | {
            "question": malicious,
            "question_id": malicious,
            "generated_answer_clean": malicious + "\ud800",
        }
        bad["hidden_states"][1][2, 3] = np.nan
        writer.append(bad, score=0.9)
    return tmp_path / "s.zarr"


def test_page_shows_the_store(store, tmp_path):
    done = report(store, "--output", tmp_path / "r.html")
    assert str(tmp_path / "r.html") in done.stdout
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    for part in ("Store", "Labels", "Lengths and scores", "Size", "Sources", "Samples", "Data-quality issues"):
        assert f"<h2>{part}</h2>" in text
    assert "<td>num traces</td><td>31</td>" in text and "3 (9.7 %)" in text  # traces without a score
    assert "<td>hidden_states</td>" in text and "<td>error</td><td>nan</td><td>1</td>" in text
    shares = [float(s) for s in re.findall(r"<td>([\d.]+) %</td></tr>", text)]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert report(store, "--output", tmp_path / "again.html").returncode == 0
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "r.html").read_bytes()


def test_page_runs_no_script_and_loads_nothing(store, tmp_path):
    report(store, "--output", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script&gt;" in text
    assert re.findall(r"<(?:img|link|iframe|object)\b[^>]*", text) and all(
        "data:image/png;base64," in tag for tag in re.findall(r"<(?:img|link|iframe|object)\b[^>]*", text)
    )


def test_scores_too_large_for_a_histogram(tmp_path):
    write_store(tmp_path / "s.zarr", [make_trace(1)], score=1e17)
    report(tmp_path / "s.zarr", "--output", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<td>score</td><td>1e+17</td>" in text and text.count("data:image/png;base64,") == 1


def test_options_and_usage_errors(store, tmp_path):
    done = report(store, "--output", tmp_path / "r.html", "--no-lint", "--json")
    assert json.loads(done.stdout)["output"] == str(tmp_path / "r.html")
    assert "Not checked." in (tmp_path / "r.html").read_text(encoding="utf-8")
    for wrong in (tmp_path, "."):
        assert "found a folder, expected" in report(store, "--output", wrong, check=2).stderr
    assert "does not exist" in report(store, "--output", tmp_path / "no" / "r.html", check=2).stderr
    assert "no such store" in report(tmp_path / "no.zarr", "--output", tmp_path / "r.html", check=2).stderr
