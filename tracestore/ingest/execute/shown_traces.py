"""Keep of the traces of a run what its summary shows, and the lengths that rule 17e compares."""

import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, escape_unprintable, some_of
from tracestore.ingest.execute.arrays import PADDING_WAYS
from tracestore.ingest.execute.axes import numbers_of
from tracestore.ingest.layout.places import Plan
from tracestore.store.write.record import TraceRecord

_MAX_ROWS = 6
_MAX_NORMS = 8  # about as many tokens of a trace give its median norm
_MANY = 8  # traces of one length that are not so by chance
_SAY_PADDING = {"S.padding", "S.mask", "S.lengths", "S.pad", "S.offsets", "S.starts", "S.owner"}


class ShownTraces:
    """Keep the first trace of the first source that is read, and the axes whose sizes are equal in every trace.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._lock = plan, threading.Lock()
        self._first: tuple[int, str] | None = None
        # Several parts or passes check the order.
        is_whole = len(plan.states) == 1 and "P" not in plan.states[0].axes
        letters = [letter for letter in "LSD" if is_whole and letter in plan.states[0].axes]
        self._equal = {f"{one}{two}" for one, two in itertools.combinations(letters, 2)}

    def add(self, number: int, record: TraceRecord, answers: range | None) -> None:
        """Keep the first trace of a source, with the rows of all answers to its question, if no earlier one has one.

        Compare the sizes of the axes of each trace; axes of size 1 have no order.
        """
        with self._lock:
            if self._first is None or number < self._first[0]:
                # Names that count from the end give no number of the model's layer.
                is_lost = record.layer_ids is None and any("layer" in p.address.bound for p in self._plan.states)
                more = ", numbers of layers not stored: L.size = N gives those that count from the end" * is_lost
                if answers is not None:
                    rows = some_of(list(map(str, answers)), _MAX_ROWS)
                    more += f", its answers in the rows {rows} of {self._plan.states[-1].address}"
                self._first = (number, _described(record) + more)
            layers = record.num_layers + record.is_without_embeddings
            sizes = {"L": layers, "S": record.num_tokens, "D": record.hidden_dim}
            self._equal = {pair for pair in self._equal if sizes[pair[0]] == sizes[pair[1]] != 1}

    def lines(self, *, is_stated: bool) -> Iterator[str]:
        """Yield the lines of the summary."""
        if self._first is not None:
            yield self._first[1]
            if self._equal and is_stated:
                letters = [letter for letter in "LSD" if any(letter in pair for pair in self._equal)]
                text = f"{', '.join(letters[:-1])} and {letters[-1]}"
                yield f"{text} have the same size in every trace: nothing in the files checks their order"

    def to_json(self) -> dict[str, Any]:
        """Return what the sources of a task have added."""
        return {"first": self._first, "equal": sorted(self._equal)}

    def add_json(self, found: Mapping[str, Any]) -> None:
        """Add what a task has found."""
        if found["first"] is not None:
            number, text = found["first"]
            self._first = min(filter(None, (self._first, (int(number), str(text)))))
        self._equal &= set(map(str, found["equal"]))


def _described(record: TraceRecord) -> str:
    """Return a trace in a line."""
    layers, width = record.num_layers, record.hidden_dim
    states = record.hidden if record.hidden is not None else list(record.last_token[:, None])  # type: ignore[index]
    step = max(1, len(states[0]) // _MAX_NORMS)
    norms = np.concatenate([np.linalg.norm(numbers_of(layer[::step]).astype("f4"), axis=-1) for layer in states])
    labels = {**record.scores, **record.deferred_scores}
    if record.label is not None:
        labels["label"] = record.label
    shown = "".join(f"{name} {value:g}, " for name, value in labels.items() if not math.isnan(value))
    tokens = f"S {record.num_tokens}" if record.hidden is not None else "last token"
    return (
        f"first trace: {escape_unprintable(record.question_id, 60)}, {shown}L {layers}, {tokens}, D {width}, "
        f"median norm {float(np.sort(norms)[len(norms) // 2]):.3g}"
    )


class EqualLengths:
    """Rule 17e: refuse padded sequences of a run: all have one number of ids, and one begins or ends with an id twice.

    The first traces decide if they are many, else all of the run: a few may have one length by chance.

    Rows of one array are checked each on their own (rules 17b and 17c). Of passes, the ids of the prompt count.

    Parameters
    ----------
    plan : Plan
    is_stated : bool
        Whether a person, or a proposal that asks for padding, states the layout.
    """

    def __init__(self, plan: Plan, *, is_stated: bool) -> None:
        stated = plan.layout.settings.keys() | plan.layout.addresses.keys()
        axes = {axis for place in plan.states for axis in place.axes}
        is_alone = axes.isdisjoint(("N", "K", "NS")) and "S" in axes
        self._is_open = not is_stated and is_alone and "tokens" in stated and not stated & _SAY_PADDING
        self._has_passes, self._lock = "P" in axes, threading.Lock()
        self._size: int | None = None
        self._repeated: int | str | None = None
        self._count = 0

    def add(self, record: TraceRecord) -> None:
        """Add a trace; raise InvalidInputError where it and the earlier ones look padded."""
        size = record.prompt_length if self._has_passes else record.num_tokens
        tokens = record.tokens_decoded if record.tokens is None else record.tokens
        if not self._is_open or tokens is None or size is None:
            return
        ids: list[Any] = np.asarray(tokens[:size]).tolist()
        with self._lock:
            self._is_open = self._size in (None, size)
            self._size, self._count = size, self._count + 1
            if self._repeated is None and len(ids) > 1:
                self._repeated = next((one for one, two in ((ids[0], ids[1]), (ids[-1], ids[-2])) if one == two), None)
        if self._count >= _MANY:
            self.close()

    def close(self) -> None:
        """Raise InvalidInputError if the traces look padded."""
        if self._is_open and self._count > 1 and self._repeated is not None:
            what = "prompt" if self._has_passes else "trace"
            raise InvalidInputError(
                f"each {what} has {self._size} tokens, and one has the id {self._repeated!r:.40} twice at one end: padding? "
                + PADDING_WAYS,
                field="tokens",
            )
