"""provenance.json of a folder of traces."""

import json
from collections.abc import Iterable
from pathlib import Path

from tracestore.errors import UsageError, escape_unprintable
from tracestore.store.format.provenance import Provenance
from tracestore.store.io.fsio import read_json, write_atomic

PROVENANCE_FILE = "provenance.json"
_MAX_BYTES = 1 << 20


def find_provenance_files(arguments: Iterable[Path]) -> dict[Path, Path]:
    """Return provenance.json of each folder among the arguments that has such a file directly in it."""
    files = {argument: argument / PROVENANCE_FILE for argument in arguments}
    return {folder: path for folder, path in files.items() if path.is_file()}


def read_provenance(path: Path) -> Provenance:
    """Read a file like provenance.json; raise UsageError with the path if it is invalid."""
    try:
        return Provenance.from_json(read_json(path, _MAX_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {escape_unprintable(str(error), 300)}") from None


def write_provenance(path: Path, provenance: Provenance) -> None:
    """Write the file that tells `tracestore convert` where the traces of its folder come from."""
    write_atomic(path, json.dumps(provenance.to_json(), indent=1).encode())
