"""Argument types, output, progress and error handling that all commands share."""

import argparse
import copy
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, field, is_dataclass
from typing import Any, NoReturn, TypeVar

from tracestore import process
from tracestore.errors import TracestoreError, TracestoreWarning, UsageError, escape_unprintable, nearest
from tracestore.extras import needs

T = TypeVar("T")
# Seconds between two progress updates on a terminal, and between two lines in a log.
_TERMINAL_INTERVAL_S, _LOG_INTERVAL_S = 0.2, 30.0


def int_between(low: int, high: int, expected: str) -> Callable[[str], int]:
    """Return an argparse type for the integers from `low` to `high`. `expected` completes the error message."""

    def parse(text: str) -> int:
        # int() refuses more than 4,300 digits with an error of its own.
        if not text.isdecimal() or len(text) > 100 or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
        return int(text)

    return parse


positive_int = int_between(1, sys.maxsize, "a whole number of at least 1")
non_negative_int = int_between(0, 2**31 - 1, "a whole number from 0")
port = int_between(0, 65535, "a port from 0 to 65535")


def float_where(accepts: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """Return an argparse type for the numbers that `accepts` allows. `expected` completes the error message."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value) or not accepts(value):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
        return value

    return parse


def option(default: T, text: str | None, *, is_resumable: bool = False, **arguments: Any) -> T:
    """Return a field of a dataclass that is an option of commands.

    Parameters
    ----------
    default : object
    text : str, optional
        The help text. None: no command has the option under this name.
    is_resumable : bool
        The option may change when a training resumes, because it does not change the results.
    **arguments
        Arguments of ``add_argument`` that the type of the field does not give.
    """
    metadata = {"text": text, "is_resumable": is_resumable, "arguments": arguments}
    made: T = field(default=default, metadata=metadata)
    return made


def int_list(text: str) -> tuple[int, ...]:
    """Return the integers of a list such as 0-9,20,-1, in its order and below 1,000,000, for argparse."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?", part)
        bounds = range(0) if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
        if not bounds:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected numbers as 0-9,20,29, each below 1,000,000")
        numbers += bounds
    return tuple(numbers)


def int_ranges(text: str) -> tuple[int, ...]:
    """Return the sorted, unique integers of a list such as 0-9,20,29, none negative, for argparse."""
    numbers = sorted(set(int_list(text)))
    if numbers[0] < 0:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected no negative numbers")
    return tuple(numbers)


def nan_to_none(value: Any) -> Any:
    """Return the value with None for each NaN and infinity, which JSON lacks, and dicts for dataclasses."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {k: nan_to_none(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Other spellings of --output, which the help leaves out.
_NOT_SHOWN = {"--output-dir", "--out", "--save", "--write"}


class _HelpFormatter(argparse.HelpFormatter):
    """Show what is required in the usage, and add the default of each option that does not explain it."""

    def _format_usage(self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: Any) -> str:
        """Return the usage without the options that may be missing."""
        needed = {action for group in groups if group.required for action in group._group_actions}
        shown = [a for a in actions if not a.option_strings or a.required or a in needed]
        return super()._format_usage(usage, shown, groups, prefix).rstrip("\n") + " [OPTION ...]\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        action = copy.copy(action)
        action.option_strings = [flag for flag in action.option_strings if flag not in _NOT_SHOWN]
        return super()._format_action_invocation(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        # Not `in`, because 0 is equal to False and is a default to show.
        if text is None or "default" in text or any(default is v for v in (None, False, argparse.SUPPRESS)):
            return text
        shown = "yes" if default is True else "%(default)s"
        return f"{text[:-1]}; default: {shown})" if text.endswith(")") else f"{text} (default: {shown})"


class _StoreOnce(argparse._StoreAction):
    """Store the value of an option, and refuse a second file, name or list: both may be meant, one has an effect.

    Of numbers and choices the last one counts, so that a command line can begin with defaults.
    """

    _filled: argparse.Namespace | None = None

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        is_open = flag is not None and self.choices is None and not isinstance(values, int | float)
        if is_open and self._filled is namespace and getattr(namespace, self.dest) != values:
            raise argparse.ArgumentError(self, "found two values, expected one")
        self._filled = namespace
        super().__call__(parser, namespace, values, flag)


class _SwitchOnce(argparse.BooleanOptionalAction):
    """Store whether an option is on, and refuse both of its spellings."""

    _flag: tuple[argparse.Namespace, str | None] | None = None

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        known = self._flag[1] if self._flag is not None and self._flag[0] is namespace else flag
        if known != flag:
            raise argparse.ArgumentError(self, f"found {known} and {flag}, expected one")
        self._flag = namespace, flag
        super().__call__(parser, namespace, values, flag)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with a suggestion for a misspelled word.

    Help texts show defaults. An option that takes one file, name or list refuses another.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": _HelpFormatter} | options)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)
        self.register("action", argparse.BooleanOptionalAction, _SwitchOnce)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the message."""
        raise UsageError(f"{message}{self._hint(message)} (see {self.prog} --help)")

    def _hint(self, message: str) -> str:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice is not None:
            word, known = choice[1], re.findall(r"[\w.-]+", choice[2])
        elif message.startswith("unrecognized arguments: "):
            word, known = (message.split()[2:] or [""])[0].split("=")[0], sorted(self._option_string_actions)
        else:
            return ""
        close = nearest(word, known)
        return f"; did you mean {close}?" if close else ""


