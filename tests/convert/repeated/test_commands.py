"""Random sequences of commands on several stores, which a model of the traces predicts."""

import pytest

from tests.convert.repeated.commands import run
from tests.tiers import long


@pytest.mark.parametrize("seed", [*range(4), *long(*range(4, 60))])
def test_stores_hold_what_the_commands_were_given(tmp_path, seed):
    log, wrong = run(seed, tmp_path)
    assert not wrong, [*log, *wrong]
