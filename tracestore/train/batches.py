"""Batches of one split, on the device of the model."""

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from tracestore import process
from tracestore.data.batches.batch import GraphBatch, SequenceBatch
from tracestore.data.batches.batch_format import EdgeMasks
from tracestore.data.batches.buffers import copy_together
from tracestore.data.loader import TraceLoader
from tracestore.data.order import Shuffle, epoch_key
from tracestore.data.tokens.answers import answer_bounds, answers_digest
from tracestore.detectors.graph.inputs import GraphInputs, edge_threshold
from tracestore.detectors.graph.padding import can_pad, to_padded
from tracestore.detectors.layers.dropout import TraceMasks
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import MODELS
from tracestore.oom.oom_errors import unless_out_of_memory
from tracestore.store.read.store import TraceStore
from tracestore.train.config import TrainConfig
from tracestore.train.distributed import DistributedContext
from tracestore.train.step_graphs import StepGraphs, StepInputs, side_streams

T = TypeVar("T")
Batch = SequenceBatch | GraphBatch
# Streams of order.epoch_key. The order of the traces uses the streams below these.
STEP, _MASKS = 2, 4


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
    is_training : bool
        Whether batches have dropout masks.

    Attributes
    ----------
    on_reduce : callable or None
        Called by `reduce_memory`.
    is_reduced : bool
        Whether memory was reduced.
    graphs : StepGraphs or None
        Recordings that replay the steps of the batches.
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
        is_training: bool = False,
    ) -> None:
        self.config, self.ranks, self.num_workers = config, ranks, num_workers
        self.is_training = is_training
        self.on_reduce: Callable[[], None] | None = None
        self.is_reduced = False
        self.graphs: StepGraphs | None = None
        spec = MODELS[name]
        self.model_config = spec.model_config(model_config)
        # The layers that the detector reads; those of the whole store need no list.
        self.layers = self.model_config.layers_read
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
        # On a GPU, copies of whole batches run ahead of the steps until the device has no room for them.
        self.copies = CopyStream(self.device) if self.device.type == "cuda" else None
        self._ahead: list[DeviceBatch] = []

    def __len__(self) -> int:
        """Return the number of batches in the epoch."""
        return len(self.loader)

    @property
    def repeats(self) -> bool:
        """Return whether steps are recorded and replayed."""
        return self.graphs is not None and self.graphs.is_active

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
            batches, self._ahead = self._ahead, []
            more = unless_out_of_memory(partial(self._gather, count - len(batches)))
            if more is not None:
                self._next += len(batches) + len(more)
                return batches + more
            del batches
            self._gather_again()
        return None

    def gather_ahead(self, count: int) -> None:
        """Gather the next `count` batches and copy them to a GPU, while it computes the step of those before.

        A thread for this would take the interpreter from the one that starts the steps.
        """
        if self.copies is None or self._ahead:
            return
        ahead = unless_out_of_memory(partial(self._gather, count))
        if ahead is None:
            self._gather_again()
        else:
            self._ahead = ahead

    def _gather_again(self) -> None:
        """Reduce the memory, and continue with the batch after those that were returned."""
        self.reduce_memory()
        self.seek(self._epoch, self._next)

    def _gather(self, count: int) -> "list[DeviceBatch]":
        """Return at most so many batches, with the start of their copies to the device."""
        if self._iterator is None:
            self._iterator = self.batches()
        batches = list(islice(self._iterator, count))
        for batch in batches:
            batch.copy_ahead()
        return batches

    def stop_copying_ahead(self) -> None:
        """Free the batches that were copied ahead, and copy each batch within its step from now on."""
        self.copies = None
        for batch in self._ahead:
            batch.copied = None

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
        """Keep one batch in flight, no decoded chunks, freed memory or worker processes from now on."""
        if self.num_workers:
            self.num_workers = 0
            # Ending the workers loses their batches, which are gathered again.
            self.seek(self._epoch, self._next)
        self.loader.reduce_memory()
        process.return_freed_memory()
        self.is_reduced = True
        if self.on_reduce is not None:
            self.on_reduce()

    def close(self) -> None:
        """Stop the threads or workers of the epoch."""
        self._ahead.clear()
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


