from typing import Any, Self, final

@final
class GineInputs:
    def __new__(
        cls,
        x: Any,
        x_dtype: int,
        node_ptr: Any,
        weights: Any,
        weight_dtype: int,
        weight_ptr: Any,
        source: Any = None,
        target: Any = None,
        threshold: float = 0.0,
        num_threads: int = 1,
        num_channels: int = 1,
    ) -> Self: ...
    def workspace_bytes(self, real_bytes: int, backward: bool) -> int: ...
    def forward(self, w: Any, b: Any, out: Any, workspace: Any) -> None: ...
    def backward(
        self, w: Any, b: Any, grad_out: Any, grad_x: Any, grad_w: Any, grad_b: Any, workspace: Any
    ) -> None: ...
