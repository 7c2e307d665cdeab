from typing import Any, Self, final

from typing_extensions import disjoint_base

# Any contiguous buffer: before Python 3.12 numpy cannot say that its arrays are one.
_Buffer = Any

@final
class ThreadPool:
    def __new__(cls, num_threads: int) -> Self: ...
    def close(self) -> None: ...

@disjoint_base
class Job:
    major_faults: int
    def run(self, num_threads: int = 1) -> None: ...
    def submit(self, pool: ThreadPool, num_threads: int = 1) -> None: ...
    def wait(self) -> None: ...

@final
class ArrayView:
    num_rows: int
    row_bytes: int
    def __new__(cls, source: _Buffer, num_rows: int, row_bytes: int) -> Self: ...
    def rows(self, begin: int, end: int) -> RowRange: ...

@final
class RowRange:
    num_bytes: int
    def __getitem__(self, bytes_: slice) -> RowRange: ...

@final
class CopyJob(Job):
    out_bytes: int
    def __new__(cls, sources: list[Any], dtype: int, out_dtype: int) -> Self: ...
    def set_output(self, out: _Buffer, offset: int = 0) -> None: ...

@final
class RowJob(Job):
    out_bytes: int
    def __new__(
        cls,
        arrays: list[Any],
        array: Any,
        row: Any,
        dtype: int,
        out_dtype: int,
        target: Any = None,
        num_targets: int = 0,
    ) -> Self: ...
    def set_output(self, out: _Buffer, offset: int = 0) -> None: ...

def find_runs(first: Any, numbers: Any, out: Any) -> None: ...
def sort_roughly(numbers: Any, total: int, out: Any) -> None: ...

@final
class GraphBatchJob(Job):
    num_graphs: int
    num_nodes: int
    num_pairs: int
    num_edges: int
    def __new__(
        cls,
        hidden: CopyJob,
        weights: list[Any],
        weight_dtype: int,
        weight_out: int,
        num_tokens: Any,
        causal: Any,
        num_layers: int,
        num_heads: int,
        attention_threshold: float,
        top_k: float,
        packed: bool,
        edges: list[tuple[Any, Any]] | None = None,
        every_head: bool = False,
        masks: tuple[bool, int] | None = None,
    ) -> Self: ...
    def count_edges(self, num_threads: int = 1) -> int: ...
    def max_edges(self) -> int: ...
    def set_output(
        self, out: _Buffer, x: int, edge_index: int, weights: int, owner: int, ptr: int, edge_ptr: int, degree: int = 0
    ) -> None: ...

@final
class PrefetchJob(Job):
    num_bytes: int
    def __new__(cls, sources: list[Any], evict: bool = False) -> Self: ...
