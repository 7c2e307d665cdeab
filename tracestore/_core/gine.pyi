from typing import Any, Self, final

@final
class Graphs:
    num_nodes: int
    def __new__(
        cls,
        node_ptr: Any,
        weight_ptr: Any,
        weights: Any,
        weight_dtype: int,
        threshold: float = 0.0,
        source: Any = None,
        target: Any = None,
    ) -> Self: ...
    def workspace_rows(self) -> int: ...
    def forward(self, x: Any, w: Any, b: Any, out: Any, num_threads: int = 1) -> None: ...
    def backward(
        self,
        x: Any,
        w: Any,
        b: Any,
        grad_out: Any,
        grad_x: Any,
        grad_w: Any,
        grad_b: Any,
        workspace: Any,
        num_threads: int = 1,
    ) -> None: ...
