"""Limits of what the values of a file may decode to, by the bytes of the file."""

from collections.abc import Callable

from tracestore.errors import InvalidInputError

# Inflated size over compressed size; real traces reach 2 to 5.
_MAX_INFLATE_RATIO = 200
_INFLATE_ALLOWANCE_BYTES = 64 << 20
# Limits of the values that a file's traces hold, where a value counts each time it is named: a fixed
# allowance and a multiple of the bytes read, for the number of values, the bytes of text and the bytes of
# arrays. A value takes at least one byte. Text is encoded again each time it is named; an array is not. The
# multiple of arrays is large because in files made by hand one array may stand for all layers.
_ALLOWANCES = ((20_000, 4), (16 << 20, 4), (64 << 20, 200))
# Values of a compressed file, by its bytes on disk; how many times its arrays may be what it may inflate to.
_COMPRESSED_ALLOWANCE = (1_000_000, 16)
_COMPRESSED_ARRAYS = 4
# Readers begin at one end of a file, so that they see only one of two files that were written into it.
APPENDED = "found a file behind another one, which would be left out; write each to a file of its own"


def max_inflated(num_bytes: int) -> int:
    """Return what this number of compressed bytes may inflate to."""
    return num_bytes * _MAX_INFLATE_RATIO + _INFLATE_ALLOWANCE_BYTES


class Limits:
    """Limits on values and bytes of the traces of one file.

    A file exceeds them only by naming the same values many times. `read_bytes` returns the
    number of bytes of the file that have been read so far. Of a compressed file, `disk_bytes` is the compressed size.
    """

    def __init__(self, read_bytes: Callable[[], int], disk_bytes: int | None = None) -> None:
        self._read_bytes, self._disk_bytes = read_bytes, disk_bytes
        self._values = self._text_bytes = self._array_bytes = 0
        self._max_values = self._max_text_bytes = self._max_array_bytes = 0

    @property
    def file_bytes(self) -> int:
        """Bytes of the file on disk."""
        return self._read_bytes() if self._disk_bytes is None else self._disk_bytes

    def charge(self, text_bytes: int = 0, array_bytes: int = 0, count: int = 1) -> None:
        """Add values and their bytes; raise InvalidInputError beyond a limit."""
        self._values += count
        self._text_bytes += text_bytes
        self._array_bytes += array_bytes
        if (
            self._values > self._max_values
            or self._text_bytes > self._max_text_bytes
            or self._array_bytes > self._max_array_bytes
        ):
            self._raise_limits()

    def _raise_limits(self) -> None:
        """Set the limits to those of the bytes that have been read by now; raise InvalidInputError beyond one of them."""
        maxima = (allowance + ratio * self._read_bytes() for allowance, ratio in _ALLOWANCES)
        self._max_values, self._max_text_bytes, self._max_array_bytes = maxima
        if self._disk_bytes is not None:
            allowance, ratio = _COMPRESSED_ALLOWANCE
            self._max_values = min(self._max_values, allowance + ratio * self._disk_bytes)
            most = _COMPRESSED_ARRAYS * max_inflated(self._disk_bytes)
            self._max_array_bytes = min(self._max_array_bytes, most)
        used = (self._values, self._text_bytes, self._array_bytes)
        limits = (self._max_values, self._max_text_bytes, self._max_array_bytes)
        if any(size > limit for size, limit in zip(used, limits, strict=True)):
            raise InvalidInputError("traces whose values, counted each time they are named, exceed the file many times")
