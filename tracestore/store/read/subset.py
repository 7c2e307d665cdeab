"""Selecting traces of a store as a lazy subset.

One module of over 400 lines: the documented methods that stores and subsets share.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from tracestore.errors import MissingFieldError, UnknownTraceError, UsageError
from tracestore.split import FRACTIONS, SPLITS, assign_splits, checked_fractions, labeled_positions
from tracestore.store.format.labels import derive
from tracestore.store.io.files import Locations, RemoteURL
from tracestore.store.read import table
from tracestore.store.read.internals import StoreInternals
from tracestore.store.read.trace import Trace
from tracestore.words import plural


class TraceCollection(ABC):
    """Traces in an order: a store, or a subset of a store.

    ``collection[key]`` is a Trace if the key is a position or a question id; it is a TraceSubset if the key is a
    slice, a boolean mask with one value per trace, an array of positions, or a list of question ids.
    """

    def __init__(self, internals: StoreInternals, chosen: "slice | np.ndarray" = slice(None)) -> None:
        self.path: Path | RemoteURL | Locations = internals.files.location
        self.internals = internals
        # Selects the values of the traces in an array with one value for each trace of the store.
        self._chosen = chosen

    def _repr_html_(self) -> str:
        from tracestore.store.html import collection_html  # in notebooks only

        return collection_html(self)

    @property
    @abstractmethod
    def indices(self) -> np.ndarray:
        """Store indices (n,) int64 of the traces."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def index_of(self, question_id: str, sample: int = 0) -> int:
        """Return the position of a question's trace. KeyError with the id if it is absent."""

    def __contains__(self, question_id: object) -> bool:
        """Return whether ``collection[question_id]`` is a trace."""
        try:
            return isinstance(question_id, str) and self.index_of(question_id) >= 0
        except UnknownTraceError:
            return False

    @abstractmethod
    def _subset(self, positions: np.ndarray) -> "TraceSubset": ...

    @property
    def num_layers(self) -> int:
        """L: number of stored layers."""
        return self.internals.num_layers

    @property
    def hidden_dim(self) -> int:
        """D: size of a hidden state."""
        return self.internals.attributes.hidden_dim or 0

    @property
    def scores(self) -> np.ndarray:
        """The default score, or the one chosen at opening: (n,) float64, NaN for a trace without it."""
        return self.internals.scores[self._chosen]

    @property
    def labels(self) -> np.ndarray:
        """Stored labels (n,) float64, those that the sources contained; NaN where missing, also if there is a score.

        `y` has the labels that training uses.
        """
        return self.internals.columns.labels[self._chosen]

    @property
    def y(self) -> np.ndarray:
        """The labels (n,) float64 that training and batches use: `targets` at the default threshold."""
        return self.targets()

    @property
    def num_tokens(self) -> np.ndarray:
        """Tokens (n,) of each trace; 0 if only its last tokens are stored."""
        return self.internals.index.read_column("num_tokens")[self._chosen]

    @property
    def has_nonfinite(self) -> np.ndarray:
        """Traces (n,) bool whose source had NaN or infinite values in its arrays."""
        return self.internals.index.read_column("nonfinite")[self._chosen].astype(bool)

    def targets(self, score_threshold: float | None = None) -> np.ndarray:
        """Return the label of each trace: the stored one, else one derived from the score.

        Parameters
        ----------
        score_threshold : float, optional
            Score below which a trace counts as a hallucination, or from which on in a store of hallucination scores.
            Default: 0.5, for scores in [0, 1].

        Returns
        -------
        np.ndarray
            (n,) float64: 1 for a hallucination, 0 for a correct answer, NaN without a label or score.

        Raises
        ------
        UsageError
            If no threshold is given and labels would be derived from scores outside [0, 1].

        Examples
        --------
        >>> import tracestore
        >>> store = tracestore.open("store.zarr")
        >>> store.y[:4], store.labels[:4]
        (array([1., 0., 1., 0.]), array([nan, nan, nan, nan]))
        """
        threshold = self.internals.score_threshold(score_threshold)
        return derive(self.scores, self.labels, threshold, self.internals.score_direction)

    @overload
    def __getitem__(self, key: int | str) -> Trace: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, key: slice | np.ndarray | Sequence[int] | Sequence[str]) -> "TraceSubset": ...
    def __getitem__(self, key: Any) -> "Trace | TraceSubset":
        if isinstance(key, str):
            return self[self.index_of(key)]
        if hasattr(key, "__index__") and getattr(key, "ndim", 0) == 0:
            return Trace(self.internals, self._store_index(operator.index(key)))
        return self._subset(self._positions(key))

    def _store_index(self, position: int) -> int:
        """Return the store index at a position; IndexError if there is none."""
        try:
            return range(len(self))[position]
        except IndexError:
            raise IndexError(f"trace {position} of {len(self)}") from None

    def _positions(self, key: Any) -> np.ndarray:
        return table.positions(key, len(self), lambda: self.internals.index.question_ids(self.indices))

    def __iter__(self) -> Iterator[Trace]:
        return (self[k] for k in range(len(self)))

    def select(self, which: slice | Iterable[int] | Iterable[str] | str) -> "TraceSubset":
        """Return the traces at some positions, or every sample of some questions, as a lazy subset.

        Parameters
        ----------
        which : slice, array or iterable of int, bool or str
            Positions, negative ones counted from the end; a boolean mask with one value per trace; or question ids.
            A single str stands for one question. The subset has the given order and repetitions of positions; the
            samples of a question follow each other in the order of the store.

        Returns
        -------
        TraceSubset

        Raises
        ------
        IndexError
            If there is no such position, or the mask has another length.
        UnknownTraceError
            With the first question id that is absent.
        TypeError
            For values of another type.

        Examples
        --------
        >>> import tracestore
        >>> store = tracestore.open("store.zarr")
        >>> store.select([7, 2]).question_ids
        ['q7', 'q2']
        >>> store.select("q4").indices
        array([4])
        """
        key: Any = [which] if isinstance(which, str) else which
        if not isinstance(key, slice) and not hasattr(key, "__len__"):
            key = list(key)  # an iterator
        return self._subset(self._positions(key))

    def filter(self, function: Callable[[Trace], Any] | None = None, /, **conditions: Any) -> "TraceSubset":
        """Return the traces that meet every condition, in the same order, as a lazy subset.

        Conditions are computed on whole columns, which takes milliseconds at a million traces. The function is called
        only for the traces that meet them.

        Parameters
        ----------
        function : callable, optional
            Returns whether to keep a `Trace`. Only the fields that it accesses are read.
        **conditions
            A condition for each column by its name in `to_pandas`, such as ``question_id``, ``sample``, ``score``,
            ``label``, ``group``, ``num_tokens``, ``has_nonfinite`` or ``source``. ``y`` is the label of batches. A
            value selects the traces that have it; a list, tuple, set, range or
            array those that have one of its values; None those without a value. A callable gets the column, an array
            (n,), and returns a boolean mask (n,).

        Returns
        -------
        TraceSubset

        Raises
        ------
        MissingFieldError
            For a condition on ``label`` if no trace of the store has a label.
        UsageError
            If there is no such column, or a callable returns no mask.

        Examples
        --------
        >>> import tracestore
        >>> store = tracestore.open("store.zarr")
        >>> len(store.filter(y=1)), len(store.filter(score=1.0, num_tokens=lambda n: n > 3))
        (6, 2)
        >>> store.filter(lambda trace: "7" in trace.answer).question_ids
        ['q7']
        """
        mask = np.ones(len(self), bool)
        for name, wanted in conditions.items():
            mask &= table.matches(self._column(name), wanted, name)
        positions = np.flatnonzero(mask)
        if function is not None:
            positions = np.array([k for k in positions.tolist() if function(self[k])], np.int64)
        return self._subset(positions)

    def _column(self, name: str) -> np.ndarray:
        """Return a column (n,) by its name in `filter`."""
        if name == "y":
            return self.targets()
        if name == "label" and len(self) and not self.internals.columns.num_labeled:
            raise MissingFieldError(
                f"{self.path}: no trace has a label; use y, which is derived from the score where there is no label"
            )
        return table.column(self.internals, name, self.indices)

    def split(
        self,
        seed: int = 42,
        by: str | None = None,
        *,
        train: float | None = None,
        val: float | None = None,
        test: float | None = None,
        score_threshold: float | None = None,
    ) -> "TraceSplit":
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
            Score below which a trace counts as a hallucination, or from which on in a store of hallucination scores. A
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
            If there is no such column, the fractions do not add up to 1, a part with a fraction would be empty, or the
            default threshold does not fit.

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
        self,
        test_size: float = 0.25,
        *,
        seed: int = 42,
        by: str | None = None,
        score_threshold: float | None = None,
    ) -> "TrainTestSplit":
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
        self,
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
        parts = {name: self._subset(labeled[names == name]) for name in SPLITS}
        if empty := [name for name in SPLITS if fractions[name] > 0 and not len(parts[name])]:
            what = "questions or groups" if by in (None, "question") else f"values of {by}"
            raise UsageError(
                f"{self.path}: no trace for {' and '.join(empty)}: the split keeps {what} together, and there are too few; "
                'choose fewer parts, such as train=0.5, test=0.5, or another `by`, such as by="question_id"'
            )
        return parts

    # Tables

    def features(self, layer: int = -1) -> np.ndarray:
        """Return the last token's hidden states in one layer, for scikit-learn and similar libraries.

        Parameters
        ----------
        layer : int
            Negative values count from the last layer.

        Returns
        -------
        np.ndarray
            (n, D) in the stored dtype, float32 for bfloat16. For a store a read-only view of the file if one
            uncompressed segment holds all traces in order, else a copy.

        Raises
        ------
        UsageError
            If the store has no such layer.

        Examples
        --------
        >>> import tracestore
        >>> store = tracestore.open("store.zarr")
        >>> store.features(layer=-1).shape, store[:5].features().dtype
        ((12, 8), dtype('float16'))
        """
        return table.features(self.internals, layer, self.indices)

    def to_pandas(self, *, texts: bool = False) -> Any:
        """Return a pandas DataFrame with one row for each trace, in order.

        The columns are question_id, sample, score, the other named scores as score_NAME, label, group, num_tokens,
        has_nonfinite, source and source_position.

        Parameters
        ----------
        texts : bool
            Add question and answer.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.

        Examples
        --------
        >>> import tracestore
        >>> store = tracestore.open("store.zarr")
        >>> store[2:4].to_pandas()["num_tokens"].tolist()
        [3, 4]
        """
        return table.data_frame(self.internals, self.indices, texts=texts)


