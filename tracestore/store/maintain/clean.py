"""Removal of files that no generation of a store names: those of writers that were stopped."""

import os
import shlex
import stat
import time
from collections.abc import Container, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tracestore.errors import CorruptStoreError, StoreLockedError, UsageError
from tracestore.store.format import paths
from tracestore.store.io import fsio, locks
from tracestore.store.io.files import LocalFiles, ReadableFiles, parse_location
from tracestore.store.io.ownership import FolderKind, classify_folder, remove_own, require_no_loss
from tracestore.store.read.generation import open_generation

if TYPE_CHECKING:
    from tracestore.store.remote.remote_files import RemoteFiles

DAY_S = 24 * 3600


@dataclass
class CleanReport:
    """The result of `clean`: the paths of removed files and folders, and their size."""

    removed: list[str] = field(default_factory=list)
    num_bytes: int = 0


def clean_store(
    store: str | os.PathLike[str], *, older_than_s: float, dry_run: bool = False, kept: Container[str] = ()
) -> CleanReport:
    """Remove the files that no generation names.

    Parameters
    ----------
    store : str or os.PathLike
        Path or URL of the store.
    older_than_s : float
        Keep what was written in this time: a writer may be about to commit it.
    dry_run : bool
        Report what would be removed.
    kept : container of str
        Paths of files and segments that stay, besides those of generations.

    Raises
    ------
    UsageError
        If there is no store.
    CorruptStoreError
        If a generation is damaged or lost, so that its files are unknown.
    StoreLockedError
        If another process holds the lock of the store.
    """
    location = parse_location(store)
    before = time.time() - older_than_s
    if not isinstance(location, Path):
        # Imported here because remote stores need an optional library.
        from tracestore.store.remote.remote_files import RemoteFiles

        return _clean_objects(RemoteFiles.open(location), before, dry_run, kept)
    if classify_folder(location) is not FolderKind.STORE:
        raise UsageError(f"{location}: no such store")
    report = CleanReport()
    with fsio.map_os_errors(location):
        lock = locks.WriterLock(location, wait_s=locks.LOCK_WAIT_S)
        try:
            named = _named(LocalFiles(location))
            for path in _units(location):
                if path not in named and path not in kept and paths.is_own(path, is_folder=(location / path).is_dir()):
                    _remove(location, path, before, dry_run, report)
        finally:
            lock.release()
    return report


def _units(store: Path) -> Iterable[str]:
    """Yield what is removed as a whole: segments, files of the other folders, and temporary folders."""
    for folder in (*paths.TOP_FOLDERS, paths.RECEIPTS):
        yield from (f"{folder}/{name}" for name in sorted(LocalFiles(store).list_dir(folder)))
    yield from (name for name in sorted(os.listdir(store)) if name.startswith(paths.TEMPORARY_PREFIX))


def _named(files: ReadableFiles) -> set[str]:
    """Return the paths of all files of all generations, and the folders of their segments."""
    require_no_loss(files)
    named = {paths.NEWEST}
    for number in files.generations():
        try:
            generation = open_generation(files, number)
        except FileNotFoundError:
            raise StoreLockedError(f"{files.location}: another writer commits; repeat the command") from None
        except CorruptStoreError as error:
            raise CorruptStoreError(
                f"{error}. Run: tracestore verify {shlex.quote(str(files.location))} --repair"
            ) from None
        with closing(generation):
            named |= {paths.manifest(number), paths.manifest_copy(number)}
            named |= {file.path for file in generation.manifest.small_files()}
            named |= {segment.path for segment in generation.index.segments()}
    return named


def _remove(store: Path, path: str, before: float, dry_run: bool, report: CleanReport) -> None:
    """Remove a file or folder that was last written before a time, unless a writer works in it."""
    if path.startswith(f"manifest/{paths.DAMAGED_PREFIX}"):
        return  # `verify --repair` has set it aside.
    lock = None
    if paths.is_writing_folder(path) and (not dry_run or (store / path / "lock").exists()):
        try:
            lock = locks.WriterLock(store / path)
        except StoreLockedError:
            return
    try:
        # The lock is no sign of age: it may be new.
        inner = [p for p in (store / path, *(store / path).rglob("*")) if p.name != "lock"]
        states = [p.lstat() for p in inner]
        files = [s for s in states if not stat.S_ISDIR(s.st_mode)]
        # A writer that uses a segment again sets the time of its folder. A lock changes that of a writer's folder.
        times = files if files and paths.is_writing_folder(path) else [states[0], *files]
        if max(s.st_mtime for s in times) <= before and (dry_run or remove_own(store, path)):
            report.removed.append(path)
            report.num_bytes += sum(s.st_size for s in files)
    finally:
        if lock is not None:
            lock.release()


def _clean_objects(files: "RemoteFiles", before: float, dry_run: bool, kept: Container[str]) -> CleanReport:
    """Remove objects. What is written again after the first look stays."""
    objects, report = files.object_store, CleanReport()
    objects.require_writable()
    first = {found.path: found for found in objects.list_objects("")}
    named = _named(files)
    if len(named) == 1 and not any(path.startswith(f"{paths.RECEIPTS}/") for path in first):
        raise UsageError(f"{files.location}: no such store")
    units: dict[str, list[str]] = {}
    for path in first:
        if paths.is_own(path, is_folder=False) and path.count("/"):
            unit = "/".join(path.split("/")[:2])
            if unit not in named and unit not in kept and not unit.startswith(f"manifest/{paths.DAMAGED_PREFIX}"):
                units.setdefault(unit, []).append(path)
    for unit, found in units.items():
        now = objects.list_objects(unit) if len(found) > 1 else [first[path] for path in found]
        if max(item.written for item in (*now, *(first[path] for path in found))) > before:
            continue
        report.removed.append(unit)
        report.num_bytes += sum(first[path].size for path in found)
        if not dry_run:
            objects.delete(found)
    return report
