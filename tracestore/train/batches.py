"""From a part of the split to what a model reads on its device."""

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tracestore.data.loader import TraceLoader
from tracestore.data.order import epoch_key
from tracestore.detectors.config import ModelConfig
from tracestore.detectors.dropout import TraceMasks
from tracestore.detectors.graph.inputs import GraphInputs, edge_threshold
from tracestore.detectors.registry import DETECTORS
from tracestore.oom.errors import is_out_of_memory
from tracestore.store.read.store import TraceStore
from tracestore.train.config import TrainConfig
from tracestore.train.distributed import DistributedContext

# Streams of order.epoch_key, beside those of the order.
_STEP, _NOISE, _DROPOUT = 2, 3, 4


class _BatchesOfEpoch(Dataset[Any]):
    """The batches of one epoch by number, for DataLoader workers."""

    def __init__(self, loader: TraceLoader, epoch: int) -> None:
        self.loader, self.epoch = loader, epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, batch: int) -> Any:
        return self.loader.gather(self.loader.batch_indices(batch, self.epoch))


def step_key(seed: int, epoch: int, batch: int, rank: int) -> int:
    """Seeds the random numbers of a step: a pure function of where it stands."""
    return epoch_key(epoch_key(seed, epoch, _STEP), batch, rank)


class BatchFeed:
    """This rank's slices of the batches of some traces, for one model."""

    def __init__(
        self,
        name: str,
        store: TraceStore,
        indices: np.ndarray,
        config: TrainConfig,
        model_config: ModelConfig,
        ranks: DistributedContext,
        *,
        shuffle: str,
        num_workers: int = 0,
    ) -> None:
        self.config, self.ranks, self.num_workers = config, ranks, num_workers
        self.is_graph = DETECTORS[name].view == "graph"
        self.device = torch.device(config.device)
        self.loader = TraceLoader(
            store,
            DETECTORS[name].view,
            batch_size=config.batch_size,
            shuffle=shuffle,
            seed=config.seed,
            num_threads=config.loader_threads,
            indices=indices,
            buffer_size=config.shuffle_buffer,
            score_threshold=config.score_threshold,
            attention_threshold=config.attention_threshold,
            top_k=config.top_k,
            edge_format=model_config.edge_format(store, self.device.type) if self.is_graph else "coo",
            max_cache_batches=config.max_cache_batches,
            pin_memory=self.device.type == "cuda",
            rank=ranks.rank,
            world_size=ranks.world_size,
            as_pyg=False,
        )

    def __len__(self) -> int:
        """Batches of the epoch."""
        return len(self.loader)

    def shrink(self) -> None:
        """Takes less memory from the next `batches` on: one batch in flight, no decoded chunks
        kept, no worker processes with batches of their own."""
        self.loader.reduce_memory()
        self.num_workers = 0

    def seek(self, epoch: int, batch: int) -> None:
        """The next `batches` begin there."""
        self.loader.load_state_dict(self.state_dict(epoch, batch))

    def state_dict(self, epoch: int, batch: int) -> dict[str, Any]:
        """The loader's state in which `batch` is the next one."""
        return self.loader.state_dict() | {"epoch": epoch, "batch": batch}

    def batches(self) -> Generator["DeviceBatch"]:
        """The rest of the epoch, by the loader's threads or by worker processes."""
        epoch, start = self.loader.epoch, self.loader.state_dict()["batch"]
        if self.num_workers == 0:
            source: Iterator[Any] = iter(self.loader)
        else:
            # A generator of its own: drawing seeds for workers must not change the training.
            source = iter(
                DataLoader(
                    _BatchesOfEpoch(self.loader, epoch),
                    batch_size=None,
                    sampler=range(start, len(self.loader)),
                    num_workers=self.num_workers,
                    generator=torch.Generator(),
                )
            )
        for number in range(start, len(self.loader)):
            batch = DeviceBatch(self, next(source), epoch, number)
            yield batch
            del batch


def next_batch(batches: Iterator["DeviceBatch"]) -> "DeviceBatch | None":
    """None where memory ran out while it was gathered."""
    try:
        return next(batches)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None


class DeviceBatch:
    """One rank's slice of a global batch. `size`: its traces; `whole`: those of all ranks."""

    def __init__(self, feed: BatchFeed, batch: Any, epoch: int, number: int) -> None:
        self.feed, self.epoch, self.number = feed, epoch, number
        self.y: torch.Tensor = batch.y
        self.question_id: list[str] = batch.question_id
        self.trace_index: torch.Tensor = batch.trace_index
        self.size = len(batch.y)
        plan = feed.loader.epochs.plan(epoch).batches
        begin, end = plan.bounds(number)
        self.whole = end - begin
        # Where the slice begins in the global batch.
        self.first = int(plan.positions(number, feed.ranks.rank, feed.ranks.world_size)[0]) - begin if self.size else 0
        if not feed.is_graph:
            self.inputs: Any = batch.sequences
        elif self.size:
            threshold = edge_threshold(feed.config.attention_threshold, feed.config.top_k)
            self.inputs = GraphInputs.from_batch(batch, threshold)

    def traces(self, begin: int, end: int) -> tuple[Any, torch.Tensor]:
        """Inputs and labels of the traces begin .. end, on the device: moved here, inside
        what the guard watches."""
        inputs = self.inputs
        if begin > 0 or end < self.size:
            inputs = inputs.traces(begin, end) if isinstance(inputs, GraphInputs) else inputs[begin:end]
        device = self.feed.device
        return inputs if device.type == "cpu" else inputs.to(device), self.y[begin:end].to(device)

    def masks(self, begin: int, end: int) -> TraceMasks:
        """Of dropout, for the traces begin .. end: as with noise, neither ranks nor micro-batches
        change them."""
        key = epoch_key(epoch_key(self.feed.config.seed, self.epoch, _DROPOUT), self.number)
        return TraceMasks(key, self.first + begin, end - begin)

    def noise(self, begin: int, end: int, num_layers: int, columns: int) -> torch.Tensor:
        """Standard normal (end - begin, num_layers, columns) on the device: a pure function
        of seed, epoch, batch and the trace's place in the global batch, so that neither
        ranks nor micro-batches change it."""
        key = epoch_key(epoch_key(self.feed.config.seed, self.epoch, _NOISE), self.number)
        generator = torch.Generator().manual_seed(key)
        drawn = torch.randn(self.whole, num_layers, columns, generator=generator)
        return drawn[self.first + begin : self.first + end].to(self.feed.device)


class AccumulatedBatch:
    """The batches of one optimizer step behind each other."""

    def __init__(self, batches: list[DeviceBatch]) -> None:
        self.batches = batches
        self.size = sum(b.size for b in batches)
        self.whole = sum(b.whole for b in batches)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[DeviceBatch, int, int]]:
        """The batches that hold the traces begin .. end, and which of theirs."""
        at = 0
        for batch in self.batches:
            first, last = max(begin - at, 0), min(end - at, batch.size)
            if first < last:
                yield batch, first, last
            at += batch.size
