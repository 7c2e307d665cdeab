"""A detector in a package of its own: the norm of the last token, with the layer chosen on the training traces."""

from dataclasses import dataclass

import numpy as np

from tracestore.detectors.interface import Detector
from tracestore.evaluation.metrics import auroc


@dataclass
class NormDetector(Detector):
    """Norm of the last token in one layer.

    Parameters
    ----------
    order : int
        Order of the norm.
    """

    order: int = 2

    kind = "untrained"
    fields = ("last_token",)
    layers = "one, chosen"
    gives_logits = False

    def _norms(self, store, indices):
        values = np.stack([store[int(k)].last_token for k in indices]).astype("f4")
        return np.linalg.norm(values, ord=self.order, axis=2)

    def fit(self, store, indices, labels):
        aurocs = [auroc(labels, column) for column in self._norms(store, indices).T]
        self.layer = int(np.argmax(np.abs(np.array(aurocs) - 0.5)))
        self.sign = 1 if aurocs[self.layer] >= 0.5 else -1
        return self

    def score(self, store, indices):
        return self.sign * self._norms(store, indices)[:, self.layer].astype("f8")
