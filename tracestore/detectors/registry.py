"""The detectors: one entry each. Imports no torch, so that commands can check names at once."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from tracestore.data.batch_format import EdgeFormat, View
from tracestore.detectors.model_config import ModelConfig
from tracestore.store.read.store import TraceStore

if TYPE_CHECKING:
    from tracestore.detectors.models import Detector


@dataclass(frozen=True)
class DetectorSpec:
    """A detector that can be trained.

    Parameters
    ----------
    name : str
        Name in results.json and in checkpoints; also the folder of its checkpoints.
    view : {"sequence", "graph"}
        The view of the store that the model reads.
    flag : str
        Suffix of the options ``--run-FLAG`` and ``--no-run-FLAG`` of ``tracestore train``.
    constructor : str
        Import path of the model class, ``module:name``.
    options : mapping
        Fields of `ModelConfig` that this detector sets, whatever the options of the run.
    twin_of : str, optional
        The graph detector of which this one is the edge-free twin, trained and reported together with it.
    is_default : bool
        Trained by default.
    reads_middle : bool
        Reads the layers from a quarter to seven eighths of the depth, unless the options name layers.
    """

    name: str
    view: View
    flag: str
    constructor: str
    options: Mapping[str, Any] = field(default_factory=dict)
    twin_of: str | None = None
    is_default: bool = True
    reads_middle: bool = False

    def model_config(self, config: ModelConfig) -> ModelConfig:
        """Return the config with what this detector sets."""
        options = dict(self.options)
        if self.reads_middle and config.layers is None:
            options["layers"] = tuple(range(round(config.num_layers / 4), round(config.num_layers * 7 / 8)))
        return replace(config, **options)

    def edge_format(self, config: ModelConfig, store: TraceStore, device_type: str) -> EdgeFormat:
        """Return the ``edge_format`` argument of TraceLoader for this detector.

        Raises
        ------
        MissingFieldError
            See `ModelConfig.edge_format`.
        """
        return config.edge_format(store, device_type) if self.view == "graph" else "coo"


_LSTM, _GNN, _GVAE = (f"tracestore.detectors.models:{name}" for name in ("LstmSolo", "GnnDetLstm", "GvaeLstm"))
_NO_EDGES = {"edges": False}
# The architectures of the first version: sums without normalization, and the mean over all tokens.
_V0 = {
    "normalization": "none",
    "aggregation": "sum",
    "residual": False,
    "pooling": "all",
    "layer_pooling": "final",
    "num_readers": 1,
    "skip": "none",
    "mask_diagonal": False,
    "mask_sinks": 0,
    "neighbors": None,
    "detach_target": False,
    "column_mean": False,
}
DETECTORS = {
    spec.name: spec
    for spec in (
        DetectorSpec("lstm_solo", "sequence", "lstm", _LSTM),
        DetectorSpec("gnn_det_lstm", "graph", "gnn-det", _GNN, reads_middle=True),
        DetectorSpec(
            "gnn_det_lstm_no_edges", "graph", "gnn-det-no-edges", _GNN, _NO_EDGES, "gnn_det_lstm", reads_middle=True
        ),
        DetectorSpec("gvae_lstm", "graph", "gvae", _GVAE, reads_middle=True),
        DetectorSpec("gvae_lstm_no_edges", "graph", "gvae-no-edges", _GVAE, _NO_EDGES, "gvae_lstm", reads_middle=True),
        DetectorSpec("lstm_solo_v0", "sequence", "lstm-v0", _LSTM, _V0, is_default=False),
        DetectorSpec("gnn_det_lstm_v0", "graph", "gnn-det-v0", _GNN, _V0, is_default=False),
        DetectorSpec("gvae_lstm_v0", "graph", "gvae-v0", _GVAE, _V0, is_default=False),
    )
}
DEFAULT_DETECTORS = tuple(name for name, spec in DETECTORS.items() if spec.is_default)


def make_model(name: str, config: ModelConfig) -> "Detector":
    """Return an untrained detector; `name` is a key of `DETECTORS`."""
    spec = DETECTORS[name]
    constructor = cast("Callable[[ModelConfig], Detector]", pkgutil.resolve_name(spec.constructor))
    return constructor(spec.model_config(config))
