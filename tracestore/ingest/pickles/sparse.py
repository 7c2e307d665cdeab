"""Sparse matrices and tensors of SciPy and PyTorch in pickles, as data."""

import math
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.pickles.pickled_torch import PickledTensor
from tracestore.ingest.pickles.pickled_values import (
    PickledArray,
    PickledValue,
    SafeFunction,
    SafeGlobal,
    checked_shape,
    functions,
)
from tracestore.store.format.schema import BFLOAT16

# Bytes of the array of a sparse matrix: an allowance, and a multiple of the bytes of its entries.
_ALLOWANCE_BYTES, _MAX_RATIO = 4 << 20, 200


class PickledSparse(PickledValue):
    """A sparse matrix or tensor: the layout "coo", "csr" or "csc", the shape, indices and values.

    SciPy sets the state with the opcode BUILD.
    """

    __slots__ = ("indices", "layout", "size", "values")

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.size: tuple[int, ...] | None = None
        self.indices: tuple[Any, ...] = ()
        self.values: Any = None

    def build(self, state: Any) -> None:
        """Set shape, indices and values from the attributes of a matrix of SciPy."""
        if not isinstance(state, dict):
            raise InvalidInputError("found a sparse matrix whose state is not a dict")
        names = ("row", "col") if self.layout == "coo" else ("indptr", "indices")
        coords = state.get("coords", tuple(state.get(name) for name in names))
        if not isinstance(coords, tuple):
            raise InvalidInputError("found a sparse matrix without indices")
        self.set(state.get("_shape"), coords, state.get("data"))

    def set(self, shape: Any, indices: tuple[Any, ...], values: Any) -> None:
        """Set shape, indices and values after checking the sizes."""
        self.size = checked_shape(shape)
        self.indices, self.values = tuple(map(_array, indices)), _array(values)
        needed, given = math.prod(self.size) * 8, self.values.nbytes + sum(part.nbytes for part in self.indices)
        if self.values.ndim != 1 or needed > _ALLOWANCE_BYTES + _MAX_RATIO * given:
            raise InvalidInputError(f"found a sparse matrix of shape {self.size} with {self.values.size:,} values")

    def resolve(self) -> np.ndarray:
        """Return the matrix as an array.

        Raises
        ------
        InvalidInputError
            If an index is outside of the shape.
        """
        if self.size is None:
            raise InvalidInputError("found a sparse matrix without values")
        coords = self._coords(self.size)
        if len(coords) != len(self.size) or any(part.shape != self.values.shape for part in coords):
            raise InvalidInputError("found a sparse matrix with other indices than values")
        for part, extent in zip(coords, self.size, strict=True):
            if part.dtype.kind not in "iu" or (part.size and not 0 <= int(part.min()) <= int(part.max()) < extent):
                raise InvalidInputError("found a sparse matrix with indices outside of its shape")
        values = self.values
        if values.dtype == BFLOAT16:
            values = (values["bfloat16"].astype("<u4") << 16).view("<f4")
        dense = np.zeros(self.size, values.dtype)
        np.add.at(dense, tuple(part.astype("i8") for part in coords), values)
        return dense

    def _coords(self, size: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        if self.layout == "coo":
            if len(self.indices) == 1 and self.indices[0].ndim == 2:
                return tuple(self.indices[0])
            return self.indices
        pointers, inner = self.indices
        axis = 0 if self.layout == "csr" else 1
        counts = np.diff(pointers.astype("i8")) if pointers.ndim == 1 else np.zeros(0, "i8")
        if len(size) != 2 or len(counts) != size[axis] or (counts < 0).any() or counts.sum() != inner.size:
            raise InvalidInputError("found a sparse matrix with other indices than values")
        outer = np.repeat(np.arange(len(counts)), counts)
        return (outer, inner) if axis == 0 else (inner, outer)


def _array(value: Any) -> np.ndarray:
    array = value.resolve() if isinstance(value, PickledArray | PickledTensor) else value
    if not isinstance(array, np.ndarray):
        raise InvalidInputError("found a sparse matrix without indices or values")
    return array


def scipy_class(module: str, name: str) -> SafeGlobal | None:
    """Return the stand-in of a class of sparse matrices of SciPy; None for other names."""
    layout, _, kind = name.partition("_")
    if module.startswith("scipy.sparse") and layout in ("coo", "csr", "csc") and kind in ("matrix", "array"):
        # BUILD fills the matrix.
        return SafeFunction(f"{module}.{name}", lambda args: PickledSparse(layout), is_class=True, is_called=False)
    return None


def _rebuild_sparse(args: tuple[Any, ...]) -> PickledSparse:
    """Return the sparse tensor of (layout, (indices..., values, size))."""
    if len(args) != 2 or args[0] not in ("coo", "csr", "csc") or not isinstance(args[1], tuple) or len(args[1]) < 3:
        raise InvalidInputError("found torch._utils._rebuild_sparse_tensor of another layout than COO, CSR and CSC")
    made = PickledSparse(args[0])
    parts = args[1][: 3 if args[0] == "coo" else 4]
    made.set(parts[-1], parts[:-2], parts[-2])
    return made


def _layout_of(args: tuple[Any, ...]) -> str:
    name = args[0] if len(args) == 1 else None
    return name.removeprefix("torch.sparse_") if isinstance(name, str) else ""


GLOBALS = functions("torch._utils", _rebuild_sparse_tensor=_rebuild_sparse, _rebuild_sparse_csr_tensor=_rebuild_sparse)
GLOBALS |= functions("torch.serialization", _get_layout=_layout_of)
