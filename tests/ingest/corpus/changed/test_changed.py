"""Test changed dumps whose meaning is known: what is read is right, everything else is refused."""

import copy
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.ingest.corpus.changed import campaign, generated
from tests.ingest.corpus.changed.mutations import EXACT, MUTATIONS


@pytest.mark.long
def test_two_hundred_folders_are_right_or_refused_in_every_way():
    found = list(campaign.of_generated(200, seed=5))

    wrong = [f"{one.way} {one.kind} {one.mutation}: {one.detail}" for one in found if one.result == "wrong"]
    assert wrong == []
    for way, least in {"layout": 0.4, "alone": 0.1, "candidates": 0.3}.items():
        results = Counter(one.result for one in found if one.way == way)
        assert results["right"] >= least * results.total(), (way, results)


@pytest.mark.long
@pytest.mark.parametrize("structure", generated.STRUCTURES, ids=lambda s: s.__name__)
def test_every_structure_is_right_unchanged(structure):
    """Sizes may be equal, or one."""
    for k, size in enumerate(generated.SIZES):
        rng = np.random.default_rng(k)
        container = generated.STRUCTURES[structure][k % len(generated.STRUCTURES[structure])]
        dump = structure(generated.Writer(rng, generated.samples_of(rng, generated.SIZES[size]), container))
        with tempfile.TemporaryDirectory(dir=campaign.SCRATCH) as scratch:
            dump.write(Path(scratch) / "in")

            assert campaign.with_layout(dump, Path(scratch) / "in", EXACT) == ("right", ""), size


def test_a_wrong_store_is_found(tmp_path):
    """The comparison finds a label, a layer number and a trace that are not those of the dump."""
    rng = np.random.default_rng(0)
    dump = generated.layers_by_name(generated.Writer(rng, generated.samples_of(rng, {}), ".npz"))
    dump.write(tmp_path / "in")
    changed = [copy.deepcopy(dump) for _ in range(3)]
    changed[0].expected[1]["label"] = 1 - changed[0].expected[1]["label"]
    changed[1].layers[-1] += 1
    changed[2].expected[0]["hidden_states"] = changed[2].expected[0]["hidden_states"][::-1]

    for one in changed:
        assert campaign.with_layout(one, tmp_path / "in", EXACT)[0] == "wrong"


def test_every_mutation_applies_to_a_generated_dump():
    applied, rng = set(), np.random.default_rng(1)
    for structure, containers in [*generated.STRUCTURES.items()] * 3:
        dump = structure(generated.Writer(rng, generated.samples_of(rng, {}), containers[0]))
        for name, (mutate, _) in MUTATIONS.items():
            if name not in applied and mutate(copy.deepcopy(dump), rng) is not None:
                applied.add(name)

    assert applied == set(MUTATIONS)
