"""Publishing to a remote store: commits are made in a local folder, then uploaded.

All files of a commit are uploaded first, then its manifest, on the condition that no manifest has that number. A lock
object, which its writer renews, excludes a second writer. A writer takes over a lock that is not renewed.
"""

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError, RemoteError, StoreLockedError, UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.paths import TEMPORARY_PREFIX
from tracestore.store.format.zip_group import ZipGroup
from tracestore.store.io import fsio
from tracestore.store.io.files import LocalFiles, RemoteURL, cache_dir, reading_committed
from tracestore.store.remote.files import RemoteFiles, cache_of_environment, list_generations
from tracestore.store.remote.object_store import ObjectStore, Version
from tracestore.store.remote.retries import seconds_of

# A lock that is not renewed for this time has no writer.
STALE_S = 30.0
_RENEWALS_UNTIL_STALE = 5
_POLLS_UNTIL_STALE = 20
_UPLOADS = 16
_LONGEST_STALE_S = 3600.0
_ABANDONED_S = 24 * 3600
_OWN_NAMES = {"manifest", "lock", "segments", "index", "columns", "zarr.json"}


class RemoteLock:
    """The `lock` object of a remote store, renewed by a thread. StoreLockedError if another writer holds it.

    Its content is a token of the writer, the number of renewals, and the seconds without renewal after which another
    writer may take it over.
    """

    def __init__(self, address: RemoteURL) -> None:
        self._stale_s = seconds_of("TRACESTORE_REMOTE_LOCK_TTL", STALE_S)
        self._object_store = ObjectStore(address)
        self._token = secrets.token_hex(16)
        self._count = 0
        self._renewed_at = time.monotonic()
        version = self._object_store.put_if_absent("lock", self._content()) or self._take_over()
        if version is None:
            raise self._locked()
        self._version = version
        # Requests now end before another writer would take over the lock.
        self._object_store = ObjectStore(address, timeout_s=self._stale_s / 3, patience_s=self._stale_s / 2)
        self._is_lost, self._ended = False, threading.Event()
        self._renewing = threading.RLock()
        self._thread = threading.Thread(target=self._renew_always, name="tracestore-lock", daemon=True)
        self._thread.start()

    def _content(self) -> bytes:
        self._count += 1
        return f"{self._token} {self._count} {self._stale_s:g}\n".encode()

    def _locked(self) -> StoreLockedError:
        return StoreLockedError(f"{self._object_store.address}: another writer holds the store")

    def _take_over(self) -> Version | None:
        """Take over the lock if no writer renews it. Return None if its writer does."""
        before = self._object_store.version("lock")
        if before is None:
            return self._object_store.put_if_absent("lock", self._content())
        stale_s = max(self._stale_s, self._interval_of_holder())
        pause = stale_s / _POLLS_UNTIL_STALE
        watched, looked_at = 0.0, time.monotonic()
        while watched < stale_s:
            time.sleep(pause)
            if self._object_store.version("lock") != before:
                return None
            # While the server does not answer, a missing renewal proves nothing.
            now = time.monotonic()
            watched, looked_at = watched + min(now - looked_at, 2 * pause), now
        self._renewed_at = time.monotonic()
        return self._object_store.put_if_match("lock", before, self._content())

    def _interval_of_holder(self) -> float:
        try:
            return min(float(self._object_store.read("lock").split()[2]), _LONGEST_STALE_S)
        except (FileNotFoundError, IndexError, ValueError):
            return 0.0

    def renew(self) -> None:
        """Renew the lock. StoreLockedError if another writer has taken it."""
        with self._renewing:
            began = time.monotonic()
            if self._is_lost:
                raise self._locked()
            version = self._object_store.put_if_match("lock", self._version, self._content()) or self._own_version()
            if version is None:
                self._is_lost = True
                raise self._locked()
            self._version, self._renewed_at = version, began

    def _own_version(self) -> Version | None:
        """Return the version of the lock if it is this writer's: an earlier answer may have been lost."""
        version = self._object_store.version("lock")
        try:
            is_own = self._object_store.read("lock").startswith(self._token.encode())
        except FileNotFoundError:
            return None
        return version if is_own else None

    def renew_if_stale(self) -> None:
        """Renew the lock before a write if another writer could take it over soon."""
        if time.monotonic() - self._renewed_at > self._stale_s / 2:
            with self._renewing:
                if time.monotonic() - self._renewed_at > self._stale_s / 2:  # Another thread may have renewed it.
                    self.renew()

    def _renew_always(self) -> None:
        while not self._ended.wait(self._stale_s / _RENEWALS_UNTIL_STALE):
            try:
                self.renew()
            except StoreLockedError:
                return  # The next commit reports it.
            except (RemoteError, UsageError):
                continue  # The next write meets the same error.

    def release(self) -> None:
        """Delete the lock if it is this writer's."""
        if self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(RemoteError, UsageError, StoreLockedError):
            self.renew()
            self._object_store.delete(["lock"])


