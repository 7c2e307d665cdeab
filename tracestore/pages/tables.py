"""Tables that are shown on a page and as text."""

from collections.abc import Sequence
from typing import NamedTuple

from tracestore.pages.elements import Html, TableCell, table

_ASCII = str.maketrans({"–": "-", "→": "->"})


class Table(NamedTuple):
    """A table whose cells are those of `elements.table`. It is HTML in a page.

    Parameters
    ----------
    caption : str
        What the table contains; the text lacks it.
    header : sequence of str
        Names of the columns.
    rows : sequence of sequences
        Texts, numbers and cells.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __html__(self) -> Html:
        """Return the table as HTML."""
        return table(self.header, self.rows, caption=self.caption)

    def text(self) -> str:
        """Return the table as lines: names to the left, other columns to the right."""
        lines = [[_text(cell) for cell in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([f"{line[0]:{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        )


def _text(cell: object) -> str:
    content = cell.text if isinstance(cell, TableCell) else cell
    text = "" if content is None else f"{content:,}" if isinstance(content, int) else str(content)
    return text.translate(_ASCII)
