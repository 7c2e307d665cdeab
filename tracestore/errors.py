"""Every exception that tracestore raises on purpose.

A message is one line that says what was found and what was expected. A command
prints it on standard error and ends with the exception's `exit_code`.
"""


def escape_unprintable(text: str, max_length: int = 600) -> str:
    """One line that a terminal shows as it is: what a file brings along (control characters,
    changes of direction, lone surrogates) is written as escapes."""
    line = " ".join(text.split())[:max_length]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


class TracestoreError(Exception):
    """Base class."""

    exit_code = 1


class UsageError(TracestoreError):
    """Wrong arguments: no such store, id, file or option, an unwritable destination."""

    exit_code = 2


class MissingFieldError(UsageError):
    """The store does not have what was asked for (graphs, sequences, scores)."""


class MissingExtraError(UsageError, ImportError):
    """A library of an extra is not installed; the message names the extra."""


class MemoryBudgetError(UsageError):
    """The batches that are held and the next one do not fit into the memory budget."""


class InvalidInputError(TracestoreError):
    """A source file that cannot be read as traces, or does not fit the store.

    `source` is the file's name, `position` the trace's place in it from 0 (None
    where it is not known), `field` the field's name (None where none is to blame).
    """

    exit_code = 3

    def __init__(
        self, reason: str, *, source: str | None = None, position: int | None = None, field: str | None = None
    ) -> None:
        self.reason, self.source, self.position, self.field = reason, source, position, field
        super().__init__(reason)

    def with_location(self, source: str | None = None, position: int | None = None) -> "InvalidInputError":
        """The same error with the place filled in where it was not known."""
        return InvalidInputError(
            self.reason,
            source=self.source if self.source is not None else source,
            position=self.position if self.position is not None else position,
            field=self.field,
        )

    def __str__(self) -> str:
        where = [] if self.source is None else [self.source]
        where += [] if self.position is None else [f"trace {self.position}"]
        where += [] if self.field is None else [self.field]
        text = ": ".join([", ".join(where), self.reason] if where else [self.reason])
        return escape_unprintable(text)


class CorruptStoreError(TracestoreError):
    """A file of the store is not what was committed; the message names it."""

    exit_code = 3


class TruncatedFileError(OSError):
    """A file that is no store's was cut short while it was mapped and read; the message names
    it where it is known."""


class DiskFullError(TracestoreError):
    """The file system is full; what was committed before stays readable."""

    exit_code = 4


class StorageError(TracestoreError):
    """The file system failed (EIO and the like); what was committed before stays readable."""


class RemoteError(StorageError):
    """The server of a remote store failed for longer than is waited for; what was committed before
    stays."""


class StoreLockedError(TracestoreError):
    """Another writer holds the store."""

    exit_code = 5


class OutputDirLockedError(TracestoreError):
    """Another training writes into the output folder."""

    exit_code = 5


class TrainingError(UsageError):
    """Training cannot start or go on with this data (one class, a NaN, an empty part)."""


class InsufficientMemoryError(TracestoreError):
    """One trace alone does not fit into memory; a checkpoint was written."""

    exit_code = 75


class RankFailedError(TracestoreError):
    """Another process of a training with several ranks is gone."""


class RunInterruptedError(TracestoreError):
    """A signal ended the run; the message names the command that continues."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class TracestoreWarning(UserWarning):
    """Something was found that costs no data but that a person should know."""
