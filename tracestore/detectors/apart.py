"""Detectors of other packages in a process of their own: whatever they do, the caller gets a result or one line.

The process is this module. It reads a job from its standard input, and writes the result to a pipe of its own; what
the detector prints is kept for the message of a failure. It ends with its parent.
"""

import contextlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Self, get_args

import numpy as np

from tracestore import process
from tracestore.detectors.interface import Detector, Kind, describe, missing_fields
from tracestore.detectors.registry import DetectorEntry, make_detector, registry
from tracestore.errors import TracestoreError, UsageError, escape_unprintable
from tracestore.store.read.store import TraceStore

_OUTPUT_BYTES, _SHOWN_CHARACTERS = 4096, 200
_POLL_S, _GRACE_S = 0.1, 1.0
_MAX_FRAMES = 100  # a recursion has a thousand


def run_apart(function: str, *arguments: Any, cancelled: threading.Event | None = None) -> Any:
    """Call a function in a new process and return its result.

    Parameters
    ----------
    function : str
        Import path, ``module:name``.
    *arguments
        Values that can be pickled. So must be the result, of classes that this process may import.
    cancelled : threading.Event, optional
        Ends the process when it is set.

    Raises
    ------
    UsageError
        With what the process did instead of returning: its error, its exit code or its signal.
    """
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for this process.
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    printed = bytearray()
    draining = threading.Thread(target=_drain, args=(process.stdout, printed), daemon=True)
    draining.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            with Connection(os.dup(process.stdin.fileno()), readable=False) as jobs:
                jobs.send((function, arguments))
        answer = _receive(reading, process, cancelled or threading.Event())
        # The detector may have started processes, and threads that keep its process alive.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        draining.join(_GRACE_S)
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
    if answer is None:
        raise UsageError(_how_it_ended(process.returncode, bytes(printed)))
    error, value = answer
    if error is not None:
        raise UsageError(error)
    return value


def _drain(pipe: Any, kept: bytearray) -> None:
    """Read what a process prints, and keep the end."""
    with contextlib.suppress(OSError, ValueError), pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            kept += data
            del kept[:-_OUTPUT_BYTES]


def _receive(reading: int, process: subprocess.Popen[bytes], cancelled: threading.Event) -> tuple[Any, Any] | None:
    """Return the error and the value that a process answers, None if it ends without an answer."""
    answer: list[tuple[Any, Any]] = []
    answers = Connection(os.dup(reading), writable=False)

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError), answers:
            answer.append(answers.recv())

    # A process that the detector has started may hold the pipe open, with a part of an answer in it.
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while waiting.is_alive() and process.poll() is None and not cancelled.is_set():
        waiting.join(_POLL_S)
    waiting.join(0 if cancelled.is_set() else _GRACE_S)
    if answer:
        return answer[0]
    return None


def _how_it_ended(code: int, printed: bytes) -> str:
    lines = printed.decode("utf-8", "replace").split("\n")
    last = next((escape_unprintable(line, _SHOWN_CHARACTERS) for line in reversed(lines) if line.strip()), "")
    suffix = f"; its last output: {last}" if last else ""
    if code >= 0:
        return f"its process ended with exit code {code} and without a result{suffix}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; if memory ran out, use fewer --workers" if -code == signal.SIGKILL else ""
    return f"its process was killed by {name}{hint}{suffix}"


def one_line(error: BaseException) -> str:
    """Return an error of a detector as a line for a terminal."""
    try:
        text = str(error)
    except Exception:
        text = "no message"
    if isinstance(error, SystemExit):
        return f"it called sys.exit({escape_unprintable(text, _SHOWN_CHARACTERS)})"
    if isinstance(error, TracestoreError):
        return escape_unprintable(text)
    return escape_unprintable(f"{type(error).__name__}: {text}".removesuffix(": ") + _place(error))


def _place(error: BaseException) -> str:
    """Return the last line of the detector's own module in the traceback of an error."""
    ours, library = os.path.dirname(os.path.dirname(__file__)), sysconfig.get_path("stdlib")
    packages = sysconfig.get_path("purelib")
    frames = [
        (name, line)
        for frame, line in islice(traceback.walk_tb(error.__traceback__), _MAX_FRAMES)
        if not (name := frame.f_code.co_filename).startswith((ours + os.sep, "<"))
        and (name.startswith(packages) or not name.startswith(library + os.sep))
    ]
    lines = [line for name, line in frames if name == frames[0][0]]
    return f" ({os.path.basename(frames[0][0])}, line {lines[-1]})" if frames else ""


