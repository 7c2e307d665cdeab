"""CSV files that are replaced atomically."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tracestore.store.io import fsio


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file as RFC 4180 describes it, with floats in full precision.

    The encoding is UTF-8; lone surrogates are escaped. The file gets its name when all rows
    are on disk; on a failure an existing file stays.

    Parameters
    ----------
    path : Path
    header : sequence of str
    rows : iterable of sequence
        Consumed while the file is written.
    """
    with fsio.atomic_write(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        writer = csv.writer(text)
        writer.writerow(header)
        writer.writerows(rows)
        text.detach()
