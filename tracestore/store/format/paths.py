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

_SEGMENT_ARRAYS = "|".join(schema.SEGMENT_ARRAYS)
_COLUMN_ARRAYS = "|".join(schema.COLUMN_ARRAYS)
_ARRAY_FILES = r"(?:zarr\.json|c(?:/0){1,3})"
_IN_SEGMENT = rf"(?:zarr\.json|(?:{_SEGMENT_ARRAYS})/{_ARRAY_FILES})"
_IN_COLUMNS = rf"(?:zarr\.json|(?:{_COLUMN_ARRAYS})/{_ARRAY_FILES})"
_COMMITTED = re.compile(
    rf"segments/[0-9]{{8}}/{_IN_SEGMENT}|columns/[0-9]{{10}}/{_IN_COLUMNS}|index/[0-9]{{10}}/(?:part|manifest)"
)
_GENERATION = re.compile(r"[0-9]{10}")
_TEMPORARY = re.escape(TEMPORARY_PREFIX)
_OWN_FILE = re.compile(
    rf"zarr\.json|lock|{_TEMPORARY}zarr\.json"
    rf"|manifest/(?:newest|(?:{_TEMPORARY}|{DAMAGED_PREFIX})?[0-9]{{10}})"
    rf"|segments/(?:{_TEMPORARY})?[0-9]{{8}}/{_IN_SEGMENT}"
    rf"|columns/(?:{_TEMPORARY})?[0-9]{{10}}/{_IN_COLUMNS}"
    r"|index/[0-9]{10}/(?:part|manifest)"
    rf"|{re.escape(SPOOL_FOLDER)}/[0-9]{{8}}(?:/[0-9]{{4}}-(?:{_SEGMENT_ARRAYS}))?"
)
_ARRAY_FOLDERS = r"(?:/c(?:/0){0,2})?"
_OWN_FOLDER = re.compile(
    rf"manifest|segments|index|columns|{re.escape(SPOOL_FOLDER)}(?:/[0-9]{{8}})?"
    rf"|segments/(?:{_TEMPORARY})?[0-9]{{8}}(?:/(?:{_SEGMENT_ARRAYS}){_ARRAY_FOLDERS})?"
    rf"|columns/(?:{_TEMPORARY})?[0-9]{{10}}(?:/(?:{_COLUMN_ARRAYS}){_ARRAY_FOLDERS})?"
    r"|index/[0-9]{10}"
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
    """Return the path of a segment's folder."""
    return f"segments/{number:08d}"


def temporary(path: str) -> str:
    """Return the path that a file or folder has until it is complete."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{TEMPORARY_PREFIX}{name}"


def manifest(generation: int) -> str:
    """Return the path of a generation's manifest."""
    return f"manifest/{generation:010d}"


def index(generation: int) -> str:
    """Return the path of the folder of the index part that a generation's commit writes."""
    return f"index/{generation:010d}"


def columns(generation: int) -> str:
    """Return the path of the folder of the columns that a generation's commit writes."""
    return f"columns/{generation:010d}"


def manifest_copy(generation: int) -> str:
    """Return the path of the second copy of a manifest, which only repair reads."""
    return f"{index(generation)}/manifest"


def is_generation(name: str) -> bool:
    """Return whether `name` is the file name of a manifest in the folder manifest/."""
    return _GENERATION.fullmatch(name) is not None
