from collections.abc import Callable, Iterator
from typing import Any, Self, final

import numpy as np
from typing_extensions import disjoint_base

@disjoint_base
class ByteReader:
    disk_bytes: int
    consumed: int
    def read(self, count: int) -> bytes | memoryview: ...
    def is_eof(self) -> bool: ...
    def peek(self) -> int: ...

@final
class BufferReader(ByteReader):
    def __new__(cls, buffer: Any) -> Self: ...

@final
class ChunkReader(ByteReader):
    def __init__(
        self,
        next_chunk: Callable[[], bytes],
        spill: Callable[[int], Any],
        *,
        disk_bytes: int,
        max_memory: int,
        max_payload: int,
    ) -> None: ...

@final
class SafeUnpickler:
    result: Any
    num_yielded: int
    root: list[Any] | None
    def __init__(
        self,
        source: ByteReader,
        *,
        find_class: Callable[[Any, Any], Any],
        global_type: type,
        value_type: type,
        persistent_load: Callable[[Any], Any] | None,
        retained_bytes: int,
        retained_types: tuple[type, ...],
    ) -> None: ...
    def load(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...

def plain_array(state: tuple[Any, ...], dtype: np.dtype, itemsize: int) -> np.ndarray | None: ...
