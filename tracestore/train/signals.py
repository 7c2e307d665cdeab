"""SIGTERM and Ctrl-C end a run after the step at hand."""

import signal
import threading
from typing import Any


class StopSignals:
    """A context in which the first SIGINT or SIGTERM is noted in `signum` (0: none came);
    a second one ends the process at once. Outside the main thread nothing is caught."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signum = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, signum: int, _: object) -> None:
        self.signum = signum
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
