"""Training one detector, read top to bottom."""

import gc
import hashlib
import math
import time
from collections.abc import Callable, Generator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from tracestore import console
from tracestore.detectors.checkpoint import detector_checkpoint
from tracestore.detectors.config import ModelConfig
from tracestore.detectors.precision import float32_layers
from tracestore.detectors.registry import DETECTORS
from tracestore.errors import (
    InsufficientMemoryError,
    RunInterruptedError,
    TrainingError,
    UsageError,
    escape_unprintable,
)
from tracestore.evaluation.evaluate import evaluate_split
from tracestore.evaluation.metrics import auroc, fit_temperature, youden_threshold
from tracestore.evaluation.split import SPLITS, Split
from tracestore.oom.errors import is_out_of_memory
from tracestore.oom.guard import OOMGuard
from tracestore.oom.micro_batch import MicroBatchPolicy
from tracestore.oom.optimizers import Adam
from tracestore.oom.snapshot import get_random_state, restore_random_state, seed_step
from tracestore.store.read.store import TraceStore
from tracestore.train.batches import AccumulatedBatch, BatchFeed, DeviceBatch, next_batch, step_key
from tracestore.train.checkpoint import (
    BEST,
    LAST,
    load_checkpoint,
    pack_random_state,
    save_checkpoint,
    unpack_random_state,
)
from tracestore.train.config import Progress, TrainConfig
from tracestore.train.distributed import DistributedContext
from tracestore.train.model_runner import ModelRunner
from tracestore.train.monitor import Log, Monitor
from tracestore.train.signals import StopSignals
from tracestore.train.split_scores import EvaluationStopped, SplitScores, score_split
from tracestore.train.standardize import fit_standardizer

CHECKPOINT_VERSION = 5
WEIGHT_DECAY = 1e-5
_MADE_BY_SETUP = ("forward", "model", "optimizer", "feed", "scaler", "guard", "_batches")


