"""The tables of bench/RESULTS.md and README.md, and the script that writes their measured rows."""

import json
from collections import Counter, defaultdict

import pytest

from tests.helpers import ROOT, load_script

README, RESULTS = ROOT / "README.md", ROOT / "bench/RESULTS.md"


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return load_script("bench/results.py")


def rows(path):
    """Return the rows of the tables of results as dicts from column to cell."""
    found, columns = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] == "what":
            columns = cells if cells[0] == "what" else []
        elif columns and line.startswith("| "):
            found.append(dict(zip(columns, cells, strict=True)))
    return found


def test_the_pages_are_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130
    assert RESULTS.stat().st_size <= 15_000
    assert (ROOT / "docs/decisions.md").stat().st_size <= 10_000


def test_each_row_has_a_result_and_a_place():
    found = rows(RESULTS)
    assert len(found) > 80
    for row in found:
        assert row["result"] and row["where"], row
    assert max(Counter((row["what"], row["where"]) for row in found).values()) < 3


def test_the_results_of_the_readme_are_those_of_the_page():
    page = [(row["what"], row["result"], row["command"]) for row in rows(RESULTS)]
    found = [row for row in rows(README) if "result" in row]
    assert len(found) > 5
    for row in found:
        assert (row["what"], row["result"], row["command"]) in page, row


def test_the_measured_rows_are_those_that_the_script_writes(results):
    found = [row["what"] for row in rows(RESULTS) if row["command"] == results.COMMAND]
    assert sorted(found) == sorted(results.ROWS)
    text = RESULTS.read_text(encoding="utf-8")
    written = results.write_rows(text, defaultdict(lambda: 0.5), "R 01-02")
    assert written.count("R 01-02") == len(found)
    changed = [new for old, new in zip(text.splitlines(), written.splitlines(), strict=True) if old != new]
    assert len(changed) == len(found)


def test_a_missed_bound_is_marked_before_rounding(results):
    value = results.speed("b", at_least=0.85)
    assert value.text({("b",): 1 / 0.8499}) == "0.85 (**missed**)" and value.bound() == "0.85"
    assert value.text({("b",): 1 / 0.8501}) == "0.85"
    value = results.cost("b", "{:.1f} ms", 50, 1e3)
    assert value.text({("b",): 0.0501}) == "50.1 ms (**missed**)" and value.bound() == "50 ms"


def test_the_page_counts_the_rows_that_miss_a_bound(results):
    found = [row["result"] for row in rows(RESULTS)]
    num_missed = sum("**missed**" in result for result in found)
    text = RESULTS.read_text(encoding="utf-8")
    assert f"in {num_missed} of {len(found)} rows" in text and results.count_missed(text) == text


def test_the_newest_results_of_asv_are_read(results, tmp_path):
    folder = tmp_path / "machine"
    folder.mkdir()
    (folder / "machine.json").write_text("{}")
    content = {"m.A.track_x": [[1.5, None], [["'.pkl'"], ["'mean'", "'heads'"]], "version"], "m.B.time_y": [[2.0], []]}
    (folder / "0123abcd-existing-py.json").write_text(json.dumps({"results": content}))
    assert results.read_results(tmp_path) == {("m.A.track_x", ".pkl", "mean"): 1.5, ("m.B.time_y",): 2.0}
