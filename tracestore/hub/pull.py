"""Download of a store from the Hugging Face Hub."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.hub.data_set import DataSet
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry, size_mismatch
from tracestore.store.format.manifest import MAX_MANIFEST_BYTES, Manifest, parse_manifest
from tracestore.store.io import fsio, locks
from tracestore.store.io.destinations import require_outside_stores
from tracestore.store.io.files import LocalFiles, RemoteURL, parse_location
from tracestore.store.io.ownership import remove_own
from tracestore.store.maintain.verify import verify_store
from tracestore.store.read.index import StoreIndex
from tracestore.store.read.segment import SegmentReader
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.remote.threads import in_threads
from tracestore.store.write.commit import root_metadata

_REQUESTS = 4
# Files in transfer are in this folder.
_PARTIAL = ".partial"
_EXPECTED = {*paths.TOP_FOLDERS, "lock", "zarr.json", _PARTIAL}
# How often a file with a wrong checksum is fetched: an earlier part of it may be of another commit.
_ATTEMPTS = 2


@dataclass
class PullReport:
    """The result of a download.

    Attributes
    ----------
    store, repo_id, commit : str
        The new store, and the commit of the data set that it was made from.
    generation, num_traces, num_files, num_bytes : int
        Of the store.
    ignored : list of str
        Files of the data set that are not the store's.
    """

    store: str
    repo_id: str
    commit: str = ""
    generation: int = 0
    num_traces: int = 0
    num_files: int = 0
    num_bytes: int = 0
    ignored: list[str] = field(default_factory=list)


def pull_store(
    repo_id: str,
    dst: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PullReport:
    """Download the newest generation of a store, verify it, and give it its name.

    Nothing in the data set is trusted: only paths that the format defines are requested, only with the sizes that
    the manifest lists, and a file is cut at that size. Until the store is complete and verified, its files are in the hidden folder ``.pull-NAME``
    next to it; after an interruption the same call continues there. All files are regular files.

    Parameters
    ----------
    repo_id : str
        The data set, USER/NAME.
    dst : str or PathLike
        The folder to create.
    revision : str, optional
        Branch, tag or commit of the data set.
    progress : callable, optional
        Called by this thread with the bytes done and the total, after each file in the order of the list.

    Returns
    -------
    PullReport

    Raises
    ------
    UsageError
        If `dst` exists, the data set or its revision does not exist or may not be read, or holds no store.
    CorruptStoreError
        If the files are not those of an intact store.
    DiskFullError
        If the store needs more space than is free.
    StoreLockedError
        If another process pulls to the same folder.
    RemoteError
        If the server fails or cannot be reached.
    """
    path = parse_location(dst)
    if isinstance(path, RemoteURL):
        raise UsageError(f"{path}: pull to a folder of this machine")
    require_outside_stores(path.absolute().parent)
    folder = path.parent / f".pull-{path.name}"
    with fsio.map_os_errors(path):
        _require_absent(path)
        data_set = DataSet(repo_id, revision)
        sizes, others = data_set.list_files()
        numbers = [int(p[-10:]) for p in sizes if p.startswith("manifest/") and paths.is_generation(p[9:])]
        if not numbers:
            raise UsageError(f"{repo_id}: the data set holds no store")
        report = PullReport(str(path), repo_id, data_set.commit, max(numbers), ignored=others)
        fsio.makedirs(folder)
        if unknown := sorted(set(os.listdir(folder)) - _EXPECTED):
            raise UsageError(f"{folder}: contains {unknown[0]!r}, which pull did not write. Move it elsewhere.")
        lock = locks.WriterLock(folder)
        try:
            _require_absent(path)
            _Download(folder, sizes, data_set.files, progress).run(report)
            os.rename(folder, path)
            fsio.fsync_path(path.parent)
        finally:
            lock.release()
    return report


def _require_absent(path: Path) -> None:
    if os.path.lexists(path):
        raise UsageError(f"{path}: exists already; choose another name, or remove it first")


@dataclass
class _Download:
    """The download of one store into a folder.

    Attributes
    ----------
    folder : Path
        The folder, which may hold files of an interrupted download.
    sizes : dict of str to int
        Sizes of the files on the server.
    objects : ObjectStore
        The files on the server.
    progress : callable or None
        Receives the bytes done and the total.
    wanted : dict
        The files by path.
    done : int
        The bytes done.
    """

    folder: Path
    sizes: dict[str, int]
    objects: ObjectStore
    progress: Callable[[int, int], None] | None
    wanted: dict[str, FileEntry] = field(default_factory=dict)
    done: int = 0

    def run(self, report: PullReport) -> None:
        """Download, verify and complete the store."""
        try:
            manifest = self._fetch_all(report.generation)
            self._verify(manifest)
        except CorruptStoreError:
            # The files that name others may be damaged here only. The next attempt fetches them again.
            for name in ("manifest", "index", "columns"):
                fsio.remove_tree(self.folder / name)
            for rows in self.folder.glob("segments/*/rows.zip"):
                rows.unlink()
            raise
        report.num_traces, report.num_files = manifest.num_traces, len(self.wanted)
        report.num_bytes = sum(entry.size for entry in self.wanted.values())
        self._complete(manifest)

    def _fetch_all(self, generation: int) -> Manifest:
        newest, files = paths.manifest(generation), LocalFiles(self.folder)
        if self.sizes[newest] > MAX_MANIFEST_BYTES:
            raise CorruptStoreError(
                f"{newest}: found {self.sizes[newest]:,} bytes, expected at most {MAX_MANIFEST_BYTES:,}"
            )
        # The manifest is written when all files are there: until then, nothing opens the folder as a store.
        fsio.remove_tree(self.folder / "manifest")
        try:
            manifest = parse_manifest(self.objects.read(newest, MAX_MANIFEST_BYTES), generation)
        except FileNotFoundError:
            raise CorruptStoreError(f"{newest}: missing in the data set") from None
        self._fetch(manifest.small_files())
        segments = list(StoreIndex(files, manifest).segments())
        self._fetch(segment.rows for segment in segments)
        readers = (SegmentReader(files, segment, manifest.attributes) for segment in segments)
        self._fetch([entry for reader in readers for entry in reader.entries.values()])
        return manifest

    def _fetch(self, entries: Iterable[FileEntry]) -> None:
        """Download files after comparing their sizes on the server with those that were committed."""
        chosen = {entry.path: entry for entry in entries}
        for entry in chosen.values():
            size = self.sizes.get(entry.path)
            if size is None:
                raise CorruptStoreError(f"{entry.path}: missing in the data set")
            if size != entry.size:
                raise size_mismatch(entry, size)
        self.wanted |= chosen
        needed = sum(entry.size for entry in chosen.values() if not (self.folder / entry.path).exists())
        fsio.require_free_bytes(self.folder, needed, "the store")
        total = sum(entry.size for entry in self.wanted.values())
        for entry in in_threads(self._download, chosen.values(), _REQUESTS):
            self.done += entry.size
            if self.progress is not None:
                self.progress(self.done, total)

    def _download(self, entry: FileEntry, check: Callable[[], None]) -> FileEntry:
        """Download a file and give it its name when it is complete. A part of an earlier download is continued."""
        final, partial = self.folder / entry.path, self.folder / _PARTIAL / entry.path.replace("/", "-")
        if final.exists() and _crc_of(final, entry.size) == entry.crc32c:
            return entry
        for folder in (final.parent, partial.parent):
            fsio.makedirs(folder)
        with open(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0) as file:

            def take(piece: Any, offset: int) -> None:
                check()
                fsio.pwritev_all(file.fileno(), [memoryview(piece)], offset)

            done = min(os.fstat(file.fileno()).st_size, entry.size)
            for _ in range(_ATTEMPTS):
                file.truncate(done)
                try:
                    found = self.objects.stream(entry.path, entry.size, take, done, _crc_of(partial, done) or 0)
                except FileNotFoundError:
                    raise CorruptStoreError(f"{entry.path}: missing in the data set") from None
                if found == entry.crc32c:
                    os.replace(partial, final)
                    return entry
                done = 0
        fsio.remove_tree(partial)
        raise CorruptStoreError(f"{entry.path}: checksum mismatch: damaged in the data set")

    def _verify(self, manifest: Manifest) -> None:
        """Raise CorruptStoreError unless the store is intact; remove damaged files, so that they are fetched again."""
        newest = self.folder / paths.manifest(manifest.generation)
        fsio.makedirs(newest.parent)
        fsio.replace_file(newest, manifest.to_bytes())
        fsio.replace_file(self.folder / "zarr.json", root_metadata(manifest.attributes))
        report = verify_store(self.folder)
        if report.damaged:
            name, problem = min(report.damaged.items())
            for damaged in report.damaged:
                fsio.remove_tree(self.folder / damaged)
            raise CorruptStoreError(
                f"{name}: {problem} ({len(report.damaged)} damaged files; the same command fetches them again)"
            )

    def _complete(self, manifest: Manifest) -> None:
        """Add the copy of the manifest, remove other files, and synchronize the store with the disk."""
        fsio.remove_tree(self.folder / _PARTIAL)
        newest = paths.manifest(manifest.generation)
        fsio.replace_file(self.folder / paths.manifest_copy(manifest.generation), manifest.to_bytes())
        kept = {*self.wanted, newest, paths.manifest_copy(manifest.generation), "zarr.json", "lock"}
        for parent, folders, names in os.walk(self.folder, topdown=False):
            for name in (*names, *folders):
                path = Path(parent, name).relative_to(self.folder).as_posix()
                if name in names and path in kept:
                    os.chmod(Path(parent, name), 0o644 if path == "lock" else 0o444)
                    fsio.fsync_path(Path(parent, name))
                elif name in names or not os.listdir(Path(parent, name)):
                    remove_own(self.folder, path)
            fsio.fsync_path(Path(parent))


def _crc_of(path: Path, size: int) -> int | None:
    """Return the CRC-32C of a file, None if it has another size."""
    if path.stat().st_size != size:
        return None
    return crc32c(memoryview(MappedFile(path, size, path.name))) if size else 0
