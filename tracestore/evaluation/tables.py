"""CSV files: written row by row, in place whole or not at all."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tracestore.store.io import fsio


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """RFC 4180: UTF-8, CRLF, quotes where they are needed, floats with all their digits. What
    UTF-8 cannot hold (lone surrogates) is written as an escape. The file gets its name
    when all rows are on disk; a failure leaves what was there before."""
    with fsio.atomic_write(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        writer = csv.writer(text)
        writer.writerow(header)
        writer.writerows(rows)
        text.detach()
