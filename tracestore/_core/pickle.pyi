from collections.abc import Callable, Iterator
from typing import Any, Self, final

from typing_extensions import disjoint_base

@disjoint_base
class ByteReader:
    disk_bytes: int
    consumed: int
    def read(self, count: int) -> bytes | memoryview: ...
    def at_end(self) -> bool: ...

@final
class BufferReader(ByteReader):
    def __new__(cls, buffer: Any, begin: int = 0, end: int | None = None) -> Self: ...

@final
class ChunkReader(ByteReader):
    def __init__(
        self,
        next_piece: Callable[[], bytes],
        spill: Callable[[int], Any],
        *,
        disk_bytes: int,
        max_memory: int,
        max_payload: int,
    ) -> None: ...

@final
class SafeUnpickler:
    result: Any
    num_streamed: int
    def __init__(
        self,
        source: ByteReader,
        *,
        lookup: Callable[[Any, Any], Any],
        builder: type,
        draft: type,
        persistent: Callable[[Any], Any] | None,
        retained_bytes: int,
        kept: tuple[type, ...],
    ) -> None: ...
    def load(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
