"""Finding input files, and knowing them again."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tracestore._core.mapping import MappedFile
from tracestore.errors import UsageError

SUFFIXES = (".pkl", ".pickle", ".pkl.gz", ".pickle.gz", ".pt", ".pth")
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True)
class SourceFile:
    """A file to read; `name` is its path under SRC with forward slashes."""

    path: Path
    name: str


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts batch_2 before batch_10."""
    pieces = re.split(r"(\d+)", name)
    return tuple((1, int(p), p) if p.isdecimal() else (0, 0, p) for p in pieces)


def find_sources(arguments: list[Path], store: Path) -> list[SourceFile]:
    """The files of SRC..., folders walked, in natural order. UsageError where an
    argument does not exist or holds no file of traces."""
    found: list[SourceFile] = []
    for argument in arguments:
        if argument.is_dir():
            inside = _walk(argument, store)
            names = [SourceFile(p, p.relative_to(argument).as_posix()) for p in inside]
            if not names:
                raise UsageError(f"{argument}: no file of traces in this folder ({', '.join(SUFFIXES)})")
            found += sorted(names, key=lambda s: natural_key(s.name))
        elif os.path.lexists(argument):
            found.append(SourceFile(argument, argument.name))
        else:
            raise UsageError(f"{argument}: no such file or folder")
    seen: set[Path] = set()
    unique = []
    for source in found:
        place = source.path.absolute()
        if place not in seen:
            unique.append(source)
        seen.add(place)
    return unique


def _walk(top: Path, store: Path) -> list[Path]:
    """Files of traces below a folder. Links to folders are followed, each folder once;
    stores and hidden names are left out."""

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename}: cannot be read: {error.strerror}")

    seen = {top.resolve()}
    found = []
    for name, folders, files in os.walk(top, followlinks=True, onerror=refuse):
        here = Path(name)
        inside = []
        for folder in sorted(folders):
            place = (here / folder).resolve()
            is_store = place == store.resolve() or (place / "manifest").is_dir()
            if not folder.startswith(".") and not is_store and place not in seen:
                seen.add(place)
                inside.append(folder)
        folders[:] = inside
        found += [here / f for f in files if f.endswith(SUFFIXES) and not f.startswith(".")]
    return found


def find_scores(arguments: list[Path]) -> Path | None:
    """The one *scores*.csv directly in a SRC folder; several are an error that lists them."""
    candidates = sorted(
        p for argument in arguments if argument.is_dir() for p in argument.glob("*scores*.csv") if p.is_file()
    )
    if len(candidates) > 1:
        listing = ", ".join(map(str, candidates))
        raise UsageError(f"several scores files: {listing}; choose one with --scores")
    return candidates[0] if candidates else None


class Identity(NamedTuple):
    """What a source is known by, and when it was last written."""

    size: int
    fingerprint: str
    modified_ns: int

    def is_of(self, path: Path) -> bool:
        """Whether nobody has written to the file since."""
        try:
            status = os.stat(path)
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.modified_ns)


def fingerprint(path: Path) -> tuple[int, str]:
    """Size and a digest of the size, the first, the last and some bytes between:
    the same on every machine, and cheap at any size."""
    mapped = MappedFile(path)
    size = len(mapped)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    for begin in [*range(0, size, step), max(0, size - _SAMPLE_BYTES)]:
        digest.update(mapped.read(begin, min(size, begin + _SAMPLE_BYTES)))
    return size, digest.hexdigest()
