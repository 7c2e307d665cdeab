"""The detectors by name: those of this package and those of entry points. Imports no torch.

A built-in detector is not an entry point itself, so that a checkout that is not installed has all of them.
"""

import functools
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from tracestore.data.batches.batch_format import EdgeFormat, View
from tracestore.detectors.interface import Detector
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.errors import UsageError, escape_unprintable
from tracestore.store.read.store import TraceStore

if TYPE_CHECKING:
    from tracestore.detectors.models import DetectorModel

GROUP = "tracestore.detectors"
_OWN = "tracestore"
# Names are also names of files, and columns of tables.
_VALID_NAME = re.compile(r"[\w.+-]{1,100}", re.ASCII)
# Sets of detectors that --detectors takes instead of names.
SETS = ("all", "features")
_PUBLISHED, _TORCH_MODEL = "tracestore.detectors.published", "tracestore.benchmark.torch_models:TorchModel"


@dataclass(frozen=True)
class ModelSpec:
    """A model that `tracestore train` trains.

    Parameters
    ----------
    name : str
        Name in results.json and in checkpoints; also the folder of its checkpoints.
    summary : str
        The architecture in a sentence, for the list of detectors and the page about training.
    view : {"sequence", "graph"}
        The view of the store that the model reads.
    constructor : str
        Import path of the model class, ``module:name``.
    options : mapping
        Fields of `ModelConfig` that this detector sets, whatever the options of the run.
    flag : str, optional
        Suffix of the options ``--run-FLAG`` and ``--no-run-FLAG`` of ``tracestore train``, which trains it by default.
    twin_of : str, optional
        The graph detector of which this one is the edge-free twin.
    reads_middle : bool
        Reads the layers from a quarter to seven eighths of the depth, unless the options name layers.
    """

    name: str
    summary: str
    view: View
    constructor: str
    options: Mapping[str, Any] = field(default_factory=dict)
    flag: str | None = None
    twin_of: str | None = None
    reads_middle: bool = False

    def model_config(self, config: ModelConfig) -> ModelConfig:
        """Return the config with what this detector sets."""
        options = dict(self.options)
        if self.reads_middle and config.layers is None:
            options["layers"] = tuple(range(round(config.num_layers / 4), round(config.num_layers * 7 / 8)))
        return replace(config, **options)

    def reads_answers(self, config: ModelConfig) -> bool:
        """Return whether this detector reads where the answers are."""
        config = self.model_config(config)
        return self.view == "graph" and "answer" in (config.pooling, config.skip)

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
_TWIN = "The edge-free twin: GINE is an MLP of each token."
_FIRST = "The first version: sums without normalization, mean over all tokens, one reader."
_OF_LSTM = (
    "Four readers of the last token of every layer: a bidirectional LSTM over the layers, and a head that reads the mean of "
    "its outputs; the logit is the mean of theirs."
)
_OF_GNN = (
    "Two GINE convolutions over the attention graph of each layer, shared by the layers, each with a normalization, a residual "
    "connection, mean over the tokens of the answer; the readers of lstm_solo of [pooled, mean of the answer's states]."
)
_OF_GVAE = (
    "The encoder of gnn_det_lstm, a variational bottleneck, the same readers of [mu, mean of the answer's states]; a decoder "
    "reconstructs the pooled vector."
)
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
MODELS = {
    spec.name: spec
    for spec in (
        ModelSpec("lstm_solo", _OF_LSTM, "sequence", _LSTM, flag="lstm"),
        ModelSpec("gnn_det_lstm", _OF_GNN, "graph", _GNN, flag="gnn-det", reads_middle=True),
        ModelSpec("gnn_det_lstm_no_edges", _TWIN, "graph", _GNN, _NO_EDGES, twin_of="gnn_det_lstm", reads_middle=True),
        ModelSpec("gvae_lstm", _OF_GVAE, "graph", _GVAE, flag="gvae", reads_middle=True),
        ModelSpec("gvae_lstm_no_edges", _TWIN, "graph", _GVAE, _NO_EDGES, twin_of="gvae_lstm", reads_middle=True),
        ModelSpec("lstm_solo_v0", _FIRST, "sequence", _LSTM, _V0),
        ModelSpec("gnn_det_lstm_v0", _FIRST, "graph", _GNN, _V0),
        ModelSpec("gvae_lstm_v0", _FIRST, "graph", _GVAE, _V0),
    )
}
DEFAULT_MODELS = tuple(name for name, spec in MODELS.items() if spec.flag is not None)
# The class, in the package published, and the options of each built-in detector that is no model of `tracestore train`.
_BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "length": ("untrained:TokenStatistic", {"statistic": "length"}),
    "group_rate": ("untrained:GroupRate", {}),
    "probe_prompt": ("probes:LayerProbe", {"pooling": "prompt_last"}),
    "mean_logprob": ("untrained:TokenStatistic", {"statistic": "mean_logprob"}),
    "min_logprob": ("untrained:TokenStatistic", {"statistic": "min_logprob"}),
    "perplexity": ("untrained:TokenStatistic", {"statistic": "perplexity"}),
    "mean_entropy": ("untrained:TokenStatistic", {"statistic": "mean_entropy"}),
    "semantic_entropy": ("untrained:SemanticEntropy", {"weights": "likelihood"}),
    "discrete_semantic_entropy": ("untrained:SemanticEntropy", {"weights": "count"}),
    "eigen_score": ("untrained:EigenScore", {}),
    "llm_check_hidden": ("untrained:LLMCheck", {"score_of": "hidden"}),
    "llm_check_attention": ("untrained:LLMCheck", {"score_of": "attention"}),
    "llm_check_regression": ("attention:LogdetRegression", {}),
    "lookback_lens": ("attention:LookbackLens", {}),
    "lap_eigvals": ("attention:LapEigvals", {}),
    "probe_last": ("probes:LayerProbe", {"pooling": "last"}),
    "probe_mean": ("probes:LayerProbe", {"pooling": "answer_mean"}),
    "probe_max": ("probes:LayerProbe", {"pooling": "answer_max"}),
    "probe_ensemble": ("probes:LayerProbe", {"num_layers": None}),
    "probe_logprob": ("probes:ProbeAndLogprob", {}),
    "probes_logprob": ("probes:ProbeAndLogprob", {"num_layers": 5}),
    "halo_scope": ("haloscope:HaloScope", {}),
    "saplma": ("saplma:Saplma", {}),
    "pooled_mlp": ("pooled_mlp:PooledMLP", {}),
}


