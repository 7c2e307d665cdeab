"""Rule 17e: sequences of a known tool that are each alone in a file or an item may be padded to one length."""

import threading

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.arrays import PADDING_WAYS
from tracestore.ingest.layout.places import Plan
from tracestore.store.write.record import TraceRecord

_MANY = 8  # traces of one length that are not so by chance
_SAY_PADDING = {"S.padding", "S.mask", "S.lengths", "S.pad", "S.offsets", "S.starts", "S.owner"}


class EqualLengths:
    """Refuse padded sequences of a run: all have one number of ids, and one begins or ends with an id twice.

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
        self._repeated: int | None = None
        self._count = 0

    def add(self, record: TraceRecord) -> None:
        """Add a trace; raise InvalidInputError where it and the earlier ones look padded."""
        size = record.prompt_length if self._has_passes else record.num_tokens
        if not self._is_open or record.tokens is None or size is None:
            return
        ids = record.tokens[:size].tolist()
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
                f"each {what} has {self._size} tokens, and one has the id {self._repeated} twice at one end: padding? "
                + PADDING_WAYS,
                field="tokens",
            )
