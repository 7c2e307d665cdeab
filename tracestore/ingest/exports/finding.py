"""Find exports among the folders of a conversion."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tracestore.ingest.exports import EXPORT_FILE

if TYPE_CHECKING:
    from tracestore.ingest.exports.export_manifest import ExportedFile


def find_export(folder: Path) -> "tuple[list[ExportedFile], frozenset[Path]] | None":
    """Return the files of the export in a folder as `read_export` does, None if the folder holds none."""
    if not os.path.lexists(folder / EXPORT_FILE):
        return None
    from tracestore.ingest.exports.export_manifest import read_export  # most folders are no exports

    return read_export(folder)
