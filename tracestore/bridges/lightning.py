"""A store as a Lightning DataModule."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from tracestore.evaluation.split import make_split
from tracestore.extras import needs
from tracestore.store.read.store import TraceStore
from tracestore.store.read.store import open_store as open

with needs("bridges"):
    from lightning import LightningDataModule

    from tracestore.data.loader import TraceLoader


class _TrainingLoader(TraceLoader):
    """Whatever part of an epoch was taken (`limit_train_batches`), what comes next is another one."""

    def __iter__(self) -> Iterator[Any]:
        if self._position > 0 and self._resume_at == 0 and not self._epoch_done:
            self._next_epoch()
        return super().__iter__()


class TraceDataModule(LightningDataModule):
    """Train, validation and test batches of a store, split by question as tracestore train does.

        trainer.fit(model, datamodule=TraceDataModule("store.zarr", view="graph", batch_size=16))

    view, batch_size and options (num_threads, edges, attention_threshold, ...) are TraceLoader's,
    and so are the batches; traces that have neither score nor label are in no part. `split` holds
    the store indices of each part. Lightning's checkpoints hold the loader's place in
    the epoch, which it finds by `state_dict`. Under several ranks each gets its slice: set `use_distributed_sampler=False` in the
    Trainer, whose own sampler these loaders have no place for.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | TraceStore,
        view: str = "sequence",
        *,
        batch_size: int = 16,
        seed: int = 42,
        score_threshold: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__()
        self.view, self.batch_size, self.seed, self.score_threshold = view, batch_size, seed, score_threshold
        self._source, self._options = store, options
        self.store: TraceStore | None = None
        self.split: dict[str, np.ndarray] = {}
        self._training: TraceLoader | None = None

    def setup(self, stage: str | None = None) -> None:
        if self.store is None:
            self.store = self._source if isinstance(self._source, TraceStore) else open(self._source)
            self.split = make_split(self.store, self.store.targets(self.score_threshold), self.seed).indices

    def _loader(self, part: str, shuffle: str, kind: type[TraceLoader] = TraceLoader) -> TraceLoader:
        self.setup()
        assert self.store is not None
        return kind(
            self.store,
            self.view,
            batch_size=self.batch_size,
            shuffle=shuffle,
            seed=self.seed,
            score_threshold=self.score_threshold,
            indices=self.split[part],
            **self._options,
        )

    def train_dataloader(self) -> TraceLoader:
        # The same one where Lightning loads anew: it knows which epoch comes.
        if self._training is None:
            self._training = self._loader("train", "global", _TrainingLoader)
            if self.trainer is not None:
                # A checkpoint of the end of an epoch has no state of the loader that is given back;
                # trainer.current_epoch still says the old epoch then.
                progress: Any = self.trainer.fit_loop.epoch_progress.current
                self._training.set_epoch(progress.processed)
        return self._training

    def val_dataloader(self) -> TraceLoader:
        return self._loader("val", "none")

    def test_dataloader(self) -> TraceLoader:
        return self._loader("test", "none")

    def predict_dataloader(self) -> TraceLoader:
        return self._loader("test", "none")
