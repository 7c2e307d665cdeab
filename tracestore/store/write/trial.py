"""A writer that writes nothing: it checks and resolves traces as a StoreWriter does, for a look at a conversion."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracestore.errors import CorruptStoreError
from tracestore.store.format.manifest import Manifest
from tracestore.store.format.provenance import Provenance
from tracestore.store.format.schema import Attributes
from tracestore.store.io.files import RemoteURL
from tracestore.store.io.folder_target import FolderTarget
from tracestore.store.read.generation import backoff
from tracestore.store.write.compared import ComparedTrace
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.segment_writer import SegmentWriter
from tracestore.store.write.writer import Options, StoreWriter

_ATTEMPTS = 5


class _ReadTarget(FolderTarget):
    """A store on this machine that is read alone; an object store counts as a new one."""

    def __init__(self, location: Path | RemoteURL, **options: Any) -> None:
        super().__init__(location if isinstance(location, Path) else Path(location.name), **options)
        self._is_new = not isinstance(location, Path) or self._overwrite

    @contextmanager
    def opened(self) -> Iterator[None]:
        yield

    @property
    def scratch(self) -> Path:
        return Path(tempfile.gettempdir())

    def new_folder(self) -> Path:
        return self.path / "trial"  # which nothing makes

    def newest(self) -> int:
        return 0 if self._is_new else super().newest()

    def sync_generations(self) -> None: ...

    def begin(self, manifest: Manifest, root: bytes) -> None: ...

    def close(self) -> None: ...


class _TrialSegment(SegmentWriter):
    """Keep what the traces of a segment are compared by."""

    _traces: list[Any]

    def append(self, trace: PackedTrace, attributes: Attributes) -> None:
        super().append(trace, attributes)
        self._traces[-1] = ComparedTrace.of(trace)

    def _write_arrays(self, trace: PackedTrace) -> None: ...

    def remove(self) -> None:
        """Do nothing: it has no files."""


class TrialWriter(StoreWriter):
    """A StoreWriter that keeps what the keys of traces need, which stay pending: nothing is written or committed.

    A source for whose path, size and fingerprint `is_known` returns True is not compared with the store, which has it
    and whose values may have been replaced since.
    """

    is_known: Callable[[str, int, str], bool]
    _open_target = staticmethod(_ReadTarget)
    _segment_type = _TrialSegment

    def _load(self, options: Options) -> None:
        """Load the newest generation, which other writers may replace: no lock is held."""
        for attempt in range(_ATTEMPTS):
            try:
                return super()._load(options)
            except (FileNotFoundError, CorruptStoreError):
                if attempt == _ATTEMPTS - 1:
                    raise
                backoff(attempt)

    def begin_source(
        self, path: str | None, size: int = 0, fingerprint: str = "", provenance: Provenance | None = None
    ) -> None:
        """See StoreWriter."""
        super().begin_source(path, size, fingerprint, provenance)
        is_known = self.is_known(path or "", size, fingerprint)
        self.keys.on_conflict = "keep-first" if is_known else self._on_conflict

    def append_packed(self, trace: PackedTrace, *, scores: Mapping[str, float] = {}, group: str = "") -> bool:
        """See StoreWriter."""
        is_new = super().append_packed(trace, scores=scores, group=group)
        self._pending.sources[-1].entries.clear()  # no newer generation needs them
        return is_new

    def segments_ahead(self) -> None:
        """Return None: no other thread may write."""

    def end_segments(self) -> None:
        """Do nothing."""

    def commit(self, *, are_open: bool = False) -> None:
        """Do nothing."""
