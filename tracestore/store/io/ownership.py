"""Detection of the files that belong to a store, so that no other file is ever overwritten or removed."""

import contextlib
import enum
import errno
import os
import shlex
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from tracestore.errors import CorruptStoreError, UsageError, escape_unprintable
from tracestore.store.format import paths
from tracestore.store.format.paths import TEMPORARY_PREFIX
from tracestore.store.io.destinations import require_outside_stores
from tracestore.store.io.files import MAX_ROOT_BYTES, LocalFiles, ReadableFiles, not_regular_error, parse_location
from tracestore.store.io.fsio import retry_eintr

# Files of a store whose creation did not finish.
_UNFINISHED_FILES = {"lock", f"{TEMPORARY_PREFIX}zarr.json"}
# Content of the lock file of a store that is being written to replace another one.
REPLACEMENT = b"replacement\n"
_ATTEMPTS = 20


class FolderKind(enum.Enum):
    """Content of a folder from the viewpoint of a writer."""

    ABSENT = enum.auto()
    EMPTY = enum.auto()  # also a store whose creation did not finish
    STORE = enum.auto()


def classify_folder(store: Path) -> FolderKind:
    """Return the kind of a folder, without changing anything.

    Raises
    ------
    UsageError
        If it is neither a store nor an empty folder, or contains files that do not belong to a store.
    CorruptStoreError
        If it is a store that contains a symbolic link or lacks its zarr.json.
    """
    for attempt in range(_ATTEMPTS):
        before = _entries(store)
        try:
            return _classify(store, before)
        except (UsageError, FileNotFoundError):
            # Another writer may be creating or removing the store.
            if before == _entries(store):
                raise
        time.sleep(0.001 * attempt)
    return _classify(store, _entries(store))


