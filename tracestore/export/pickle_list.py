"""Pickles of traces, for other programs: written, never read."""

import pickle
from typing import Any, BinaryIO


class PickleListWriter:
    """One pickled list in `file`, written item by item in the memory of one item."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # Protocol 3 has no frames, so that items pickled alone can stand in one
        # list: each puts its own objects into the memo before it gets them.
        self._file.write(pickle.PROTO + b"\x03" + pickle.EMPTY_LIST + pickle.MARK)

    def append(self, item: dict[str, Any]) -> None:
        self._file.write(memoryview(pickle.dumps(item, protocol=3))[2:-1])

    def finish(self) -> None:
        """Ends the list; the file stays open."""
        self._file.write(pickle.APPENDS + pickle.STOP)
