"""Streams of the compressed files that may hold a pickle, each inflated in bounded steps."""

import bz2
import importlib
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from isal import igzip, igzip_lib
from isal.igzip_lib import IsalError

from tracestore.errors import InvalidInputError

_READ_BYTES = 256 << 10
# Memory that a stream may request for its dictionary; `xz -9` needs 65 MiB, `zstd --ultra -22` 128 MiB.
_MAX_WINDOW_LOG = 27
_MAX_XZ_MEMORY = 256 << 20
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
# First two bytes of a zlib stream, as `joblib.dump(compress=True)` writes it. No pickle begins with "x".
_MAGIC |= {bytes((0x78, flags)): "zlib" for flags in (0x01, 0x5E, 0x9C, 0xDA)}
# What the libraries raise for a damaged stream.
DAMAGE = (zlib.error, IsalError, lzma.LZMAError, OSError, ValueError)


def compression_of(head: bytes) -> str | None:
    """Return the compression of a file from its first bytes; None if it is not compressed."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def open_inflated(path: Path, compression: str) -> "BinaryIO | _Streams":
    """Open a compressed file, whose read() raises EOFError if the file ends inside a stream.

    Raises
    ------
    InvalidInputError
        If the library for the compression is not installed.
    """
    if compression == "gzip":
        return cast(BinaryIO, igzip.open(path, "rb"))
    if compression == "zstd":
        return _zstd(open(path, "rb"))
    return _Streams(open(path, "rb"), _DECOMPRESSORS[compression])


class _Streams:
    """Streams behind each other in one file, inflated by decompressors of the interface of bz2.

    An `error` of the library that is none of DAMAGE becomes a ValueError.
    """

    def __init__(self, file: BinaryIO, new: Callable[[], Any], error: type[Exception] = ValueError) -> None:
        self._file, self._new, self._error = file, new, error
        self._inflate = new()
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        while True:
            if self._inflate.eof:
                self._rest = self._inflate.unused_data or self._file.read(_READ_BYTES)
                if not self._rest:
                    return b""
                self._inflate = self._new()
            if not self._rest and self._inflate.needs_input:
                self._rest = self._file.read(_READ_BYTES)
                if not self._rest:
                    raise EOFError
            try:
                data: bytes = self._inflate.decompress(self._rest, size)
            except self._error as error:
                raise ValueError(str(error)) from None
            self._rest = b""
            if data:
                return data

    def close(self) -> None:
        self._file.close()


def _zstd(file: BinaryIO) -> _Streams:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            library = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        limit = {library.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
        return _Streams(file, partial(library.ZstdDecompressor, options=limit), library.ZstdError)
    raise InvalidInputError(
        "reading .zst needs Python 3.14 or the package backports.zstd; inflate the file, or run: "
        "pip install tracestore[inputs]",
        is_whole_source=True,
    )


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "bz2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_XZ_MEMORY),
    "zlib": lambda: igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_ZLIB),
}
