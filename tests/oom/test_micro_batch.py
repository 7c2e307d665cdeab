"""The sizes of micro-batches are learned from failures and successes."""

import json

from tracestore.oom.micro_batch import MicroBatchPolicy


def test_epochs_search_between_the_largest_fit_and_the_smallest_failure():
    """The memory holds 11 of 32 items. The size is halved to 8 and then bisected, once per epoch.

    A policy restored from a checkpoint plans the same sizes.
    """
    policy, tried = MicroBatchPolicy(), []
    for epoch in range(8):
        policy.begin_epoch(epoch)
        restored = MicroBatchPolicy()
        restored.load_state_dict(json.loads(json.dumps(policy.state_dict())))
        restored.begin_epoch(epoch)
        assert vars(restored) == vars(policy)
        micro_batch = policy.size or 32
        tried.append(micro_batch)
        while micro_batch > 11:
            micro_batch = policy.on_failure(micro_batch)
        for _ in range(5):
            policy.on_success(micro_batch, 32)
    assert tried == [32, 12, 10, 11, 11, 11, 11, 11]
    assert (policy.fits, policy.fails) == (11, 12)
