"""Verification of a store: the steps that are the same for a folder and for an object store."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.zip_group import ZipGroup
from tracestore.store.io.files import MAX_ROOT_BYTES, ReadableFiles, StoreFiles
from tracestore.store.io.ownership import require_no_loss
from tracestore.store.maintain.consistency import ConsistencyChecker, collect_damage, reason_of
from tracestore.store.read.index import SegmentEntry, StoreIndex, part_segments
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.commit import root_metadata

# Files of a segment by its path, and by their own path.
SegmentFiles = dict[str, dict[str, FileEntry]]


@dataclass
class VerifyReport:
    """The result of `verify`.

    `damaged` maps the path of a file in the store to a description of its damage. `leftovers` lists the files that
    no generation names: those of interrupted or running writers.
    """

    generation: int | None = None
    num_files: int = 0
    num_bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)


class StoreVerifier(ABC):
    """Compares the files of some generations with what was committed, several at a time.

    Parameters
    ----------
    files : ReadableFiles
        The files of the store.
    quick : bool
        Check the sizes of the files only.
    num_threads : int
    progress : callable, optional
        Receives the bytes done and the total, from any thread.
    """

    def __init__(
        self, files: ReadableFiles, quick: bool, num_threads: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self.files, self.quick, self.report = files, quick, VerifyReport()
        self._pool, self._progress = ThreadPoolExecutor(num_threads), progress
        self._lock, self._done = threading.Lock(), 0

    @abstractmethod
    def start(self, pool: ThreadPoolExecutor, entry: FileEntry) -> Callable[[], int]:
        """Begin to compare the size of a file, and to compute its CRC-32C unless `quick`.

        Returns
        -------
        callable
            Waits for the result and returns the CRC-32C. CorruptStoreError if the size differs, OSError if the
            file cannot be read.
        """

    @contextlib.contextmanager
    def segment_files(self) -> Iterator[StoreFiles]:
        """Yield the files of a segment, which are checked during the block."""
        yield self.files

    def _check_contents(self, manifests: list[mf.Manifest], listed: SegmentFiles) -> None:
        """Check the files of each segment, then its values.

        Correct checksums prove that nothing changed after writing, not that correct values were written.
        """
        generations = [ConsistencyChecker(self.files, manifest) for manifest in manifests]
        for path, entries in listed.items():
            with self.segment_files() as files:
                self.check(entries.values())
                for generation in () if self.report.damaged else generations:
                    generation.check_segment(files, path)
        for generation in generations:
            self.report.damaged |= generation.damaged

    @abstractmethod
    def list_all(self) -> list[str]:
        """Return the paths of all files in the store; none if its server does not list them."""

    def existing(self, found: list[str]) -> list[str]:
        """Return those of some paths that exist, where that takes no request."""
        return found

    def run(self, generations: list[int]) -> VerifyReport:
        """Check the files of some generations, newest first."""
        with self._pool:
            return self._run(generations)

    def _run(self, generations: list[int]) -> VerifyReport:
        report, manifests = self.report, []
        for number in generations:
            with collect_damage(report.damaged, paths.manifest(number)):
                manifests.append(self.files.load_manifest(number))
                report.num_files += 1
        report.generation = manifests[0].generation if manifests else None
        small = {file.path: file for manifest in manifests for file in manifest.small_files()}
        copies = {}
        for manifest in manifests:
            path, data = paths.manifest_copy(manifest.generation), manifest.to_bytes()
            copies[path] = FileEntry(path, len(data), crc32c(data))
        self._announce_and_check([*small.values(), *(copies[path] for path in self.existing(list(copies)))])
        segments: dict[str, SegmentEntry] = {}
        for path in {part.path: None for manifest in manifests for part in manifest.parts}:
            if path not in report.damaged:
                with collect_damage(report.damaged, path):
                    segments |= {
                        s.path: s for s in part_segments(ZipGroup(self.files.map(small[path]), mf.PART_DTYPES))
                    }
        self._announce_and_check([segment.rows for segment in segments.values()])
        listed: SegmentFiles = {}
        for segment in segments.values():
            if segment.rows.path not in report.damaged:
                with collect_damage(report.damaged, segment.rows.path):
                    listed[segment.path] = SegmentReader(self.files, segment, manifests[0].attributes).entries
        entries = {path: entry for files_of_segment in listed.values() for path, entry in files_of_segment.items()}
        self._announce(entries.values())
        if self.quick or report.damaged:
            self.check(entries.values())
            for manifest in () if report.damaged else manifests:
                with collect_damage(report.damaged, paths.manifest(manifest.generation)):
                    StoreIndex(self.files, manifest)
        else:
            self._check_contents(manifests, listed)
        self._check_root(manifests)
        with collect_damage(report.damaged, "manifest"):
            require_no_loss(self.files)
        report.leftovers = self._leftovers({*small, *copies, *entries, *(s.rows.path for s in segments.values())})
        return report

    def _announce(self, entries: Iterable[FileEntry]) -> None:
        """Add files that will be checked to the totals of the report."""
        for entry in entries:
            self.report.num_files += 1
            self.report.num_bytes += entry.size

    def _announce_and_check(self, entries: list[FileEntry]) -> None:
        self._announce(entries)
        self.check(entries)

    def check(self, entries: Iterable[FileEntry]) -> None:
        """Check announced files. Large files go first, which balances the threads."""
        started = [(e, self.start(self._pool, e)) for e in sorted(entries, key=lambda e: (-e.size, e.path))]
        for entry, crc in started:
            try:
                if crc() != entry.crc32c and not self.quick:
                    self.report.damaged[entry.path] = "checksum mismatch"
            except (CorruptStoreError, OSError) as error:
                self.report.damaged[entry.path] = reason_of(error)
            except BaseException:
                self._pool.shutdown(cancel_futures=True)  # A server that fails does so for every file that waits.
                raise

    def advance(self, num_bytes: int) -> None:
        """Report that some more bytes are done."""
        if self._progress is not None:
            with self._lock:
                self._done += num_bytes
                self._progress(self._done, self.report.num_bytes)

    def _check_root(self, manifests: list[mf.Manifest]) -> None:
        with collect_damage(self.report.damaged, "zarr.json"):
            found = self.files.read_small("zarr.json", MAX_ROOT_BYTES)
            if not manifests or found in {root_metadata(m.attributes) for m in manifests}:
                return
            for number in self.files.generations():  # Includes generations that a writer has added meanwhile.
                with contextlib.suppress(CorruptStoreError, OSError):
                    if found == root_metadata(self.files.load_manifest(number).attributes):
                        return
            raise CorruptStoreError("zarr.json: not what the manifest says")

    def _leftovers(self, known: set[str]) -> list[str]:
        """Return the files that neither `known`, the files of the verified generations, nor a generation names."""
        found = self.list_all()  # Before the generations: the files of each commit in between are then named.
        if not found:
            return []
        named, later = known | {"zarr.json", "lock", paths.NEWEST}, set()
        for number in self.files.generations():
            named |= {paths.manifest(number), paths.manifest_copy(number)}
            with contextlib.suppress(CorruptStoreError, OSError):
                manifest = self.files.load_manifest(number)
                named |= {file.path for file in manifest.small_files()}
                if number > (self.report.generation or 0):
                    later |= {segment.path for segment in StoreIndex(self.files, manifest).segments()}
        left = [path for path in found if path not in named and "/".join(path.split("/")[:2]) not in later]
        # `verify --repair` has set aside damaged manifests; the next plan removes receipts.
        kept = (f"manifest/{paths.DAMAGED_PREFIX}", f"{paths.RECEIPTS}/")
        return self.existing(sorted(p for p in left if not p.startswith(kept)))
