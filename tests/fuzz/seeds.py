"""Inputs that fuzzing starts from: small files of every format, valid and malicious, layouts, changes of stores."""

import json
import random
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.malicious_inputs.files.bombs import valid_files
from tests.malicious_inputs.files.containers import gz
from tests.malicious_inputs.files.corpus import crash_files, small_files

MAX_SEED_BYTES = 4096
_TESTS = Path(__file__).resolve().parent.parent
_GOLDEN, _LAYOUTS = _TESTS / "golden", _TESTS / "ingest/corpus/layouts.toml"
_EVERY = 5
# Bytes for two changes.
_STORE_SEED_BYTES = 40
_STORE_SEEDS = 300


def _mode(data: bytes) -> str:
    if data[:2] == b"\x1f\x8b":
        return "gzip"
    torch_file = data[:4] == b"PK\x03\x04" or data[:4] == b"\x80\x02\x8a\x0a"
    return "zip" if torch_file else "pickle"


def valid_inputs(mode: str) -> list[bytes]:
    """Return files that are accepted; for stores, inputs that choose different changes."""
    if mode == "store":
        return [random.Random(k).randbytes(_STORE_SEED_BYTES) for k in range(_STORE_SEEDS)]
    if mode == "layout":
        layouts = tomllib.loads(_LAYOUTS.read_text())
        return [_lines(entries).encode() for name, entries in layouts.items() if name in _some(layouts)]
    small = [data for _, data in valid_files().values()]
    golden = [p.read_bytes() for p in sorted((_GOLDEN / "libraries").glob("*.pkl*"))]
    golden += [p.read_bytes() for p in sorted((_GOLDEN / "inputs").rglob("*")) if p.is_file() and p.suffix != ".csv"]
    files = [d for d in [*small, *golden] if len(d) <= 4 * MAX_SEED_BYTES]
    if mode == "gzip":
        files += [gz(d) for d in files if _mode(d) == "pickle"]
    return [d for d in files if _mode(d) == mode]


def _some(names: Iterable[str]) -> set[str]:
    return set(sorted(names)[::_EVERY])


def _lines(entries: dict[str, Any]) -> str:
    """Return the entries of a layout as lines of --field."""
    found = []
    for name, value in entries.items():
        if isinstance(value, dict):  # a name with a dot
            found += [f"{name}.{line}" for line in _lines(value).splitlines()]
        else:
            found.append(f"{name} = {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    return "\n".join(found)


def seeds(mode: str) -> list[bytes]:
    """Return valid files, a fifth of the small malicious ones, and inputs that fuzzing found."""
    if mode in ("store", "layout"):
        return valid_inputs(mode) + [p.read_bytes() for p in crash_files() if p.name.startswith(f"{mode}-")]
    malicious = [c.data for c in small_files() if len(c.data) <= MAX_SEED_BYTES]
    found = [p.read_bytes() for p in crash_files() if not p.name.startswith(("store-", "layout-"))]
    return valid_inputs(mode) + [d for d in [*malicious[::_EVERY], *found] if _mode(d) == mode]
