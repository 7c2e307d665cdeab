"""The corpus of files that the readers must refuse, by kind."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tests.malicious_inputs.files import archives, arrays, bombs, callables, names, opcodes, tensors
from tests.malicious_inputs.files.case import Case

MARKER = "malicious-marker"
# Inputs that a fuzzer found, replayed by the tests.
CRASHES = Path(__file__).resolve().parent.parent / "crashes"


def malicious_files(marker: str = MARKER) -> Iterator[Case]:
    """Yield every case; names and contents are unique.

    If unpickled, many of them create a file named `marker` in the working folder.
    """
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
    for case in callables.all_cases(marker):
        yield case._replace(name=f"callables/{case.name}")


def small_files() -> Iterator[Case]:
    """Yield the small files, which a fuzzer may start from."""
    for module in (opcodes, arrays, archives, tensors, names):
        for group in module.GROUPS:
            yield from group()
    for group in bombs.SMALL_GROUPS:
        yield from group()
    yield from callables.all_cases(MARKER)


def crash_files() -> list[Path]:
    """Return the paths of the inputs that a fuzzer found, sorted by name."""
    return sorted(p for p in CRASHES.iterdir() if p.is_file() and p.name != "README") if CRASHES.is_dir() else []
