"""Test argument types, sizes, JSON values and the progress line."""

import argparse
import math
import subprocess
import sys

import pytest

from tracestore import console
from tracestore.console import Output, Progress
from tracestore.words import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [("17", 17), ("3B", 3), ("2GB", 2_000_000_000), ("2GiB", 2 << 30), ("1.5 mib", 3 << 19), ("4k", 4096)],
)
def test_parse_size(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(("count", "expected"), [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"),
                                                 (3 << 30, "3.0 GiB"), (5 << 40, "5,120.0 GiB")])  # fmt: skip
def test_format_size(count, expected):
    assert format_size(count) == expected


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_size, "much"),
        (console.positive_int, "0"),
        (console.positive_int, "1.5"),
        (console.non_negative_int, "-1"),
        (console.non_negative_int, "9" * 5000),
        (console.port, "65536"),
        *((console.int_list, text) for text in ("", "a", "1-", "3-1", "--1", "1,,2", "0-9999999")),
        (console.int_ranges, "3-1"),
        (console.int_ranges, "-1-2"),
        (console.float_where(lambda value: value > 0, "a number above 0"), "nan"),
        (console.float_where(lambda value: value > 0, "a number above 0"), "0"),
    ],
)
def test_invalid_arguments_name_what_was_expected(parse, text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"found .*expected"):
        parse(text)


def test_int_ranges_are_sorted_and_unique():
    assert console.int_ranges("7,0-3,2") == (0, 1, 2, 3, 7)


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", (3,)), ("8,1-3", (8, 1, 2, 3)), ("-1", (-1,)), ("-4--2,-1", (-4, -3, -2, -1))]
)
def test_int_list_keeps_the_order(text, numbers):
    assert console.int_list(text) == numbers


def test_nan_to_none_replaces_nested_values():
    value = {"a": [math.nan, 1.0], "b": (math.inf, "text"), "c": {"d": None}}
    assert console.nan_to_none(value) == {"a": [None, 1.0], "b": [None, "text"], "c": {"d": None}}


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock; return the list that holds its time."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_progress_in_a_log_prints_lines_with_rate_and_time_left(clock, capsys):
    progress = Progress(Output(as_json=False))
    for clock[0] in (1.0, 31.0, 32.0):
        progress.update(310, 1000, lambda: "44 % correct")
    progress.clear()
    assert capsys.readouterr() == ("31 %, 310 of 1000 traces, ? traces/s, ? left, 44 % correct\n", "")


def test_rate_excludes_what_was_done_before(clock, capsys):
    progress = Progress(Output(as_json=False), "B")
    for clock[0], done in ((0.0, 1000), (32.0, 33_000)):
        progress.update(done, 65_000)
    assert capsys.readouterr().out == "51 %, 33.0k of 65.0kB, 1.00kB/s, 00:32 left\n"


def test_a_rate_below_one_is_per_second_too(clock, capsys):
    progress = Progress(Output(as_json=False), "batches")
    for clock[0], done in ((0.0, 0), (40.0, 10)):
        progress.update(done, 100)
    assert "0.25 batches/s, 06:00 left" in capsys.readouterr().out


def test_progress_on_a_terminal_is_a_bar_that_clear_removes(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    with Progress(Output(as_json=False)) as progress:
        for clock[0], done in ((0.1, 0), (1.0, 250), (2.0, 500)):
            progress.update(done, 1000)
        shown = capsys.readouterr()
    assert shown.out == "" and "| 500/1000 [" in shown.err
    assert capsys.readouterr().err.strip() == ""


def test_bars_of_commands_are_shown_where_those_of_libraries_are_disabled():
    """TQDM_DISABLE=1, which configure_program() sets, is read when tqdm is imported."""
    code = (
        "import sys; from tracestore import console, process; process.configure_program(); "
        "sys.stderr.isatty = lambda: True; console._TERMINAL_INTERVAL_S = 0; "
        "console.Progress(console.Output(False)).update(250, 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "250/1000" in done.stderr
