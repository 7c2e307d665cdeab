"""Options of commands that are fields of dataclasses, and those that several commands share."""

import argparse
import math
import os
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tracestore.console import float_where, int_ranges, positive_int
from tracestore.errors import UsageError
from tracestore.store.format.labels import THRESHOLD_HELP
from tracestore.store.format.provenance import ALLOW_HELP
from tracestore.store.io.files import parse_location

_NUMBER = float_where(math.isfinite, "a number")
# Arguments by the type of the field.
_BY_TYPE: dict[Any, dict[str, Any]] = {
    bool: {"action": "store_true"},
    int: {"type": positive_int, "metavar": "N"},
    float: {"type": _NUMBER},
    tuple[int, ...]: {"type": int_ranges, "metavar": "LIST"},
}

# Arguments that several commands have, by their flag.
_SHARED: dict[str, dict[str, Any]] = {
    "store": {"metavar": "STORE", "help": "folder or URL of a store"},
    "stores": {
        "metavar": "STORE", "nargs": "+", "type": parse_location, "help": "folder or URL of a store; several are read as one"
    },
    "--overwrite": {"action": "store_true", "help": "replace an existing FILE"},
    "--num-threads": {
        "type": positive_int, "metavar": "N",
        "help": "threads of torch and of the loader (default: torch's own number, and 2 of the loader)",
    },
    "--score": {"metavar": "NAME", "help": "named score to use (default: the store's)"},
    "--score-threshold": {"type": _NUMBER, "metavar": "T", "help": THRESHOLD_HELP},
    "--allow-mixed-provenance": {"action": "store_true", "help": ALLOW_HELP},
}  # fmt: skip


def add_shared(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Add arguments that several commands have: of _SHARED, by their flag."""
    for flag in flags:
        parser.add_argument(flag, **_SHARED[flag])


def option_names(options: type) -> list[str]:
    """Return the names of the fields of a dataclass that are options of commands."""
    return [f.name for f in fields(options) if f.metadata.get("text")]


def add_flags(parser: argparse._ActionsContainer, options: type, *names: str) -> None:
    """Add an option for each field of a dataclass that is made by `console.option`, or for some of them.

    A bool field becomes a switch, the values of a Literal become choices. A suffix ``_s`` (seconds) is left out of the
    flag.
    """
    hints = get_type_hints(options)
    for f in fields(options):
        if f.name in (names or option_names(options)):
            arguments: dict[str, Any] = {}
            for kind in (hints[f.name], *get_args(hints[f.name])):
                arguments |= {"choices": get_args(kind)} if get_origin(kind) is Literal else _BY_TYPE.get(kind, {})
            arguments |= {"default": f.default, "help": f.metadata["text"], **f.metadata["arguments"]}
            parser.add_argument("--" + f.name.removesuffix("_s").replace("_", "-"), dest=f.name, **arguments)


def values(args: argparse.Namespace, *tables: Iterable[str]) -> dict[str, Any]:
    """Return the parsed values of the fields in some tables, by field name."""
    return {name: getattr(args, name) for names in tables for name in names}


def add_shard(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the flag --shard, whose value is a pair of integers; `text` states the share of process I of N."""
    parser.add_argument(
        "--shard",
        type=_shard,
        default=f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}",
        metavar="I/N",
        help=f"{text} (default: RANK/WORLD_SIZE as torchrun sets them, else all)",
    )


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected I/N with 0 <= I < N")
    return int(match[1]), int(match[2])


def require_existing(*locations: object, what: str = "store") -> None:
    """Raise UsageError if a path on this machine does not exist."""
    for location in locations:
        if isinstance(location, Path) and not location.exists():
            raise UsageError(f"{location}: no such {what}")
