"""What the allowed names of a pickle stand for.

Each builder records plain data and checks it. Nothing here imports or calls what
a file names; a name that is not in ALLOWED is refused with the name.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tracestore._core.arrays import plain_array
from tracestore.errors import InvalidInputError
from tracestore.store.format.schema import BFLOAT16

MAX_NDIM = 16
# An array without bytes may claim any length; none that traces hold is longer.
MAX_EMPTY_AXIS = 1 << 20
# Tuples: a union would be made anew with every array.
_BUFFERS, _SEQUENCES = (bytes, bytearray, memoryview), (tuple, list)
_DTYPE = re.compile(r"([<>|=]?)(?:([biufc])(1|2|4|8|16)|([SU])(\d{1,6}))")


def _refuse(reason: str) -> InvalidInputError:
    return InvalidInputError(reason)


class SafeGlobal:
    """Base of what an allowed name stands for; each form of use is refused unless it is overridden."""

    name = "?"

    def call(self, args: tuple[Any, ...]) -> Any:
        raise _refuse(f"{self.name} is called, which no file of traces does")

    def new(self, args: tuple[Any, ...]) -> Any:
        raise _refuse(f"{self.name} is instantiated, which no file of traces does")


class PickledValue:
    """An object that BUILD may complete."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        raise _refuse("an object gets a state that it cannot have")


class PickledDtype(PickledValue):
    """numpy.dtype: a string, then a state with the byte order."""

    def __init__(self, text: str) -> None:
        match = _DTYPE.fullmatch(text)
        self.plain_itemsize = 0  # where any bytes are values
        if text == "O" or text == "O8":
            self.dtype: np.dtype | None = None
            return
        if match is None:
            raise _refuse(f"found dtype {text[:40]!r}, expected numbers or strings")
        kind = match[2] or match[4]
        size = int(match[3] or match[5])
        if (kind, size) not in _SIZES and kind not in "SU":
            raise _refuse(f"found dtype {text[:40]!r}, which does not exist")
        self.dtype = np.dtype(f"{match[1] or '<'}{kind}{size}" if kind + str(size) != "b1" else "?")
        if kind in "iufc":
            self.plain_itemsize = size

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 8 or any(part is not None for part in state[2:5]):
            raise _refuse("found a structured dtype, expected plain numbers")
        if not isinstance(state[1], str) or state[1] not in ("<", ">", "|", "="):
            raise _refuse("found a dtype of no byte order")
        if self.dtype is not None and state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


_SIZES = {("b", 1)} | {(k, s) for k in "iu" for s in (1, 2, 4, 8)} | {("f", s) for s in (2, 4, 8, 16)}
_SIZES |= {("c", 8), ("c", 16)}


def _shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, int) and not isinstance(shape, bool):
        shape = (shape,)
    if not isinstance(shape, _SEQUENCES) or len(shape) > MAX_NDIM:
        raise _refuse("found a shape that is not a tuple of integers")
    for n in shape:
        if type(n) is not int or n < 0:
            raise _refuse("found a shape with a negative or no integer")
    return shape if type(shape) is tuple else tuple(shape)


