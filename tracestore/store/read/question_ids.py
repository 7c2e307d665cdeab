"""The question ids of a store as a sequence."""

from collections.abc import Sequence
from typing import overload

import numpy as np

from tracestore.store.read.index import StoreIndex


class QuestionIds(Sequence[str]):
    """The question ids of a store, decoded on access."""

    def __init__(self, index: StoreIndex) -> None:
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, item: int) -> str: ...
    @overload
    def __getitem__(self, item: slice) -> list[str]: ...
    def __getitem__(self, item: int | slice) -> str | list[str]:
        if isinstance(item, slice):
            return [self._index.question_id(k) for k in range(*item.indices(len(self)))]
        k = range(len(self))[item]
        return self._index.question_id(k)

    def take(self, indices: np.ndarray) -> list[str]:
        """Return the ids of some traces."""
        return self._index.question_ids(indices)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} question ids>"
