from collections.abc import Sequence
from typing import Any

# Any contiguous buffer: before Python 3.12 numpy cannot say that its arrays are one.
_Buffer = Any

F16: int
BF16: int
F32: int
F64: int

def simd_level() -> int: ...
def simd_name() -> str: ...
def crc32c(data: _Buffer, value: int = 0) -> int: ...
def crc32c_combine(first: int, second: int, second_bytes: int) -> int: ...
def to_float16(source: _Buffer, dtype: int, out: _Buffer) -> int: ...
def unpack_triangle(source: _Buffer, itemsize: int, num_matrices: int, num_tokens: int, out: _Buffer) -> None: ...
def mean_rows(source: _Buffer, dtype: int, num_rows: int, row_length: int, out: _Buffer) -> None: ...
def checksum_scan(
    arrays: Sequence[_Buffer],
    dtype: int,
    num_values: int,
    out: _Buffer | None = None,
    layer_crcs: _Buffer | None = None,
) -> tuple[int, int]: ...
def pack_attention(
    sources: Sequence[_Buffer],
    source_dtype: int,
    stored: Sequence[_Buffer] | None,
    stored_dtype: int,
    num_heads: int,
    num_tokens: int,
    causal: bool,
    out: _Buffer | None,
    layer_crcs: _Buffer | None = None,
) -> tuple[bool, int, int]: ...
