"""Batches of one split, on the device of the model."""

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tracestore.data.batch import GraphBatch, SequenceBatch
from tracestore.data.batch_format import EdgeMasks
from tracestore.data.loader import TraceLoader
from tracestore.data.order import Shuffle, epoch_key
from tracestore.data.tokens.answers import answer_bounds
from tracestore.detectors.config import ModelConfig
from tracestore.detectors.dropout import TraceMasks
from tracestore.detectors.graph.inputs import GraphInputs, edge_threshold
from tracestore.detectors.registry import DETECTORS
from tracestore.oom.errors import is_out_of_memory
from tracestore.store.read.store import TraceStore
from tracestore.train.config import TrainConfig
from tracestore.train.distributed import DistributedContext

Batch = SequenceBatch | GraphBatch
# Streams of order.epoch_key. The order of the traces uses the streams below these.
STEP, _NOISE, _DROPOUT = 2, 3, 4


class BatchFeed:
    """The batches of some traces for one detector; each rank gets its slice of every batch.

    Parameters
    ----------
    name : str
        The detector.
    store : TraceStore
    indices : numpy.ndarray
        Store indices of the traces, int64.
    config : TrainConfig
    model_config : ModelConfig
    ranks : DistributedContext
    shuffle : {"global", "buffer", "block", "none"}
        As `TrainConfig.shuffle`.
    num_workers : int
        Worker processes. 0: threads of this process.
    targets : numpy.ndarray, optional
        Labels ``(N,)`` of all traces of the store. Default: those of the store and `config`.
    memory_budget : int, optional
        Bytes for the batches of the loader.

    Attributes
    ----------
    on_reduce : callable or None
        Called by `reduce_memory`.
    is_reduced : bool
        Whether memory was reduced.
    """

    def __init__(
        self,
        name: str,
        store: TraceStore,
        indices: np.ndarray,
        config: TrainConfig,
        model_config: ModelConfig,
        ranks: DistributedContext,
        *,
        shuffle: Shuffle,
        num_workers: int = 0,
        targets: np.ndarray | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self.config, self.ranks, self.num_workers = config, ranks, num_workers
        self.on_reduce: Callable[[], None] | None = None
        self.is_reduced = False
        spec = DETECTORS[name]
        self.model_config = spec.model_config(model_config)
        # The layers that the detector reads; those of the whole store need no list.
        self.layers = tuple(self.model_config.layers_read)
        self.device = torch.device(config.device)
        c = self.model_config
        edge_format = spec.edge_format(c, store, self.device.type)
        # The threads of the loader mask and count edges of packed graphs; others are masked in `GraphInputs.prepare`.
        masks = EdgeMasks(c.mask_diagonal, c.mask_sinks)
        self.loader: TraceLoader[Batch] = TraceLoader(
            store,
            spec.view,
            layers=None if len(self.layers) == store.num_layers else self.layers,
            batch_size=config.batch_size,
            shuffle=shuffle,
            seed=config.seed,
            num_threads=config.loader_threads,
            indices=indices,
            buffer_size=config.shuffle_buffer,
            score_threshold=config.score_threshold,
            targets=targets,
            attention_threshold=config.attention_threshold,
            top_k=config.top_k,
            edge_format=edge_format,
            edge_masks=masks if edge_format == "packed" and c.edges and c.neighbors is None else None,
            max_cache_batches=config.max_cache_batches,
            memory_budget=memory_budget,
            pin_memory=self.device.type == "cuda",
            rank=ranks.rank,
            world_size=ranks.world_size,
            as_pyg=False,
        )

        self._iterator: Generator[DeviceBatch] | None = None
        self._epoch = self._next = 0

    def __len__(self) -> int:
        """Return the number of batches in the epoch."""
        return len(self.loader)

    def state_dict(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return the loader's state before a batch."""
        return self.loader.state_dict() | {"epoch": epoch, "batch": batch}

    def seek(self, epoch: int, batch: int) -> None:
        """Continue with this batch."""
        self.close()
        self._epoch, self._next = epoch, batch
        self.loader.load_state_dict(self.state_dict(epoch, batch))

    def next_batches(self, count: int) -> "list[DeviceBatch] | None":
        """Return the next `count` batches, fewer at the end of the epoch.

        If memory runs out, this reduces the memory of the feed and gathers the batches again.
        None: memory ran out twice.
        """
        for _ in range(2):
            try:
                if self._iterator is None:
                    self._iterator = self.batches()
                batches = list(islice(self._iterator, count))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            else:
                self._next += len(batches)
                return batches
            self.reduce_memory()
            self.seek(self._epoch, self._next)
        return None

    def batches(self) -> Generator["DeviceBatch"]:
        """Yield the rest of the epoch, gathered by the loader's threads or by worker processes."""
        epoch, numbers = self._epoch, range(self._next, len(self.loader))
        if self.num_workers == 0:
            source: Iterator[Batch] = iter(self.loader)
        else:
            indices = [self.loader.batch_indices(number, epoch) for number in numbers]
            # DataLoader draws the seeds of its workers; a generator of its own keeps them from
            # changing the random state of the training.
            workers: DataLoader[Batch] = DataLoader(
                indices,  # type: ignore[arg-type]
                batch_size=None,
                collate_fn=self.loader.gather,
                num_workers=self.num_workers,
                generator=torch.Generator(),
            )
            source = iter(workers)
        for number in numbers:
            batch = DeviceBatch(self, next(source), epoch, number)
            yield batch
            del batch

    def reduce_memory(self) -> None:
        """Keep one batch in flight, no decoded chunks and no worker processes from now on."""
        if self.num_workers:
            self.num_workers = 0
            # Ending the workers loses their batches, which are gathered again.
            self.seek(self._epoch, self._next)
        self.loader.reduce_memory()
        self.is_reduced = True
        if self.on_reduce is not None:
            self.on_reduce()

    def close(self) -> None:
        """Stop the threads or workers of the epoch."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


class DeviceBatch:
    """One rank's slice of a global batch.

    Attributes
    ----------
    size, global_size : int
        Traces of this rank's slice and of the global batch.
    offset : int
        Position of the slice's first trace in the global batch.
    epoch : int
        The epoch that the feed was moved to by seek(); 0 for validation and test, which never call it.
    y : torch.Tensor
        Labels ``(size,)``.
    """

    def __init__(self, feed: BatchFeed, batch: Batch, epoch: int, number: int) -> None:
        self.feed, self.epoch, self.number = feed, epoch, number
        self.y: torch.Tensor = batch.y
        self.question_id: list[str] = batch.question_id
        self.trace_index: torch.Tensor = batch.trace_index
        self.size = len(batch.y)
        plan = feed.loader.planner.plan(epoch).batches
        begin, end = plan.bounds(number)
        self.global_size = end - begin
        self.offset = int(plan.positions(number, feed.ranks.rank, feed.ranks.world_size)[0]) - begin if self.size else 0
        if isinstance(batch, SequenceBatch):
            self.inputs: Any = batch.sequences
        elif self.size:
            threshold = edge_threshold(feed.config.attention_threshold, feed.config.top_k)
            answer = torch.from_numpy(answer_bounds(feed.loader.store, batch.trace_index.tolist()))
            self.inputs = GraphInputs.from_batch(batch, threshold, answer, feed.layers)

    def key(self, stream: int, rank: int = 0) -> int:
        """Return a seed that is a pure function of the position of the batch."""
        return epoch_key(epoch_key(self.feed.config.seed, self.epoch, stream), self.number, rank)

    def traces(self, begin: int, end: int) -> tuple[Any, torch.Tensor]:
        """Return inputs and labels of traces begin to end on the device.

        The guard calls this within a step, so that it recovers if the device has no memory for them.
        """
        inputs = self.inputs
        if begin > 0 or end < self.size:
            inputs = inputs.traces(begin, end) if isinstance(inputs, GraphInputs) else inputs[begin:end]
        device = self.feed.device
        return inputs if device.type == "cpu" else inputs.to(device), self.y[begin:end].to(device)

    def masks(self, begin: int, end: int) -> TraceMasks:
        """Return the dropout masks of traces begin to end, a function of the same values as `noise`."""
        return TraceMasks(self.key(_DROPOUT), self.offset + begin, end - begin)

    def noise(self, begin: int, end: int, num_layers: int, columns: int) -> torch.Tensor:
        """Return standard normal noise ``(end - begin, num_layers, columns)`` on the device.

        It is a pure function of seed, epoch, batch and the trace's position in the global batch,
        so that it does not depend on ranks and micro-batches.
        """
        generator = torch.Generator().manual_seed(self.key(_NOISE))
        drawn = torch.randn(self.global_size, num_layers, columns, generator=generator)
        return drawn[self.offset + begin : self.offset + end].to(self.feed.device)


class AccumulatedBatch:
    """The batches of one optimizer step, concatenated."""

    def __init__(self, batches: list[DeviceBatch]) -> None:
        self.batches = batches
        self.size = sum(b.size for b in batches)
        self.global_size = sum(b.global_size for b in batches)

    def slices(self, begin: int, end: int) -> Iterator[tuple[DeviceBatch, int, int]]:
        """Yield the batches that hold traces begin to end, each with its own range of traces."""
        offset = 0
        for batch in self.batches:
            first, last = max(begin - offset, 0), min(end - offset, batch.size)
            if first < last:
                yield batch, first, last
            offset += batch.size
