"""Threads that wait for servers."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class FetchCancelledError(Exception):
    """The fetch was cancelled: its result is no longer needed."""


def in_threads(work: Callable[[T, Callable[[], None]], R], items: Iterable[T], num_threads: int) -> Iterator[R]:
    """Yield the result of each ``work(item, check)`` in the order of completion.

    After an error, or when the iterator is closed, `check` raises FetchCancelledError in the other threads. They are
    daemon threads that the caller does not wait for: a server may take minutes to answer.
    """
    waiting = list(items)
    upcoming, count = iter(waiting), len(waiting)
    results: queue.Queue[tuple[R | None, BaseException | None]] = queue.Queue()
    taking, stopped = threading.Lock(), threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise FetchCancelledError

    def run() -> None:
        try:
            while not stopped.is_set():
                with taking:
                    item = next(upcoming, upcoming)
                if item is upcoming:
                    return
                results.put((work(item, check), None))  # type: ignore[arg-type]
        except BaseException as error:
            results.put((None, error))

    for _ in range(min(count, num_threads)):
        threading.Thread(target=run, name="tracestore-fetch", daemon=True).start()
    try:
        for _ in range(count):
            result, error = results.get()
            if error is not None:
                raise error
            yield result  # type: ignore[misc]
    finally:
        stopped.set()
