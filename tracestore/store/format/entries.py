"""The committed files that a manifest names."""

from dataclasses import dataclass

from tracestore.errors import CorruptStoreError
from tracestore.store.format import paths

# No file of a store is larger: a segment holds one trace or SEGMENT_SPLIT_BYTES.
MAX_FILE_BYTES = 1 << 50


@dataclass(frozen=True)
class FileEntry:
    """A file as the manifest names it: path in the store, size and crc32c of all its bytes.

    CorruptStoreError where the format has no such path, size or checksum.
    """

    path: str
    size: int
    crc32c: int

    def __post_init__(self) -> None:
        paths.committed(self.path)
        if type(self.size) is not int or not 0 <= self.size <= MAX_FILE_BYTES:
            raise CorruptStoreError(f"{self.path}: found {self.size!r:.40} as its size")
        if type(self.crc32c) is not int or not 0 <= self.crc32c < 1 << 32:
            raise CorruptStoreError(f"{self.path}: found {self.crc32c!r:.40} as its checksum")


def size_mismatch(entry: FileEntry, found: int) -> CorruptStoreError:
    return CorruptStoreError(f"{entry.path}: {found} bytes where {entry.size} were committed")
