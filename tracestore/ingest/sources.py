"""Sources of a conversion: their files, how a file that was read before is recognized, and their traces."""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError, OnRefused
from tracestore.ingest.exports.export_manifest import ExportedFile
from tracestore.ingest.readers.content import READING, refusal
from tracestore.store.format.entries import Fingerprint
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.record import TraceRecord

_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10
# A fault that the checks missed must end as a refusal too, never as a traceback.
_FAULTS: tuple[type[Exception], ...] = (ValueError, TypeError, OverflowError, IndexError, KeyError, struct.error)
_FAULTS += READING


class Described(NamedTuple):
    """Read a source that is no file of an export.

    Attributes
    ----------
    read : callable
        Yield the records of the source. The arguments are those of `Execution.read` behind the files: whether attention
        is needed, the scratch, and what gets the error of each trace that is refused.
    fingerprint : bytes
        A digest of what the source depends on besides its files.
    layout : str
        The digest of the layout that the store keeps for the source; empty for one that is built in.
    what : str or None
        The place of the layers in the model, if it is stated.
    tables : object
        What reads the tables whose rows the source shares with others, None without tables.
    error : InvalidInputError or None
        Why the source cannot be read.
    may_be_empty : bool
        Whether the layout may leave out all of its traces.
    stated : frozenset of str
        The scores and labels that each trace has by the layout, and "group": one without them has none.
    """

    read: Callable[[bool | None, Scratch, OnRefused], Iterator[TraceRecord]]
    fingerprint: bytes = b""
    layout: str = ""
    what: str | None = None
    tables: object = None
    error: InvalidInputError | None = None
    may_be_empty: bool = False
    stated: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SourceFile:
    """A file to read, or several files that are read together.

    Parameters
    ----------
    path : Path
        The file, or the first one of `parts`.
    name : str
        Its path below SRC, with forward slashes.
    parts : tuple of Path
        The files of a source that consists of several.
    export : ExportedFile, optional
        What an export says about the file, if it is one of its files.
    described : Described, optional
        How a layout reads the source, if it is no file of an export.
    """

    path: Path
    name: str
    parts: tuple[Path, ...] = ()
    export: ExportedFile | None = field(default=None, compare=False)
    described: Described | None = field(default=None, compare=False)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with its arrays."""
        return self.parts or (self.path,)

    @property
    def shared(self) -> Any:
        """Return what one process must read for all sources that have it, None for nothing."""
        return None if self.described is None else self.described.tables

    @property
    def may_be_empty(self) -> bool:
        """Return whether the layout may leave out all of its traces."""
        return self.described is not None and self.described.may_be_empty

    def without_values(self) -> "SourceFile":
        """Return the source without the labels, scores and groups of an export."""
        return self if self.export is None else replace(self, export=self.export._replace(has_values=False))

    def file_bytes(self) -> int:
        """Return the size of its files; 0 for one that is missing or not regular."""
        return sum(path.stat().st_size for path in self.files if path.is_file())


class SourceIdentity(NamedTuple):
    """Size, fingerprint and modification time of a source."""

    size: int
    fingerprint: str
    modified_ns: int

    def matches(self, source: SourceFile) -> bool:
        """Return whether the files have not been written to since."""
        try:
            found = [os.stat(path) for path in source.files]
        except OSError:
            return False
        size, modified_ns = sum(s.st_size for s in found), max(s.st_mtime_ns for s in found)
        return (size, modified_ns) == (self.size, self.modified_ns)


def source_fingerprint(source: SourceFile) -> tuple[int, str]:
    """Return size and fingerprint of the files of a source, and of what it depends on besides.

    The fingerprint has the parts of `Fingerprint`; that of the files is the same whatever reads them.
    """
    if source.export is not None:
        size, text = _fingerprint_with_time(source.path)
        return size, hashlib.blake2b(f"{text} {source.export.facts.digest}".encode(), digest_size=16).hexdigest()
    if not source.parts:
        return _fingerprint_with_time(source.path)
    found = [(path.name, *_fingerprint_with_time(path)) for path in source.files]
    texts = "".join(f"{name}\0{text}\0" for name, _, text in found)
    files = short_digest(texts.encode()) if len(found) > 1 else Fingerprint.parse(found[0][2]).files
    layout, needed = ("", b"") if source.described is None else (source.described.layout, source.described.fingerprint)
    return sum(size for _, size, _ in found), "".join(Fingerprint(layout, short_digest(needed), files))


def short_digest(data: bytes) -> str:
    """Return a digest as long as a part of a fingerprint."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _fingerprint_with_time(path: Path) -> tuple[int, str]:
    """Return size and fingerprint of a file; that of a file larger than its samples depends on when it was written, too.

    A label that changes among arrays of megabytes is hardly ever in a sample.
    """
    size, text = fingerprint(path)
    if size > _SAMPLES * _SAMPLE_BYTES:
        text = hashlib.blake2b(f"{text} {os.stat(path).st_mtime_ns}".encode(), digest_size=16).hexdigest()
    return size, text


def fingerprint(path: Path) -> tuple[int, str]:
    """Return the size and a digest of the size and of evenly spaced samples, the last bytes included.

    The cost does not depend on the size of the file.
    """
    mapped = MappedFile(path)
    size = len(mapped)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    for begin in [*range(0, size, step), max(0, size - _SAMPLE_BYTES)]:
        digest.update(mapped.read(begin, min(size, begin + _SAMPLE_BYTES)))
    return size, digest.hexdigest()


def read_traces(
    source: SourceFile,
    need_attention: bool | None = True,
    *,
    scratch: Scratch | None = None,
    on_refused: OnRefused = None,
) -> Iterator[TraceRecord]:
    """Read the traces of one source in order.

    Parameters
    ----------
    source : SourceFile
        A file of an export, or files that a layout describes.
    need_attention : bool or None
        Whether a trace without attention is refused; None accepts both.
    scratch : Scratch, optional
        Files for what exceeds some MiB of a trace of a compressed file. By default they are in the system's temporary
        folder.
    on_refused : callable, optional
        Called with the error of each trace that is refused, after which reading continues. By default it is raised.

    Yields
    ------
    TraceRecord
        If the file is not compressed, the arrays are views of the mapped file.

    Raises
    ------
    InvalidInputError
        Names file, position and field. Unless `on_refused` is given, the caller must discard the traces it got before.
    """
    count = num_refused = 0

    def refuse(error: InvalidInputError) -> None:
        nonlocal num_refused
        assert on_refused is not None
        num_refused += 1
        on_refused(error)

    scratch = scratch or Scratch()
    try:
        if source.export is not None:
            from tracestore.ingest.exports.exported_records import read_exported  # most sources are no files of exports

            records = read_exported(source.export, source.name, scratch, need_attention=need_attention)
        else:
            assert source.described is not None
            records = source.described.read(need_attention, scratch, None if on_refused is None else refuse)
        for record in records:
            count += 1
            yield record
            del record
    except InvalidInputError as error:
        # The trace behind those that were read, unless the source as a whole is refused.
        position = count + num_refused if error.position is None and count and source.export is not None else None
        raise error.with_location(source=source.name, position=position) from None
    except _FAULTS as error:
        raise refusal(error).with_location(source=source.name, position=count + num_refused) from None
    if not (count + num_refused or source.may_be_empty):
        raise InvalidInputError("found no trace", source=source.name)
