"""Training one detector, read top to bottom."""

import gc
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from tracestore.data.loader import TraceLoader
from tracestore.errors import DoesNotFitError, TrainingError, UsageError, printable
from tracestore.store.reader import TraceStore
from tracestore.train.checkpoint import load_checkpoint, pack_random_state, save_checkpoint, unpack_random_state
from tracestore.train.gine import GraphInputs
from tracestore.train.metrics import auroc, evaluate_test, youden_threshold
from tracestore.train.models import VIEWS, Detector, ModelConfig, Standardiser, detector_loss, make_model
from tracestore.train.oom import OOMGuard
from tracestore.train.oom_errors import classify
from tracestore.train.snapshot import random_state, restore_random_state
from tracestore.train.split import Split

CHECKPOINT_VERSION = 1
WEIGHT_DECAY = 1e-5
HISTORY = ("train_loss", "val_loss", "val_auroc", "traces_per_s", "data_wait_share")


@dataclass(frozen=True)
class TrainConfig:
    """How a detector is trained; the names are tools/train.py's flags."""

    epochs: int = 50
    batch_size: int = 16
    lr: float = 0.001
    seed: int = 42
    device: str = "cpu"
    shuffle: str = "global"
    shuffle_buffer: int = 1000
    score_threshold: float = 0.5
    attention_threshold: float = 0.0
    top_k: float | None = None
    max_cache_batches: int = 2
    num_workers: int = 0
    loader_threads: int = 2
    resume: bool = False


@dataclass
class Progress:
    """What a run has come to; everything a resumed run needs beside weights."""

    epoch: int = 0
    history: dict[str, list[float]] = field(default_factory=lambda: {k: [] for k in HISTORY})
    seconds_per_epoch: list[float] = field(default_factory=list)
    best_val_auroc: float = -math.inf
    best_epoch: int = -1
    # Of an epoch that was left in the middle:
    loss_sum: float = 0.0
    loss_count: int = 0
    seconds: float = 0.0


class _BatchesOfEpoch(Dataset[Any]):
    """The batches of one epoch by number, for DataLoader workers."""

    def __init__(self, loader: TraceLoader, epoch: int) -> None:
        self.loader, self.epoch = loader, epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, batch: int) -> Any:
        return self.loader.gather(self.loader.batch_indices(batch, self.epoch))


def _batches(loader: TraceLoader, num_workers: int, start: int) -> Iterator[Any]:
    """The batches from `start` on, by the loader's threads or by worker processes."""
    if num_workers == 0:
        yield from loader
        return
    # A generator of its own: drawing seeds for workers must not change the training.
    yield from DataLoader(
        _BatchesOfEpoch(loader, loader.epoch),
        batch_size=None,
        sampler=range(start, len(loader)),
        num_workers=num_workers,
        generator=torch.Generator(),
    )


