"""Show what a benchmark does at the moment, by a thread of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from tracestore.train.monitor import Log

# Receives the steps done, their number, and a text for the rest of the line.
Show = Callable[[int, int, Callable[[], str]], None]
_INTERVAL_S = 0.2
_NAMES = 3


class Activity:
    """The steps of a benchmark. Use it as a context manager; safe to use from threads.

    Parameters
    ----------
    log : callable
        Called with each line of the log, by one thread at a time.
    show : callable, optional
        Called several times a second with the steps done, their number and what runs.
    """

    def __init__(self, log: Log, show: Show | None = None) -> None:
        self._log, self._show = log, show
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._running: list[str] = []
        self._done = self.total = 0
        self._thread = threading.Thread(target=self._run, name="tracestore-activity", daemon=True)

    def __enter__(self) -> Self:
        if self._show is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._show is not None:
            self._thread.join()

    def log(self, line: str) -> None:
        """Write a line of the log."""
        with self._lock:
            self._log(line)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show the name while the block runs, and count it as done."""
        with self._lock:
            self._running.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(name)
                self._done += 1

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            with self._lock:
                if self._show is not None and self._running:
                    self._show(self._done, max(self.total, self._done + 1), self._note)

    def _note(self) -> str:
        more = len(self._running) - _NAMES
        return f"now {', '.join(self._running[:_NAMES])}{f' and {more} more' if more > 0 else ''}"
