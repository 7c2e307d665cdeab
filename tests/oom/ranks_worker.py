"""One rank of two, whose steps fail on one rank alone: python -m tests.oom.ranks_worker RANK FILE COUNT.

The ranks meet at FILE. COUNT operations fail in turn (0: all). Prints a JSON list with an entry per
failure: its events, whether both ranks end with equal weights, and whether the weights are those of
steps without a failure.
"""

import datetime
import gc
import json
import sys

import torch
import torch.distributed as dist

from tests.oom.failing import SIZE, FailAt, everything, fail_in_attempts, make, same
from tracestore.errors import InsufficientMemoryError, TracestoreError
from tracestore.train.distributed import DistributedContext


def second_step(ranks, case, rank, failing, operation, times, error=None):
    """Run three steps of 3 items on rank 0 and 1 on rank 1. In the second, an operation of rank `failing` fails."""
    model, guard, loss_of = make(*case, ranks=ranks)
    ranks.allocate(list(model.parameters()))
    begin, size = (0, 3) if rank == 0 else (3, 1)
    mode = FailAt()

    def step():
        return guard.step(size, lambda a, b: loss_of(begin + a, begin + b), SIZE)

    step()
    fail_in_attempts(guard, mode, operation, times if rank == failing else 0)
    before = everything(guard)
    try:
        with mode:
            step()
    except (InsufficientMemoryError, TracestoreError) as raised:
        return guard, before, type(raised).__name__, mode.count
    finally:
        guard.on_event = None
    step()
    return guard, before, "", mode.count


def main():
    """Run all failures on this rank."""
    rank, where, wanted = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{where}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    ranks, out = DistributedContext(), []

    def equal_on_both(guard):
        tensors = torch.cat([t.reshape(-1).double() for t in everything(guard)[:-1]])
        other = tensors.clone()
        dist.broadcast(other, 0)
        return ranks.all_reduce_max(int(not torch.equal(tensors, other))) == 0

    for case in (("lstm_solo", "adam"), ("gnn_det_lstm", "fused")):
        guard, _, _, count = second_step(ranks, case, rank, -1, 0, 0)
        # The guard collects garbage after each failure: leave out the modules that torch has imported by now.
        gc.collect()
        gc.freeze()
        expected = everything(guard)
        count = ranks.all_reduce_max(count)
        operations = sorted({round(k * (count - 1) / (wanted - 1)) for k in range(min(wanted, count))})
        for operation in range(count) if wanted == 0 else operations:
            for failing in (0, 1):
                for times in (1, 2, 99):
                    guard, before, error, _ = second_step(ranks, case, rank, failing, operation, times)
                    now = everything(guard)[:-1]
                    out.append(
                        {
                            "case": case[0],
                            "operation": operation,
                            "failing": failing,
                            "times": times,
                            "events": guard.events,
                            "error": error,
                            "equal": equal_on_both(guard),
                            "unchanged": same(now, before[:-1]),
                            "close": all(
                                torch.allclose(a, b, rtol=1e-12, atol=1e-12)
                                for a, b in zip(now, expected[:-1], strict=True)
                            ),
                        }
                    )
    # An error other than out of memory ends both ranks.
    _, guard, loss_of = make("lstm_solo", "adam", ranks=ranks)
    try:
        guard.step(2, loss_of if rank == 0 else lambda a, b: [][1], SIZE)
    except (IndexError, TracestoreError) as raised:
        out.append({"other": type(raised).__name__})
    # A rank without items takes part in the step.
    _, guard, loss_of = make("lstm_solo", "adam", ranks=ranks)
    loss = guard.step(SIZE if rank == 0 else 0, loss_of, SIZE)
    _, alone, loss_of = make("lstm_solo", "adam")
    alone_loss = alone.step(SIZE, loss_of)
    out.append(
        {
            "empty": all(
                torch.allclose(a, b, rtol=1e-12, atol=1e-12)
                for a, b in zip(everything(guard)[:-1], everything(alone)[:-1], strict=True)
            ),
            "loss": loss,
            "alone": alone_loss,
        }
    )
    print(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
