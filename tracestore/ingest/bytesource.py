"""Bytes of an input file: mapped, or inflated piece by piece."""

import os
import stat
import zlib
from pathlib import Path
from typing import Any, Protocol

from isal import igzip_threaded
from isal.igzip_lib import IsalError

from tracestore._core.mapping import MappedFile
from tracestore.errors import InputRefusedError

# Inflated size against compressed size: real traces reach 2 to 5.
MAX_INFLATE_RATIO = 200
INFLATE_ALLOWANCE_BYTES = 256 << 20
MAX_INFLATED_BYTES = 1 << 40
MAX_INFLATED_PAYLOAD_BYTES = 1 << 30
_PIECE_BYTES = 1 << 20


class ByteSource(Protocol):
    """What the pickle reader reads from. `mapped`: payloads are views that cost no memory."""

    mapped: bool

    def read(self, count: int) -> Any:
        """Exactly `count` bytes; InputRefusedError where there are fewer."""

    def read_line(self) -> bytes:
        """Up to and without the next newline."""

    def at_end(self) -> bool: ...


def truncated(what: str = "the file ends inside a value") -> InputRefusedError:
    return InputRefusedError(f"truncated: {what}")


class BufferSource:
    """A buffer read from `begin` to `end`."""

    def __init__(self, buffer: Any, begin: int = 0, end: int | None = None, *, mapped: bool = True) -> None:
        self.view = memoryview(buffer).cast("B")
        self.position = begin
        self.end = len(self.view) if end is None else end
        self.mapped = mapped

    def read(self, count: int) -> memoryview:
        stop = self.position + count
        if count < 0 or stop > self.end:
            raise truncated()
        piece = self.view[self.position : stop]
        self.position = stop
        return piece

    def read_line(self) -> bytes:
        # Protocol 0 writes whole arrays as one line: looked for piece by piece, copied once.
        begin, step = self.position, 4096
        while begin < self.end:
            stop = min(self.end, begin + step)
            found = bytes(self.view[begin:stop]).find(b"\n")
            if found >= 0:
                line = bytes(self.view[self.position : begin + found])
                self.position = begin + found + 1
                return line
            begin, step = stop, min(2 * step, _PIECE_BYTES)
        raise truncated()

    def at_end(self) -> bool:
        return self.position >= self.end


class GzipSource:
    """A gzip file, inflated in a thread of its own, against a ratio and a cap."""

    mapped = False

    def __init__(self, path: Path) -> None:
        self._limit = min(MAX_INFLATED_BYTES, os.stat(path).st_size * MAX_INFLATE_RATIO + INFLATE_ALLOWANCE_BYTES)
        self._file = igzip_threaded.open(str(path), "rb", threads=1, block_size=_PIECE_BYTES)
        self._buffer = b""
        self._offset = 0
        self._total = 0
        self._ended = False

    def _fill(self) -> bool:
        """Loads the next piece; False at the end, where the checksums have been compared."""
        if self._ended:
            return False
        try:
            piece = self._file.read(_PIECE_BYTES)
        except EOFError:
            raise truncated("the gzip stream ends early") from None
        except (zlib.error, IsalError, OSError, ValueError) as error:  # type: ignore[misc]
            raise InputRefusedError(f"damaged gzip: {error or type(error).__name__}") from None
        self._total += len(piece)
        if self._total > self._limit:
            raise InputRefusedError(
                f"inflates to more than {self._limit:,} bytes, over {MAX_INFLATE_RATIO} times its size: not a file of traces"
            )
        self._ended = not piece
        self._buffer, self._offset = piece, 0
        return bool(piece)

    def read(self, count: int) -> bytes | bytearray:
        stop = self._offset + count
        if count >= 0 and stop <= len(self._buffer):
            piece = self._buffer[self._offset : stop]
            self._offset = stop
            return piece
        if count < 0 or count > MAX_INFLATED_PAYLOAD_BYTES:
            raise InputRefusedError(f"a value of {count:,} bytes inside gzip, at most {MAX_INFLATED_PAYLOAD_BYTES:,}")
        # Grows with what is there, not with what the file says.
        out = bytearray()
        while len(out) < count:
            take = min(count - len(out), len(self._buffer) - self._offset)
            out += memoryview(self._buffer)[self._offset : self._offset + take]
            self._offset += take
            if len(out) < count and not self._fill():
                raise truncated()
        return out

    def read_line(self) -> bytes:
        out = bytearray()
        while True:
            found = self._buffer.find(b"\n", self._offset)
            if found >= 0:
                out += self._buffer[self._offset : found]
                self._offset = found + 1
                return bytes(out)
            out += self._buffer[self._offset :]
            if len(out) > MAX_INFLATED_PAYLOAD_BYTES:
                raise InputRefusedError("a line without an end")
            if not self._fill():
                raise truncated()

    def at_end(self) -> bool:
        return self._offset >= len(self._buffer) and not self._fill()

    def close(self) -> None:
        self._file.close()


def check_regular(path: Path) -> os.stat_result:
    """InputRefusedError unless `path` is a regular file (links are followed)."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        kind = "a dangling link" if path.is_symlink() else "nothing"
        raise InputRefusedError(f"found {kind}, expected a regular file") from None
    except OSError as error:
        raise InputRefusedError(f"cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise InputRefusedError(f"found {kind}, expected a regular file")
    return status


def map_file(path: Path) -> MappedFile:
    """The file mapped; InputRefusedError where it cannot be read."""
    try:
        return MappedFile(path)
    except OSError as error:
        raise InputRefusedError(f"cannot be opened: {error.strerror}") from None
