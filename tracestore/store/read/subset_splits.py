"""Splitting the traces of a store or subset into train, validation and test subset."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tracestore.errors import UsageError
from tracestore.split import FRACTIONS, SPLITS, assign_splits, checked_fractions, labeled_positions

if TYPE_CHECKING:
    from tracestore.store.read.subset import TraceSubset


class TraceSplit(NamedTuple):
    """Train, validation and test subset: a tuple, whose parts are also found by name."""

    train: "TraceSubset"
    val: "TraceSubset"
    test: "TraceSubset"

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if key in self._fields else tuple.__getitem__(self, key)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the parts."""
        return self._fields


class TrainTestSplit(NamedTuple):
    """Train and test subset: a tuple, whose parts are also found by name."""

    train: "TraceSubset"
    test: "TraceSubset"

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if key in self._fields else tuple.__getitem__(self, key)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the parts."""
        return self._fields


class CollectionSplits:
    """Base of stores and subsets: splits the traces."""

    def split(
        self: Any,
        seed: int = 42,
        by: str | None = None,
        *,
        train: float | None = None,
        val: float | None = None,
        test: float | None = None,
        score_threshold: float | None = None,
    ) -> TraceSplit:
        """Split the labeled traces into train, validation and test subset, stratified by label.

        Without fractions the split is 70 %, 15 % and 15 %: for a store that of ``tracestore train`` with the same seed
        and threshold. It is a pure function of question ids, groups, labels and the seed. Traces with neither a label
        nor a score are in no part.

        Parameters
        ----------
        seed : int
            Seed of the split.
        by : str, optional
            None, "question" or "group": the traces of a question, and the questions of a stored group, stay together.
            "question_id": the traces of a question stay together, groups do not count. The name of another column of
            `to_pandas`, such as "source": questions that share its value stay together.
        train, val, test : float, optional
            Fractions of the questions, or of the groups, that add up to 1. If one is given, the others are 0 by
            default.
        score_threshold : float, optional
            Score below which a trace counts as a hallucination, or above which in a store of hallucination scores. A
            stored label takes precedence. Default: 0.5, for scores in [0, 1].

        Returns
        -------
        TraceSplit
            The subsets ``train``, ``val`` and ``test``; also a tuple of them.

        Raises
        ------
        TrainingError
            If no trace has a label or a score.
        UsageError
            If there is no such column, the fractions do not add up to 1, or the default threshold does not fit.

        Examples
        --------
        >>> import tracestore
        >>> store = tracestore.open("store.zarr")
        >>> train, val, test = store.split(seed=42)
        >>> len(train), len(val), len(test)
        (8, 2, 2)
        >>> [len(part) for part in store.split(train=0.5, test=0.5)]
        [6, 0, 6]
        """
        given = {name: f for name, f in (("train", train), ("val", val), ("test", test)) if f is not None}
        fractions = checked_fractions(given) if given else FRACTIONS
        return TraceSplit(**self._divide(seed, by, fractions, score_threshold))

    def train_test_split(
        self: Any,
        test_size: float = 0.25,
        *,
        seed: int = 42,
        by: str | None = None,
        score_threshold: float | None = None,
    ) -> TrainTestSplit:
        """Split the labeled traces into a train and a test subset, stratified by label.

        Parameters
        ----------
        test_size : float
            Fraction of the questions, or of the groups, above 0 and below 1.
        seed, by, score_threshold
            As of `split`.

        Returns
        -------
        TrainTestSplit
            The subsets ``train`` and ``test``; also a tuple of them.

        Raises
        ------
        TrainingError, UsageError
            As `split`.

        Examples
        --------
        >>> import tracestore
        >>> train, test = tracestore.open("store.zarr").train_test_split(0.25)
        >>> len(train), len(test)
        (8, 4)
        """
        if not 0 < test_size < 1:
            raise UsageError(f"found test_size {test_size!r}, expected a fraction above 0 and below 1")
        fractions = checked_fractions({"train": 1 - test_size, "test": test_size})
        parts = self._divide(seed, by, fractions, score_threshold)
        return TrainTestSplit(parts["train"], parts["test"])

    def _divide(
        self: Any,
        seed: int,
        by: str | None,
        fractions: Mapping[str, float],
        score_threshold: float | None,
    ) -> "dict[str, TraceSubset]":
        """Return the subset of each of SPLITS."""
        if not hasattr(seed, "__index__"):
            raise UsageError(
                f"found seed {seed!r}, expected a whole number; fractions have names, such as train=0.8, test=0.2"
            )
        if by is not None and not isinstance(by, str):
            raise UsageError(f"found by {by!r}, expected the name of a column")
        targets = self.targets(score_threshold)
        labeled = labeled_positions(targets, str(self.path))
        chosen = self._subset(labeled)
        groups = chosen._column("group" if by in (None, "question") else by)
        names = assign_splits(
            self.internals.index.question_ids(chosen.indices),
            ["" if value != value else str(value) for value in groups.tolist()],
            targets[labeled].tolist(),
            seed,
            fractions,
        )
        return {name: self._subset(labeled[names == name]) for name in SPLITS}
