"""CSV files: written row by row, in place whole or not at all."""

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tracestore.store import fsio


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """RFC 4180: UTF-8, CRLF, quotes where they are needed, floats with all their digits. What
    UTF-8 cannot hold (lone surrogates) is written as an escape. The file gets its name
    when all rows are on disk; a failure leaves what was there before."""
    temporary = path.with_name(fsio.TEMPORARY_PREFIX + path.name)
    fsio.remove_tree(temporary)
    try:
        with temporary.open("x", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows(rows)
            file.flush()
            with fsio.naming(temporary):
                os.fsync(file.fileno())
        fsio.again(os.rename, temporary, path)
    except BaseException:
        fsio.remove_tree(temporary)
        raise
    fsio.fsync_path(path.parent)
