"""Content of the checkpoint of a trained detector."""

from dataclasses import asdict
from typing import Any

import torch

import tracestore
from tracestore.detectors.interface import answer_positions
from tracestore.detectors.model_config import ModelConfig
from tracestore.detectors.models import DetectorModel
from tracestore.store.read.store import TraceStore

DETECTOR_VERSION = 6


def detector_checkpoint(
    name: str, model: DetectorModel, config: ModelConfig, store: TraceStore, training: dict[str, Any]
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
        },
        **training,
    }