class TraceSubset(TraceCollection):
    """Some traces of a store, in an order: a lazy view that reads nothing.

    Made by ``store[...]``, `select`, `filter` and `split`, of a store or of another subset. Every loader, dataset and
    bridge takes it like a store. The `trace_index` of batches and items, and `Trace.index`, stay store indices.
    A subset can be pickled, and is as safe as its store to use from threads and worker processes.

    Attributes
    ----------
    store : TraceStore
        The whole store.
    indices : np.ndarray
        Store indices (n,) int64 of the traces, read-only.

    Examples
    --------
    >>> import tracestore
    >>> store = tracestore.open("store.zarr")
    >>> hallucinated = store[store.scores < 0.5]
    >>> hallucinated
    TraceSubset(6 of 12 traces of 'store.zarr')
    >>> hallucinated[1].question_id, hallucinated[-2:].indices
    ('q2', array([ 8, 10]))
    """

    def __init__(self, store: Any, indices: np.ndarray) -> None:
        self._indices = indices.astype(np.int64)
        self._indices.flags.writeable = False
        super().__init__(store.internals, self._indices)
        # Of type Any, because the module of TraceStore imports this one.
        self.store = store

    def __reduce__(self) -> tuple[Any, ...]:
        return TraceSubset, (self.store, self._indices)

    def __repr__(self) -> str:
        return f"TraceSubset({len(self)} of {plural(len(self.store), 'trace')} of {str(self.path)!r})"

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def indices(self) -> np.ndarray:
        """Store indices (n,) int64 of the traces, read-only."""
        return self._indices

    @property
    def question_ids(self) -> list[str]:
        """The question id of each trace."""
        return self.internals.index.question_ids(self._indices)

    def index_of(self, question_id: str, sample: int = 0) -> int:
        """Return the first position of a question's trace in the subset; see `TraceStore.index_of`."""
        if len(self.internals.members) > 1:  # whose traces may have one key
            samples = self.internals.index.read_column("sample")[self._indices].tolist()
            found = [key == (question_id, sample) for key in zip(self.question_ids, samples, strict=True)]
            positions = np.flatnonzero(found)
        else:
            positions = np.flatnonzero(self._indices == self.store.index_of(question_id, sample))
        if len(positions) == 0:
            raise UnknownTraceError(question_id, *([sample] if sample else []))
        return int(positions[0])

    def _store_index(self, position: int) -> int:
        return int(self._indices[super()._store_index(position)])

    def _subset(self, positions: np.ndarray) -> "TraceSubset":
        return TraceSubset(self.store, self._indices[positions])


class TraceSplit(NamedTuple):
    """Train, validation and test subset: a tuple, whose parts are also found by name."""

    train: TraceSubset
    val: TraceSubset
    test: TraceSubset

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if key in self._fields else tuple.__getitem__(self, key)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the parts."""
        return self._fields


class TrainTestSplit(NamedTuple):
    """Train and test subset: a tuple, whose parts are also found by name."""

    train: TraceSubset
    test: TraceSubset

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if key in self._fields else tuple.__getitem__(self, key)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the parts."""
        return self._fields
