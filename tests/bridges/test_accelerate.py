"""accelerate, which divides the data of a DataLoader among the ranks."""

import pytest
import torch
from torch.utils.data import DataLoader

import tracestore


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_each_trace_is_on_one_rank(path, num_ranks, kind, monkeypatch):
    data_loader = pytest.importorskip("accelerate.data_loader")
    pytest.importorskip("accelerate.state").PartialState(cpu=True)
    seen = []
    for rank in range(num_ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        dataset = tracestore.TraceDataset(path)
        if kind == "iterable":
            dataset = tracestore.TraceIterableDataset(path, rank=0, world_size=1)
        loader = data_loader.prepare_data_loader(
            DataLoader(dataset, batch_size=4),
            device=torch.device("cpu"),
            num_processes=num_ranks,
            process_index=rank,
            put_on_device=False,
            dispatch_batches=False,
        )
        seen += [k for batch in loader for k in batch.trace_index.tolist()]
    assert sorted(seen) == list(range(24))
