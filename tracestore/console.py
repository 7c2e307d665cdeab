"""What every command shares: exit codes, one-line errors, sizes, progress."""

import argparse
import difflib
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from tracestore.errors import TracestoreError, TracestoreWarning, UsageError, escape_unprintable
from tracestore.extras import needs

_UNITS = {"": 1, "B": 1}
for _k, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_k, f"{_letter}IB": 1024**_k, _letter: 1024**_k}


def parse_size(text: str) -> int:
    """Bytes of 512MiB, 2GiB, 2GB or a plain number; argparse reports what is not one."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"found size {text!r}, expected one like 512MiB, 2GiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def positive_int(text: str) -> int:
    """An integer of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number of at least 1")
    return value


def non_negative_int(text: str) -> int:
    """For argparse, an integer from 0 to 2^31 - 1."""
    if not text.isdecimal() or int(text[:12]) >= 2**31:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 0")
    return int(text)


def port(text: str) -> int:
    """For argparse, a port; 0 means any."""
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a port from 0 to 65535")
    return int(text)


def float_where(accepts: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """For argparse, a number that `accepts` is true of."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value) or not accepts(value):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
        return value

    return parse


def int_ranges(text: str) -> tuple[int, ...]:
    """For argparse, numbers and ranges as 0-9,20,29: in order, each once."""
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected numbers as 0-9,20,29")
        if int(last or first) >= 1_000_000:
            raise argparse.ArgumentTypeError(f"found {last or first}, expected numbers below 1,000,000")
        chosen.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(chosen))


def format_size(count: float) -> str:
    """1.5 GiB and so on."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def nan_to_none(value: Any) -> Any:
    """The value with NaN and infinities as None, for JSON."""
    if isinstance(value, dict):
        return {k: nan_to_none(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Parser(argparse.ArgumentParser):
    """Wrong usage is one line on standard error, with a hint where a word looks misspelt, and
    exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {escape_unprintable(message)}{self._hint(message)} (see {self.prog} --help)\n")

    def _hint(self, message: str) -> str:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice is not None:
            word, known = choice[1], re.findall(r"[\w.-]+", choice[2])
        elif message.startswith("unrecognized arguments: "):
            word, known = (message.split()[2:] or [""])[0].split("=")[0], sorted(_options(self))
        else:
            return ""
        close = difflib.get_close_matches(word, known, n=1)
        return f"; did you mean {close[0]}?" if close else ""


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser and of its commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(_options, action.choices.values()))
    return found


class Output:
    """Where a command's words go: notes to standard output, or with --json to
    standard error, where standard output is then one JSON document."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @property
    def notes(self) -> TextIO:
        return sys.stderr if self.as_json else sys.stdout

    def info(self, text: str) -> None:
        print(text, file=self.notes, flush=True)

    def print_json(self, value: Any) -> None:
        """NaN and infinities become null, which is all that JSON has for them."""
        if self.as_json:
            print(json.dumps(nan_to_none(value), indent=1), flush=True)


class Progress:
    """A line that is rewritten on a terminal; a plain line now and then in a log."""

    def __init__(self, output: Output, *, log_every_s: float = 30.0) -> None:
        self._output, self._log_every_s = output, log_every_s
        self._terminal = sys.stderr.isatty()
        self._start = self._last = time.monotonic()
        self._width = 0

    def update(self, text: Callable[[float], str]) -> None:
        """`text` gets the seconds since the start; it is called only when a line is due."""
        now = time.monotonic()
        if now - self._last < (0.2 if self._terminal else self._log_every_s):
            return
        self._last = now
        line = text(now - self._start)
        if self._terminal:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            line = line[: max(10, columns - 1)]
            print("\r" + line.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(line)
        else:
            self._output.info(line)

    def clear(self) -> None:
        """Removes the line, so that the next output starts clean."""
        if self._terminal and self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start


def traces_done(output: Output) -> tuple[Progress, Callable[[int, int], None]]:
    """Return a progress line and the function that sets it to "done of total traces"."""
    progress = Progress(output)
    return progress, lambda done, total: progress.update(lambda s: f"{done:,} of {total:,} traces")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {escape_unprintable(str(message))}", file=sys.stderr)


def run_command(prog: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit code. An error becomes one line on standard error."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", TracestoreWarning)
        warnings.showwarning = _show_warning
        try:
            with needs():
                return command()
        except SystemExit as ended:  # argparse: help, version, wrong usage
            if not isinstance(ended.code, int | None):
                raise
            return ended.code or 0
        except TracestoreError as error:
            text, code = str(error), error.exit_code
        except KeyError as error:
            text, code = f"no such id: {error.args[0] if error.args else error}", UsageError.exit_code
        except KeyboardInterrupt as error:
            text, code = str(error) or "interrupted", 128 + signal.SIGINT
        except MemoryError:
            text, code = "out of memory", 1
        except Exception as error:
            if os.environ.get("TRACESTORE_DEBUG"):
                raise
            text, code = f"unexpected {type(error).__name__}: {error} (TRACESTORE_DEBUG=1 shows where)", 1
    print(f"{prog}: {escape_unprintable(text)}", file=sys.stderr, flush=True)
    return code
