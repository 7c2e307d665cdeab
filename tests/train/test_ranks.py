"""Several ranks train one model with the same batches and losses as one process, and do not hang."""

import json
import signal

import numpy as np
import pytest
import torch

from tests.helpers import run_cli
from tests.oom.failing import FailAt
from tests.train.runs import FAST, ONLY
from tracestore.train.distributed import DistributedContext

# Batches of 3 leave the last of four ranks without a trace.
SMALL = ["--no-probe", "--batch-size", 3, *FAST]


@pytest.mark.long
def test_the_same_losses_for_1_2_and_4_ranks(driver, labeled, tmp_path):
    """Four ranks train one epoch and two the next; dropout and the noise of the VAE are included."""
    flags = ["--store", labeled, *SMALL]
    driver("by_ranks", [*flags, "--epochs", 2], tmp_path / "one", 1)
    driver("by_ranks", [*flags, "--epochs", 1], tmp_path / "many", 4)
    driver("by_ranks", [*flags, "--epochs", 2], tmp_path / "many", 2)
    one, many = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "many"))
    assert (one["config"]["world_size"], many["config"]["world_size"]) == (1, 2)
    assert one["split"] == many["split"]
    for name in ONLY:
        a, b = one["models"][name], many["models"][name]
        for key in ("train_loss", "val_loss"):
            assert np.allclose(a["history"][key], b["history"][key], rtol=0, atol=1e-5), (name, key)
        assert a["test_scores"]["question_id"] == b["test_scores"]["question_id"]
        assert np.allclose(a["test_scores"]["logit"], b["test_scores"]["logit"], rtol=0, atol=1e-5)


@pytest.mark.long
def test_torchrun(labeled, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    flags = ["--store", labeled, *SMALL, *ONLY["lstm_solo"], "--epochs", 1, "--json"]
    done = run_cli(*launcher, "tools/train.py", *flags, "--output-dir", tmp_path / "r", check=0)
    results = json.loads(done.stdout)
    assert results["config"]["world_size"] == 2
    assert done.stderr.count("lstm_solo epoch 1/1") == 1, "rank 0 alone writes the log"
    assert results["models"] == json.loads((tmp_path / "r/results.json").read_text())["models"]
    second = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    wrong = run_cli("tools/train.py", *flags, "--lr", -1, env=second, check=2)
    assert wrong.stderr == "", "rank 0 reports errors that all ranks find"


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_a_signal_or_kill_of_one_rank_ends_all(driver, labeled, tmp_path, signum):
    flags = ["--store", labeled, *SMALL, *ONLY["lstm_solo"], "--epochs", 3]
    found = driver("rank_signaled", flags, tmp_path, int(signum))
    first, second = found["stderr"]
    if signum == signal.SIGTERM:
        assert found["codes"] == [143, 143] and second == ""
        assert "saved" in first
    else:
        assert found["codes"] == [1, -9]
        assert "another rank ended" in first
    assert first.count("\n") == 1 and "torchrun --nproc-per-node 2 -m tracestore train" in first and "--resume" in first
    assert np.allclose(*found["losses"], rtol=0, atol=1e-5)


@pytest.mark.long
def test_ranks_with_slices_of_different_sizes_try_the_same_micro_batches(driver, labeled, tmp_path):
    """Slices of 3, 2 and 2 traces stop after the same attempts, with a checkpoint.

    The resumed run uses whole batches.
    """
    flags = ["--store", labeled, "--no-probe", *FAST, "--batch-size", 7, *ONLY["lstm_solo"], "--epochs", 1]
    found = driver("ranks_out_of_memory", flags, tmp_path, 3, 2)
    assert found["codes"] == [75, 75, 75]
    assert found["events"] == [[3, 3], [3, 1], [1, 1], [1, 1]] and found["size"] is None
    first, *others = found["stderr"]
    assert "one item alone does not fit" in first and first.count("\n") == 1 and others == ["", ""]
    assert np.allclose(*found["losses"], rtol=0, atol=1e-5)


@pytest.mark.long
def test_several_ranks_with_the_probe(labeled, tmp_path):
    """Rank 0 fits the probe alone, on all traces."""
    flags = ["--store", labeled, *FAST, *ONLY["lstm_solo"], "--epochs", 1, "--json"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    many = run_cli(*launcher, "tools/train.py", *flags, "--output-dir", tmp_path / "many", check=0)
    one = run_cli("tools/train.py", *flags, "--output-dir", tmp_path / "one", check=0)
    probes = [json.loads(done.stdout)["probe"] for done in (many, one)]
    assert probes[0] == probes[1] and (tmp_path / "many/predictions.csv").exists()


def test_collectives_of_one_process_return_their_argument():
    ranks, parameter = DistributedContext(), torch.nn.Parameter(torch.ones(2))
    parameter.grad = gradient = torch.ones(2)
    ranks.sum_gradients([parameter])
    assert parameter.grad is gradient and ranks.all_reduce_max(7) == 7 and ranks.all_gather("x") == ["x"]


def test_no_operation_follows_the_collective(monkeypatch):
    """An operation after the sum could run out of memory, and the other ranks would not sum again."""
    ranks = DistributedContext()
    ranks.world_size = 2
    first, second = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))
    first.grad = torch.full((2, 3), 5.0)
    operations = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: (operations.append(mode.count), flat.mul_(2)))
    with FailAt() as mode:
        ranks.sum_gradients([first, second])
    assert mode.count == operations[0] + 1
    assert first.grad.tolist() == [[10.0] * 3] * 2 and second.grad.tolist() == [0.0] * 4
