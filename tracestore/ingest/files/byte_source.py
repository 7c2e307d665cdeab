"""Read the bytes of an input file: mapped, or inflated chunk by chunk."""

import os
import stat
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import ClassVar

from tracestore._core.mapping import MappedFile
from tracestore._core.pickle import ChunkReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.files.decompress import DAMAGE, open_inflated
from tracestore.ingest.files.limits import max_inflated
from tracestore.platform_support import num_processors
from tracestore.store.io.scratch import Scratch

TRUNCATED_WHILE_READING = "another program truncated the file while it was read"
MAX_INFLATED_BYTES = 1 << 40
MAX_INFLATED_PAYLOAD_BYTES = 1 << 30
# Memory for one trace; the rest of it goes through files.
MAX_INFLATED_MEMORY_BYTES = 32 << 20
_CHUNK_BYTES = 2 << 20
_CHUNKS_AHEAD = 3
# Most looks at the first item of a file end here: what is inflated ahead is lost then.
_LOOKED_BYTES = 2 * _CHUNK_BYTES


class InflatedChunks:
    """Inflate a compressed file chunk by chunk, with a limit on ratio and size.

    While `is_ahead()` is true, a thread inflates some chunks ahead. Otherwise each chunk is
    inflated on request, which costs less processor time when all processors are busy: by default
    while as many files are open.
    """

    open_ids: ClassVar[set[int]] = set()  # of the objects that are not closed

    def __init__(self, path: Path, is_ahead: Callable[[], bool] | None = None, compression: str = "gzip") -> None:
        from concurrent.futures import Future, ThreadPoolExecutor  # only compressed files need it

        self.disk_bytes = os.stat(path).st_size
        self.inflated_bytes = 0
        self._limit = min(MAX_INFLATED_BYTES, max_inflated(self.disk_bytes))
        self._compression = compression
        self._file = open_inflated(path, compression)
        self._is_ahead = is_ahead or _is_processor_idle
        # isal's own thread would copy each chunk once more.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tracestore-inflate")
        self._ahead: deque[Future[bytes]] = deque()
        self.open_ids.add(id(self))

    def __call__(self) -> bytes:
        """Return the next chunk; b"" at the end, after the checksums have been compared."""
        is_ahead = self.inflated_bytes >= _LOOKED_BYTES and self._is_ahead()
        while is_ahead and len(self._ahead) < _CHUNKS_AHEAD:
            self._ahead.append(self._pool.submit(self._file.read, _CHUNK_BYTES))
        try:
            chunk = self._ahead.popleft().result() if self._ahead else self._file.read(_CHUNK_BYTES)
        except EOFError:
            raise InvalidInputError(f"truncated: the {self._compression} stream ends early") from None
        except DAMAGE as error:  # type: ignore[misc]
            reason = f"damaged {self._compression}: {error or type(error).__name__}"
            raise InvalidInputError(reason, is_whole_source=True) from None
        self.inflated_bytes += len(chunk)
        if self.inflated_bytes > self._limit:
            raise InvalidInputError(
                f"inflates to more than {self._limit:,} bytes, the limit for its size: not a trace file"
            )
        return chunk

    def close(self) -> None:
        """End the thread and close the file."""
        self.open_ids.discard(id(self))
        self._pool.shutdown(cancel_futures=True)
        self._file.close()


def _is_processor_idle() -> bool:
    return len(InflatedChunks.open_ids) < num_processors()


def value_reader(read: Callable[[], bytes], disk_bytes: int, scratch: Scratch) -> ChunkReader:
    """Return a reader of values in chunks of `disk_bytes` compressed bytes; large traces go through `scratch`."""
    return ChunkReader(
        read,
        scratch.new_file,
        disk_bytes=disk_bytes,
        max_memory=min(scratch.max_memory, MAX_INFLATED_MEMORY_BYTES),
        max_payload=MAX_INFLATED_PAYLOAD_BYTES,
    )


def inflate(path: Path, compression: str, scratch: Scratch) -> MappedFile:
    """Return the bytes of a compressed file, inflated to an unnamed one.

    Raises
    ------
    InvalidInputError
        If the file is damaged, or inflates to too many bytes.
    """
    with (
        closing(InflatedChunks(path, lambda: False, compression)) as chunks,
        tempfile.TemporaryFile(dir=scratch.folder) as file,
    ):
        while chunk := chunks():
            file.write(chunk)
        file.flush()
        return MappedFile(path, fd=file.fileno())


def check_regular(path: Path) -> os.stat_result:
    """Return the status of a regular file, following links; raise InvalidInputError for anything else."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        kind = "a dangling link" if path.is_symlink() else "nothing"
        raise InvalidInputError(f"found {kind}, expected a regular file") from None
    except OSError as error:
        raise InvalidInputError(f"cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise InvalidInputError(f"found {kind}, expected a regular file")
    return status


def map_file(path: Path) -> MappedFile:
    """Map a file; raise InvalidInputError if it cannot be opened."""
    try:
        return MappedFile(path)
    except OSError as error:
        raise InvalidInputError(f"cannot be opened: {error.strerror}") from None


class MappedStream:
    """The part of a seekable file object that zipfile uses, over a mapped file."""

    def __init__(self, mapped: MappedFile) -> None:
        self._mapped, self._position = mapped, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position."""
        base = (0, self._position, len(self._mapped))[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return a copy of the next bytes, at most `size`."""
        begin, end = min(self._position, len(self._mapped)), len(self._mapped)
        data = self._mapped.read(begin, end if size < 0 else min(begin + size, end))
        self._position += len(data)
        return data
