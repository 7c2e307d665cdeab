"""A store as a Lightning DataModule."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import numpy as np

from tracestore.data.batches.batch_format import View
from tracestore.data.order import Shuffle
from tracestore.errors import UsageError, explain_dtype
from tracestore.extras import needs
from tracestore.split import SPLITS
from tracestore.store.read.store import TraceStore, open_store
from tracestore.store.read.subset import TraceSubset
from tracestore.words import plural

with needs("bridges"):
    from lightning import LightningDataModule

    from tracestore.data.datasets import StoreLike
    from tracestore.data.loader import TraceLoader


# Options with which an epoch has not each trace once.
_OF_TRAINING = ("drop_last", "pad_last", "weights", "epoch_size")


class _RankLoader(TraceLoader):
    """Loader whose batches have a trace for each rank: the mean loss of no traces is NaN."""

    def __iter__(self) -> Iterator[Any]:
        iterator = super().__iter__()
        batches = self.planner.plan(self.epoch).batches
        for number in range(len(batches)) if self.world_size > 1 else ():
            begin, end = batches.bounds(number)
            if end - begin < self.world_size:
                raise UsageError(
                    f"batch {number} of {len(batches)} has {plural(end - begin, 'trace')} for {self.world_size} ranks, "
                    "so that some have none; use fewer ranks or larger batches, and drop_last or pad_last for training"
                )
        return iterator


def _size_for_ranks(num_samples: int, batch_size: int, num_ranks: int) -> int:
    """Return the batch size, or one near it with which the last batch has a sample for each rank."""
    sizes = (*range(batch_size, num_ranks - 1, -1), *range(max(batch_size, num_ranks), num_samples + 1))
    return next((size for size in sizes if num_samples % size == 0 or num_samples % size >= num_ranks), batch_size)


class _TrainingLoader(_RankLoader):
    """Loader that starts a new epoch even if the last one was left early.

    Lightning leaves an epoch early with ``limit_train_batches``.
    """

    _is_resuming = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["batch"] >= len(self.planner.plan(self.epoch)):
            self.set_epoch(self.epoch + 1)  # Lightning would count what is left of the epoch, nothing, as one
        self._is_resuming = True

    def __iter__(self) -> Iterator[Any]:
        if self.state_dict()["batch"] > 0 and not self._is_resuming:
            self.set_epoch(self.epoch + 1)
        self._is_resuming = False
        return super().__iter__()


class TraceDataModule(LightningDataModule):
    """Training, validation and test batches, split by question as `tracestore train` does.

    Traces with neither a score nor a label are in no split. Lightning's checkpoints hold the
    position in the epoch. With several ranks each gets its slice of a batch: set
    ``use_distributed_sampler=False`` in the Trainer, because these loaders accept no sampler.

    Parameters
    ----------
    store : TraceStore, TraceSubset, str or PathLike
        A store, a subset of one, or the path of a store.
    view : {"sequence", "graph"}
        The form of the batches, see `tracestore.TraceLoader`.
    batch_size : int
        Traces of a batch over all ranks. Validation and test with several ranks take a size near it with
        which each rank has a trace of each batch; training refuses a batch without one.
    seed : int
        Seed of the split and of the order.
    score_threshold : float, optional
        Score below which a trace counts as a hallucination, or from which on in a store of
        hallucination scores. A stored label takes precedence. Default: 0.5, for scores in [0, 1];
        others need a threshold.
    **options
        Further options of `tracestore.TraceLoader`, such as `dtype`, `num_threads` or
        `attention_threshold`. `drop_last`, `pad_last`, `weights` and `epoch_size` are those of training:
        validation and test have each of their traces once.

    Attributes
    ----------
    split : dict of str to ndarray of int64
        Store indices of "train", "val" and "test". Empty before `setup`.
    store : TraceStore
        The whole store. None before `setup`.

    Examples
    --------
    >>> from tracestore.bridges.lightning import TraceDataModule
    >>> module = TraceDataModule("store.zarr", view="sequence", batch_size=4, dtype="float32")
    >>> module.setup()
    >>> sorted(module.split)
    ['test', 'train', 'val']

    Train with ``lightning.Trainer().fit(model, datamodule=module)``.
    """

    def __init__(
        self,
        store: "StoreLike",
        view: View = "sequence",
        *,
        batch_size: int = 16,
        seed: int = 42,
        score_threshold: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if chosen := options.keys() & {"shuffle", "indices"}:
            raise UsageError(f"found {' and '.join(sorted(chosen))}, which the split chooses for each loader")
        self.view, self.batch_size, self.seed, self.score_threshold = view, batch_size, seed, score_threshold
        self._path_or_store, self._options = store, options
        self.store: TraceStore | None = None
        self.split: dict[str, np.ndarray] = {}
        self._train_loader: TraceLoader | None = None

    def setup(self, stage: str | None = None) -> None:
        """Open the store and split it. Lightning calls this."""
        if self.store is None:
            given = self._path_or_store
            traces = given if isinstance(given, TraceStore | TraceSubset) else open_store(given)
            self.store = traces.store if isinstance(traces, TraceSubset) else traces
            split = traces.split(self.seed, score_threshold=self.score_threshold)
            self.split = {name: part.indices for name, part in zip(SPLITS, split, strict=True)}

    def on_exception(self, exception: BaseException) -> None:
        """Add a note on how to get float32 batches to an error that a float16 batch caused."""
        explained = explain_dtype(exception)
        if explained is not exception:
            exception.add_note(str(explained))

    def _loader(
        self,
        split: Literal["train", "val", "test"],
        shuffle: Shuffle,
        loader_class: type[TraceLoader] = _RankLoader,
    ) -> TraceLoader:
        self.setup()
        assert self.store is not None
        left_out = () if split == "train" else _OF_TRAINING
        make_loader = partial(
            loader_class,
            self.store,
            self.view,
            shuffle=shuffle,
            seed=self.seed,
            score_threshold=self.score_threshold,
            indices=self.split[split],
            **{name: value for name, value in self._options.items() if name not in left_out},
        )
        loader = make_loader(batch_size=self.batch_size)
        if split != "train" and loader.world_size > 1:
            size = _size_for_ranks(loader.planner.num_samples, self.batch_size, loader.world_size)
            loader = make_loader(batch_size=size)
        return loader

    def train_dataloader(self) -> TraceLoader:
        """Return the loader of the training split, shuffled. The same loader at each call.

        Raises
        ------
        UsageError
            With `batch_by`, if the trainer keeps the number of batches of the first epoch.
        """
        # One loader for all epochs: it counts them, also with reload_dataloaders_every_n_epochs.
        if self._train_loader is None:
            self._train_loader = self._loader("train", "global", _TrainingLoader)
            trainer: Any = self.trainer
            if trainer is not None:
                reloads = trainer.reload_dataloaders_every_n_epochs == 1 or trainer.max_epochs == 1
                if self._train_loader.planner.batch_by is not None and not reloads:
                    raise UsageError(
                        "with batch_by, epochs differ in the number of their batches, and Lightning cuts each to the first: "
                        "Trainer(reload_dataloaders_every_n_epochs=1)"
                    )
                # Lightning does not restore the loader's state from a checkpoint at the end of an
                # epoch, and trainer.current_epoch is then still the old epoch.
                self._train_loader.set_epoch(trainer.fit_loop.epoch_progress.current.processed)
        return self._train_loader

    def val_dataloader(self) -> TraceLoader:
        """Return the loader of the validation split, in store order."""
        return self._loader("val", "none")

    def test_dataloader(self) -> TraceLoader:
        """Return the loader of the test split, in store order."""
        return self._loader("test", "none")

    def predict_dataloader(self) -> TraceLoader:
        """Return the loader of the test split, in store order."""
        return self.test_dataloader()
