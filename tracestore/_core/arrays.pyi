from typing import Any

import numpy as np

def plain_array(state: tuple[Any, ...], dtype: np.dtype, itemsize: int) -> np.ndarray | None: ...
