"""Two ranks of which one runs out of memory: both take the same steps and do not hang."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

# 0: every operation.
OPERATIONS = 0 if os.environ.get("TRACESTORE_OOM") == "all" else 4
SECONDS = 7200 if OPERATIONS == 0 else 200
pytestmark = [pytest.mark.long, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return the reports of both ranks."""
    where = tmp_path_factory.mktemp("ranks") / "meet"
    command = [sys.executable, "-m", "tests.oom.ranks_worker"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(where), str(OPERATIONS)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-4000:] for _, error in outputs)
    return [json.loads(out) for out, _ in outputs]


def test_a_failure_on_one_rank_has_the_same_result_on_both(reports):
    for mine, other in zip(*reports, strict=True):
        if "operation" not in mine:
            continue
        assert (mine["case"], mine["operation"], mine["error"]) == (other["case"], other["operation"], other["error"])
        assert mine["equal"] and other["equal"], mine
        if mine["error"]:
            assert mine["times"] == 99 and mine["unchanged"] and other["unchanged"], mine
        else:
            assert mine["close"] and other["close"], mine


def test_failures_occur_in_all_phases_with_equal_sizes(reports):
    phases, halved = set(), 0
    for mine, other in zip(*reports, strict=True):
        agreed = [side.get("events", []) for side in (mine, other)]
        assert [(e["size_before"], e["size_after"]) for e in agreed[0]] == [
            (e["size_before"], e["size_after"]) for e in agreed[1]
        ]
        phases |= {e["phase"] for side in agreed for e in side}
        halved += any(e["size_after"] < e["size_before"] for e in agreed[0])
    assert phases >= {"forward", "backward", "optimizer"} and halved > 0


def test_other_errors_end_both_ranks(reports):
    assert {report[-2]["other"] for report in reports} == {"IndexError", "TracestoreError"}


def test_a_rank_without_items_takes_part(reports):
    assert all(report[-1]["empty"] for report in reports)
    assert reports[1][-1]["loss"] == 0
    assert abs(reports[0][-1]["loss"] - reports[0][-1]["alone"]) < 1e-12