@dataclass(frozen=True)
class DetectorEntry:
    """A detector that can be made.

    Attributes
    ----------
    name : str
    package : str
        The distribution that the detector comes from.
    make : callable
        Returns a new detector; its keyword arguments are options.
    model : ModelSpec, optional
        The model of `tracestore train`, which takes minutes to train, if it is one.
    """

    name: str
    package: str
    make: Callable[..., Detector]
    model: ModelSpec | None = None

    @property
    def is_foreign(self) -> bool:
        """True for a detector of another package, whose code runs in a process of its own: see `apart`."""
        return self.package != _OWN


@functools.cache
def registry() -> dict[str, DetectorEntry]:
    """Return every detector by name, without importing those of other packages.

    Raises
    ------
    UsageError
        Two packages have a detector of the same name.
    """
    found = {
        name: DetectorEntry(name, _OWN, _lazy(f"{_PUBLISHED}.{path}", options))
        for name, (path, options) in _BUILT_IN.items()
    }
    for name, model in MODELS.items():
        found[name] = DetectorEntry(name, _OWN, _lazy(_TORCH_MODEL, {"name": name}), model)
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        package = escape_unprintable(point.dist.name if point.dist else point.value, 100)
        name = escape_unprintable(point.name, 200)
        if name in found:
            other = found[name].package
            raise UsageError(f"{package}: its detector {name} has the name of one of {other}; uninstall {package}")
        found[name] = DetectorEntry(name, package, functools.partial(_load, name, point.load, package))
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
        raise UsageError(
            f"{package}: {name} is a {type(detector).__name__}, expected a tracestore.detectors.interface.Detector"
        )
    return detector


def make_detector(name: str, **options: Any) -> Detector:
    """Return a new detector.

    Parameters
    ----------
    name : str
        A key of `registry`.
    **options
        Options of the detector.

    Raises
    ------
    UsageError
        There is no such detector, it lacks an option, or its package cannot be imported.
    """
    entries = registry()
    if name not in entries:
        raise UsageError(f"no detector {name}, expected one of {', '.join(entries)}")
    try:
        return entries[name].make(**options)
    except TypeError as error:
        raise UsageError(f"detector {name}: {error}") from None


def select(text: str) -> list[str]:
    """Return the names in a comma-separated list of names and of `SETS`, in the order of the registry."""
    entries, wanted = registry(), {word.strip() for word in text.split(",")} - {""}
    known = f"expected {', '.join((*SETS, *entries))}"
    for word in sorted(wanted - set(entries) - set(SETS)):
        raise UsageError(f"no detector {word}, {known}")
    if not wanted:
        raise UsageError(f"no detector in {text!r}, {known}")
    if "all" in wanted:
        return list(entries)
    return [name for name, entry in entries.items() if name in wanted or ("features" in wanted and entry.model is None)]


def make_model(name: str, config: ModelConfig) -> "DetectorModel":
    """Return an untrained detector; `name` is a key of `MODELS`."""
    spec = MODELS[name]
    constructor = cast("Callable[[ModelConfig], DetectorModel]", pkgutil.resolve_name(spec.constructor))
    return constructor(spec.model_config(config))
