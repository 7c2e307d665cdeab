"""Content of the checkpoint of a trained detector."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

import tracestore
from tracestore.detectors.interface import answer_positions
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.models import DetectorModel
from tracestore.store.read.store import TraceStore
from tracestore.store.read.table import hashes

DETECTOR_VERSION = 7


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
        "version": DETECTOR_VERSION,
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
