"""Paths of the files in a store, and validation of paths from untrusted input.

Every path from a manifest, an index part, a server or a directory listing is validated here before
it is used. docs/format.md lists the same paths.
"""

import re

from tracestore.errors import CorruptStoreError, escape_unprintable
from tracestore.store.format import schema

TEMPORARY_PREFIX = ".tmp-"  # prefix of incomplete files and folders
DAMAGED_PREFIX = "damaged-"  # prefix of a manifest that `verify --repair` has set aside

# Top-level folders of a store.
TOP_FOLDERS = ("manifest", "segments", "index", "columns")
NEWEST = "manifest/newest"  # names the newest generation for readers that cannot list a folder
_COPY_SUFFIX = ".manifest"
RECEIPTS = "receipts"  # plans of conversions, and what their tasks have written

_ARRAYS = "|".join(schema.LARGE_ARRAYS)
_SEGMENT_NAME = r"[0-9a-z][0-9a-z_-]{0,62}"
_IN_SEGMENT = rf"(?:zarr\.json|rows\.zip|(?:{_ARRAYS})/(?:zarr\.json|c(?:/0){{1,3}}))"
# The first versions wrote small files without their checksum in the name.
_SMALL = r"(?:columns|index)/[0-9]{10}(?:-[0-9a-f]{8})?\.zip"
_COMMITTED = re.compile(rf"segments/{_SEGMENT_NAME}/{_IN_SEGMENT}|{_SMALL}|index/[0-9]{{10}}\.manifest")
_GENERATION = re.compile(r"[0-9]{10}")
_TEMPORARY = re.escape(TEMPORARY_PREFIX)
_WRITING = rf"{_TEMPORARY}[0-9a-f]{{16}}"  # the temporary folder of a writer
_WRITING_NAME = re.compile(_WRITING)
_OWN_FILE = re.compile(
    rf"zarr\.json|lock|{_TEMPORARY}zarr\.json"
    rf"|manifest/(?:newest|(?:{_TEMPORARY}|{DAMAGED_PREFIX})?[0-9]{{10}})"
    rf"|segments/{_SEGMENT_NAME}/{_IN_SEGMENT}|{_SMALL}|index/(?:{_TEMPORARY})?[0-9]{{10}}\.manifest"
    rf"|{RECEIPTS}/[0-9a-f]{{32}}\.(?:json|zip)"
    rf"|{_WRITING}/(?:lock|small|[0-9]{{8}}/{_IN_SEGMENT})"
)
_OWN_FOLDER = re.compile(
    rf"manifest|segments|index|columns|{RECEIPTS}|{_WRITING}"
    rf"|(?:segments/{_SEGMENT_NAME}|{_WRITING}/[0-9]{{8}})(?:/(?:{_ARRAYS})(?:/c(?:/0){{0,2}})?)?"
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


def is_writing_folder(name: str) -> bool:
    """Return whether `name` is that of the temporary folder of a writer, which lies in the store's folder."""
    return _WRITING_NAME.fullmatch(name) is not None


def segment(name: str) -> str:
    """Return the path of a segment's folder. Readers know no rule for names."""
    return f"segments/{name}"


def segment_rows(segment: str) -> str:
    """Return the path of the small arrays of a segment."""
    return f"{segment}/rows.zip"


def manifest(generation: int) -> str:
    """Return the path of a generation's manifest."""
    return f"manifest/{generation:010d}"


def newest(generation: int) -> bytes:
    """Return the content of NEWEST."""
    return b"%010d\n" % generation


def small_file(folder: str, generation: int, crc: int) -> str:
    """Return the path of a file that a generation's commit adds to the folder index or columns."""
    return f"{folder}/{generation:010d}-{crc:08x}.zip"


def plan(digest: str) -> str:
    """Return the path of a plan."""
    return f"{RECEIPTS}/{digest}.json"


def receipt(task: str) -> str:
    """Return the path of the receipt of a task."""
    return f"{RECEIPTS}/{task}.zip"


def manifest_copy(generation: int) -> str:
    """Return the path of the second copy of a manifest, which repair and verify read."""
    return f"index/{generation:010d}{_COPY_SUFFIX}"


def copied_generation(name: str) -> int:
    """Return the generation whose manifest a file in the folder index/ is a copy of; 0 for other files."""
    number = name.removesuffix(_COPY_SUFFIX)
    return int(number) if number != name and is_generation(number) else 0


def is_generation(name: str) -> bool:
    """Return whether `name` is the file name of a manifest in the folder manifest/."""
    return _GENERATION.fullmatch(name) is not None
