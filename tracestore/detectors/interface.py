"""The interface of detectors that the benchmark compares. Imports no torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np

from tracestore.errors import MissingFieldError, UsageError
from tracestore.store.format import schema
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace


def _has_answer(trace: Trace) -> bool:
    known = min(trace.answer_span or (-1, -1)) >= 0
    return known or trace.generated_mask is not None or trace.prompt_length is not None


def _none_of_first(has: Callable[[Trace], bool]) -> Callable[[TraceStore, list[Trace]], bool]:
    return lambda _, first: not any(map(has, first))


# Whether a store lacks a field, by the store and its first traces, and what it lacks then.
_LACKS: dict[str, tuple[Callable[[TraceStore, list[Trace]], bool], str]] = {
    "answer": (_none_of_first(_has_answer), "its first traces lack answer_span, generated_mask and prompt_length"),
    "answer_text": (
        _none_of_first(lambda trace: trace.answer is not None),
        "its first traces lack the text of the answer",
    ),
    "samples": (
        lambda store, _: len(set(store.question_ids.take(np.arange(len(store))))) == len(store),
        "one answer per question, several are needed: tracestore extract --samples K",
    ),
    "group": (
        lambda store, _: not any(store.group(k) for k in range(len(store))),
        "no trace has a group; add them: tracestore score STORE --scores CSV --group-column COLUMN",
    ),
    **{
        name: (
            _none_of_first(lambda trace, name=name: trace.optional(name) is not None),  # type: ignore[misc]
            f"its first traces lack {name}, which tracestore extract records",
        )
        for name in schema.OPTIONAL_FIELDS
    },
}
# The fields that `Detector.fields` may name. "answer", "answer_text" and "attention" stand for the fields that give
# them; "samples" for several answers to a question.
FIELDS = ("last_token", "hidden_states", "attention", *_LACKS)
Kind = Literal["trained", "untrained", "control"]
Key = Literal["question", "group"]
_TRACES_CHECKED = 16


class Detector(ABC):
    """A hallucination detector: it is fitted to labeled traces of a store, and scores others.

    A package adds a detector with an entry point of the group ``tracestore.detectors``, whose value is a subclass or
    a function that returns a detector. Its keyword arguments are the options of the detector. A subclass that is a
    dataclass needs nothing else for `parameters`.

    Attributes
    ----------
    summary : str
        What the detector is, in a sentence. Default: the first line of the docstring.
    kind : {"trained", "untrained", "control"}
        "untrained": `fit` reads no labels, except to choose a layer or a sign. "control": a reference that a detector
        has to beat; it is part of every table.
    fields : tuple of str
        The fields of a trace that the detector reads, names in `FIELDS`.
    layers : str
        The layers that it reads: "none", "all", or how they are chosen.
    gives_logits : bool
        True if sigmoid(score) is meant as the probability of a hallucination. The benchmark calibrates other scores
        on the training split.
    cost : str
        What scoring a trace costs, in a few words.
    reference : str
        The paper and the equation.
    source : str
        Origin of the expected values in the tests: "by formula", or the authors' code and its commit.
    seed : int
        Seed of everything random in `fit`. Set by the benchmark.
    keep_together : {"question", "group"}
        The traces that splits inside `fit` must not separate. Set by the benchmark.
    """

    summary: ClassVar[str] = ""
    kind: ClassVar[Kind] = "trained"
    fields: ClassVar[tuple[str, ...]] = ("hidden_states",)
    layers: ClassVar[str] = "all"
    gives_logits: ClassVar[bool] = True
    cost: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    source: ClassVar[str] = ""

    seed = 0
    keep_together: Key = "question"

    @abstractmethod
    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Fit the detector to traces, and return it.

        Every statistic, such as a mean for standardization or the choice of a layer, must come from these traces.

        Parameters
        ----------
        store : TraceStore
        indices : np.ndarray
            ``(n,)`` int64, store indices.
        labels : np.ndarray
            ``(n,)`` int64; 1: hallucination, 0: correct.

        Raises
        ------
        TrainingError
            If the traces do not suffice.
        """

    @abstractmethod
    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the scores ``(n,)`` float64 of traces, high for hallucinations; NaN where there is none.

        The store may be another one than that of `fit`, with the same number of layers and hidden size.
        """

    @property
    def parameters(self) -> dict[str, Any]:
        """The options of the detector, values of JSON. Default: the fields of a dataclass."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init} if is_dataclass(self) else {}

    @property
    def chosen(self) -> dict[str, Any]:
        """The choices of `fit` on the training traces, such as layers; values of JSON."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what `fit` learned: numbers, texts, arrays, and lists and dicts of them. UsageError: cannot be saved."""
        raise UsageError(f"{type(self).__name__} cannot be saved without the methods state and load_state")

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; any exception if it is damaged."""
        raise UsageError(f"{type(self).__name__} cannot be saved without the methods state and load_state")

    def provenance(self, store: TraceStore) -> dict[str, Any]:
        """Return what the detector reads of a store: fields, layers, options and choices, values of JSON."""
        return {
            "fields": list(self.fields),
            "layers": self.chosen.get("layers", self.layers),
            "parameters": self.parameters,
            "chosen": self.chosen,
            "store": {"num_layers": store.num_layers, "hidden_dim": store.hidden_dim, "generation": store.generation},
            "provenance": [p.to_json() for p in store.provenance],
        }

    def check(self, store: TraceStore) -> None:
        """Check that a store has the fields that the detector reads.

        Raises
        ------
        MissingFieldError
            With the first field that is missing.
        """
        for missing in missing_fields(store, self.fields):
            raise MissingFieldError(missing)


def missing_fields(store: TraceStore, names: tuple[str, ...]) -> Iterator[str]:
    """Yield a sentence for each of the fields that the store lacks. UsageError for a name outside `FIELDS`."""
    first = [store[k] for k in range(min(len(store), _TRACES_CHECKED))]
    for name in names:
        if name not in FIELDS:
            raise UsageError(f"found field {name!r}, expected one of {', '.join(FIELDS)}")
        if name in ("hidden_states", "attention"):
            try:
                store.require_view("tokens" if name == "hidden_states" else "graph")
            except MissingFieldError as error:
                yield str(error)
            else:
                if name == "attention" and len(store) and store.attention_layout != "causal":
                    yield f"{store.path}: holds {store.attention_layout} attention, causal attention is needed"
        elif name in _LACKS and _LACKS[name][0](store, first):
            yield f"{store.path}: {_LACKS[name][1]}"


def answer_positions(store: TraceStore) -> str:
    """Return "known" if the first traces of a store tell where their answers are, else "unknown"."""
    return "unknown" if any(missing_fields(store, ("answer",))) else "known"


def describe(detector: Detector) -> dict[str, Any]:
    """Return the static properties of a detector, values of JSON."""
    names = ("kind", "layers", "cost", "reference", "source")
    summary = detector.summary or next(iter((type(detector).__doc__ or "").strip().splitlines()), "")
    return {"summary": summary, "fields": list(detector.fields), **{name: getattr(detector, name) for name in names}}
