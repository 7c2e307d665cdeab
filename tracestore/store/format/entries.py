"""Entries of committed files in a manifest."""

from dataclasses import dataclass

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


def size_mismatch(entry: FileEntry, found: int) -> CorruptStoreError:
    """Return the error for a file of `found` bytes that has another committed size."""
    return CorruptStoreError(f"{entry.path}: found {found} bytes, expected {entry.size}")
