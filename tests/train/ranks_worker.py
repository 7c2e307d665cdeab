"""One rank of two (RANK, and a file to meet at): steps of which some fail on one rank alone.

Prints a JSON document: per operation the events, whether both ranks ended equal, and
whether they are what they are without a failure."""

import datetime
import gc
import json
import sys

import torch
import torch.distributed as dist

from tests.train.failing import SIZE, FailAt, everything, make, same
from tracestore.errors import DoesNotFitError, TracestoreError


class Ranks:
    """What a guard needs, of torch.distributed: all that allocates comes before the collective."""

    def __init__(self):
        self.world_size = dist.get_world_size()
        self._code = torch.zeros(1, dtype=torch.int64)
        self._value = self._code.numpy()

    def agree(self, code):
        self._value[0] = code
        dist.all_reduce(self._code, op=dist.ReduceOp.MAX)
        return int(self._value[0])

    def sum_gradients(self, parameters):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
        views = [v.view_as(p) for v, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]
        dist.all_reduce(flat)
        for p, view in zip(parameters, views, strict=True):
            p.grad = view


def second_step(ranks, case, rank, failing, operation, times, error=None):
    """Three steps of slices of 3 items and 1; in the second an operation fails on rank `failing`."""
    _, guard, loss_of = make(*case, ranks=ranks)
    begin, size = (0, 3) if rank == 0 else (3, 1)
    attempt, calls = guard._attempt, []
    mode = FailAt()

    def counted(*args):
        mode.count = 0
        mode.first = mode.last = operation if rank == failing and len(calls) < times else -1
        calls.append(1)
        return attempt(*args)

    def step():
        return guard.step(size, lambda a, b: loss_of(begin + a, begin + b), SIZE)

    step()
    guard._attempt = counted
    before = everything(guard)
    try:
        with mode:
            step()
    except (DoesNotFitError, TracestoreError) as raised:
        return guard, before, type(raised).__name__, mode.count
    finally:
        guard._attempt = attempt
    step()
    return guard, before, "", mode.count


def main():
    rank, where, wanted = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{where}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    ranks, out = Ranks(), []
    gc.collect()
    gc.freeze()

    def equal_on_both(guard):
        tensors = torch.cat([t.reshape(-1).double() for t in everything(guard)[:-1]])
        other = tensors.clone()
        dist.broadcast(other, 0)
        return ranks.agree(int(not torch.equal(tensors, other))) == 0

    for case in (("lstm_solo", "adam", 0.0, torch.float64), ("gnn_det_lstm", "fused", 0.0, torch.float64)):
        guard, _, _, count = second_step(ranks, case, rank, -1, 0, 0)
        expected = everything(guard)
        count = ranks.agree(count)
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
    # An error that is not of memory ends both.
    _, guard, loss_of = make("lstm_solo", "adam", 0.0, torch.float64, ranks=ranks)
    try:
        guard.step(2, loss_of if rank == 0 else lambda a, b: [][1], SIZE)
    except (IndexError, TracestoreError) as raised:
        out.append({"other": type(raised).__name__})
    # A rank without an item of the batch takes part.
    _, guard, loss_of = make("lstm_solo", "adam", 0.0, torch.float64, ranks=ranks)
    loss = guard.step(SIZE if rank == 0 else 0, loss_of, SIZE)
    _, alone, loss_of = make("lstm_solo", "adam", 0.0, torch.float64)
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
