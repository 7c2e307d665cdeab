"""Download of a store from the Hugging Face Hub."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tracestore.errors import CorruptStoreError, UsageError
from tracestore.hub.client import REPO_TYPE, hub_calls, store_files
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry, size_mismatch
from tracestore.store.format.manifest import MAX_MANIFEST_BYTES, Manifest
from tracestore.store.io import fsio
from tracestore.store.io.destinations import require_outside_stores
from tracestore.store.io.files import LocalFiles, RemoteURL, parse_location
from tracestore.store.io.ownership import remove_own
from tracestore.store.maintain.verify import verify_store
from tracestore.store.read.index import StoreIndex
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.commit import write_root

_REQUESTS = 4
# The library keeps its records of complete files in this folder.
_LIBRARY_FOLDER = ".cache"
_EXPECTED = {*paths.TOP_FOLDERS, "lock", "zarr.json", _LIBRARY_FOLDER}


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
    the manifest lists. Until the store is complete and verified, its files are in the hidden folder ``.pull-NAME``
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
    require_outside_stores(path)
    folder = path.parent / f".pull-{path.name}"
    with fsio.map_os_errors(path), hub_calls(repo_id) as api:
        _require_absent(path)
        commit = str(api.dataset_info(repo_id, revision=revision).sha)
        sizes, others = store_files(api, repo_id, commit)
        numbers = [int(p[-10:]) for p in sizes if p.startswith("manifest/") and paths.is_generation(p[9:])]
        if not numbers:
            raise UsageError(f"{repo_id}: the data set holds no store")
        report = PullReport(str(path), repo_id, commit, max(numbers), ignored=others)
        fsio.makedirs(folder)
        if unknown := sorted(set(os.listdir(folder)) - _EXPECTED):
            raise UsageError(f"{folder}: contains {unknown[0]!r}, which pull did not write. Move it elsewhere.")
        lock = fsio.WriterLock(folder)
        try:
            _require_absent(path)

            def download(name: str) -> None:
                api.hf_hub_download(repo_id, name, repo_type=REPO_TYPE, revision=commit, local_dir=folder)

            _Download(folder, sizes, download, progress).run(report)
            os.rename(folder, path)
            fsio.fsync_path(path.parent)
        finally:
            lock.release()
    return report


def _require_absent(path: Path) -> None:
    if os.path.lexists(path):
        raise UsageError(f"{path}: exists already; choose another name, or remove it first")


class _Download:
    """The download of one store into a folder.

    Parameters
    ----------
    folder : Path
        The folder, which may hold files of an interrupted download.
    sizes : dict of str to int
        Sizes of the files on the server.
    download : callable
        Download a file into the folder, unless it is there.
    progress : callable or None
        Receives the bytes done and the total.
    """

    def __init__(
        self,
        folder: Path,
        sizes: dict[str, int],
        download: Callable[[str], None],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._folder, self._sizes, self._download, self._progress = folder, sizes, download, progress
        self._wanted: dict[str, FileEntry] = {}
        self._done = 0

    def run(self, report: PullReport) -> None:
        """Download, verify and complete the store."""
        try:
            manifest = self._fetch_all(report.generation)
            self._verify(manifest)
        except CorruptStoreError:
            # The files that name others may be damaged here only. The next attempt fetches them again.
            for name in ("manifest", "index", "columns"):
                fsio.remove_tree(self._folder / name)
            for rows in self._folder.glob("segments/*/rows.zip"):
                rows.unlink()
            raise
        report.num_traces, report.num_files = manifest.num_traces, len(self._wanted)
        report.num_bytes = sum(entry.size for entry in self._wanted.values())
        self._complete(manifest)

    def _fetch_all(self, generation: int) -> Manifest:
        newest, files = paths.manifest(generation), LocalFiles(self._folder)
        if self._sizes[newest] > MAX_MANIFEST_BYTES:
            raise CorruptStoreError(
                f"{newest}: found {self._sizes[newest]:,} bytes, expected at most {MAX_MANIFEST_BYTES:,}"
            )
        self._download(newest)
        manifest = files.load_manifest(generation)
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
            size = self._sizes.get(entry.path)
            if size is None:
                raise CorruptStoreError(f"{entry.path}: missing in the data set")
            if size != entry.size:
                raise size_mismatch(entry, size)
        self._wanted |= chosen
        needed = sum(entry.size for entry in chosen.values() if not (self._folder / entry.path).exists())
        fsio.require_free_bytes(self._folder, needed, "the store")
        total = sum(entry.size for entry in self._wanted.values())
        pool = ThreadPoolExecutor(_REQUESTS)
        try:
            for entry, _ in zip(chosen.values(), pool.map(self._download, chosen), strict=True):
                self._done += entry.size
                if self._progress is not None:
                    self._progress(self._done, total)
        finally:
            pool.shutdown(cancel_futures=True)

    def _verify(self, manifest: Manifest) -> None:
        """Raise CorruptStoreError unless the store is intact; remove damaged files, so that they are fetched again."""
        for number in LocalFiles(self._folder).generations():
            if number != manifest.generation:  # of an earlier commit of the data set
                remove_own(self._folder, paths.manifest(number))
        fsio.remove_tree(self._folder / paths.manifest_copy(manifest.generation))
        write_root(self._folder, manifest.attributes)
        report = verify_store(self._folder)
        if report.damaged:
            name, problem = min(report.damaged.items())
            for damaged in report.damaged:
                fsio.remove_tree(self._folder / damaged)
            raise CorruptStoreError(
                f"{name}: {problem} ({len(report.damaged)} damaged files; the same command fetches them again)"
            )

    def _complete(self, manifest: Manifest) -> None:
        """Add the copy of the manifest, remove other files, and synchronize the store with the disk."""
        fsio.remove_tree(self._folder / _LIBRARY_FOLDER)
        newest = paths.manifest(manifest.generation)
        fsio.replace_file(self._folder / paths.manifest_copy(manifest.generation), manifest.to_bytes())
        kept = {*self._wanted, newest, paths.manifest_copy(manifest.generation), "zarr.json", "lock"}
        for parent, folders, names in os.walk(self._folder, topdown=False):
            for name in (*names, *folders):
                path = Path(parent, name).relative_to(self._folder).as_posix()
                if name in names and path in kept:
                    os.chmod(Path(parent, name), 0o644 if path == "lock" else 0o444)
                    fsio.fsync_path(Path(parent, name))
                elif name in names or not os.listdir(Path(parent, name)):
                    remove_own(self._folder, path)
            fsio.fsync_path(Path(parent))
