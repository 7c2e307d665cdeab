from typing import Any, Self, final

from typing_extensions import disjoint_base

# Any contiguous buffer: before Python 3.12 numpy cannot say that its arrays are one.
_Buffer = Any

@final
class Crew:
    def __new__(cls, num_threads: int) -> Self: ...
    def close(self) -> None: ...

@disjoint_base
class Job:
    def run(self, num_threads: int = 1) -> None: ...
    def submit(self, crew: Crew, num_threads: int = 1) -> None: ...
    def wait(self) -> None: ...

@final
class Copies(Job):
    out_bytes: int
    def __new__(cls, sources: list[Any], dtype: int, out_dtype: int) -> Self: ...
    def aim(self, out: _Buffer) -> None: ...

@final
class GraphGather(Job):
    num_graphs: int
    num_nodes: int
    num_pairs: int
    num_edges: int
    def __new__(
        cls,
        hidden: Copies,
        weights: list[Any],
        weight_dtype: int,
        weight_out: int,
        num_tokens: Any,
        causal: Any,
        num_layers: int,
        num_heads: int,
        threshold: float,
        top_k_fraction: float,
        packed: bool,
        edges: list[tuple[Any, Any]] | None = None,
    ) -> Self: ...
    def count(self, num_threads: int = 1) -> int: ...
    def aim(self, x: _Buffer, owner: Any, ptr: Any, edge_index: Any, weights: _Buffer, edge_ptr: Any) -> None: ...