class Output:
    """The standard output of a command.

    Notes go to standard output. With --json they go to standard error, and standard output holds one
    JSON document.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def info(self, text: str) -> None:
        """Print a note."""
        print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def print_json(self, value: Any) -> None:
        """Print a value or dataclass as the JSON document if --json was given, with null for NaN and infinities."""
        if self.as_json:
            print(json.dumps(nan_to_none(value), indent=1), flush=True)


class Progress:
    """Progress with its rate and the time left: a bar on a terminal, a note of the Output now and then in a log.

    Parameters
    ----------
    output : Output
        Receives the notes.
    unit : str
        What is counted; "B" for bytes.
    log_interval_s : float
        Seconds between two notes in a log.
    """

    def __init__(self, output: Output, unit: str = "traces", log_interval_s: float = _LOG_INTERVAL_S) -> None:
        self._output, self._log_interval_s = output, log_interval_s
        self._is_terminal = sys.stderr.isatty()
        self._start = self._last = time.monotonic()
        # tqdm puts the unit behind the rate without a space.
        self._format = {"unit": unit if unit == "B" else f" {unit}", "unit_scale": unit == "B"}
        self._first: int | None = None  # done before the first update, for example by an earlier run
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the object was made."""
        return time.monotonic() - self._start

    def update(self, done: int, total: int, note: Callable[[], str] = str) -> None:
        """Show that `done` of `total` units are done.

        Parameters
        ----------
        done, total : int
        note : callable, optional
            Return a text for the end of the line. It is called only if an update is due.
        """
        self._first = done if self._first is None else self._first
        now = time.monotonic()
        if now - self._last < (_TERMINAL_INTERVAL_S if self._is_terminal else self._log_interval_s):
            return
        self._last = now
        # Imported here, because most commands end before the first update.
        from tqdm import tqdm

        if self._is_terminal:
            if self._bar is None:
                tqdm.monitor_interval = 0  # no thread
                bar = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
                # process.configure_program() disables the bars of libraries by default.
                options = {
                    "disable": False,
                    "initial": self._first,
                    "leave": False,
                    "dynamic_ncols": True,
                    "file": sys.stderr,
                }
                self._bar = tqdm(total=total, bar_format=bar, **options, **self._format)
                self._bar.start_t -= now - self._start
            self._bar.n, self._bar.total = done, total
            self._bar.set_postfix_str(note())
            return
        elapsed = now - self._start
        text = "{percentage:.0f} %, {n_fmt} of {total_fmt}{unit}, {rate_noinv_fmt}, {remaining} left{postfix}"
        line = tqdm.format_meter(
            done, total, elapsed, initial=self._first, bar_format=text, postfix=note(), **self._format
        )
        self._output.info(line)

    def clear(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _print_error(origin: str, text: str) -> None:
    print(f"{origin}: {escape_unprintable(text)}", file=sys.stderr, flush=True)


def run_command(prog: str, command: Callable[[], int], *, as_json: bool = False, is_program: bool = False) -> int:
    """Run a command and return its exit code. Print an error as one line on standard error.

    With `as_json` an error is also printed as a JSON document on standard output. Warnings of libraries are
    hidden. TRACESTORE_DEBUG=1 lets unexpected exceptions propagate. If the reader of the output has gone, the
    command ends silently, with the exit code of SIGPIPE; with `is_program`, what is still buffered is discarded.
    """
    try:
        code = _exit_code(prog, command, as_json)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        if not process.closed_output():
            raise
        code = 128 + signal.SIGPIPE
    if is_program:
        process.discard_closed_output()
    return code


def _exit_code(prog: str, command: Callable[[], int], as_json: bool) -> int:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", TracestoreWarning)
        warnings.showwarning = lambda message, *_, **__: _print_error("warning", str(message))
        try:
            with needs():
                return command()
        except SystemExit as ended:  # argparse: help, version, wrong usage
            if not isinstance(ended.code, int | None):
                raise
            return ended.code or 0
        except (Exception, KeyboardInterrupt) as error:
            raised = error
    code, text = 1, str(raised)
    if isinstance(raised, TracestoreError):
        code = raised.exit_code
    elif isinstance(raised, KeyboardInterrupt):
        code, text = 128 + signal.SIGINT, text or "interrupted"
    elif isinstance(raised, MemoryError):
        text = "out of memory"
    elif os.environ.get("TRACESTORE_DEBUG"):
        raise raised
    else:
        text = f"unexpected {type(raised).__name__}: {text} (TRACESTORE_DEBUG=1 shows where)"
    cause: BaseException | None = raised
    while cause is not None and not isinstance(cause, BrokenPipeError):
        cause = cause.__context__
    if cause is not None and process.closed_output():
        return 128 + signal.SIGPIPE
    _print_error(prog, text)
    if as_json:
        document = {"error": {"type": type(raised).__name__, "message": text, "exit_code": code}}
        print(json.dumps(document, indent=1), flush=True)
    return code
