"""Train one detector, from the first step to its test metrics."""

import gc
import hashlib
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from tracestore import console
from tracestore.data.order import Shuffle
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.layers.precision import float32_layers
from tracestore.detectors.registry import MODELS, make_model
from tracestore.detectors.saved import detector_checkpoint, seen_hashes
from tracestore.errors import (
    InsufficientMemoryError,
    RunInterruptedError,
    TracestoreError,
    TrainingError,
    UsageError,
    escape_unprintable,
)
from tracestore.evaluation.evaluate import evaluate_split
from tracestore.evaluation.metrics import auroc, fit_temperature, youden_threshold
from tracestore.evaluation.store_split import Split
from tracestore.oom.guard import OOMGuard
from tracestore.oom.oom_errors import is_out_of_memory, unless_out_of_memory
from tracestore.oom.snapshot import seed_step
from tracestore.split import SPLITS
from tracestore.store.read.store import TraceStore
from tracestore.train.batches import STEP, AccumulatedBatch, BatchFeed, digest_of_answers
from tracestore.train.checkpoint import (
    BEST,
    LAST,
    CheckpointedRun,
    finished_test,
    load_best,
    load_checkpoint,
    save_checkpoint,
)
from tracestore.train.config import TrainConfig, TrainState
from tracestore.train.distributed import DistributedContext
from tracestore.train.model_runner import ModelRunner, SplitScores, UnreadLoss, fit_standardizer, score_split
from tracestore.train.monitor import Log, Monitor
from tracestore.train.signals import StopReason, StopSignals

# Attributes that hold memory; _setup() creates them.
_LARGE_ATTRIBUTES = ("runner", "model", "feed", "guard", "checkpointed")


