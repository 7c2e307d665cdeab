"""Exceptions and warnings of tracestore.

Each message is one line that names what was found and what was expected. A command prints it on
standard error and exits with the exception's `exit_code`.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# torch names the dtypes of operands that it cannot combine, each operation in its own words: "mat1 and mat2 must have
# the same dtype, but got Half and Float", "input dtype (torch.float16) does not match weight dtype (torch.float32)".
_REDUCED, _FULL = r"\b(?:half|bfloat16|float16)\b", r"\bfloat(?:32)?\b"
_MIXED_DTYPES = re.compile(f"{_REDUCED}.*{_FULL}|{_FULL}.*{_REDUCED}", re.IGNORECASE | re.DOTALL)


def some_of(names: Sequence[str], most: int = 3, max_length: int = 600) -> str:
    """Return the first names, of which each has at most `max_length` characters, and how many follow."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(escape_unprintable(name, max_length) for name in names[:most]) + more


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return which of `names` was probably meant, None if none is near."""
    from difflib import get_close_matches  # only wrong names need it

    return next(iter(get_close_matches(name, list(names), 1)), None)


def escape_unprintable(text: str, max_length: int = 600) -> str:
    """Return text as one line that a terminal displays safely.

    Control characters, changes of text direction and lone surrogates become escape sequences.

    Parameters
    ----------
    text : str
        Text from an untrusted file.
    max_length : int
        Number of characters of `text` after which the rest is dropped.
    """
    line = " ".join(text.split())[:max_length]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


class TracestoreError(Exception):
    """Base class of the exceptions that tracestore raises deliberately."""

    exit_code = 1


class UsageError(TracestoreError):
    """Wrong arguments: no such store, id, file or option, or an unwritable destination."""

    exit_code = 2


class UnknownTraceError(UsageError, KeyError):
    """No trace has a question id, or that id with a sample. `args` holds the id, and the sample unless it is 0."""

    def __str__(self) -> str:
        question_id, *sample = self.args
        text = str(question_id)
        shown = text if text == text.strip() != "" else repr(text)  # a blank at an end is part of the id
        return f"no such id: {shown}{f', sample {sample[0]}' if sample else ''}"


class MissingFieldError(UsageError):
    """The store lacks the requested data (graphs, sequences or scores)."""


class MissingExtraError(UsageError, ImportError):
    """A library of an extra is not installed. The message names the extra."""


class MemoryBudgetError(UsageError):
    """The batches in memory and the next one exceed the memory budget."""


class InvalidInputError(TracestoreError):
    """A source file does not hold valid traces, or its traces do not fit the store.

    Parameters
    ----------
    reason : str
        What was found and what was expected.
    source : str, optional
        Name of the source file.
    position : int, optional
        Position of the trace in the source file, from 0.
    field : str, optional
        Name of the invalid field.
    is_whole_source : bool
        Whether the traces before the position cannot be trusted either.
    """

    exit_code = 3

    def __init__(
        self,
        reason: str,
        *,
        source: str | None = None,
        position: int | None = None,
        field: str | None = None,
        is_whole_source: bool = False,
    ) -> None:
        self.reason, self.source, self.position, self.field = reason, source, position, field
        self.is_whole_source = is_whole_source
        super().__init__(reason)

    def with_location(self, source: str | None = None, position: int | None = None) -> "InvalidInputError":
        """Return a copy of the error in which a missing source and position are filled in."""
        error = copy.copy(self)
        error.source = source if self.source is None else self.source
        error.position = position if self.position is None else self.position
        return error

    def __str__(self) -> str:
        where = [] if self.source is None else [self.source]
        where += [] if self.position is None else [f"trace {self.position}"]
        where += [] if self.field is None else [self.field]
        text = ": ".join([", ".join(where), self.reason] if where else [self.reason])
        return escape_unprintable(text)


# What gets the error of each trace that is refused. Without it the error is raised.
OnRefused = Callable[[InvalidInputError], None] | None


class NoTracesError(InvalidInputError):
    """A source file holds settings or texts, and no arrays, or all files of a new store were refused. Others may hold traces."""


def error_to_json(error: InvalidInputError) -> dict[str, Any]:
    """Return an error for another process."""
    return {**vars(error), "has_traces": not isinstance(error, NoTracesError)}


def error_from_json(found: Mapping[str, Any]) -> InvalidInputError:
    """Return the error that error_to_json() has described. KeyError, TypeError or ValueError if it is invalid."""
    texts = {name: None if found[name] is None else str(found[name]) for name in ("source", "field")}
    position = None if found["position"] is None else int(found["position"])
    kind = InvalidInputError if found["has_traces"] else NoTracesError
    is_whole = bool(found["is_whole_source"])
    return kind(str(found["reason"]), position=position, is_whole_source=is_whole, **texts)


class LateConflictError(InvalidInputError):
    """A complete source conflicts with what another writer has committed before it. It was left out of the commit."""


class error_location:
    """Fill in a missing source and position of each InvalidInputError of a block.

    A class, because each trace enters it, and a generator takes three times as long.
    """

    __slots__ = ("_position", "_source")

    def __init__(self, source: str | None = None, position: int | None = None) -> None:
        self._source, self._position = source, position

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, InvalidInputError):
            raise error.with_location(self._source, self._position) from None


class CorruptStoreError(TracestoreError):
    """A file of the store differs from what was committed. The message names the file."""

    exit_code = 3


class TruncatedFileError(OSError):
    """A mapped file outside of a store became shorter while it was read."""


class DiskFullError(TracestoreError):
    """The file system is full. Committed data stays readable."""

    exit_code = 4


class StorageError(TracestoreError):
    """The file system failed, for example with EIO. Committed data stays readable."""


class RemoteError(StorageError):
    """The server of a remote store failed for longer than the retry timeout. Committed data stays readable."""


class ClusterError(StorageError):
    """A worker of a Dask cluster failed. The sources before its source are committed."""


class StoreLockedError(TracestoreError):
    """Another writer holds the lock of the store."""

    exit_code = 5


class OutputDirLockedError(TracestoreError):
    """Another run holds the lock of the output folder."""

    exit_code = 5


class TrainingError(UsageError):
    """Training cannot start or continue with this data, for example with one class or a NaN."""


class InsufficientMemoryError(TracestoreError):
    """One trace, or the model, does not fit into memory. The message names the checkpoint, if there is one."""

    exit_code = 75


class RankFailedError(TracestoreError):
    """Another rank of a distributed run ended early."""


class RunInterruptedError(TracestoreError):
    """A signal ended the run. The message names the command that continues it.

    Parameters
    ----------
    message : str
        The message, in one line.
    signum : int
        Number of the signal. The exit code is 128 + `signum`.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class TracestoreWarning(UserWarning):
    """A finding that costs no data but needs attention."""


def explain_dtype(error: BaseException) -> BaseException:
    """Return the error, or a UsageError that tells what to do if torch refused to combine float16 and float32.

    Parameters
    ----------
    error : BaseException
        An error of a model that read a batch. It becomes the cause of the UsageError.
    """
    if not isinstance(error, RuntimeError | ValueError) or not _MIXED_DTYPES.search(str(error)):
        return error
    explained = UsageError(
        f"the model and the batch differ in dtype ({escape_unprintable(str(error), 200)}): batches have the stored "
        'dtype, mostly float16; pass dtype="float32" to the loader, or convert the model with model.half()'
    )
    explained.__cause__ = error
    return explained
