"""The malicious corpus: every file that the border must refuse, by kind."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tests.malicious_inputs import archives, arrays, bombs, callables, names, opcodes, tensors
from tests.malicious_inputs.case import Case

MARKER = "malicious-marker"
# Inputs that a fuzzer found; each is replayed for ever.
CRASHES = Path(__file__).resolve().parent / "crashes"


def malicious_files(marker: str = MARKER) -> Iterator[Case]:
    """Every case, names unique, no two alike. Unpickled, many of them leave a file named
    `marker` in the working folder."""
    seen = set()
    for case in _all(marker):
        content = case.suffix, hashlib.blake2b(case.data).digest()
        if content not in seen:
            seen.add(content)
            yield case


def _all(marker: str) -> Iterator[Case]:
    for module in (opcodes, arrays, bombs, archives, tensors, names):
        kind = module.__name__.rpartition(".")[2]
        for group in module.GROUPS:
            for case in group():
                yield case._replace(name=f"{kind}/{case.name}")
    for case in callables.every(marker):
        yield case._replace(name=f"callables/{case.name}")


def small_files() -> Iterator[Case]:
    """The files that a fuzzer may start from."""
    for module in (opcodes, arrays, archives, tensors, names):
        for group in module.GROUPS:
            yield from group()
    for group in bombs.SMALL_GROUPS:
        yield from group()
    yield from callables.every(MARKER)


def crash_files() -> list[Path]:
    """What fuzzing left, oldest first."""
    return sorted(p for p in CRASHES.iterdir() if p.is_file() and p.name != "README") if CRASHES.is_dir() else []