class Trainer:
    """One detector on one split of a store."""

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
    ) -> None:
        self.name, self.store, self.split, self.targets = name, store, split, targets
        self.model_config, self.config, self.folder = model_config, config, folder
        self.ranks, self.stop = ranks or DistributedContext(), stop or StopSignals()
        self.monitor = Monitor(name, config.epochs, log, line)
        self.resume_command = f"tracestore train --store {store.path} --output-dir {folder.parent} --resume"
        # Called before the checkpoint of a run that cannot go on: gives memory back.
        self.on_fatal_oom: Callable[[], None] | None = None
        # Traces of a micro-batch to begin with; None: whole batches.
        self.planned_micro_batch: int | None = None
        self._saved_at = time.monotonic()
        # Whether host memory ran out once, and workers were given up with the batches they held.
        self._is_short = self._is_cut = False

    def run(self) -> dict[str, Any]:
        """Trains, selects on validation, tests once. -> the entry of results.json.
        InsufficientMemoryError, with a checkpoint, where memory ran out for good."""
        try:
            return self._run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = f"out of memory: {error}" if str(error) else "out of memory"
        # Outside what the guard watches, files and logs among them: on from the last checkpoint.
        for made in _MADE_BY_SETUP:
            vars(self).pop(made, None)
        gc.collect()
        if self.on_fatal_oom is not None:
            self.on_fatal_oom()
        try:
            if not (self.folder / LAST).exists():
                self._setup()
                self._save_last(Progress())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Nor does the model alone fit: there is nothing to save.
        raise InsufficientMemoryError(
            f"{self.name}: {escape_unprintable(reason, 200)}; free memory, then: {self.resume_command}"
        )

    def _run(self) -> dict[str, Any]:
        self._setup()
        progress, result = self._resume()
        if result is not None:
            self.monitor.say("already finished")
            return result
        if self.config.tensorboard and self.ranks.is_rank_zero:
            self.monitor.open_events(self.folder / "events", progress, len(self.feed))
        try:
            if progress.epoch == 0 and progress.batch == 0:
                fit_standardizer(
                    self.model, self.store, self.split.indices["train"], DETECTORS[self.name].view, self.ranks
                )
            while progress.epoch < self.config.epochs:
                self._train_epoch(progress)
                self._validate(progress)
                self._save_last(progress)
                self.monitor.epoch(progress, len(self.feed))
            return self._finish(progress)
        finally:
            self.monitor.close()

    # The run's beginning

    def _setup(self) -> None:
        torch.manual_seed(self.config.seed)
        self.forward = ModelRunner(self.name, self.model_config, self.config)
        self.model = self.forward.model
        for layer in float32_layers(self.config.precision, self.forward.device.type):
            self.monitor.say(f"{self.config.precision}: no {layer} kernel on this processor; it runs in float32")
        self.optimizer = Adam(self.model.parameters(), lr=self.config.lr, weight_decay=WEIGHT_DECAY, fused=True)
        self.ranks.allocate(list(self.model.parameters()))
        c = self.config
        self.feed = BatchFeed(
            self.name,
            self.store,
            self.split.indices["train"],
            c,
            self.model_config,
            self.ranks,
            shuffle=c.shuffle,
            num_workers=c.num_workers,
        )
        # Small gradients of float16 would be zero.
        self.scaler = torch.amp.GradScaler(self.forward.device.type) if c.precision == "fp16" else None
        self.guard = OOMGuard(
            self.model,
            self.optimizer,
            scaler=self.scaler,
            on_event=self._on_event,
            on_host_memory=self._give_back,
            ranks=self.ranks,
        )
        self.guard.policy.size = self.planned_micro_batch

    def _resume(self) -> tuple[Progress, dict[str, Any] | None]:
        """What last.pt says, and the result where nothing is left to train."""
        path = self.folder / LAST
        saved = None
        if self.config.resume:
            saved = self.ranks.on_rank_zero(lambda: load_checkpoint(path) if path.exists() else None)
        if saved is None:
            return Progress(), None
        if saved.get("version") != CHECKPOINT_VERSION:
            self.ranks.abort_all(
                UsageError(f"--resume: {path} is of another version of tracestore; train without --resume")
            )
        for key, value in self._identity().items():
            if saved["config"].get(key) != value:
                flag = key.removeprefix("model_").replace("_", "-")
                self.ranks.abort_all(
                    UsageError(f"--resume: {path} was trained with {flag} {saved['config'].get(key)}, not {value}")
                )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])
        self.guard.load_state_dict(saved["guard"])
        if saved["did_not_fit"]:
            # Memory has been freed since: what was learned of sizes holds no longer.
            self.guard.policy = MicroBatchPolicy(self.planned_micro_batch)
        self.feed.loader.load_state_dict(saved["loader"])
        restore_random_state(unpack_random_state(saved["random"]))
        progress = Progress(**saved["progress"])
        if saved["result"] is not None and progress.epoch >= self.config.epochs:
            return progress, dict(saved["result"])
        inside = f", batch {progress.batch} of {len(self.feed)}" if progress.batch else ""
        self.monitor.say(f"continues after epoch {progress.epoch} of {self.config.epochs}{inside}")
        return progress, None

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one it continues."""
        digest = hashlib.blake2b(digest_size=16)
        for name in SPLITS:
            digest.update(self.split.indices[name].tobytes() + self.targets[self.split.indices[name]].tobytes())
        model = {f"model_{k}": v for k, v in asdict(self.model_config).items()}
        return self.config.identity() | {"split_and_labels": digest.hexdigest()} | model

    # An epoch

    def _train_epoch(self, progress: Progress) -> None:
        """Steps from progress.batch to the epoch's end."""
        self.model.train()
        self.guard.begin_epoch(progress.epoch)
        self.feed.seek(progress.epoch, progress.batch)
        self._batches: Generator[DeviceBatch] = self.feed.batches()
        self._shrunk = self._is_cut = False
        while progress.batch < len(self.feed):
            loss = self._step(progress)
            self.monitor.step(progress, len(self.feed), loss)
            if time.monotonic() - self._saved_at >= self.config.checkpoint_interval_s:
                self._save_last(progress)
        # Its threads, and the last batch.
        self._batches.close()

    def _step(self, progress: Progress) -> float:
        """One step of the optimizer. -> the mean loss over the traces of all ranks."""
        began = time.perf_counter()
        step = self._fetch(progress)
        progress.waited_s += time.perf_counter() - began
        first = step.batches[0]
        key = step_key(self.config.seed, first.epoch, first.number, self.ranks.rank)
        try:
            loss = self.guard.step(
                step.size,
                partial(self.forward.step_loss, step),
                global_size=step.whole,
                # Batches that are accumulated are computed one after the other. Of this rank's
                # slices, but the same on all ranks: they have to try the same sizes.
                max_micro_batch=max(-(-batch.whole // self.ranks.world_size) for batch in step.batches),
                seed=partial(seed_step, key, self.forward.device),
            )
        except InsufficientMemoryError as error:
            progress.seconds += time.perf_counter() - began
            self._end(progress, error.exit_code, str(error))
        loss = float(self.ranks.sum(torch.tensor([loss], dtype=torch.float64)))
        if not math.isfinite(loss):
            self._report_nonfinite(loss, step)
        progress.batch += len(step.batches)
        progress.loss_sum += loss * step.whole
        progress.loss_count += step.whole
        progress.seconds += time.perf_counter() - began
        return loss

    def _fetch(self, progress: Progress) -> AccumulatedBatch:
        """The batches of the next step, where no rank has to stop before it."""
        batches: list[DeviceBatch] = []
        failed = False
        if self._is_cut:
            self.feed.seek(progress.epoch, progress.batch)
            self._batches, self._is_cut = self.feed.batches(), False
        while len(batches) < min(self.config.grad_accum_steps, len(self.feed) - progress.batch) and not failed:
            batch = next_batch(self._batches)
            if batch is not None:
                batches.append(batch)
            elif self._shrunk:
                failed = True
            else:
                batches.clear()
                self._give_back()
                self.feed.seek(progress.epoch, progress.batch)
                self._batches, self._shrunk, self._is_cut = self.feed.batches(), True, False
        code = self.ranks.all_reduce_max(InsufficientMemoryError.exit_code if failed else self.stop.signum)
        if code:
            self._end(progress, code, "one batch does not fit")
        return AccumulatedBatch(batches)

    def _report_nonfinite(self, loss: float, step: AccumulatedBatch) -> NoReturn:
        own = [(i, q) for b in step.batches for i, q in zip(b.trace_index.tolist(), b.question_id, strict=True)]
        found = self.ranks.gather([q for i, q in own if self.store[i].has_nonfinite])
        ids = [q for of_rank in found for q in of_rank]
        if ids:
            reason = f"the trace of question {ids[0]!r} holds NaN or infinite values"
        else:
            reason = f"questions of the step: {', '.join(q for _, q in own[:4])}, ...; lower --lr"
            if self.scaler is not None:
                reason += ", or, as float16 ends at 65,504, --standardize or --precision bf16"
        self.ranks.abort_all(TrainingError(f"the loss is {loss}: {reason}"))

    # Validation and test

    def _validate(self, progress: Progress) -> None:
        """Scores the validation part, keeps the best epoch, begins the next one."""
        scores = self._scores("val", progress)
        value = auroc(scores.y, scores.logits)
        if value > progress.best_val_auroc:
            progress.best_val_auroc, progress.best_epoch = value, progress.epoch
            self._save_best(progress, scores)
        progress.end_epoch(scores.loss, value)

    def _scores(self, part: str, progress: Progress | None) -> SplitScores:
        indices = self.split.indices[part]
        feed = BatchFeed(self.name, self.store, indices, self.config, self.model_config, self.ranks, shuffle="none")
        if self._is_short:
            feed.shrink()
        try:
            scores = score_split(self.forward, self.guard, feed, self.ranks, lambda: self.stop.signum)
        except EvaluationStopped as halted:
            self._end(progress, halted.code, f"out of memory while scoring the {part} part")
        wrong = np.flatnonzero(~np.isfinite(scores.logits))
        if len(wrong):
            question = self.store.question_ids[int(self.split.indices[part][wrong[0]])]
            self.ranks.abort_all(TrainingError(f"{self.name} gives no number for the trace of question {question!r}"))
        return scores

    def _finish(self, progress: Progress) -> dict[str, Any]:
        """Tests the best epoch's weights. last.pt keeps the last ones, so that more epochs can follow."""
        last = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        best = self.ranks.on_rank_zero(lambda: load_checkpoint(self.folder / BEST))
        self.model.load_state_dict(best["model"])
        # Nothing to save where this ends early: last.pt is whole.
        scores = self._scores("test", None)
        self.model.load_state_dict(last)
        result = self.ranks.on_rank_zero(lambda: self._result(progress, best, scores))
        self._save_last(progress, result)
        return result

    def _result(self, progress: Progress, best: dict[str, Any], scores: SplitScores) -> dict[str, Any]:
        return {
            **evaluate_split(
                self.store,
                self.split.indices["test"],
                scores.y,
                scores.logits,
                best["threshold"],
                best["temperature"],
                self.config.seed,
            ),
            # Of the weights that were tested: a run that was killed right after they were written
            # may, on another device or number of ranks, not have come to them again.
            "best_val_auroc": best["val_auroc"],
            "best_epoch": best["epoch"],
            "history": progress.history,
            "oom_events": self.guard.events,
            "seconds_per_epoch": progress.seconds_per_epoch,
        }

    # Checkpoints

    def _save_last(
        self, progress: Progress, result: dict[str, Any] | None = None, *, did_not_fit: bool = False
    ) -> None:
        """The state between two steps; rank 0's, as weights and progress are those of all.
        did_not_fit: one trace alone was too much."""
        if not self.ranks.is_rank_zero:
            return
        self.monitor.flush()
        save_checkpoint(
            self.folder / LAST,
            {
                "version": CHECKPOINT_VERSION,
                "name": self.name,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
                "progress": asdict(progress),
                "loader": self.feed.state_dict(progress.epoch, progress.batch),
                "random": pack_random_state(get_random_state()),
                "guard": self.guard.state_dict(),
                "did_not_fit": did_not_fit,
                "config": self._identity(),
                "result": result,
            },
        )
        self._saved_at = time.monotonic()
        self.guard.cuda_cache.after_checkpoint()

    def _save_best(self, progress: Progress, scores: SplitScores) -> None:
        """`scores` of the validation part."""
        if not self.ranks.is_rank_zero:
            return
        about = {
            "threshold": youden_threshold(scores.y, scores.logits),
            "temperature": fit_temperature(scores.y, scores.logits),
            "epoch": progress.epoch,
            "val_auroc": progress.best_val_auroc,
            "attention_threshold": self.config.attention_threshold,
            "top_k": self.config.top_k,
            "precision": self.config.precision,
        }
        save_checkpoint(
            self.folder / BEST, detector_checkpoint(self.name, self.model, self.model_config, self.store, about)
        )

    # Out of memory, and stopping

    def _on_event(self, event: dict[str, Any]) -> None:
        self.monitor.say(
            f"out of memory in {event['phase']} of epoch {event['epoch'] + 1}, step {event['step']}: "
            f"micro-batch {event['size_before']} -> {event['size_after']}"
        )

    def _give_back(self) -> None:
        """Host memory ran out: caches, batches in flight and workers go first."""
        if self.feed.num_workers:
            self._batches.close()
            self._is_cut = True
        self.feed.shrink()
        self._is_short = True
        self.monitor.say("host memory ran out; one batch in flight from now on, nothing cached")

    def _end(self, progress: Progress | None, code: int, reason: str) -> NoReturn:
        """Ends all ranks: a signal came, or memory is too small. A checkpoint, and the way on."""
        if code == InsufficientMemoryError.exit_code and self.on_fatal_oom is not None:
            self.on_fatal_oom()
        if progress is not None:
            self._save_last(progress, did_not_fit=code == InsufficientMemoryError.exit_code)
        saved = f"saved {self.folder / LAST}"
        if code == InsufficientMemoryError.exit_code:
            self.ranks.abort_all(
                InsufficientMemoryError(f"{self.name}: {reason}; {saved}; free memory, then: {self.resume_command}")
            )
        self.ranks.abort_all(RunInterruptedError(f"stopped; {saved}; continue with: {self.resume_command}", code))
