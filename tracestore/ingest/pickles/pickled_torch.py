"""Values of PyTorch and PyTorch Geometric that a pickle may hold: storages, tensors, graphs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.pickles.pickled_objects import UnknownClass
from tracestore.ingest.pickles.pickled_values import (
    MAX_EMPTY_AXIS,
    OBJECT,
    PickledValue,
    SafeClass,
    SafeFunction,
    SafeGlobal,
    checked_shape,
    functions,
)
from tracestore.store.format.schema import BFLOAT16

# The dtypes of torch: name, storage class, dtype of NumPy.
_DTYPES = (
    ("float16", "HalfStorage", np.dtype("<f2")),
    ("bfloat16", "BFloat16Storage", BFLOAT16),
    ("float32", "FloatStorage", np.dtype("<f4")),
    ("float64", "DoubleStorage", np.dtype("<f8")),
    ("uint8", "ByteStorage", np.dtype("u1")),
    ("int8", "CharStorage", np.dtype("i1")),
    ("int16", "ShortStorage", np.dtype("<i2")),
    ("int32", "IntStorage", np.dtype("<i4")),
    ("int64", "LongStorage", np.dtype("<i8")),
    ("bool", "BoolStorage", np.dtype("?")),
)


class PickledStorage(PickledValue):
    """A torch storage: elements of one dtype. Legacy files set `data` later."""

    __slots__ = ("data", "dtype", "numel")

    def __init__(self, dtype: np.dtype | None, numel: int, data: Any = None) -> None:
        self.dtype, self.numel, self.data = dtype, numel, data

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes."""
        return self.numel * (self.dtype.itemsize if self.dtype is not None else 1)


class PickledTensor(PickledValue):
    """A torch tensor: offset, size and stride in elements of a storage."""

    __slots__ = ("dtype", "offset", "size", "storage", "stride")

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, dtype: np.dtype | None = None) -> None:
        if not isinstance(storage, PickledStorage):
            raise InvalidInputError("found a tensor without a storage")
        size, stride = checked_shape(size), checked_shape(stride)
        dtype = dtype or storage.dtype
        if dtype is None or len(size) != len(stride) or not isinstance(offset, int) or offset < 0:
            raise InvalidInputError("found a tensor with an inconsistent layout")
        available = storage.num_bytes // dtype.itemsize
        numel = math.prod(size)
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if numel else offset
        if (numel == 0 and max(size, default=0) > MAX_EMPTY_AXIS) or any(s >= 1 << 48 for s in stride):
            raise InvalidInputError(f"found a tensor of size {size} and stride {stride}")
        if last > available or numel > available:
            raise InvalidInputError(f"a tensor of size {size} reaches outside its storage of {available:,} elements")
        self.storage, self.offset, self.size, self.stride, self.dtype = storage, offset, size, stride, dtype

    def resolve(self) -> np.ndarray:
        """Return the values as a read-only view of the storage."""
        if self.storage.data is None:
            raise InvalidInputError("found a tensor whose storage is not in the file")
        if math.prod(self.size) == 0:
            return np.empty(self.size, self.dtype)
        strides = tuple(s * self.dtype.itemsize for s in self.stride)
        found = np.ndarray(self.size, self.dtype, self.storage.data, self.offset * self.dtype.itemsize, strides)
        found.flags.writeable = False
        return found


class PickledGraph(PickledValue):
    """A PyG Data object, or the storage object inside it."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] | None = None

    def build(self, state: Any) -> None:
        """Set the attributes of the object."""
        if not isinstance(state, dict):
            raise InvalidInputError("found a PyG object whose state is not a dict")
        self.state = state

    def fields(self) -> dict[str, Any]:
        """Return x, edge_index, edge_attr and the rest, from the old layout (attributes) or the new (_store)."""
        state = self.state or {}
        store = state.get("_store")
        if isinstance(store, PickledGraph):
            mapping = (store.state or {}).get("_mapping")
            if not isinstance(mapping, dict):
                raise InvalidInputError("found a PyG Data without its fields")
            state = mapping
        return {str(k): v for k, v in state.items() if isinstance(k, str) and not k.startswith("_")}


class _ClassWithDtype(SafeClass):
    """A class that stands for a dtype; None for untyped storages."""

    def __init__(self, name: str, dtype: np.dtype | None) -> None:
        super().__init__(name)
        self.dtype = dtype


class StorageType(_ClassWithDtype):
    """A storage class such as torch.HalfStorage."""


class TorchDtype(_ClassWithDtype):
    """A dtype object such as torch.float16."""


class _GraphClass(SafeClass):
    """A PyG class whose objects hold a graph."""

    def new(self, args: tuple[Any, ...]) -> PickledGraph:
        if args:
            raise InvalidInputError(f"found {self.name} made with arguments")
        return PickledGraph()


def _rebuild_tensor(version: int, args: tuple[Any, ...]) -> PickledTensor:
    """Make a tensor over a storage, as either version of torch's function does."""
    if len(args) < 4:
        raise InvalidInputError(f"found torch._utils._rebuild_tensor_v{version} with {len(args)} arguments")
    if len(args) > 5 and args[5]:
        raise InvalidInputError("found a tensor with hooks")
    dtype = None
    if version == 3:
        if len(args) < 7 or not isinstance(args[6], TorchDtype):
            raise InvalidInputError("found a tensor without a dtype")
        dtype = args[6].dtype
    # torch negates and conjugates lazily: the metadata names the operations still to be applied.
    metadata = args[version + 4] if len(args) > version + 4 else None
    if metadata is not None and metadata != {} and metadata != {"neg": False, "conj": False}:
        raise InvalidInputError(
            "found a tensor that torch negates or conjugates when it is used; save tensor.resolve_neg().resolve_conj()"
        )
    return PickledTensor(args[0], args[1], args[2], args[3], dtype)