class DetectorRun:
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
        log: Callable[[str], None],
    ) -> None:
        self.name, self.store, self.split, self.targets = name, store, split, targets
        self.model_config, self.config, self.folder, self.log = model_config, config, folder, log
        self.device = torch.device(config.device)
        self.resume_command = f"python tools/train.py --store {store.path} --output-dir {folder.parent} --resume"
        # Called before the checkpoint of a run that cannot go on: gives memory back.
        self.on_last_resort: Callable[[], None] | None = None
        # Where to begin; None: whole batches.
        self.planned_micro_batch: int | None = None
        self._process = psutil.Process()

    # Data

    def _loader(self, part: str, *, shuffle: str) -> TraceLoader:
        c = self.config
        packed = self.store.attention_layout == "causal" and self.device.type == "cpu"
        view = VIEWS[self.name]
        return TraceLoader(
            self.store,
            view,
            batch_size=c.batch_size,
            shuffle=shuffle,
            seed=c.seed,
            num_threads=c.loader_threads,
            indices=self.split.indices[part],
            buffer_size=c.shuffle_buffer,
            score_threshold=c.score_threshold,
            attention_threshold=c.attention_threshold,
            top_k=c.top_k,
            edges="packed" if packed else "coo",
            max_cache_batches=c.max_cache_batches,
            pin_memory=self.device.type == "cuda",
            rank=0,
            world_size=1,
        )

    def _inputs(self, batch: Any) -> Any:
        if VIEWS[self.name] == "sequence":
            return batch.sequences
        # top-k has already marked what it drops as NaN, which is above nothing.
        threshold = self.config.attention_threshold if self.config.top_k is None else -math.inf
        return GraphInputs.from_batch(batch, threshold)

    def _slice(self, inputs: Any, begin: int, end: int, size: int) -> Any:
        """Traces begin .. end on the device: moved here, inside what the guard watches."""
        if begin > 0 or end < size:
            inputs = inputs.traces(begin, end) if isinstance(inputs, GraphInputs) else inputs[begin:end]
        return inputs if self.device.type == "cpu" else inputs.to(self.device)

    # Steps

    def _check_finite(self, loss: float, batch: Any) -> None:
        if math.isfinite(loss):
            return
        ids = [batch.question_id[k] for k, i in enumerate(batch.trace_index) if self.store[int(i)].has_nonfinite]
        if ids:
            raise TrainingError(f"the loss is {loss}: the trace of question {ids[0]!r} holds NaN or infinite values")
        raise TrainingError(
            f"the loss is {loss}; questions of the batch: {', '.join(batch.question_id[:4])}, ...; lower --lr"
        )

    def _train_epoch(self, loader: TraceLoader, progress: Progress) -> None:
        self.model.train()
        start = loader.state_dict()["batch"]
        began, waited = time.perf_counter(), 0.0
        iterator = iter(_batches(loader, self.config.num_workers, start))
        done, shrunk = start, False
        while True:
            asked = time.perf_counter()
            batch, out_of_memory = self._next(iterator)
            waited += time.perf_counter() - asked
            if out_of_memory:
                progress.seconds += time.perf_counter() - began
                if shrunk:
                    self._stop(loader, progress, done, DoesNotFitError("one batch does not fit"))
                self._give_back(loader)
                loader.load_state_dict(loader.state_dict() | {"epoch": progress.epoch, "batch": done})
                iterator, shrunk = iter(_batches(loader, self.config.num_workers, done)), True
                began = time.perf_counter()
                continue
            if batch is None:
                break
            inputs, y = self._inputs(batch), batch.y
            size = len(y)

            def loss_of(
                begin: int, end: int, inputs: Any = inputs, y: torch.Tensor = y, size: int = size
            ) -> torch.Tensor:
                output = self.model(self._slice(inputs, begin, end, size))
                return detector_loss(output, y[begin:end].to(self.device), self.model_config.kl_weight)

            try:
                loss = self.guard.step(size, loss_of)
            except DoesNotFitError as error:
                progress.seconds += time.perf_counter() - began
                self._stop(loader, progress, done, error)
            self._check_finite(loss, batch)
            progress.loss_sum += loss * size
            progress.loss_count += size
            done += 1
            del batch, inputs, y, loss_of
        seconds = progress.seconds + time.perf_counter() - began
        progress.seconds_per_epoch.append(seconds)
        progress.history["train_loss"].append(progress.loss_sum / max(1, progress.loss_count))
        progress.history["traces_per_s"].append(progress.loss_count / max(seconds, 1e-9))
        progress.history["data_wait_share"].append(waited / max(seconds, 1e-9))
        progress.loss_sum, progress.loss_count, progress.seconds = 0.0, 0, 0.0

    def _end_without_validation(self, loader: TraceLoader, progress: Progress, error: BaseException) -> None:
        progress.history["val_loss"].append(math.nan)
        progress.history["val_auroc"].append(math.nan)
        progress.epoch += 1
        self._stop(loader, progress, 0, DoesNotFitError(f"validation: {error or 'out of memory'}"))

    def _next(self, iterator: Iterator[Any]) -> tuple[Any, bool]:
        """The next batch or None, and whether memory ran out while it was gathered."""
        try:
            return next(iterator, None), False
        except Exception as error:
            if classify(error) is None:
                raise
        return None, True

    def _give_back(self, loader: TraceLoader) -> None:
        """Host memory ran out: caches and batches in flight go first."""
        loader.shrink()
        self.log(f"{self.name}: host memory ran out; one batch in flight from now on, nothing cached")

    def _stop(self, loader: TraceLoader, progress: Progress, done: int, error: DoesNotFitError) -> None:
        """One trace does not fit: a checkpoint before the failed step, and the way on."""
        if self.on_last_resort is not None:
            self.on_last_resort()
        state = loader.state_dict() | {"epoch": progress.epoch, "batch": done}
        self._save_last(progress, state)
        raise DoesNotFitError(
            f"{self.name}: {error}; saved {self.folder / 'last.pt'}; free memory, then: {self.resume_command}"
        ) from None

    @torch.no_grad()
    def _scores(self, part: str) -> tuple[np.ndarray, np.ndarray, float]:
        """Labels, logits and mean loss over a part, without padding."""
        self.model.eval()
        labels, logits, total = [], [], 0.0
        for batch in self._loader(part, shuffle="none"):
            inputs, y = self._inputs(batch), batch.y

            def run(begin: int, end: int, inputs: Any = inputs, y: torch.Tensor = y) -> tuple[torch.Tensor, float]:
                output = self.model(self._slice(inputs, begin, end, len(y)))
                loss = detector_loss(output, y[begin:end].to(self.device), self.model_config.kl_weight)
                return output.logits, float(loss) * (end - begin)

            for piece, loss in self.guard.evaluate(len(y), run):
                logits.append(piece.float().cpu())
                total += loss
            labels.append(batch.y)
        y_all = (torch.cat(labels).numpy() >= 0.5).astype(int)
        score = torch.cat(logits).numpy().astype(np.float64)
        if not np.isfinite(score).all():
            bad = int(self.split.indices[part][int(np.flatnonzero(~np.isfinite(score))[0])])
            raise TrainingError(
                f"{self.name} gives no number for the trace of question {self.store.question_ids[bad]!r}"
            )
        return y_all, score, total / len(y_all)

    def _fit_standardiser(self) -> None:
        """Mean and standard deviation per layer and column over the training traces."""
        standardiser = next(m for m in self.model.modules() if isinstance(m, Standardiser))
        if not standardiser.active:
            return
        total = torch.zeros(self.store.num_layers, self.store.hidden_dim, dtype=torch.float64)
        squares, count = torch.zeros_like(total), 0
        for index in self.split.indices["train"]:
            trace = self.store[int(index)]
            rows = trace.last_token[:, None] if VIEWS[self.name] == "sequence" else trace.hidden_states
            values = _as_float(rows, self.store.hidden_dtype)
            total += values.sum(1)
            squares += values.square().sum(1)
            count += values.shape[1]
        mean = total / count
        std = (squares / count - mean.square()).clamp_min(0).sqrt().clamp_min(1e-6)
        standardiser.mean.copy_(mean)
        standardiser.std.copy_(std)

    # The run

    def _setup(self) -> None:
        torch.manual_seed(self.config.seed)
        self.model: Detector = make_model(self.name, self.model_config)
        self.model.to(self.device)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=self.config.lr, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.loader = self._loader("train", shuffle=self.config.shuffle)
        self.guard = OOMGuard(
            self.model,
            self.optimizer,
            on_event=self._on_event,
            on_host_memory=lambda: self._give_back(self.loader),
        )
        self.guard.sizes.size = self.planned_micro_batch

    def _on_event(self, event: dict[str, Any]) -> None:
        self.log(
            f"{self.name}: out of memory in {event['phase']} of epoch {event['epoch'] + 1}, step {event['step']}: "
            f"micro-batch {event['size_before']} -> {event['size_after']}"
        )

    def _save_last(
        self, progress: Progress, loader_state: dict[str, Any], result: dict[str, Any] | None = None
    ) -> None:
        save_checkpoint(
            self.folder / "last.pt",
            {
                "version": CHECKPOINT_VERSION,
                "name": self.name,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": asdict(progress),
                "loader": loader_state,
                "random": pack_random_state(random_state()),
                "guard": self.guard.state_dict(),
                "config": self._identity(),
                "result": result,
            },
        )

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one it continues."""
        c = asdict(self.config)
        for name in ("epochs", "resume", "num_workers", "loader_threads", "max_cache_batches", "device"):
            c.pop(name)
        digest = hashlib.blake2b(digest_size=16)
        for part in ("train", "val", "test"):
            digest.update(self.split.indices[part].tobytes() + self.targets[self.split.indices[part]].tobytes())
        c["split_and_labels"] = digest.hexdigest()
        return c | {f"model_{k}": v for k, v in asdict(self.model_config).items()}

    def _save_best(self, progress: Progress, threshold: float) -> None:
        save_checkpoint(
            self.folder / "best.pt",
            {
                "version": CHECKPOINT_VERSION,
                "name": self.name,
                "model": self.model.state_dict(),
                "model_config": asdict(self.model_config),
                "threshold": threshold,
                "epoch": progress.epoch,
                "val_auroc": progress.best_val_auroc,
                "attention_threshold": self.config.attention_threshold,
                "top_k": self.config.top_k,
            },
        )

    def _resume(self, loader: TraceLoader) -> tuple[Progress, dict[str, Any] | None]:
        path = self.folder / "last.pt"
        if not self.config.resume or not path.exists():
            return Progress(), None
        saved = load_checkpoint(path)
        mine = self._identity()
        for key, value in mine.items():
            if saved["config"].get(key) != value:
                flag = key.removeprefix("model_").replace("_", "-")
                raise UsageError(f"--resume: {path} was trained with {flag} {saved['config'].get(key)}, not {value}")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.guard.load_state_dict(saved["guard"])
        loader.load_state_dict(saved["loader"])
        restore_random_state(unpack_random_state(saved["random"]))
        progress = Progress(**saved["progress"])
        if saved["result"] is not None and progress.epoch >= self.config.epochs:
            return progress, dict(saved["result"])
        self.log(f"{self.name}: continues after epoch {progress.epoch} of {self.config.epochs}")
        return progress, None

    def run(self) -> dict[str, Any]:
        """Trains, selects on validation, tests once. -> the entry of results.json.
        DoesNotFitError, with a checkpoint, where memory ran out for good."""
        try:
            return self._run()
        except Exception as error:
            if classify(error) is None:
                raise
            reason = f"out of memory: {error}" if str(error) else "out of memory"
        # Outside what the guard watches, validation, files, logs: on from the last checkpoint.
        gc.collect()
        if self.on_last_resort is not None:
            self.on_last_resort()
        if not (self.folder / "last.pt").exists():
            self._setup()
            self._save_last(Progress(), self.loader.state_dict())
        raise DoesNotFitError(f"{self.name}: {printable(reason, 200)}; free memory, then: {self.resume_command}")

    def _run(self) -> dict[str, Any]:
        self._setup()
        loader = self.loader
        progress, result = self._resume(loader)
        if result is not None:
            self.log(f"{self.name}: already finished")
            return result
        if progress.epoch == 0 and progress.loss_count == 0:
            self._fit_standardiser()
        while progress.epoch < self.config.epochs:
            loader.set_epoch(progress.epoch)
            self.guard.begin_epoch(progress.epoch)
            self._train_epoch(loader, progress)
            try:
                y, score, val_loss = self._scores("val")
            except (DoesNotFitError, MemoryError) as error:
                # The epoch's training is done: a resumed run begins with the next one.
                self._end_without_validation(loader, progress, error)
            val_auroc = auroc(y, score)
            progress.history["val_loss"].append(val_loss)
            progress.history["val_auroc"].append(val_auroc)
            if val_auroc > progress.best_val_auroc:
                progress.best_val_auroc, progress.best_epoch = val_auroc, progress.epoch
                self._save_best(progress, youden_threshold(y, score))
            progress.epoch += 1
            self._save_last(progress, loader.state_dict() | {"epoch": progress.epoch, "batch": 0})
            self.guard.cleaner.after_checkpoint()
            self._log_epoch(progress)
        last = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        result = self._finish(progress)
        # last.pt keeps the last weights, so that more epochs can follow.
        self.model.load_state_dict(last)
        self._save_last(progress, loader.state_dict() | {"epoch": progress.epoch, "batch": 0}, result)
        return result

    def _log_epoch(self, progress: Progress) -> None:
        h = {name: values[-1] for name, values in progress.history.items()}
        memory = self._process.memory_info().rss
        self.log(
            f"{self.name} epoch {progress.epoch}/{self.config.epochs}: loss {h['train_loss']:.4f}, "
            f"val loss {h['val_loss']:.4f}, val AUROC {h['val_auroc']:.3f}, {h['traces_per_s']:,.0f} traces/s, "
            f"waiting for data {h['data_wait_share']:.0%}, memory {memory / 2**20:,.0f} MiB"
        )

    def _finish(self, progress: Progress) -> dict[str, Any]:
        best = load_checkpoint(self.folder / "best.pt")
        self.model.load_state_dict(best["model"])
        y, score, _ = self._scores("test")
        order = self.split.indices["test"]
        return {
            "test": evaluate_test(y, score, best["threshold"], self.config.seed),
            "best_val_auroc": progress.best_val_auroc,
            "best_epoch": progress.best_epoch,
            "threshold": best["threshold"],
            "history": progress.history,
            "oom_events": self.guard.events,
            "seconds_per_epoch": progress.seconds_per_epoch,
            "test_scores": {
                "question_id": [self.store.question_ids[int(k)] for k in order],
                "label": y.tolist(),
                "logit": score.tolist(),
            },
        }


def _as_float(rows: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy((rows.astype("<u4") << 16).view("<f4")).double()
    return torch.from_numpy(rows.astype("<f8"))
