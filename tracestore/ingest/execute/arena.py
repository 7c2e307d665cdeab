"""Copies of arrays that wait for the rest of their traces, in memory up to a limit and beyond it in files."""

from collections.abc import Iterable, Iterator

import numpy as np

from tracestore.ingest.execute.walk import Cell
from tracestore.ingest.tree import Array, Items, NumpyArray, Value
from tracestore.store.io.scratch import Scratch

# Up to this many bytes of arrays wait without a copy: a trace for each row needs none.
_WAITING_BYTES = 16 << 20
_BLOCK_BYTES = 16 << 20


class Arena:
    """Keep the arrays of cells without the buffers of their reader.

    Parameters
    ----------
    scratch : Scratch
        Memory for the copies.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch, self._block, self._end, self._waiting_bytes = scratch, np.empty(0, "u1"), 0, 0

    def kept(self, cells: Iterable[Cell | None], root: Value) -> Iterator[Cell | None]:
        """Yield cells of a file; where its reader lends arrays, copies of them once many wait for their traces."""
        is_lent = isinstance(root, Items) and root.is_lent
        for cell in cells:
            if cell is None:
                self._block, self._end, self._waiting_bytes = np.empty(0, "u1"), 0, 0
            if cell is not None and is_lent and isinstance(cell.value, Array):
                cell = cell._replace(value=self._copied(cell.value))
            yield cell

    def _copied(self, value: Array) -> Array:
        array = value.read()
        self._waiting_bytes += array.nbytes
        if self._waiting_bytes <= _WAITING_BYTES:
            return value
        if self._end + array.nbytes > len(self._block):
            self._block, self._end = self._scratch.empty(max(_BLOCK_BYTES, array.nbytes), "u1"), 0
        begin, self._end = self._end, self._end + -(-array.nbytes // 16) * 16
        copy = self._block[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return NumpyArray(copy)