class Trainer:
    """Trains one detector on one split of a store.

    `targets` are the labels ``(N,)`` of all traces of the store, `folder` is the directory of the
    checkpoints, and `line` the progress line of a terminal.

    Parameters
    ----------
    micro_batch : int, optional
        Size of the first micro-batches in traces. Default: whole batches.
    on_fatal_oom : callable
        Called before the last checkpoint of a run that cannot continue; frees reserved memory.
    resume_command : str, optional
        The command that error messages name.
    """

    def __init__(
        self,
        name: str,
        store: TraceStore,
        split: Split,
        targets: np.ndarray,
        model_config: ModelConfig,
        config: TrainConfig,
        folder: Path,
        log: Log,
        *,
        line: console.Progress | None = None,
        ranks: DistributedContext | None = None,
        stop: StopSignals | None = None,
        micro_batch: int | None = None,
        on_fatal_oom: Callable[[], None] = lambda: None,
        resume_command: str | None = None,
    ) -> None:
        self.name, self.store, self.split, self.targets = name, store, split, targets
        self.model_config, self.config, self.folder = model_config, config, folder
        self.ranks, self.stop = ranks or DistributedContext(), stop or StopSignals()
        self.monitor = Monitor(name, config.epochs, log, line)
        self.planned_micro_batch, self.on_fatal_oom = micro_batch, on_fatal_oom
        paths = [str(member.files.location) for member in store.internals.members]
        words = ("tracestore", "train", *paths, "--output", str(folder.parent), "--resume")
        self.resume_command = resume_command or shlex.join(words)
        self._saved_at = time.monotonic()
        self._unread: UnreadLoss | None = None

    def run(self) -> dict[str, Any]:
        """Train, select the best epoch by validation, and test it once.

        Returns
        -------
        dict
            The detector's entry of results.json.

        Raises
        ------
        InsufficientMemoryError
            If memory ran out for good. A checkpoint exists, unless the model alone does not fit.
        RunInterruptedError
            If a signal ended the run. A checkpoint exists.
        TrainingError
            If the loss or a logit is not finite.
        """
        try:
            return self._run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = f"out of memory: {error}" if str(error) else "out of memory"
        # Memory ran out outside of the guard. The run can resume from its last checkpoint.
        for attribute in _LARGE_ATTRIBUTES:
            vars(self).pop(attribute, None)
        gc.collect()
        self.on_fatal_oom()
        if not (self.folder / LAST).exists():
            # If the model alone does not fit, there is nothing to save.
            unless_out_of_memory(self._save_untrained)
        raise InsufficientMemoryError(
            f"{self.name}: {escape_unprintable(reason, 200)}; free memory, then: {self.resume_command}"
        )

    def _save_untrained(self) -> None:
        self._setup()
        self._save_last(TrainState())

    def _run(self) -> dict[str, Any]:
        self._setup()
        state, result = self._resume()
        if result is not None:
            self.monitor.log("already finished")
            return result
        if self.config.logger is not None and self.ranks.is_rank_zero:
            options = asdict(self.config) | asdict(self.model_config)
            self.monitor.open_logger(self.config.logger, self.folder, options, state, len(self.feed))
        try:
            if state.epoch == 0 and state.batch == 0:
                indices, view = self.split.indices["train"], MODELS[self.name].view
                fit_standardizer(self.model, self.store, indices, view, self.ranks)
            while state.epoch < self.config.epochs:
                self._train_epoch(state)
                self._validate(state)
                self._save_last(state)
                self.monitor.epoch(state, len(self.feed))
            return self._finish(state)
        finally:
            self.monitor.close()

    # Setup

    def _setup(self) -> None:
        c = self.config
        torch.manual_seed(c.seed)
        self.runner = ModelRunner(make_model(self.name, self.model_config), self.model_config, c)
        self.model = self.runner.model
        for layer in float32_layers(c.precision, self.runner.device.type):
            self.monitor.log(f"{c.precision}: no {layer} kernel on this processor; it runs in float32")
        optimizer = self.runner.make_optimizer(c.lr)
        self.ranks.allocate(list(self.model.parameters()))
        self.feed = self._make_feed("train", c.shuffle, c.num_workers)
        self.feed.graphs = self.runner.record_steps(optimizer)
        self.feed.on_reduce = partial(self.monitor.log, "host memory ran out; one batch in flight, no cache")
        # Without a scaler, small gradients are zero in float16.
        scaler = torch.amp.GradScaler(self.runner.device.type) if c.precision == "fp16" else None
        self.guard = OOMGuard(
            self.model,
            optimizer,
            scaler=scaler,
            on_event=self.monitor.out_of_memory,
            on_host_memory=self.feed.reduce_memory,
            ranks=self.ranks,
            graphs=self.runner.graphs,
        )
        self.guard.policy.size = self.planned_micro_batch
        self._seen = seen_hashes(self.store, np.concatenate([self.split.indices[name] for name in ("train", "val")]))
        self.checkpointed = CheckpointedRun(
            self.name, self.guard, self.feed, self._identity(), self.store.provenance, c.allow_mixed_provenance
        )

    def _make_feed(self, split: str, shuffle: Shuffle, num_workers: int = 0) -> BatchFeed:
        given = self.name, self.store, self.split.indices[split], self.config, self.model_config, self.ranks
        return BatchFeed(
            *given,
            shuffle=shuffle,
            num_workers=num_workers,
            targets=self.targets,
            is_training=split == "train",
        )

    def _identity(self) -> dict[str, Any]:
        """Return what must not change when the run resumes: options, split, labels and traces."""
        digest = hashlib.blake2b(digest_size=16)
        for split in SPLITS:
            digest.update(self.split.indices[split].tobytes() + self.targets[self.split.indices[split]].tobytes())
        options = self.config.identity() | {f"model_{k}": v for k, v in asdict(self.model_config).items()}
        used = np.concatenate([self.split.indices[split] for split in SPLITS])
        answers = digest_of_answers([self.name], self.model_config, self.store, used)
        return options | {"split_and_labels": digest.hexdigest(), "traces": self.store.digest(used), "answers": answers}

    def _resume(self) -> tuple[TrainState, dict[str, Any] | None]:
        """Load last.pt if the run resumes. Return its state, and its result if it is finished."""
        path = self.folder / LAST
        saved = None
        if self.config.resume:
            saved = self.ranks.on_rank_zero(lambda: load_checkpoint(path) if path.exists() else None)
        if saved is None:
            return TrainState(), None
        try:
            state = self.checkpointed.load_state_dict(saved)
            if (trained := state.epoch + (state.batch > 0)) > self.config.epochs:
                raise UsageError(f"has more epochs than {self.config.epochs}: pass --epochs {trained} or more")
            if saved.get("result") is not None and state.epoch >= self.config.epochs:
                best, logits = finished_test(saved, len(self.split.indices["test"]))
                return state, self._result(state, best, logits)
        except UsageError as error:
            self.ranks.abort_all(UsageError(f"--resume: {path} {error}"))
        batch = f", batch {state.batch} of {len(self.feed)}" if state.batch else ""
        self.monitor.log(f"continues after epoch {state.epoch} of {self.config.epochs}{batch}")
        return state, None

    # Training

    def _train_epoch(self, state: TrainState) -> None:
        """Train from `state.batch` to the end of the epoch."""
        self.model.train()
        self.guard.begin_epoch(state.epoch)
        self.feed.seek(state.epoch, state.batch)
        while state.batch < len(self.feed):
            self._step(state)
            if time.monotonic() - self._saved_at >= self.config.checkpoint_interval_s:
                self._read_loss(state)
                self._save_last(state)
        self._read_loss(state)
        self.feed.close()

    def _step(self, state: TrainState) -> None:
        """Step the optimizer once, and read the loss of the step before, while a GPU computes this one."""
        began = time.perf_counter()
        step = self._fetch(state)
        state.waited_s += time.perf_counter() - began
        key = step.batches[0].key(STEP, self.ranks.rank)
        try:
            loss = self.guard.submit(
                step.size,
                partial(self.runner.step_loss, step),
                step.global_size,
                # Accumulated batches are computed one after the other. All ranks must try the same
                # sizes, so the limit is that of the largest slice of any rank.
                max_micro_batch=max(-(-batch.global_size // self.ranks.world_size) for batch in step.batches),
                seed=partial(seed_step, key, self.runner.device),
            )
        except InsufficientMemoryError as error:
            state.seconds += time.perf_counter() - began
            self._abort_with_checkpoint(StopReason.OUT_OF_MEMORY, str(error), state)
        submitted = time.perf_counter()
        self.feed.gather_ahead(self.config.grad_accum_steps)
        if loss.is_computed:
            # The GPU waited for the next batch, at most so long.
            state.waited_s += time.perf_counter() - submitted
        state.seconds += time.perf_counter() - began
        self._read_loss(state)
        self._unread = UnreadLoss.of(step, loss)
        state.batch += len(step.batches)
        if self.ranks.world_size > 1:
            # The sum over the ranks is a collective: a rank that ends alone must leave none of them waiting in it.
            self._read_loss(state)

    def _read_loss(self, state: TrainState) -> None:
        """Add the loss of the last step to the state, if it has not been read."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        began = time.perf_counter()
        loss = unread.read(self.store, self.ranks, is_scaled=self.guard.scaler is not None)
        state.loss_sum += loss * unread.size
        state.loss_count += unread.size
        state.seconds += time.perf_counter() - began
        self.monitor.step(state, len(self.feed), loss)

    def _fetch(self, state: TrainState) -> AccumulatedBatch:
        """Return the batches of the next step, unless a rank has to stop before it."""
        batches = self.feed.next_batches(self.config.grad_accum_steps)
        own_reason = StopReason.OUT_OF_MEMORY if batches is None else self.stop.reason
        reason = StopReason(self.ranks.all_reduce_max(own_reason))
        if reason or batches is None:
            self._abort_with_checkpoint(reason, "one batch does not fit", state)
        return AccumulatedBatch(batches)

    # Validation and test

    def _validate(self, state: TrainState) -> None:
        """Score the validation split, save the best epoch, and begin the next epoch."""
        scores = self._score("val", state)
        if (value := auroc(scores.y, scores.logits)) > state.best_val_auroc:
            state.best_val_auroc, state.best_epoch = value, state.epoch
            self._save_best(state, scores)
        state.end_epoch(scores.loss, value)

    def _score(self, split: str, state: TrainState | None) -> SplitScores:
        feed = self._make_feed(split, "none")
        if self.feed.is_reduced:
            feed.reduce_memory()
        scores = score_split(self.runner, self.guard, feed, self.ranks, self.stop)
        if isinstance(scores, StopReason):
            self._abort_with_checkpoint(scores, f"out of memory while scoring the {split} split", state)
        nonfinite = self.split.indices[split][~np.isfinite(scores.logits)]
        if len(nonfinite):
            question = self.store.question_ids[int(nonfinite[0])]
            self.ranks.abort_all(
                TrainingError(f"{self.name} produced a non-finite logit for the trace of question {question!r}")
            )
        return scores

    def _finish(self, state: TrainState) -> dict[str, Any]:
        """Test the weights of the best epoch. last.pt keeps the last weights, so that more epochs can follow."""
        last = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        best = self.ranks.on_rank_zero(lambda: load_best(self.folder / BEST, self.model))
        self.model.load_state_dict(best["model"])
        # last.pt is complete: there is nothing to save if the test stops early.
        scores = self._score("test", None)
        self.model.load_state_dict(last)
        result = self.ranks.on_rank_zero(lambda: self._result(state, best, scores.logits))
        self._save_last(state, result)
        return result

    def _result(self, state: TrainState, best: dict[str, Any], logits: np.ndarray) -> dict[str, Any]:
        tested, seed = self.split.indices["test"], self.config.seed
        y = (self.targets[tested] >= 0.5).astype(np.int64)
        return {
            **evaluate_split(self.store, tested, y, logits, best["threshold"], best["temperature"], seed),
            # These values belong to the tested weights. A run that was killed after it wrote best.pt, and
            # resumed on another device or number of ranks, may not have reached them again.
            "best_val_auroc": best["val_auroc"],
            "best_epoch": best["epoch"],
            "history": state.history,
            "oom_events": self.guard.events,
            "seconds_per_epoch": state.seconds_per_epoch,
        }

    # Checkpoints

    def _save_last(self, state: TrainState, result: dict[str, Any] | None = None, *, did_not_fit: bool = False) -> None:
        """Save last.pt on rank 0; weights and state are the same on all ranks."""
        if not self.ranks.is_rank_zero:
            return
        self.monitor.flush()
        save_checkpoint(self.folder / LAST, self.checkpointed.state_dict(state, result, did_not_fit=did_not_fit))
        self._saved_at = time.monotonic()
        self.guard.cuda_cache.after_checkpoint()

    def _save_best(self, state: TrainState, scores: SplitScores) -> None:
        """Save best.pt on rank 0, with threshold and temperature of the validation split."""
        if not self.ranks.is_rank_zero:
            return
        about = {
            "threshold": youden_threshold(scores.y, scores.logits),
            "temperature": fit_temperature(scores.y, scores.logits),
            "epoch": state.epoch,
            "val_auroc": state.best_val_auroc,
            "attention_threshold": self.config.attention_threshold,
            "top_k": self.config.top_k,
            "precision": self.config.precision,
        }
        save_checkpoint(
            self.folder / BEST,
            detector_checkpoint(self.name, self.model, self.model_config, self.store, self._seen, about),
        )

    def _abort_with_checkpoint(self, reason: StopReason, text: str, state: TrainState | None) -> NoReturn:
        """End all ranks. Without a state, the checkpoint of the last epoch is kept."""
        is_oom = reason == StopReason.OUT_OF_MEMORY
        if is_oom:
            self.on_fatal_oom()
        if state is not None:
            self._read_loss(state)
            self._save_last(state, did_not_fit=is_oom)
        saved = f"{'kept' if state is None else 'saved'} {self.folder / LAST}"
        if is_oom:
            error: TracestoreError = InsufficientMemoryError(
                f"{self.name}: {text}; {saved}; free memory, then: {self.resume_command}"
            )
        else:
            error = RunInterruptedError(f"stopped; {saved}; continue with: {self.resume_command}", reason.signum)
        self.ranks.abort_all(error)
