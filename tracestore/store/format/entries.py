"""Entries of committed files in a manifest, and what tells source files apart."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError
from tracestore.store.format import paths

# Upper limit for a file of a store: a segment holds one trace or at most SEGMENT_SPLIT_BYTES.
MAX_FILE_BYTES = 1 << 50


@dataclass(frozen=True)
class FileEntry:
    """Path (relative to the store), size in bytes and CRC-32C of a committed file.

    Raises
    ------
    CorruptStoreError
        If the path, size or checksum is not valid in this format.
    """

    path: str
    size: int
    crc32c: int

    def __post_init__(self) -> None:
        paths.committed(self.path)
        if type(self.size) is not int or not 0 <= self.size <= MAX_FILE_BYTES:
            raise CorruptStoreError(f"{self.path}: invalid size {self.size!r:.40}")
        if type(self.crc32c) is not int or not 0 <= self.crc32c < 1 << 32:
            raise CorruptStoreError(f"{self.path}: invalid checksum {self.crc32c!r:.40}")


class Fingerprint(NamedTuple):
    """The parts of the fingerprint of a source, of 16 hexadecimal digits.

    Attributes
    ----------
    layout : str
        Digest of the layout that the store keeps for the source; empty without one.
    needed : str
        Digest of all that the source depends on besides its files, or a part of that of its file.
    files : str
        Digest of its files alone.
    """

    layout: str
    needed: str
    files: str

    @classmethod
    def parse(cls, text: str) -> "Fingerprint":
        """Return the parts of a fingerprint; an empty one has empty parts."""
        return cls(text[:-32], text[-32:-16], text[-16:])


class Layers(NamedTuple):
    """The n layers of an uncompressed array, which its file begins with, one after another.

    Attributes
    ----------
    ends : np.ndarray
        Where the layers end, in rows or bytes: (n + 1,) int64, from 0.
    crcs : np.ndarray
        Their CRC-32C, (n,) uint32.
    """

    ends: np.ndarray
    crcs: np.ndarray


class PartialFile(Protocol):
    """A mapped file of which some layers are here; see remote.layer_file."""

    mapped: MappedFile

    def missing(self, ranges: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Return what ranges of bytes need and is not here."""

    def fetch(self, ranges: Sequence[tuple[int, int]], check: Callable[[], None] = lambda: None) -> bool:
        """Fetch the layers that ranges of bytes need; False if the file must be mapped again."""


class FilePart(NamedTuple):
    """Layers of a large array that a batch needs: the file, their size in bytes, and what fetches them."""

    entry: FileEntry
    num_bytes: int
    fetch: Callable[[Callable[[], None]], None]


# Lists what a batch, by its number, needs: files and parts of files.
FilesOf = Callable[[int], Iterable[FileEntry | FilePart]]


def size_mismatch(entry: FileEntry, found: int | None) -> CorruptStoreError:
    """Return the error for a file of `found` bytes, None if it is missing, that has another committed size."""
    return CorruptStoreError(
        f"{entry.path}: {'missing' if found is None else f'found {found} bytes, expected {entry.size}'}"
    )
