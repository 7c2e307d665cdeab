"""Simulations. TRACESTORE_SEEDS is their number, or "=n" to run seed n only."""

import os

import pytest

from tests.fault_injection.conftest import select_shard
from tests.fault_injection.driver import small_commits
from tests.fault_injection.simulation import simulate

pytestmark = pytest.mark.long

SEEDS = os.environ.get("TRACESTORE_SEEDS", "15")


def seeds():
    """Return the seeds that this process runs."""
    return [int(SEEDS[1:])] if SEEDS.startswith("=") else select_shard(range(int(SEEDS)))


@pytest.mark.timeout(7200)
def test_no_interleaving_breaks_the_store(memory_folder, monkeypatch):
    """`simulate` raises an AssertionError if an actor reads a wrong value or the final store is not intact."""
    small_commits(monkeypatch)
    steps = kills = generations = 0
    for seed in seeds():
        with pytest.MonkeyPatch.context() as patch:
            found = simulate(seed, memory_folder / "simulation", patch)
        steps, kills, generations = steps + found.steps, kills + found.kills, generations + found.generations
    print(f"{len(seeds())} seeds: {steps:,} calls, {kills} kills, {generations} generations")
    assert generations >= len(seeds()) and steps > 1000 * len(seeds())


@pytest.mark.parametrize("seed", [3, 7])
def test_a_seed_reproduces_its_run(memory_folder, monkeypatch, seed):
    small_commits(monkeypatch)
    runs = []
    for _ in range(6):  # the first imports modules, which are calls too
        with pytest.MonkeyPatch.context() as patch:
            runs.append(simulate(seed, memory_folder / "again", patch).trail)
    assert all(run == runs[1] for run in runs[2:]) and len(runs[0]) > 1000
