"""Paths of the files in a store, and validation of paths from untrusted input.

Every path from a manifest, an index part, a server or a directory listing is validated here before
it is used. docs/format.md lists the same paths.
"""

import re

from tracestore.errors import CorruptStoreError, escape_unprintable
from tracestore.store.format import schema

TEMPORARY_PREFIX = ".tmp-"  # prefix of incomplete files and folders
SPOOL_FOLDER = ".spool"  # packed traces that precede their turn in the store
DAMAGED_PREFIX = "damaged-"  # prefix of a manifest that `verify --repair` has set aside

# Top-level folders of a store.
TOP_FOLDERS = ("manifest", "segments", "index", "columns")

_ARRAYS = "|".join(schema.LARGE_ARRAYS)
_SEGMENT_NAME = r"[0-9a-z][0-9a-z_-]{0,62}"
_IN_SEGMENT = rf"(?:zarr\.json|rows\.zip|(?:{_ARRAYS})/(?:zarr\.json|c(?:/0){{1,3}}))"
_COMMITTED = re.compile(
    rf"segments/{_SEGMENT_NAME}/{_IN_SEGMENT}|(?:columns|index)/[0-9]{{10}}\.zip|index/[0-9]{{10}}\.manifest"
)
_GENERATION = re.compile(r"[0-9]{10}")
_TEMPORARY = re.escape(TEMPORARY_PREFIX)
_OWN_FILE = re.compile(
    rf"zarr\.json|lock|{_TEMPORARY}zarr\.json"
    rf"|manifest/(?:newest|(?:{_TEMPORARY}|{DAMAGED_PREFIX})?[0-9]{{10}})"
    rf"|segments/(?:{_TEMPORARY})?{_SEGMENT_NAME}/{_IN_SEGMENT}"
    rf"|(?:columns|index)/(?:{_TEMPORARY})?[0-9]{{10}}\.zip|index/(?:{_TEMPORARY})?[0-9]{{10}}\.manifest"
    rf"|{re.escape(SPOOL_FOLDER)}/[0-9]{{8}}(?:/[0-9]{{4}}-(?:{_ARRAYS}))?"
)
_OWN_FOLDER = re.compile(
    rf"manifest|segments|index|columns|{re.escape(SPOOL_FOLDER)}(?:/[0-9]{{8}})?"
    rf"|segments/(?:{_TEMPORARY})?{_SEGMENT_NAME}(?:/(?:{_ARRAYS})(?:/c(?:/0){{0,2}})?)?"
)


def committed(path: object) -> str:
    """Return `path` if it is a valid path of a committed file, relative to its store.

    Raises
    ------
    CorruptStoreError
        If the format has no such path.
    """
    if not isinstance(path, str) or _COMMITTED.fullmatch(path) is None:
        raise CorruptStoreError(f"{escape_unprintable(repr(path), 100)}: not a valid path in a store")
    return path


def is_own(path: str, *, is_folder: bool) -> bool:
    """Return whether writers create a file or folder with this path in a store, committed or not."""
    return (_OWN_FOLDER if is_folder else _OWN_FILE).fullmatch(path) is not None


def segment(number: int) -> str:
    """Return the path of the folder in which a writer creates a segment. Readers know no rule for names."""
    return f"segments/{number:08d}"


def segment_rows(segment: str) -> str:
    """Return the path of the small arrays of a segment."""
    return f"{segment}/rows.zip"


def temporary(path: str) -> str:
    """Return the path that a file or folder has until it is complete."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{TEMPORARY_PREFIX}{name}"


def manifest(generation: int) -> str:
    """Return the path of a generation's manifest."""
    return f"manifest/{generation:010d}"


def index(generation: int) -> str:
    """Return the path of the index part that a generation's commit writes."""
    return f"index/{generation:010d}.zip"


def columns(generation: int) -> str:
    """Return the path of the columns that a generation's commit writes."""
    return f"columns/{generation:010d}.zip"


def manifest_copy(generation: int) -> str:
    """Return the path of the second copy of a manifest, which repair and verify read."""
    return f"index/{generation:010d}.manifest"


def generation_of(path: str) -> int | None:
    """Return the generation whose commit wrote a file of index/ or columns/, or None for another file."""
    name = path.rpartition("/")[2].partition(".")[0]
    return int(name) if is_own(path, is_folder=False) and is_generation(name) else None


def is_generation(name: str) -> bool:
    """Return whether `name` is the file name of a manifest in the folder manifest/."""
    return _GENERATION.fullmatch(name) is not None
