"""The list of refused traces next to a store: STORE.refused.jsonl."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tracestore.errors import InvalidInputError, UsageError
from tracestore.store.io import fsio
from tracestore.store.io.files import RemoteURL

SUFFIX = ".refused.jsonl"
_KEYS = {"source", "position", "field", "reason"}
_MAX_BYTES = 1 << 30


def partial_fingerprint(fingerprint: str) -> str:
    """Return the fingerprint of a source of which some traces were refused, so that it is read again."""
    return hashlib.blake2b(f"partial {fingerprint}".encode(), digest_size=16).hexdigest()


class RefusedTraces:
    """The refused traces of all conversions into a store, one JSON object per line.

    A source that is read again replaces its lines. For a store at a URL the file is in the working folder.

    Parameters
    ----------
    store : Path or RemoteURL
        The store.
    is_new : bool
        Whether the store is new, so that lines of an older one are dropped.

    Raises
    ------
    UsageError
        If there is a file of this name with other content.
    """

    def __init__(self, store: Path | RemoteURL, *, is_new: bool) -> None:
        parent = Path() if isinstance(store, RemoteURL) else store.parent
        self.path = parent / f"{store.name}{SUFFIX}"
        self._lines: dict[str, list[str]] = {}
        self._is_changed = False
        if self.path.exists():
            self._read()
            if is_new:
                self._is_changed, self._lines = bool(self._lines), {}

    def _read(self) -> None:
        try:
            if self.path.stat().st_size > _MAX_BYTES:
                raise ValueError
            for line in self.path.read_text("utf-8").splitlines():
                entry = json.loads(line)
                if not isinstance(entry, dict) or entry.keys() != _KEYS:
                    raise ValueError
                self._lines.setdefault(str(entry["source"]), []).append(line)
        except (OSError, ValueError, RecursionError):
            raise UsageError(f"{self.path}: not a list of refused traces; move it away") from None

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def replace(self, source: str, errors: Sequence[InvalidInputError]) -> None:
        """Set the refused traces of a source; an error without a position refuses the rest of the file."""
        lines = [
            json.dumps({"source": source, "position": e.position, "field": e.field, "reason": e.reason}) for e in errors
        ]
        if lines != self._lines.get(source, []):
            self._lines[source] = lines
            self._is_changed = True

    def write(self) -> None:
        """Write the file atomically; remove it if no trace is refused any more."""
        if not self._is_changed:
            return
        self._is_changed = False
        if not len(self):
            self.path.unlink(missing_ok=True)
            return
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with fsio.map_os_errors(self.path.parent):
            try:
                temporary.write_text("".join(f"{line}\n" for lines in self._lines.values() for line in lines), "utf-8")
                os.replace(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)
