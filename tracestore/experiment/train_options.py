"""Options of a training run. Imports no torch, so that commands report wrong usage at once."""

from argparse import BooleanOptionalAction
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracestore.console import int_between, option
from tracestore.detectors.registry import DEFAULT_MODELS
from tracestore.train.config import TrainConfig
from tracestore.words import parse_size


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run; the defaults are those of ``tracestore train``.

    Parameters
    ----------
    models : tuple of str
        Names in `MODELS`.
    config : TrainConfig
        How each detector is trained.
    model_options : mapping
        Fields of `ModelConfig` other than num_layers and hidden_dim.
    overwrite : bool
        Replace an earlier run in the output directory.
    command : str, optional
        The command of the run, for the report.
    resume_command : str, optional
        The command that error messages tell the user to run. Default: built from store and
        output directory.
    """

    models: tuple[str, ...] = DEFAULT_MODELS
    config: TrainConfig = field(default_factory=TrainConfig)
    model_options: Mapping[str, Any] = field(default_factory=dict)
    probe: bool = option(True, "fit a logistic-regression probe as a baseline", action=BooleanOptionalAction)
    folds: int | None = option(
        None,
        "cross-validation by question: each question is tested in one of K folds (default: one split)",
        type=int_between(2, 2**31 - 1, "a whole number of at least 2"),
        metavar="K",
    )
    seeds: int | None = option(None, "N trainings of each model and split, from --seed on (default: 1)")
    memory_budget: int | None = option(
        None,
        "memory for training in addition to the libraries, e.g. 8GiB (default: no limit)",
        type=parse_size,
        metavar="SIZE",
    )
    overwrite: bool = False
    command: str | None = None
    resume_command: str | None = None

    @property
    def is_folded(self) -> bool:
        """True for a cross-validation."""
        return self.folds is not None

    @property
    def is_repeated(self) -> bool:
        """True if the run has folds or several seeds; results.json then has an entry for each."""
        return self.folds is not None or self.seeds is not None