def nested_loader(load: Callable[[Any], Any] | None) -> SafeFunction:
    """Return torch.storage._load_from_bytes, which reads a whole legacy torch file inside a pickle with `load`.

    Without `load` the call is refused, as on a second level.
    """

    def call(args: tuple[Any, ...]) -> Any:
        if load is None or len(args) != 1:
            raise InvalidInputError("found a torch file inside a torch file inside a pickle")
        return load(args[0])

    return SafeFunction("torch.storage._load_from_bytes", call)


def _rebuild_parameter(args: tuple[Any, ...]) -> PickledTensor:
    if len(args) != 3 or not isinstance(args[0], PickledTensor) or args[2]:
        raise InvalidInputError("found a torch parameter without a tensor, or with hooks")
    return args[0]


def _rebuild_from_type(args: tuple[Any, ...]) -> PickledTensor:
    """Make a tensor that has attributes of its own, such as those of a static cache; they are left out."""
    if len(args) != 4 or args[0] is not _TENSOR_V2 or not isinstance(args[2], tuple):
        raise InvalidInputError("found torch._tensor._rebuild_from_type_v2 of another object than a tensor")
    return _rebuild_tensor(2, args[2])


def _reconstructor(args: tuple[Any, ...]) -> Any:
    """Make an object as protocols 0 and 1 do: of a PyG class, or of a class whose objects are only data."""
    is_class = len(args) == 3 and isinstance(args[0], _GraphClass | UnknownClass)
    if not is_class or args[1] is not OBJECT or args[2] is not None:
        raise InvalidInputError("found an object of a class that no trace file has")
    return args[0].new(())


_PYG_DATA = "torch_geometric.data.data"
_PYG_STORAGE = "torch_geometric.data.storage"

_TENSOR_V2 = SafeFunction("torch._utils._rebuild_tensor_v2", partial(_rebuild_tensor, 2))

GLOBALS: dict[tuple[str, str], SafeGlobal] = {
    ("torch._utils", "_rebuild_tensor_v2"): _TENSOR_V2,
    **functions("torch._utils", _rebuild_parameter=_rebuild_parameter),
    **functions("torch._tensor", _rebuild_from_type_v2=_rebuild_from_type),
    ("torch", "Tensor"): SafeFunction("torch.Tensor", _rebuild_from_type, is_called=False),
    **functions("torch._utils", _rebuild_tensor_v3=partial(_rebuild_tensor, 3)),
    **functions("torch", Size=lambda args: checked_shape(args[0] if args else ()), device=lambda args: "cpu"),
    ("torch", "UntypedStorage"): StorageType("torch.UntypedStorage", None),
    ("torch.storage", "UntypedStorage"): StorageType("torch.UntypedStorage", None),
    (_PYG_DATA, "Data"): _GraphClass(f"{_PYG_DATA}.Data"),
    (_PYG_DATA, "DataEdgeAttr"): SafeClass(f"{_PYG_DATA}.DataEdgeAttr"),
    (_PYG_DATA, "DataTensorAttr"): SafeClass(f"{_PYG_DATA}.DataTensorAttr"),
    (_PYG_STORAGE, "GlobalStorage"): _GraphClass(f"{_PYG_STORAGE}.GlobalStorage"),
}
for _module in ("copyreg", "copy_reg"):  # Python 3 and 2
    GLOBALS |= functions(_module, _reconstructor=_reconstructor)
for _name, _storage, _dtype in _DTYPES:
    GLOBALS["torch", _name] = TorchDtype(f"torch.{_name}", _dtype)
    GLOBALS["torch", _storage] = StorageType(f"torch.{_storage}", _dtype)
