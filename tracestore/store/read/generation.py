"""Which generation a reader sees, and holding it."""

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tracestore.errors import CorruptStoreError, TracestoreWarning, UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths
from tracestore.store.io.files import LocalFiles
from tracestore.store.io.fsio import Pin
from tracestore.store.io.manifests import list_generations
from tracestore.store.io.ownership import has_root
from tracestore.store.read.columns import Columns, join_columns, read_columns
from tracestore.store.read.index import StoreIndex

# How often a reader looks again where writers remove what it is about to open.
ATTEMPTS = 100


class Holds(Protocol):
    """What keeps a generation from being removed."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Generation:
    """A generation as readers hold it: pinned, its index and columns mapped."""

    manifest: mf.Manifest
    index: StoreIndex
    columns: Columns
    pin: Holds


def pause(attempt: int) -> None:
    """Before looking again: a writer may be at work on what was found."""
    time.sleep(min(0.05, 0.001 * attempt))


def open_generation(store: Path, number: int) -> Generation:
    """FileNotFoundError where a writer has removed it meanwhile, CorruptStoreError
    where it does not read back whole."""
    files = LocalFiles(store)
    path = paths.manifest(number)
    pin = Pin(files.open(path), store / path)
    try:
        manifest = mf.parse_manifest(pin.read(mf.MAX_MANIFEST_BYTES), number)
        try:
            index = StoreIndex(files, manifest)
            columns = join_columns([read_columns(files, ref) for ref in manifest.columns])
        except FileNotFoundError as error:
            # What a pinned generation names is not removed.
            raise CorruptStoreError(f"{error.filename or error}: missing") from None
    except OSError as error:
        pin.close()
        raise CorruptStoreError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        pin.close()
        raise CorruptStoreError(f"{path}: {error}") from None
    except BaseException:
        pin.close()
        raise
    return Generation(manifest, index, columns, pin)


def _require_root(store: Path) -> None:
    """UsageError where what cannot be read is no store at all."""
    if not has_root(store):
        raise UsageError(f"{store}: not a store, or one without its zarr.json (tracestore verify {store} --repair)")


def open_latest(store: Path, preferred: int | None = None) -> Generation:
    """`preferred` where it is still there, else the newest generation that reads back
    whole. A damaged newest one is said in a warning."""
    if preferred is not None:
        try:
            return open_generation(store, preferred)
        except (FileNotFoundError, CorruptStoreError):
            pass  # said below if it is the newest
    for attempt in range(ATTEMPTS):
        try:
            numbers = list_generations(LocalFiles(store))
        except CorruptStoreError:
            _require_root(store)
            raise
        if not numbers:
            if (store / "lock").exists():
                raise UsageError(f"{store}: the store is empty, nothing has been committed")
            raise UsageError(f"{store}: not a store")
        problem: CorruptStoreError | None = None
        for number in numbers:
            try:
                found = open_generation(store, number)
            except CorruptStoreError as error:
                problem = problem or error
                continue
            except FileNotFoundError:
                break
            if problem is None:
                return found
            if list_generations(LocalFiles(store))[:1] == numbers[:1]:
                warnings.warn(
                    f"{store}: {problem}; reading generation {number} instead", TracestoreWarning, stacklevel=4
                )
                return found
            break
        else:
            if list_generations(LocalFiles(store))[:1] == numbers[:1]:
                _require_root(store)
                raise problem or CorruptStoreError(f"{store}: no readable generation")
        pause(attempt)
    raise CorruptStoreError(f"{store}: generations change faster than they can be read")
