"""A store as a Lightning DataModule."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from tracestore.data.batch_format import View
from tracestore.data.order import Shuffle
from tracestore.errors import explain_dtype
from tracestore.extras import needs
from tracestore.split import SPLITS
from tracestore.store.read.store import TraceStore, open_store
from tracestore.store.read.subset import TraceSubset

with needs("bridges"):
    from lightning import LightningDataModule

    from tracestore.data.datasets import StoreLike
    from tracestore.data.loader import TraceLoader


# Options with which an epoch has not each trace once.
_OF_TRAINING = ("drop_last", "pad_last", "weights", "epoch_size")


class _TrainingLoader(TraceLoader):
    """Loader that starts a new epoch even if the last one was left early.

    Lightning leaves an epoch early with ``limit_train_batches``.
    """

    _is_resuming = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
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
        Traces of a batch over all ranks.
    seed : int
        Seed of the split and of the order.
    score_threshold : float, optional
        Score below which a trace counts as a hallucination, or above which in a store of
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
        loader_class: type[TraceLoader] = TraceLoader,
    ) -> TraceLoader:
        self.setup()
        assert self.store is not None
        left_out = () if split == "train" else _OF_TRAINING
        return loader_class(
            self.store,
            self.view,
            batch_size=self.batch_size,
            shuffle=shuffle,
            seed=self.seed,
            score_threshold=self.score_threshold,
            indices=self.split[split],
            **{name: value for name, value in self._options.items() if name not in left_out},
        )

    def train_dataloader(self) -> TraceLoader:
        """Return the loader of the training split, shuffled. The same loader at each call."""
        # One loader for all epochs: it counts them, also with reload_dataloaders_every_n_epochs.
        if self._train_loader is None:
            self._train_loader = self._loader("train", "global", _TrainingLoader)
            if self.trainer is not None:
                # Lightning does not restore the loader's state from a checkpoint at the end of an
                # epoch, and trainer.current_epoch is then still the old epoch.
                progress: Any = self.trainer.fit_loop.epoch_progress.current
                self._train_loader.set_epoch(progress.processed)
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
