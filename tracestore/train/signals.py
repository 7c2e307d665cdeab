"""SIGINT and SIGTERM end a run after the current step."""

import signal
import threading
from contextlib import ExitStack
from enum import IntEnum
from typing import Self

from tracestore.process import signal_handler


class StopReason(IntEnum):
    """Reason for an early end of a run. Ranks reduce their reasons to the largest one."""

    NONE = 0
    SIGINT = 1
    SIGTERM = 2
    OUT_OF_MEMORY = 3

    @property
    def signum(self) -> signal.Signals:
        """The signal of SIGINT or SIGTERM."""
        return signal.Signals[self.name]


class StopSignals:
    """A context that catches the first SIGINT or SIGTERM and keeps it in `reason`.

    A second signal ends the process at once. Outside of the main thread nothing is caught.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.reason = StopReason.NONE
        self._handlers = ExitStack()

    def __enter__(self) -> Self:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in self._SIGNALS:
                self._handlers.enter_context(signal_handler(number, self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        self._handlers.close()

    def _handle(self, signum: int, _: object) -> None:
        self.reason = StopReason[signal.Signals(signum).name]
        for number in self._SIGNALS:
            signal.signal(number, signal.SIG_DFL)