class _Written:
    """Committed files, local ones before they are uploaded."""

    def __init__(self, here: LocalFiles, there: RemoteFiles) -> None:
        self._here, self._there = here, there

    def read(self, entry: FileEntry) -> bytes:
        try:
            return self._here.read(entry)
        except FileNotFoundError:
            return self._there.read(entry)

    def map(self, entry: FileEntry) -> MappedFile:
        try:
            return self._here.map(entry)
        except FileNotFoundError:
            return self._there.map(entry)


def _remove_abandoned(writing: Path, name: str) -> None:
    """Remove local folders that killed writers of this store left, and old ones of other stores."""
    for folder in writing.glob("*"):
        try:
            is_old = time.time() - folder.stat().st_mtime > _ABANDONED_S
        except FileNotFoundError:
            continue
        if not is_old and not folder.name.startswith(name):
            continue  # Its writer may be starting.
        with contextlib.suppress(StoreLockedError, OSError):
            lock = fsio.WriterLock(folder)
            fsio.remove_tree(folder)
            lock.release()


class RemotePublisher:
    """The local side of writing a remote store.

    `folder`, on the disk of this machine, starts as the newest generation without its segments; publish() makes what
    was committed there the next generation. `files` reads the committed files.
    """

    def __init__(self, address: RemoteURL, *, overwrite: bool, exist_ok: bool) -> None:
        self.address = address
        self._object_store = ObjectStore(address)
        self._object_store.require_writable()
        name = hashlib.sha256(str(self._object_store.address).encode()).hexdigest()[:32]
        self.folder = cache_dir() / ".writing" / f"{name}-{secrets.token_hex(4)}"
        self._cached = RemoteFiles(self._object_store, cache_of_environment())
        self.files = _Written(LocalFiles(self.folder), self._cached)
        found = self._object_store.list_dir("")
        if set(found) - _OWN_NAMES:
            raise UsageError(f"{address}: holds other objects and is not a store")
        if "manifest" in found and not exist_ok and not overwrite:
            raise UsageError(f"{address}: the store exists (overwrite=True replaces it)")
        self._lock = RemoteLock(self._object_store.address)
        self._object_store.before_write = self._lock.renew_if_stale
        try:
            with fsio.map_os_errors(self.folder):
                _remove_abandoned(self.folder.parent, name)
                fsio.makedirs(self.folder)
            self._there: set[str] = set()  # Paths of files that are local and uploaded.
            # A store that is replaced stays until the first new generation is ready.
            self._is_replaced = overwrite
            if not overwrite:
                self._fetch_newest()
        except BaseException:
            self.close()
            raise

    def _clear(self) -> None:
        # The manifests go first: an interruption leaves no store that looks complete.
        for folder in ("manifest", "index", "columns", "segments"):
            self._delete_own(folder)
        self._object_store.delete(["zarr.json"])

    def _delete_own(self, folder: str) -> None:
        """Remove the objects in a folder whose names belong to the format."""
        self._object_store.delete(
            [p for p in self._object_store.list_recursive(folder) if paths.is_own(p, is_folder=False)]
        )

    def _fetch_newest(self) -> None:
        numbers = list_generations(self._object_store)
        kept: set[str] = set()
        if numbers:
            try:
                data = self._object_store.read(paths.manifest(numbers[0]), mf.MAX_MANIFEST_BYTES)
                manifest = mf.parse_manifest(data, numbers[0])
            except (CorruptStoreError, FileNotFoundError) as error:
                raise CorruptStoreError(f"{self.address}: {error}") from None
            small = manifest.small_files()
            self._cached.fetch(small)
            for entry in small:
                self._write_copy(entry.path, self._cached.read(entry))
            for path in (paths.manifest(numbers[0]), paths.manifest_copy(numbers[0])):
                self._write_copy(path, data)
            with contextlib.suppress(FileNotFoundError):
                self._write_copy("zarr.json", self._object_store.read("zarr.json"))
            kept = set().union(*(self._segment_names(part) for part in manifest.parts))
        # Segments of a writer that was stopped before its manifest.
        for name in self._object_store.list_dir("segments"):
            if name not in kept:
                self._delete_own(f"segments/{name}")

    def _write_copy(self, path: str, data: bytes) -> None:
        """Write a file of the remote store into the local folder."""
        with fsio.map_os_errors(self.folder):
            fsio.makedirs((self.folder / path).parent)
            fsio.write_file(self.folder / path, data)
        self._there.add(path)

    def _segment_names(self, part: mf.PartRef) -> list[str]:
        """Return the names of the segments of an index part that was fetched."""
        with reading_committed(part.path):
            mapped = LocalFiles(self.folder).map(FileEntry(part.path, part.size, part.crc32c))
            return ZipGroup(mapped, mf.PART_DTYPES).strings("segment_name", 0, part.num_segments)

    def publish(self, manifest: mf.Manifest) -> None:
        """Upload a generation that was committed in `folder`.

        StoreLockedError if another writer committed first. After a RemoteError the old generation is unchanged, and
        the call can be repeated.
        """
        named = [file.path for file in manifest.small_files()]
        copy = paths.manifest_copy(manifest.generation)
        self._lock.renew()
        segments = {path.split("/")[1] for path in self._local_files("segments")}
        new = [path for name in sorted(segments) for path in self._local_files(f"segments/{name}")]
        new += [path for path in (*named, copy) if path not in self._there]
        if self._is_replaced:
            self._clear()
            self._is_replaced = False
        with ThreadPoolExecutor(_UPLOADS) as pool:
            list(pool.map(lambda path: self._object_store.put(path, self.folder / path), new))
        root = (self.folder / "zarr.json").read_bytes()
        if "zarr.json" not in self._there:
            self._object_store.put("zarr.json", root)
        self._lock.renew()
        if self._object_store.put_if_absent(paths.manifest(manifest.generation), manifest.to_bytes()) is None:
            raise StoreLockedError(f"{self.address}: another writer has committed generation {manifest.generation}")
        self._object_store.put("manifest/newest", f"{manifest.generation:010d}\n".encode())
        self._object_store.put("zarr.json", root)
        self._there |= {*named, copy, "zarr.json"}
        for name in sorted(segments):
            fsio.remove_tree(self.folder / "segments" / name)
        self._remove_old(manifest)

    def _local_files(self, folder: str) -> Iterable[str]:
        found = sorted(p for p in (self.folder / folder).rglob("*") if p.is_file())
        return [p.relative_to(self.folder).as_posix() for p in found if TEMPORARY_PREFIX not in p.as_posix()]

    def _remove_old(self, manifest: mf.Manifest) -> None:
        """Remove all generations but the last two, and the files that only they refer to."""
        generations = [n for n in list_generations(self._object_store) if n <= manifest.generation]
        self._object_store.delete([paths.manifest(n) for n in generations[2:]])
        named = set()
        for number in generations[:2]:
            try:
                kept = mf.parse_manifest(self._object_store.read(paths.manifest(number)), number)
            except (FileNotFoundError, CorruptStoreError):
                return  # The files it refers to are unknown: remove nothing.
            named |= {paths.manifest_copy(number), *(file.path for file in kept.small_files())}
        found = [p for folder in ("index", "columns") for p in self._object_store.list_recursive(folder)]
        ours = {p for p in found if (written := paths.generation_of(p)) is not None and written <= manifest.generation}
        self._object_store.delete(sorted(ours - named))

    def close(self) -> None:
        """Release the lock and remove the local folder."""
        self._lock.release()
        with contextlib.suppress(OSError):
            fsio.remove_tree(self.folder)
