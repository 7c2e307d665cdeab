"""Runs of the simulation. TRACESTORE_SEEDS: how many, or with "=n" the one to look at."""

import os

import pytest

from tests.faults.conftest import part_of
from tests.faults.driver import small_commits
from tests.faults.simulation import simulate

pytestmark = pytest.mark.long

SEEDS = os.environ.get("TRACESTORE_SEEDS", "30")


def seeds():
    return [int(SEEDS[1:])] if SEEDS.startswith("=") else part_of(range(int(SEEDS)))


@pytest.mark.timeout(7200)
def test_simulation(memory, monkeypatch):
    small_commits(monkeypatch)
    steps = kills = generations = 0
    for seed in seeds():
        with pytest.MonkeyPatch.context() as patch:
            found = simulate(seed, memory / "simulation", patch)
        steps, kills, generations = steps + found.steps, kills + found.kills, generations + found.generations
    print(f"{len(seeds())} seeds: {steps:,} calls, {kills} kills, {generations} generations")


def test_a_seed_gives_the_same_run_again(memory, monkeypatch):
    small_commits(monkeypatch)
    runs = []
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            runs.append(simulate(7, memory / "again", patch).trail)
    assert runs[1] == runs[2] and len(runs[0]) > 1000