def make_array(data: Any, dtype: np.dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    """A read-only array over `data`, whose length must be just what the shape needs."""
    needed = math.prod(shape) * dtype.itemsize
    view = memoryview(data)
    if needed != view.nbytes:
        raise _refuse(f"an array of shape {shape} and dtype {dtype} needs {needed:,} bytes, {view.nbytes:,} are there")
    if needed == 0 and (dtype.itemsize == 0 or max(shape, default=0) > MAX_EMPTY_AXIS):
        raise _refuse(f"found an empty array of shape {shape}")
    if needed == 0:
        return np.empty(shape, dtype)
    if dtype.kind == "U" and (np.frombuffer(data, dtype.str[0] + "u4") > 0x10FFFF).any():
        raise _refuse("found text beyond the last letter of Unicode")
    array = np.ndarray(shape, dtype, data, 0, None, order)  # type: ignore[arg-type]
    if not view.readonly:
        array.flags.writeable = False
    return array


class PickledArray(PickledValue):
    """numpy.ndarray from _reconstruct; its state is (version, shape, dtype, is_fortran, data)."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | list[Any] | None = None

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise _refuse("found an ndarray with another state than (version, shape, dtype, order, data)")
        if type(state) is tuple and type(state[-3]) is PickledDtype:
            draft = state[-3]
            if draft.plain_itemsize and draft.dtype is not None:
                self.array = plain_array(state, draft.dtype, draft.plain_itemsize)
                if self.array is not None:
                    return
        shape, dtype, fortran, data = state[-4:]
        shape = _shape(shape)
        if not isinstance(dtype, PickledDtype):
            raise _refuse("found an ndarray without a dtype")
        if dtype.dtype is None:
            self.array = _object_array(shape, data)
            return
        if isinstance(data, str):
            data = _latin1(data)
        if not isinstance(data, _BUFFERS):
            raise _refuse(f"found ndarray data of type {type(data).__name__}, expected bytes")
        self.array = make_array(data, dtype.dtype, shape, "F" if fortran else "C")

    def resolve(self) -> Any:
        if self.array is None:
            raise _refuse("found an ndarray that was never filled")
        return self.array


def _object_array(shape: tuple[int, ...], data: Any) -> list[Any]:
    flat = isinstance(data, list) and len(shape) == 1 and len(data) == shape[0]
    if not flat or not all(isinstance(v, str | int | float | PickledValue | np.generic) for v in data):
        raise _refuse("found an object array, expected at most a flat list of strings, numbers or arrays")
    return list(data)


def _latin1(text: str) -> bytes:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise _refuse("found bytes written as text beyond latin1") from None


class PickledStorage(PickledValue):
    """A torch storage: elements of one dtype; `data` comes later in legacy files."""

    __slots__ = ("data", "dtype", "numel")

    def __init__(self, dtype: np.dtype | None, numel: int, data: Any = None) -> None:
        self.dtype, self.numel, self.data = dtype, numel, data

    @property
    def num_bytes(self) -> int:
        return self.numel * (self.dtype.itemsize if self.dtype is not None else 1)


class PickledTensor(PickledValue):
    """A torch tensor: offset, size and stride in elements of a storage."""

    __slots__ = ("dtype", "is_negated", "offset", "size", "storage", "stride")

    def __init__(
        self,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        dtype: np.dtype | None = None,
        is_negated: bool = False,
    ) -> None:
        if not isinstance(storage, PickledStorage):
            raise _refuse("found a tensor without a storage")
        size, stride = _shape(size), _shape(stride)
        dtype = dtype or storage.dtype
        if dtype is None or len(size) != len(stride) or not isinstance(offset, int) or offset < 0:
            raise _refuse("found a tensor with an inconsistent layout")
        available = storage.num_bytes // dtype.itemsize
        numel = math.prod(size)
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if numel else offset
        if (numel == 0 and max(size, default=0) > MAX_EMPTY_AXIS) or any(s >= 1 << 48 for s in stride):
            raise _refuse(f"found a tensor of size {size} and stride {stride}")
        if last > available or numel > available:
            raise _refuse(f"a tensor of size {size} reaches outside its storage of {available:,} elements")
        self.storage, self.offset, self.size, self.stride, self.dtype = storage, offset, size, stride, dtype
        self.is_negated = is_negated

    def resolve(self) -> np.ndarray:
        if self.storage.data is None:
            raise _refuse("found a tensor whose storage is not in the file")
        if math.prod(self.size) == 0:
            return np.empty(self.size, self.dtype)
        items = np.frombuffer(self.storage.data, self.dtype, self.storage.num_bytes // self.dtype.itemsize)
        strides = tuple(s * self.dtype.itemsize for s in self.stride)
        values = np.lib.stride_tricks.as_strided(items[self.offset :], self.size, strides, writeable=False)
        if not self.is_negated:
            return values
        if self.dtype == BFLOAT16:
            return (np.ascontiguousarray(values).view("<u2") ^ 0x8000).astype("<u2").view(BFLOAT16)
        negated: np.ndarray = np.negative(values)
        return negated


class PickledGraph(PickledValue):
    """A PyG Data object: its fields, flattened out of its storage."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] | None = None

    def build(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise _refuse("found a PyG object whose state is not a dict")
        self.state = state

    def fields(self) -> dict[str, Any]:
        """x, edge_index, edge_attr and the rest, of old (attributes) and new (_store) layouts."""
        state = self.state or {}
        store = state.get("_store")
        if isinstance(store, PickledGraph):
            mapping = (store.state or {}).get("_mapping")
            if not isinstance(mapping, dict):
                raise _refuse("found a PyG Data without its fields")
            state = mapping
        return {str(k): v for k, v in state.items() if isinstance(k, str) and not k.startswith("_")}


class _Class(SafeGlobal):
    """A class that is only ever passed as a value."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Dtype(SafeGlobal):
    name = "numpy.dtype"

    def call(self, args: tuple[Any, ...]) -> PickledDtype:
        if not args or not isinstance(args[0], str):
            raise _refuse("found numpy.dtype of something that is not a string")
        return PickledDtype(args[0])


class _Reconstruct(SafeGlobal):
    name = "numpy _reconstruct"

    def call(self, args: tuple[Any, ...]) -> PickledArray:
        if len(args) != 3 or args[0] is not _NDARRAY:
            raise _refuse("found _reconstruct of another class than numpy.ndarray")
        return PickledArray()


class _Scalar(SafeGlobal):
    name = "numpy scalar"

    def call(self, args: tuple[Any, ...]) -> Any:
        if len(args) != 2 or not isinstance(args[0], PickledDtype) or args[0].dtype is None:
            raise _refuse("found a numpy scalar without a plain dtype")
        data = _latin1(args[1]) if isinstance(args[1], str) else args[1]
        if not isinstance(data, _BUFFERS):
            raise _refuse("found a numpy scalar without bytes")
        return make_array(data, args[0].dtype, (), "C")[()]


class _FromBuffer(SafeGlobal):
    name = "numpy _frombuffer"

    def call(self, args: tuple[Any, ...]) -> PickledArray:
        if (
            len(args) != 4
            or not isinstance(args[1], PickledDtype)
            or args[1].dtype is None
            or args[3] not in ("C", "F")
        ):
            raise _refuse("found _frombuffer without (bytes, dtype, shape, order)")
        if not isinstance(args[0], _BUFFERS):
            raise _refuse("found an array whose bytes are not in the file")
        draft = PickledArray()
        draft.array = make_array(args[0], args[1].dtype, _shape(args[2]), args[3])
        return draft


class _Encode(SafeGlobal):
    name = "_codecs.encode"

    def call(self, args: tuple[Any, ...]) -> bytes:
        if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
            raise _refuse("found _codecs.encode with another codec than latin1")
        return _latin1(args[0])


class _Bytes(SafeGlobal):
    name = "bytes"

    def call(self, args: tuple[Any, ...]) -> bytes:
        if args and not (len(args) == 1 and isinstance(args[0], list) and not args[0]):
            raise _refuse("found bytes() of a value, expected empty bytes")
        return b""


class _Reconstructor(SafeGlobal):
    """How protocols 0 and 1 make an object: of a PyG class, of nothing else."""

    name = "copyreg._reconstructor"

    def call(self, args: tuple[Any, ...]) -> "PickledGraph":
        if len(args) != 3 or not isinstance(args[0], _Graph) or args[1] is not _OBJECT or args[2] is not None:
            raise _refuse("found an object of a class that a file of traces does not have")
        return args[0].new(())


class _OrderedDict(SafeGlobal):
    name = "collections.OrderedDict"

    def call(self, args: tuple[Any, ...]) -> dict[Any, Any]:
        if args and not (len(args) == 1 and args[0] == []):
            raise _refuse("found an OrderedDict made from values")
        return {}

    new = call


class StorageType(SafeGlobal):
    """torch.HalfStorage and so on."""

    def __init__(self, name: str, dtype: np.dtype | None) -> None:
        self.name, self.dtype = name, dtype


class _TorchDtype(SafeGlobal):
    def __init__(self, name: str, dtype: np.dtype) -> None:
        self.name, self.dtype = name, dtype


class _RebuildTensor(SafeGlobal):
    def __init__(self, version: int) -> None:
        self.name = f"torch._utils._rebuild_tensor_v{version}"
        self.version = version

    def call(self, args: tuple[Any, ...]) -> PickledTensor:
        if len(args) < 4:
            raise _refuse(f"found {self.name} with {len(args)} arguments")
        if len(args) > 5 and args[5]:
            raise _refuse("found a tensor with hooks")
        dtype = None
        if self.version == 3:
            if len(args) < 7 or not isinstance(args[6], _TorchDtype):
                raise _refuse("found a tensor without a dtype")
            dtype = args[6].dtype
        # What torch has not done yet to the values: changing their sign, or conjugating them.
        metadata = args[self.version + 4] if len(args) > self.version + 4 else None
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict) or not metadata.keys() <= {"neg", "conj"} or metadata.get("conj"):
            raise _refuse("found a tensor with attributes of its own, such as torch's conjugate bit")
        return PickledTensor(args[0], args[1], args[2], args[3], dtype, bool(metadata.get("neg")))


class _RebuildParameter(SafeGlobal):
    name = "torch._utils._rebuild_parameter"

    def call(self, args: tuple[Any, ...]) -> PickledTensor:
        if len(args) != 3 or not isinstance(args[0], PickledTensor) or args[2]:
            raise _refuse("found a torch parameter without a tensor, or with hooks")
        return args[0]


class _Size(SafeGlobal):
    name = "torch.Size"

    def call(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        return _shape(args[0] if args else ())


class _Device(SafeGlobal):
    name = "torch.device"

    def call(self, args: tuple[Any, ...]) -> str:
        return "cpu"


class _Graph(SafeGlobal):
    def __init__(self, name: str) -> None:
        self.name = name

    def new(self, args: tuple[Any, ...]) -> PickledGraph:
        if args:
            raise _refuse(f"found {self.name} made with arguments")
        return PickledGraph()


class NestedTorchLoader(SafeGlobal):
    """torch.storage._load_from_bytes: a whole legacy torch file inside a pickle, which `load`
    reads; without it, as on a second level, it is refused."""

    name = "torch.storage._load_from_bytes"

    def __init__(self, load: Callable[[Any], Any] | None = None) -> None:
        self._load = load

    def call(self, args: tuple[Any, ...]) -> Any:
        if self._load is None or len(args) != 1:
            raise _refuse("a torch file inside a torch file inside a pickle")
        return self._load(args[0])


_TORCH_DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype("<f2"),
    "bfloat16": BFLOAT16,
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "uint8": np.dtype("u1"),
    "int8": np.dtype("i1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "bool": np.dtype("?"),
}
_STORAGES = {
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
}

_OBJECT, _NDARRAY = _Class("builtins.object"), _Class("numpy.ndarray")

ALLOWED: dict[tuple[str, str], SafeGlobal] = {
    ("copyreg", "_reconstructor"): _Reconstructor(),
    ("copy_reg", "_reconstructor"): _Reconstructor(),
    ("builtins", "object"): _OBJECT,
    ("__builtin__", "object"): _OBJECT,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Dtype(),
    ("_codecs", "encode"): _Encode(),
    ("builtins", "bytes"): _Bytes(),
    ("__builtin__", "bytes"): _Bytes(),
    ("collections", "OrderedDict"): _OrderedDict(),
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(2),
    ("torch._utils", "_rebuild_tensor_v3"): _RebuildTensor(3),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    ("torch", "Size"): _Size(),
    ("torch", "device"): _Device(),
    ("torch", "UntypedStorage"): StorageType("torch.UntypedStorage", None),
    ("torch.storage", "UntypedStorage"): StorageType("torch.UntypedStorage", None),
    ("torch.storage", "_load_from_bytes"): NestedTorchLoader(),
    ("torch_geometric.data.data", "Data"): _Graph("torch_geometric.data.data.Data"),
    ("torch_geometric.data.data", "DataEdgeAttr"): _Class("torch_geometric.data.data.DataEdgeAttr"),
    ("torch_geometric.data.data", "DataTensorAttr"): _Class("torch_geometric.data.data.DataTensorAttr"),
    ("torch_geometric.data.storage", "GlobalStorage"): _Graph("torch_geometric.data.storage.GlobalStorage"),
}
for _module in ("numpy.core", "numpy._core"):
    ALLOWED[f"{_module}.multiarray", "_reconstruct"] = _Reconstruct()
    ALLOWED[f"{_module}.multiarray", "scalar"] = _Scalar()
    ALLOWED[f"{_module}.numeric", "_frombuffer"] = _FromBuffer()
for _name, _dtype_name in _STORAGES.items():
    ALLOWED["torch", _name] = StorageType(f"torch.{_name}", _TORCH_DTYPES[_dtype_name])
for _name, _dtype in _TORCH_DTYPES.items():
    ALLOWED["torch", _name] = _TorchDtype(f"torch.{_name}", _dtype)


def lookup(module: Any, name: Any) -> SafeGlobal:
    """The builder of an allowed name; anything else is refused with the name."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise _refuse("a class is named by something that is not a string")
    builder = ALLOWED.get((module, name))
    if builder is None:
        raise _refuse(f"names {f'{module}.{name}'[:200]!r}, which is not among the classes a file of traces may have")
    return builder
