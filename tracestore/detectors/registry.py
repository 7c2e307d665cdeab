"""The detectors: one entry each. Imports no torch, so that commands can check names at once."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tracestore.data.batch_format import EdgeFormat, View
from tracestore.detectors.config import ModelConfig
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
    """

    name: str
    view: View
    flag: str
    constructor: str

    def edge_format(self, config: ModelConfig, store: TraceStore, device_type: str) -> EdgeFormat:
        """Return the ``edge_format`` argument of TraceLoader for this detector.

        Raises
        ------
        MissingFieldError
            See `ModelConfig.edge_format`.
        """
        return config.edge_format(store, device_type) if self.view == "graph" else "coo"


DETECTORS = {
    spec.name: spec
    for spec in (
        DetectorSpec("lstm_solo", "sequence", "lstm", "tracestore.detectors.models:LstmSolo"),
        DetectorSpec("gnn_det_lstm", "graph", "gnn-det", "tracestore.detectors.models:GnnDetLstm"),
        DetectorSpec("gvae_lstm", "graph", "gvae", "tracestore.detectors.models:GvaeLstm"),
    )
}


def make_model(name: str, config: ModelConfig) -> "Detector":
    """Return an untrained detector; `name` is a key of `DETECTORS`."""
    constructor = cast("Callable[[ModelConfig], Detector]", pkgutil.resolve_name(DETECTORS[name].constructor))
    return constructor(config)
