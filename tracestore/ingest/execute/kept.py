"""The entries `keep.NAME`: rows and traces that say another value are left out."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from tracestore.errors import InvalidInputError, escape_unprintable, some_of
from tracestore.ingest.execute.values import key_text
from tracestore.ingest.layout.fields import KEEP
from tracestore.ingest.layout.places import Plan, given_name

_MAX_VALUES = 64  # that differ, of which the message about an unknown one chooses


class KeptValues:
    """Tell the rows and traces that are kept, and count the others.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan) -> None:
        entries = {name.removeprefix(KEEP): v for name, v in plan.layout.settings.items() if name.startswith(KEEP)}
        self._wanted = {
            name: {key_text(v) for v in (found if isinstance(found, list) else [found])}
            for name, found in entries.items()
        }
        self._of_traces = {name for place in plan.others if (name := given_name(place)) in entries and name is not None}
        self._lock = threading.Lock()
        self._found: dict[str, set[str]] = defaultdict(set)
        self._num_left_out = Counter[tuple[str, str]]()

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def has(self, bound: Mapping[str, Any], where: str) -> bool:
        """Return whether a row is kept that binds values; count it if not, by the place where it lies."""
        for name in self._wanted.keys() & bound.keys():
            text = key_text(bound[name])
            is_kept = text in self._wanted[name]
            with self._lock:
                if is_kept or len(self._found[name]) < _MAX_VALUES:
                    self._found[name].add(text)
                self._num_left_out[name, where] += not is_kept
            if not is_kept:
                return False
        return True

    def has_trace(self, environment: Mapping[str, Any]) -> bool:
        """Return whether a trace is kept; refuse one that lacks a value which a line gives to traces."""
        if missing := sorted(self._of_traces - environment.keys()):
            raise InvalidInputError(f"the trace has no {missing[0]}, which decides whether it is kept", field="keep")
        return self.has(environment, "traces")

    def not_found(self) -> InvalidInputError | None:
        """Return the error of a value that no row and no trace has: it may be misspelled."""
        for name, wanted in self._wanted.items():
            if missing := sorted(wanted - self._found[name]):
                others = some_of([escape_unprintable(text, 40) for text in sorted(self._found[name])])
                text = f"{escape_unprintable(missing[0], 40)!r} occurs nowhere, found {others or 'no value'}"
                return InvalidInputError(text, field=f"{KEEP}{name}")
        return None

    def lines(self) -> Iterator[str]:
        """Yield how many rows and traces were left out."""
        for (name, where), count in sorted(self._num_left_out.items()):
            if count:
                what = "traces" if where == "traces" else f"rows of {where}"
                yield f"{KEEP}{name}: {count:,} {what} left out"

    def to_json(self) -> dict[str, Any]:
        """Return what the sources of a task have added."""
        counts = [[*key, count] for key, count in self._num_left_out.items()]
        return {"found": {name: sorted(texts) for name, texts in self._found.items()}, "num_left_out": counts}

    def add_json(self, found: Mapping[str, Any]) -> None:
        """Add what a task has found."""
        for name, texts in found["found"].items():
            self._found[str(name)].update(map(str, texts))
        for name, where, count in found["num_left_out"]:
            self._num_left_out[str(name), str(where)] += int(count)