def check_store_destination(location: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Check that a writer can create or extend the store at a location, so that commands fail before their work.

    The writer checks again, and checks URLs.

    Parameters
    ----------
    location : str or os.PathLike
        Path or URL of the store.
    overwrite : bool
        Whether the writer replaces the store, which needs a writable parent folder.

    Raises
    ------
    UsageError
        The parent folder does not exist, a folder is not writable, or the location holds something else than a store.
    CorruptStoreError
        The store contains a symbolic link or lacks its zarr.json.
    """
    store = parse_location(location)
    if not isinstance(store, Path):
        return
    kind, parent = classify_folder(store), store.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{store}: the parent folder does not exist")
    require_outside_stores(parent)
    for folder in {parent} if overwrite or kind is FolderKind.ABSENT else {store}:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write {store}: the folder {folder} is not writable")


def _entries(store: Path) -> dict[str, tuple[int, int]] | None:
    """Return inode and change time by name: a file that was removed and created again is another one."""
    try:
        names = [n for n in os.listdir(store) if not _is_system_file(n)]
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise UsageError(f"{store}: exists and is not a folder") from None
    found = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(store / name)
            found[name] = (status.st_ino, status.st_ctime_ns)
    return found


def _is_system_file(name: str) -> bool:
    """Return whether file managers or network file systems create files of this name."""
    return name == ".DS_Store" or name.startswith(".nfs")


def _classify(store: Path, entries: Mapping[str, tuple[int, int]] | None) -> FolderKind:
    if entries is None:
        return FolderKind.ABSENT
    names = sorted(entries)
    if not names or _is_unfinished(store, names):
        return FolderKind.EMPTY
    if not LocalFiles(store).has_root():
        if has_manifest(store):
            raise CorruptStoreError(
                f"{store}: zarr.json is missing or invalid. Run: tracestore verify {shlex.quote(str(store))} --repair"
            )
        raise UsageError(f"{store}: the folder is neither empty nor a store")
    for name in names:
        _require_own(store, name)
        if name in (*paths.TOP_FOLDERS, paths.RECEIPTS):
            for inner in LocalFiles(store).list_dir(name):
                if not _is_system_file(inner):
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
        raise UsageError(
            f"{store}: contains {escape_unprintable(path, 100)}, which does not belong to a store. Move it elsewhere."
        )


def _is_unfinished(store: Path, names: list[str]) -> bool:
    """Return whether a writer was stopped before it had written the root zarr.json."""
    for name in names:
        status = os.lstat(store / name)
        if paths.is_writing_folder(name) and stat.S_ISDIR(status.st_mode):
            continue
        if name not in _UNFINISHED_FILES or not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ROOT_BYTES:
            return False
        if name == "lock" and status.st_size not in (0, len(REPLACEMENT)):
            return False
    return True


def has_manifest(store: Path) -> bool:
    """Return whether one of the two latest manifests is valid."""
    files = LocalFiles(store)
    with contextlib.suppress(OSError, CorruptStoreError):
        for number in files.generations()[:2]:
            with contextlib.suppress(FileNotFoundError, CorruptStoreError):
                files.load_manifest(number)
                return True
    return False


def lost_generations(files: ReadableFiles) -> list[int]:
    """Return the generations that were committed but have lost their manifest, newest first.

    Each is newer than every manifest and has a copy of its own, which a commit writes after the manifest.
    """
    copies = map(paths.copied_generation, files.list_dir("index"))
    copied = sorted(copies, reverse=True)  # Before the manifests are listed: a writer may commit meanwhile.
    names = (name.removeprefix(paths.DAMAGED_PREFIX) for name in files.list_dir("manifest"))
    newest = max((int(name) for name in names if paths.is_generation(name)), default=0)
    return [number for number in copied if number > newest]


def require_no_loss(files: ReadableFiles) -> None:
    """Raise CorruptStoreError if the store has `lost_generations`."""
    for number in lost_generations(files):
        name, copy, place = paths.manifest(number), paths.manifest_copy(number), files.location
        command = f"tracestore verify {shlex.quote(str(place))} --repair restores it"
        advice = command if isinstance(place, Path) else f"copy {place}/{copy} to {place}/{name}"
        raise CorruptStoreError(f"{name}: missing, but its copy {copy} exists ({advice})")


def remove_own(store: Path, path: str) -> bool:
    """Remove a file or folder of a store, but only files with a path of the format.

    Symbolic links, files with other names and the folders that contain them are kept. Other processes may remove the
    same files.

    Returns
    -------
    bool
        Whether everything was removed.
    """
    try:
        mode = os.lstat(store / path).st_mode
        is_folder = stat.S_ISDIR(mode)
        if not (is_folder or stat.S_ISREG(mode)) or not paths.is_own(path, is_folder=is_folder):
            return False
        if not is_folder:
            retry_eintr(os.unlink, store / path)
            return True
        # The lock of a temporary folder goes last: until then its holder excludes others.
        names = sorted(os.listdir(store / path), key=lambda name: name == "lock")
        if [name for name in names if not remove_own(store, f"{path}/{name}")]:
            return False
        retry_eintr(os.rmdir, store / path)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False  # Another process has created a file in it.
    return True


def require_removed(store: Path, path: str) -> None:
    """Remove a file or folder of a store; raise UsageError if it contains files that are not the store's."""
    if not remove_own(store, path):
        raise UsageError(
            f"{store}: {escape_unprintable(path, 100)} contains files that do not belong to a store. "
            "Move them elsewhere."
        )


def remove_contents(store: Path, *, keep_lock: bool = False) -> None:
    """Remove all files of a store.

    The manifests are removed first and the root zarr.json last, so that an interruption leaves a store
    without traces.
    """
    for name in (
        "manifest",
        paths.RECEIPTS,
        "index",
        "columns",
        "segments",
        f"{TEMPORARY_PREFIX}zarr.json",
        "zarr.json",
    ):
        remove_own(store, name)
    for name in (*filter(paths.is_writing_folder, os.listdir(store)), *([] if keep_lock else ["lock"])):
        remove_own(store, name)
