"""The detectors by name: those of this package and those of entry points. Imports no torch.

A built-in detector is not an entry point itself, so that a checkout that is not installed has all of them.
"""

import functools
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from tracestore.detectors.interface import Detector
from tracestore.detectors.registry import DETECTORS
from tracestore.errors import UsageError, escape_unprintable

GROUP = "tracestore.detectors"
_OWN = "tracestore"
# Names are also names of files, and columns of tables.
_VALID_NAME = re.compile(r"[\w.+-]{1,100}", re.ASCII)
# Sets of detectors that --detectors takes instead of names.
SETS = ("all", "features")
_TORCH_MODEL = "tracestore.benchmark.torch_models:TorchModel"
# The import path and the options of each built-in detector that is not in the registry of torch models.
_PROBES, _UNTRAINED = "tracestore.detectors.published.probes", "tracestore.detectors.published.untrained"
_ATTENTION, _SAMPLES = "tracestore.detectors.published.attention", "tracestore.detectors.published.samples"
_BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "length": (f"{_UNTRAINED}:TokenStatistic", {"statistic": "length"}),
    "group_rate": (f"{_UNTRAINED}:GroupRate", {}),
    "probe_prompt": (f"{_PROBES}:LayerProbe", {"pooling": "prompt_last"}),
    "mean_logprob": (f"{_UNTRAINED}:TokenStatistic", {"statistic": "mean_logprob"}),
    "min_logprob": (f"{_UNTRAINED}:TokenStatistic", {"statistic": "min_logprob"}),
    "perplexity": (f"{_UNTRAINED}:TokenStatistic", {"statistic": "perplexity"}),
    "mean_entropy": (f"{_UNTRAINED}:TokenStatistic", {"statistic": "mean_entropy"}),
    "semantic_entropy": (f"{_SAMPLES}:SemanticEntropy", {"weights": "likelihood"}),
    "discrete_semantic_entropy": (f"{_SAMPLES}:SemanticEntropy", {"weights": "count"}),
    "eigen_score": (f"{_SAMPLES}:EigenScore", {}),
    "llm_check_hidden": (f"{_UNTRAINED}:LLMCheck", {"score_of": "hidden"}),
    "llm_check_attention": (f"{_UNTRAINED}:LLMCheck", {"score_of": "attention"}),
    "llm_check_regression": (f"{_ATTENTION}:LogdetRegression", {}),
    "lookback_lens": (f"{_ATTENTION}:LookbackLens", {}),
    "lap_eigvals": (f"{_ATTENTION}:LapEigvals", {}),
    "probe_last": (f"{_PROBES}:LayerProbe", {"pooling": "last"}),
    "probe_mean": (f"{_PROBES}:LayerProbe", {"pooling": "answer_mean"}),
    "probe_max": (f"{_PROBES}:LayerProbe", {"pooling": "answer_max"}),
    "probe_ensemble": (f"{_PROBES}:LayerProbe", {"num_layers": None}),
    "probe_logprob": (f"{_PROBES}:ProbeAndLogprob", {}),
    "probes_logprob": (f"{_PROBES}:ProbeAndLogprob", {"num_layers": 5}),
    "halo_scope": ("tracestore.detectors.published.haloscope:HaloScope", {}),
    "saplma": ("tracestore.detectors.published.saplma:Saplma", {}),
    "pooled_mlp": ("tracestore.detectors.published.pooled_mlp:PooledMLP", {}),
}


@dataclass(frozen=True)
class CatalogEntry:
    """A detector that can be made.

    Attributes
    ----------
    name : str
    package : str
        The distribution that the detector comes from.
    make : callable
        Returns a new detector; its keyword arguments are options.
    is_torch_model : bool
        True for a model of `tracestore train`, which takes minutes to train.
    """

    name: str
    package: str
    make: Callable[..., Detector]
    is_torch_model: bool = False

    @property
    def is_foreign(self) -> bool:
        """True for a detector of another package, whose code runs in a process of its own: see `apart`."""
        return self.package != _OWN


@functools.cache
def catalog() -> dict[str, CatalogEntry]:
    """Return every detector by name, without importing those of other packages.

    Raises
    ------
    UsageError
        Two packages have a detector of the same name.
    """
    found = {name: CatalogEntry(name, _OWN, _lazy(path, options)) for name, (path, options) in _BUILT_IN.items()}
    for name in DETECTORS:
        found[name] = CatalogEntry(name, _OWN, _lazy(_TORCH_MODEL, {"name": name}), is_torch_model=True)
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        package = escape_unprintable(point.dist.name if point.dist else point.value, 100)
        name = escape_unprintable(point.name, 200)
        if name in found:
            other = found[name].package
            raise UsageError(f"{package}: its detector {name} has the name of one of {other}; uninstall {package}")
        found[name] = CatalogEntry(name, package, functools.partial(_load, name, point.load, package))
    return found


def _lazy(path: str, options: dict[str, Any]) -> Callable[..., Detector]:
    def make(**others: Any) -> Detector:
        detector: Detector = pkgutil.resolve_name(path)(**options | others)
        return detector

    return make


def _load(name: str, load: Callable[[], Any], package: str, **options: Any) -> Detector:
    """Return a detector of another package; UsageError, with the name of the package, if it cannot be made."""
    if _VALID_NAME.fullmatch(name) is None:
        raise UsageError(f"{package}: found the name {name!r}, expected letters, digits and the characters _.+-")
    try:
        detector = load()(**options)
    except Exception as error:
        reason = escape_unprintable(f"{type(error).__name__}: {error}", 200)
        raise UsageError(f"{package}: detector {name} cannot be loaded: {reason}") from error
    if not isinstance(detector, Detector):
        raise UsageError(f"{package}: {name} is a {type(detector).__name__}, expected a tracestore.detectors.Detector")
    return detector


def make_detector(name: str, **options: Any) -> Detector:
    """Return a new detector.

    Parameters
    ----------
    name : str
        A key of `catalog`.
    **options
        Options of the detector.

    Raises
    ------
    UsageError
        There is no such detector, it lacks an option, or its package cannot be imported.
    """
    entries = catalog()
    if name not in entries:
        raise UsageError(f"no detector {name}, expected one of {', '.join(entries)}")
    try:
        return entries[name].make(**options)
    except TypeError as error:
        raise UsageError(f"detector {name}: {error}") from None


def select(text: str) -> list[str]:
    """Return the names in a comma-separated list of names and of `SETS`, in the order of the catalog."""
    entries, wanted = catalog(), {word.strip() for word in text.split(",")} - {""}
    known = f"expected {', '.join((*SETS, *entries))}"
    for word in sorted(wanted - set(entries) - set(SETS)):
        raise UsageError(f"no detector {word}, {known}")
    if not wanted:
        raise UsageError(f"no detector in {text!r}, {known}")

    def is_wanted(entry: CatalogEntry) -> bool:
        return entry.name in wanted or "all" in wanted or ("features" in wanted and not entry.is_torch_model)

    return [name for name, entry in entries.items() if is_wanted(entry)]
