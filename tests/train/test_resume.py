"""Runs that were killed, interrupted or out of disk space resume with the same results."""

import os
import signal

import pytest

from tests.train.runs import FAST, ONLY

# `make torture` kills each model's run 30 times.
KILLS = int(os.environ.get("TRACESTORE_TRAIN_KILLS", "2"))
SMALL = ["--no-probe", "--epochs", 6, "--batch-size", 4, "--shuffle", "buffer", "--shuffle-buffer", 16, *FAST]


@pytest.mark.long
@pytest.mark.timeout(3600 if KILLS > 5 else 300)
@pytest.mark.parametrize("model", ONLY)
def test_a_run_killed_at_random_moments_resumes(driver, labeled, tmp_path, model):
    flags = ["--store", labeled, *SMALL, *ONLY[model]]
    found = driver("killed_at_random", flags, tmp_path, KILLS, int(os.environ.get("TRACESTORE_SEED", "1")))
    assert found["kills"] >= KILLS and found["compared"] >= 1


@pytest.mark.long
def test_a_kill_during_a_write_keeps_the_previous_checkpoint(driver, labeled, tmp_path):
    flags = ["--store", labeled, *SMALL, "--grad-accum-steps", 2, *ONLY["lstm_solo"]]
    assert driver("killed_while_writing", flags, tmp_path)["valid_checkpoints"] >= 5


@pytest.mark.long
def test_a_full_disk_keeps_the_previous_checkpoint(driver, labeled, tmp_path):
    found = driver("disk_full", ["--store", labeled, *SMALL, *ONLY["lstm_solo"]], tmp_path)
    assert found["files"] == ["last.pt"] and found["batch"] == 3
    assert "no space left" in found["stderr"] and found["stderr"].count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_and_it_resumes(driver, labeled, tmp_path, signum):
    """The results are exact with bf16 and activation checkpointing too."""
    flags = ["--store", labeled, *SMALL, *ONLY["lstm_solo"], "--precision", "bf16", "--activation-checkpointing"]
    stderr = driver("stopped", flags, tmp_path, int(signum))["stderr"]
    assert stderr.count("\n") == 1 and "--resume" in stderr and "last.pt" in stderr
