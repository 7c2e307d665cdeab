"""Content of the checkpoints that `tracestore predict` reads: of trained models, and of fitted detectors."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

import tracestore
from tracestore.detectors.apart import DetectorApart
from tracestore.detectors.interface import Detector, answer_positions
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.models import DetectorModel
from tracestore.detectors.registry import make_detector, registry
from tracestore.errors import TracestoreError, UsageError
from tracestore.oom.oom_errors import is_out_of_memory
from tracestore.store.format.provenance import Provenance
from tracestore.store.read.store import TraceStore
from tracestore.store.read.table import hashes

FITTED_VERSION, MODEL_VERSION = 3, 7  # of saved detectors on features, and of best.pt


@dataclass(frozen=True)
class FittedDetector:
    """A detector of a checkpoint.

    Attributes
    ----------
    name : str
    detector : Detector
    slope, intercept : float
        The logit of a hallucination is slope * score + intercept.
    threshold : float
        Decision threshold of the logit.
    shape : (int, int)
        Layers and hidden size of the store that the detector was fitted to.
    provenance : tuple of Provenance
        That of the same store.
    seen : torch.Tensor
        Of `seen_hashes`: the traces that it was fitted to.
    """

    name: str
    detector: Detector
    slope: float
    intercept: float
    threshold: float
    shape: tuple[int, int]
    provenance: tuple[Provenance, ...]
    seen: torch.Tensor

    def check(self, store: TraceStore) -> None:
        """Raise UsageError or MissingFieldError unless the detector can read the store."""
        check_shape(self.name, self.shape, store)
        self.detector.check(store)

    def logits(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return calibrated logits ``(n,)`` float64 of traces, NaN where there is none.

        Raises
        ------
        UsageError
            The fitted values are not those of such a detector, or not for such a store.
        """
        try:
            scores = self.slope * self.detector.score(store, indices) + self.intercept
        except Exception as error:
            if isinstance(error, TracestoreError | OSError) or is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UsageError(f"not a complete detector: {self.name} cannot score: {reason:.200}") from error
        return np.where(np.isfinite(scores) & ~store.has_nonfinite[indices], scores, np.nan)


def check_shape(name: str, shape: tuple[int, int], store: TraceStore) -> None:
    """Raise UsageError unless a store has the layers and the hidden size that a detector was fitted to."""
    if (found := (store.num_layers, store.hidden_dim)) != shape:
        raise UsageError(
            f"{store.path}: {name} was fitted to {shape[0]} layers of {shape[1]} columns, this store has {found[0]} "
            f"of {found[1]}"
        )


def content(
    name: str,
    detector: Detector,
    store: TraceStore,
    seen: np.ndarray,
    slope: float,
    intercept: float,
    threshold: float,
) -> dict[str, Any]:
    """Return the content of the checkpoint of a detector that was fitted to traces `seen`; see `FittedDetector`.

    Raises
    ------
    UsageError
        The detector cannot be saved.
    """
    return {
        "detector_version": FITTED_VERSION,
        "tracestore": tracestore.__version__,
        "name": name,
        "parameters": json.dumps(detector.parameters),
        "model": _to_tensors(detector.state()),
        "slope": slope,
        "intercept": intercept,
        "threshold": threshold,
        "store": {
            "shape": [store.num_layers, store.hidden_dim],
            "provenance": [p.to_json() for p in store.provenance],
            "seen": seen_hashes(store, seen),
        },
    }


def from_content(saved: Mapping[str, Any], path: object) -> FittedDetector:
    """Return the detector of a checkpoint, which is untrusted data.

    Raises
    ------
    UsageError
        The checkpoint is of another version or damaged, or the detector is not installed.
    """
    if saved["detector_version"] != FITTED_VERSION:
        raise UsageError(f"{path}: of another version of tracestore; fit the detector again")
    try:
        name, options = str(saved["name"]), json.loads(saved["parameters"])
        slope, intercept, threshold = numbers = [float(saved[key]) for key in ("slope", "intercept", "threshold")]
        layers, columns = map(int, saved["store"]["shape"])
        if not np.isfinite(numbers).all():
            raise ValueError
        origin = tuple(map(Provenance.from_json, saved["store"]["provenance"]))
        seen = checked_hashes(saved["store"]["seen"])
        is_foreign = name in registry() and registry()[name].is_foreign
        detector = DetectorApart(name, options) if is_foreign else make_detector(name, **options)
        detector.load_state(tree_map_only(torch.Tensor, torch.Tensor.numpy, saved["model"]))
    except Exception as error:
        if isinstance(error, UsageError) or is_out_of_memory(error):
            raise
        raise UsageError(f"{path}: not a complete detector: {type(error).__name__}") from None
    return FittedDetector(name, detector, slope, intercept, threshold, (layers, columns), origin, seen)


def _to_tensors(value: Any) -> Any:
    """Return a state with tensors for arrays, and plain dicts and lists, which torch.load reads as data."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    if isinstance(value, dict):
        return {key: _to_tensors(item) for key, item in value.items()}
    return [_to_tensors(item) for item in value] if isinstance(value, list | tuple) else value


def detector_checkpoint(
    name: str,
    model: DetectorModel,
    config: ModelConfig,
    store: TraceStore,
    seen: torch.Tensor,
    training: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of best.pt.

    Parameters
    ----------
    name : str
        Name of the detector.
    model : DetectorModel
        Its weights are stored, with the statistics of its Standardizer.
    config : ModelConfig
    store : TraceStore
        The training data; its shape, attention layout and provenance are stored, and whether it tells where answers are.
    seen : torch.Tensor
        Of `seen_hashes`: the traces of training and validation.
    training : dict
        Further entries: threshold (of the logit), temperature, attention_threshold, top_k,
        precision, epoch and val_auroc.
    """
    return {
        "version": MODEL_VERSION,
        "tracestore": tracestore.__version__,
        "torch": str(torch.__version__),
        "name": name,
        "model": model.state_dict(),
        "model_config": asdict(config),
        "store": {
            "num_layers": store.num_layers,
            "hidden_dim": store.hidden_dim,
            "hidden_dtype": store.hidden_dtype,
            "attention": store.attention_mode,
            "attention_layout": store.attention_layout,
            "answer_positions": answer_positions(store),
            "provenance": [p.to_json() for p in store.provenance],
            "seen": seen,
        },
        **training,
    }


def seen_hashes(store: TraceStore, indices: np.ndarray) -> torch.Tensor:
    """Return hashes ``(n,)`` int64 of the traces that a detector has seen, sorted."""
    return torch.from_numpy(np.sort(hashes(store.internals, indices).view(np.int64)))


def checked_hashes(value: Any) -> torch.Tensor:
    """Return the hashes of a checkpoint, which is untrusted data; raise ValueError for other values."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or value.ndim != 1:
        raise ValueError("hashes of traces")
    return value


def count_seen(seen: torch.Tensor, store: TraceStore) -> int:
    """Return how many traces of a store have one of the hashes of `seen_hashes`."""
    return int(np.isin(seen_hashes(store, store.indices).numpy(), seen.numpy()).sum())