def plain(value: Any) -> Any:
    """Return values of JSON as such, with texts for a terminal; arrays become lists, other values texts."""
    return _escaped(json.loads(json.dumps(value, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))))


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {escape_unprintable(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return escape_unprintable(value) if isinstance(value, str) else value


def properties(name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the static properties of a detector and its parameters, values of JSON.

    Raises
    ------
    UsageError
        The detector cannot be made, or its attributes are not those of a detector.
    """
    if registry()[name].is_foreign:
        found: dict[str, Any] = run_apart(f"{__name__}:_properties", name, dict(options or {}))
        return found
    return _properties(name, dict(options or {}))


def named(entry: DetectorEntry, error: UsageError) -> str:
    """Return the message of an error, which begins with the package if the detector is of another one."""
    text = str(error)
    return f"{entry.package}: {entry.name}: {text}" if entry.is_foreign and not text.startswith(entry.package) else text


def _properties(name: str, options: dict[str, Any]) -> dict[str, Any]:
    detector = make_detector(name, **options)
    found = plain({**describe(detector), "parameters": detector.parameters})
    texts = [found["summary"], *found["fields"], *(found[key] for key in ("layers", "cost", "reference", "source"))]
    if found["kind"] not in get_args(Kind):
        raise UsageError(f"kind: found {found['kind']!r:.60}, expected one of {', '.join(get_args(Kind))}")
    if not isinstance(found["parameters"], dict) or not all(isinstance(text, str) for text in texts):
        raise UsageError("its attributes are not those of a tracestore.detectors.interface.Detector")
    return dict(found)


def list_detectors(store: TraceStore | None = None) -> list[dict[str, Any]]:
    """Return the properties of every detector, values of JSON.

    Each has name, package, the keys of `interface.describe` and parameters. With a store, "missing" lists what the
    store lacks for the detector. A detector that cannot be loaded has "error" instead.
    """
    rows = []
    for name, entry in registry().items():
        row: dict[str, Any] = {"name": name, "package": entry.package}
        try:
            found = properties(name)
            lacks = {} if store is None else {"missing": list(missing_fields(store, tuple(found["fields"])))}
            rows.append(row | found | lacks)
        except UsageError as error:
            rows.append(row | {"error": named(entry, error)})
    return rows


class DetectorApart(Detector):
    """A fitted detector of another package that scores in a process of its own.

    Parameters
    ----------
    name : str
    options : dict
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self._options = name, options
        self._state: dict[str, Any] = {}
        self.fields = tuple(properties(name, options)["fields"])  # type: ignore[misc]

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Raise NotImplementedError: a checkpoint has fitted values."""
        raise NotImplementedError

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """See Detector. UsageError with what the detector did instead."""
        scores = run_apart(f"{__name__}:_score", self.name, self._options, self._state, store, indices)
        return np.asarray(scores, np.float64)

    def load_state(self, state: dict[str, Any]) -> None:
        """See Detector. The values are given to each process that scores."""
        self._state = state


def _score(
    name: str, options: dict[str, Any], state: dict[str, Any], store: TraceStore, indices: np.ndarray
) -> np.ndarray:
    detector = make_detector(name, **options)
    detector.load_state(state)
    return as_scores(detector.score(store, indices), indices.shape)


def as_scores(scores: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return what a detector returned as float64, with NaN for infinities. ValueError for another shape."""
    found = np.asarray(scores, np.float64)
    if found.shape != shape:
        raise ValueError(f"score() returned the shape {found.shape}, expected {shape}")
    return np.where(np.isfinite(found), found, np.nan)


def _end_with_parent(pipe: int) -> None:
    while os.read(pipe, 1 << 16):
        pass
    os._exit(1)


def main() -> NoReturn:
    """Run the job of the standard input."""
    process.reuse_freed_memory()
    writing, pipe = int(sys.argv[1]), os.dup(0)
    os.set_inheritable(writing, False)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    with Connection(os.dup(pipe), writable=False) as jobs:
        function, arguments = jobs.recv()
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    with Connection(writing, readable=False) as answers:
        try:
            answers.send((None, pkgutil.resolve_name(function)(*arguments)))
        except BaseException as error:  # A detector may call sys.exit() or raise KeyboardInterrupt.
            answers.send((one_line(error), None))
    os._exit(0)


if __name__ == "__main__":
    main()
