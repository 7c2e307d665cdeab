"""What the checkpoint of a detector holds."""

from dataclasses import asdict
from typing import Any

import torch

import tracestore
from tracestore.detectors.config import ModelConfig
from tracestore.detectors.models import Detector
from tracestore.store.read.store import TraceStore

DETECTOR_VERSION = 4


def detector_checkpoint(
    name: str, model: Detector, config: ModelConfig, store: TraceStore, about: dict[str, Any]
) -> dict[str, Any]:
    """What best.pt holds: weights (a standardiser's statistics among them), architecture,
    versions, what the store's traces were like, and `about`: threshold (of the logit),
    temperature, attention_threshold, top_k, precision and how the epoch was chosen."""
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
            "attention": store.attention,
            "attention_layout": store.attention_layout,
        },
        **about,
    }