class CopyStream:
    """Copies to a GPU on a stream of its own, next to the computation."""

    def __init__(self, device: torch.device) -> None:
        # torch takes longer to find the current stream of a device than of its number.
        self._number = torch.cuda.current_device() if device.index is None else device.index
        self._stream = side_streams(device).copies

    def run(self, copy: Callable[[], T]) -> tuple[T, torch.cuda.Event]:
        """Start copies. Return their result, and the event that ends them."""
        with torch.cuda.stream(self._stream):
            return copy(), self._stream.record_event()

    def join(self, copied: torch.cuda.Event, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current stream wait for copies, and keep their memory until it has used them."""
        current = torch.cuda.current_stream(self._number)
        current.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(current)


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
    copied : tuple or None
        What a step needs of the whole batch, on the device, and the event that ends its copy.
    can_repeat : bool
        Whether the whole batch is padded on the device, so that a graph of its step can be replayed.
    """

    def __init__(self, feed: BatchFeed, batch: Batch, epoch: int, number: int) -> None:
        self.feed, self.epoch, self.number = feed, epoch, number
        self.y: torch.Tensor = batch.y
        self.copied: tuple[StepInputs, torch.cuda.Event] | None = None
        self.can_repeat = False
        self.question_id: list[str] = batch.question_id
        self.trace_index: torch.Tensor = batch.trace_index
        self.size = len(batch.y)
        plan = feed.loader.planner.plan(epoch).batches
        begin, end = plan.bounds(number)
        self.global_size = end - begin
        self.offset = int(plan.positions(number, feed.ranks.rank, feed.ranks.world_size)[0]) - begin if self.size else 0
        if isinstance(batch, SequenceBatch):
            self.inputs: Any = batch.sequences
            self.can_repeat = feed.repeats
        elif self.size:
            threshold = edge_threshold(feed.config.attention_threshold, feed.config.top_k)
            answer = torch.from_numpy(answer_bounds(feed.loader.store, batch.trace_index.tolist()))
            inputs = GraphInputs.from_batch(batch, threshold, answer, feed.layers)
            # What the threads of the loader do not mask is masked on the device.
            on_host = inputs.in_degree is not None or not feed.model_config.edges or feed.device.type == "cpu"
            self.inputs = inputs.prepare(feed.model_config) if on_host else inputs
            self.can_repeat = feed.repeats and can_pad(self.inputs)

    def key(self, stream: int, rank: int = 0) -> int:
        """Return a seed that is a pure function of the position of the batch."""
        return epoch_key(epoch_key(self.feed.config.seed, self.epoch, stream), self.number, rank)

    def traces(self, begin: int, end: int) -> StepInputs:
        """Return what a step needs of traces begin to end, on the device.

        The guard calls this within a step, so that it recovers if the device has no memory for them. A second call
        for the same traces follows a failure, and a call for some of the traces means that the batch does not fit.
        """
        copied, self.copied = self.copied, None
        if copied is not None and self.feed.copies is not None and begin == 0 and end == self.size:
            given, event = copied
            self.feed.copies.join(event, given.tensors())
            return given
        del copied
        self.feed.stop_copying_ahead()
        return self._copy(begin, end)

    def copy_ahead(self) -> None:
        """Start to copy the whole batch to the device, unless it has no room."""
        copies = self.feed.copies
        if copies is None or self.copied is not None or not self.size:
            return
        self.copied = unless_out_of_memory(lambda: copies.run(lambda: self._copy(0, self.size)))
        if self.copied is None:
            self.feed.copies = None

    def _copy(self, begin: int, end: int) -> StepInputs:
        feed, inputs = self.feed, self.inputs
        is_whole = begin == 0 and end == self.size
        if not is_whole:
            inputs = inputs.traces(begin, end) if isinstance(inputs, GraphInputs) else inputs[begin:end]
        # A function of the traces' positions in the global batch, whatever the ranks and micro-batches.
        masks = TraceMasks(self.key(_MASKS), self.offset + begin, end - begin) if feed.is_training else None
        given = StepInputs(inputs, self.y[begin:end], masks)
        device = feed.device
        if device.type == "cpu":
            return given
        # A copy from pinned memory runs in the order of the stream.
        small = [given.y, *([] if masks is None else [masks.state])]
        if isinstance(inputs, GraphInputs) and is_whole and self.can_repeat:
            given.inputs, moved = to_padded(inputs, device, small)
        else:
            given.inputs = inputs.to(device, non_blocking=True)
            moved = copy_together(small, device, non_blocking=True)
        if isinstance(inputs, GraphInputs):
            given.inputs = given.inputs.prepare(feed.model_config)
        given.y = moved[0]
        if masks is not None:
            masks.state = moved[1]
        return given


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


def digest_of_answers(models: Iterable[str], config: ModelConfig, store: TraceStore, indices: np.ndarray) -> str | None:
    """Return a digest of where the answers of some traces are, None if no detector of these names reads that."""
    is_read = any(MODELS[name].reads_answers(config) for name in models)
    return answers_digest(store, indices) if is_read else None
