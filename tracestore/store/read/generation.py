"""Choosing the generation that a reader sees, and pinning it."""

import os
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tracestore.errors import CorruptStoreError, TracestoreWarning
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths
from tracestore.store.io.files import ReadableFiles
from tracestore.store.io.locks import Pin
from tracestore.store.io.ownership import require_no_loss
from tracestore.store.read.columns import Columns, MappedColumns, join_columns
from tracestore.store.read.index import StoreIndex

# Maximum number of attempts of a reader while writers remove the generation that it opens.
ATTEMPTS = 100


@dataclass(frozen=True)
class PinnedGeneration:
    """A generation that is kept while it is read: its manifest, its mapped index and its mapped columns."""

    manifest: mf.Manifest
    index: StoreIndex
    mapped_columns: tuple[MappedColumns, ...]
    pin: Pin | None

    @cached_property
    def columns(self) -> Columns:
        """The values of the columns, which are read on first use."""
        return join_columns([mapped.read() for mapped in self.mapped_columns])

    def close(self) -> None:
        """Release the pin."""
        if self.pin is not None:
            self.pin.close()


def backoff(attempt: int) -> None:
    """Wait before another look: a writer may be changing what was found."""
    time.sleep(min(0.05, 0.001 * attempt))


def open_generation(files: ReadableFiles, number: int) -> PinnedGeneration:
    """Open one generation.

    Raises
    ------
    FileNotFoundError
        If a writer has removed the generation.
    CorruptStoreError
        If a file of the generation is damaged or missing.
    """
    try:
        data, pin = files.read_manifest(number, mf.MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CorruptStoreError(f"{paths.manifest(number)}: {reason}") from None
    with ExitStack() as stack:
        if pin is not None:
            stack.callback(pin.close)
        manifest = mf.parse_manifest(data, number)
        files.fetch(manifest.small_files())
        index = StoreIndex(files, manifest)
        columns = tuple(MappedColumns(files, ref, manifest.attributes.scores) for ref in manifest.columns)
        stack.pop_all()
    return PinnedGeneration(manifest, index, columns, pin)


def _generations(files: ReadableFiles) -> list[int]:
    """Return the generations of a store, the newest first; raise the error of a store without one."""
    try:
        numbers = files.generations()
        if not numbers:
            require_no_loss(files)
    except CorruptStoreError:
        files.require_root()
        raise
    if not numbers:
        raise files.no_store_error()
    return numbers


def _next_loss(files: ReadableFiles, newest: int) -> CorruptStoreError | None:
    """Return the error of a lost generation that follows the newest one; a server, which takes time, is not asked."""
    place = files.location
    if isinstance(place, Path) and os.path.lexists(place / paths.manifest_copy(newest + 1)):
        try:
            require_no_loss(files)
        except CorruptStoreError as error:
            return error
    return None


def open_latest(files: ReadableFiles, preferred: int | None = None) -> PinnedGeneration:
    """Open the generation `preferred` if it still exists, else the newest one that is intact.

    A TracestoreWarning reports that the newest generation is damaged or lost.
    """
    if preferred is not None:
        try:
            return open_generation(files, preferred)
        except (FileNotFoundError, CorruptStoreError):
            pass  # The loop reports the error if this is the newest generation.
    before: list[int] = []
    for attempt in range(ATTEMPTS):
        numbers = _generations(files)
        problem: CorruptStoreError | None = None
        found: PinnedGeneration | None = None
        for number in numbers:
            try:
                found = open_generation(files, number)
                break
            except CorruptStoreError as error:
                problem = problem or error
            except FileNotFoundError:
                if numbers != before:
                    problem = None
                    break  # A writer has removed it: a newer generation exists.
                problem = problem or CorruptStoreError(f"{paths.manifest(number)}: missing")
        if problem is None and found is not None:
            problem = _next_loss(files, numbers[0])
            if problem is None:
                return found
        if problem is not None and files.generations()[:1] == numbers[:1]:
            if found is None:
                files.require_root()
                raise problem
            warnings.warn(
                f"{files.location}: {problem}; reading generation {found.manifest.generation} instead",
                TracestoreWarning,
                stacklevel=4,
            )
            return found
        if found is not None:
            found.close()
        before = numbers
        backoff(attempt)
    raise CorruptStoreError(f"{files.location}: generations change faster than they can be read")
