"""What in a folder is a store's, so that nothing else is ever written over or removed."""

import enum
import json
import os
import stat
import time
from pathlib import Path

from tracestore.errors import CorruptStoreError, UsageError, escape_unprintable
from tracestore.store.format import paths, schema
from tracestore.store.format.paths import TEMPORARY_PREFIX
from tracestore.store.io.files import LocalFiles, not_regular_error
from tracestore.store.io.fsio import retry_eintr
from tracestore.store.io.manifests import list_generations, load_manifest

MAX_ROOT_BYTES = 1 << 16
# Of an unfinished creation.
_BEGINNING = {"lock", f"{TEMPORARY_PREFIX}zarr.json"}
# What the lock of a store says that is being written to take the place of another one.
REPLACEMENT = b"replacement\n"
_ATTEMPTS = 20


class FolderKind(enum.Enum):
    """What a folder is to a writer."""

    ABSENT = enum.auto()
    EMPTY = enum.auto()  # or the beginning of a store, which holds nothing yet
    STORE = enum.auto()


def classify_folder(store: Path) -> FolderKind:
    """Return what lies at a path. Nothing is changed.

    Raises
    ------
    UsageError
        Where it is neither a store nor an empty folder, or holds what no writer of a store wrote.
    CorruptStoreError
        Where it is a store with a link in it, or without its zarr.json.
    """
    for attempt in range(_ATTEMPTS):
        before = _names(store)
        try:
            return _examine(store, before)
        except UsageError:
            # Another writer may be about to make or to remove the store.
            if before == _names(store):
                raise
        time.sleep(0.001 * attempt)
    return _examine(store, _names(store))


def _names(store: Path) -> list[str] | None:
    try:
        return sorted(n for n in os.listdir(store) if not _is_of_file_system(n))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise UsageError(f"{store}: exists and is not a folder") from None


def _is_of_file_system(name: str) -> bool:
    """What file managers and network file systems put beside anything."""
    return name == ".DS_Store" or name.startswith(".nfs")


def _examine(store: Path, found: list[str] | None) -> FolderKind:
    if found is None:
        return FolderKind.ABSENT
    if not found or _is_beginning(store, found):
        return FolderKind.EMPTY
    if not has_root(store):
        if has_manifest(store):
            raise CorruptStoreError(
                f"{store}: zarr.json is missing or not a store's; run: tracestore verify {store} --repair"
            )
        raise UsageError(f"{store}: the folder is not empty and not a store")
    for name in found:
        _require_own(store, name)
        if name in paths.TOP_FOLDERS:
            for inner in LocalFiles(store).list_dir(name):
                if not _is_of_file_system(inner):
                    _require_own(store, f"{name}/{inner}")
    return FolderKind.STORE


def _require_own(store: Path, path: str) -> None:
    try:
        mode = os.lstat(store / path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise not_regular_error(store, path)
    if not paths.is_own(path, is_folder=stat.S_ISDIR(mode)):
        raise UsageError(f"{store}: holds {escape_unprintable(path, 100)}, which is not a store's: move it elsewhere")


def _is_beginning(store: Path, found: list[str]) -> bool:
    """Whether a writer was stopped before it had written the root zarr.json."""
    if not set(found) <= _BEGINNING:
        return False
    for name in found:
        status = os.lstat(store / name)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ROOT_BYTES:
            return False
        if name == "lock" and status.st_size not in (0, len(REPLACEMENT)):
            return False
    return True


def has_root(store: Path) -> bool:
    """Return whether the root zarr.json says that this is a store of this format."""
    try:
        data = json.loads(LocalFiles(store).read_small("zarr.json", MAX_ROOT_BYTES))
        schema.Attributes.from_json(data["attributes"]["tracestore"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, CorruptStoreError):
        return False
    return bool(data.get("node_type") == "group")


def has_manifest(store: Path) -> bool:
    """Return whether one of the two newest manifests is whole."""
    files = LocalFiles(store)
    try:
        for number in list_generations(files)[:2]:
            try:
                load_manifest(files, number)
                return True
            except (CorruptStoreError, FileNotFoundError):
                continue
    except (OSError, CorruptStoreError):
        pass
    return False


def remove_own(store: Path, path: str) -> bool:
    """Remove a file or folder of a store with all in it that has a name of the format.

    Links, and what else has another name, stay, and so do the folders that they lie in.

    Returns
    -------
    bool
        Whether nothing stays.
    """
    try:
        mode = os.lstat(store / path).st_mode
    except FileNotFoundError:
        return True
    is_folder = stat.S_ISDIR(mode)
    if not (is_folder or stat.S_ISREG(mode)) or not paths.is_own(path, is_folder=is_folder):
        return False
    if not is_folder:
        retry_eintr(os.unlink, store / path)
        return True
    kept = [name for name in os.listdir(store / path) if not remove_own(store, f"{path}/{name}")]
    if not kept:
        retry_eintr(os.rmdir, store / path)
    return not kept


def require_removed(store: Path, path: str) -> None:
    """As remove_own; UsageError where something stays that is in the way."""
    if not remove_own(store, path):
        raise UsageError(f"{store}: {escape_unprintable(path, 100)} holds what is not a store's: move it elsewhere")


def remove_contents(store: Path, *, keep_lock: bool = False) -> None:
    """Remove what a store consists of: the manifests first and durably, the root zarr.json last, so
    that what a stop leaves is a store without traces."""
    remove_own(store, "manifest")
    for name in ("index", "columns", "segments", paths.SPOOL_FOLDER, f"{TEMPORARY_PREFIX}zarr.json", "zarr.json"):
        remove_own(store, name)
    if not keep_lock:
        remove_own(store, "lock")
