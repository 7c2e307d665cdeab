"""Count the operations that code would start on a GPU, on a machine without one.

Inside `Gpu`, tensors of the device "cuda" are tensors of the CPU whose storage is marked. Their attribute
``device`` names the GPU, so that code takes the branches of a GPU, while torch computes on the CPU. A dispatch mode
counts what reads or writes such a tensor:

- each operator once, also `_foreach` operators and copies; those of a fused optimizer as the launches of a GPU
- a bidirectional layer of an LSTM once forward and once backward, apart from conversions of its weights
- the operations in the body of an operator of tracestore, instead of the operator
- the launch of a Triton kernel once; the kernel does not run, and its outputs are zeros
- views and empty tensors not at all

and what a GPU has to finish before Python continues: `tolist` and numbers of tensors, copies from memory that is not
pinned and to the CPU, and operators whose size of the result depends on values.
"""

import contextlib
import types
from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from tracestore.detectors.graph import gine
from tracestore.detectors.layers import dropout, precision
from tracestore.train.step_graphs import side_streams

CUDA = torch.device("cuda", 0)
_NO_LAUNCH = {"detach", "_unsafe_view", "lift_fresh", "resize_", "set_", "_has_compatible_shallow_copy_type"}
# The size of the result depends on the values.
_SYNCHRONIZING = {"nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "equal", "unique_consecutive"}
# Autocast computes these in float32 on a GPU, but in the dtype of the input on a CPU.
_FLOAT32 = {F.layer_norm, torch.layer_norm, torch.exp, torch.Tensor.exp, torch.sum, torch.Tensor.sum}
# A multi-tensor kernel of a fused optimizer takes so many tensors, or so many chunks of elements, at once.
_FUSED_TENSORS, _FUSED_CHUNKS, _CHUNK = 36, 320, 65536


def _is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


class _Storages:
    """The storages of some tensors. Views of a tensor are among them as well."""

    def __init__(self):
        self._found = {}

    def add(self, tensor):
        storage = tensor.untyped_storage()
        self._found[storage._cdata] = StorageWeakRef(storage)

    def __contains__(self, tensor):
        # A weak reference keeps the address of its storage from being used again.
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._found


class Gpu(contextlib.ExitStack):
    """A context in which the device "cuda" exists and is counted. Use `reset` before the code to count.

    Attributes
    ----------
    operations, synchronizations : Counter
        Names and how often each was counted.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.synchronizations = Counter(), Counter()
        self._on_gpu, self._pinned = _Storages(), _Storages()
        self._is_paused = False
        self._backward = 0

    def reset(self):
        """Forget what was counted."""
        self.operations.clear()
        self.synchronizations.clear()

    def __enter__(self):
        super().__enter__()
        side_streams.cache_clear()
        self.callback(side_streams.cache_clear)
        for owner, name, value in self._patches():
            self._patch(owner, name, value)
        self.enter_context(_Functions(self))
        self.enter_context(_Operators(self))
        return self

    @contextlib.contextmanager
    def paused(self):
        """Count nothing."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def has(self, value):
        """Return whether a value is a tensor on the GPU."""
        return isinstance(value, torch.Tensor) and value in self._on_gpu

    def place(self, tensor):
        """Put the results of a factory or an operator on the GPU."""
        for leaf in tree_leaves(tensor):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                self._on_gpu.add(leaf)
        return tensor

    def pin(self, tensor):
        """Mark a tensor of the CPU as pinned."""
        self._pinned.add(tensor)
        return tensor

    def count(self, name, times=1):
        """Count an operation."""
        if not self._is_paused:
            self.operations[name] += times

    def synchronize(self, name):
        """Count a synchronization."""
        if not self._is_paused:
            self.synchronizations[name] += 1

    def move(self, tensor, device, non_blocking=False, dtype=None):
        """Copy a tensor between the CPU and the GPU, or return it where it is there already."""
        to_gpu = _is_cuda(device)
        if self.has(tensor) != to_gpu:
            self.count("copy to the GPU" if to_gpu else "copy to the CPU")
            if not non_blocking or (to_gpu and tensor not in self._pinned):
                self.synchronize("copy to the GPU" if to_gpu else "copy to the CPU")
            with _disable_current_modes():
                tensor = self.place(tensor.clone()) if to_gpu else tensor.clone()
        return tensor if dtype is None else tensor.to(dtype)

    def lstm(self, original):
        """Return a replacement of ``torch._VF.lstm`` that is one operation for each layer and direction of autograd."""
        gpu = self

        class Lstm(torch.autograd.Function):
            @staticmethod
            def forward(ctx, options, dtype, x, *tensors):
                ctx.layers, ctx.dtypes = options[1], [t.dtype for t in (x, *tensors)]
                narrow = [t for t in (x, *tensors) if dtype is not None and t.dtype != dtype]
                ctx.narrow = len(narrow)
                gpu.count("convert for an LSTM", len(narrow))
                gpu.count("lstm", ctx.layers)
                with gpu.paused(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
                    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
                    leaves = [t.detach().to(wide).requires_grad_() for t in (x, *tensors)]
                    out = original(leaves[0], leaves[1:3], leaves[3:], *options)
                ctx.graph = leaves, out
                return tuple(gpu.place(t.detach().to(dtype or wide)) for t in out)

            @staticmethod
            def backward(ctx, *grads):
                gpu.count("lstm backward", ctx.layers)
                gpu.count("convert for an LSTM", ctx.narrow)
                leaves, out = ctx.graph
                with gpu.paused(), torch.autocast("cpu", enabled=False):
                    grads = [
                        torch.zeros_like(o) if g is None else g.to(o.dtype) for g, o in zip(grads, out, strict=True)
                    ]
                    found = torch.autograd.grad(out, leaves, grads, allow_unused=True)
                    narrowed = [None if g is None else g.to(d) for g, d in zip(found, ctx.dtypes, strict=True)]
                return None, None, *gpu.place(narrowed)

        def run(x, state, weights, *options):
            if not gpu.has(x):
                return original(x, state, weights, *options)
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            return Lstm.apply(options, dtype, x, *state, *weights)

        return run

    def _patch(self, owner, name, value):
        had = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, value)
        self.callback(setattr, owner, name, before) if had else self.callback(delattr, owner, name)

    def _patches(self):
        plain_device, plain_tolist = torch.Tensor.device, torch.Tensor.tolist
        is_autocast_enabled, get_autocast_dtype, autocast = (
            torch.is_autocast_enabled,
            torch.get_autocast_dtype,
            torch.autocast,
        )
        gpu = self

        def tolist(tensor):
            if gpu.has(tensor):
                gpu.synchronize("tolist")
            with gpu.paused():
                return plain_tolist(tensor)

        class Stream:
            """Accepts what code does with streams and events. All work is in the order of the program."""

            def __init__(self, *_, **__):
                self.cuda_stream = 0

            def synchronize(self):
                gpu.synchronize("synchronize a stream")

            def query(self):
                return True

            def record_event(self, event=None):
                return event or Stream()

            def wait_stream(self, *_):
                pass

            wait_event = record = wait = wait_stream

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

        yield torch.Tensor, "device", property(lambda t: CUDA if gpu.has(t) else plain_device.__get__(t))
        yield torch.Tensor, "is_cuda", property(gpu.has)
        yield torch.Tensor, "tolist", tolist
        yield torch.Tensor, "record_stream", lambda *_: None
        yield torch.Tensor, "pin_memory", lambda t, *_: gpu.pin(t.clone())
        yield torch.Tensor, "is_pinned", lambda t, *_: t in gpu._pinned
        yield torch._VF, "lstm", self.lstm(torch._VF.lstm)
        yield torch, "is_autocast_enabled", lambda *_: is_autocast_enabled("cpu")
        yield torch, "get_autocast_dtype", lambda *_: get_autocast_dtype("cpu")
        yield torch, "autocast", lambda _, *args, **options: autocast("cpu", *args, **options)
        yield torch.cuda, "default_generators", [types.SimpleNamespace(manual_seed=lambda _: None)]
        yield torch.cuda, "Stream", Stream
        yield torch.cuda, "Event", Stream
        yield torch.cuda, "stream", lambda stream: stream
        yield torch.cuda, "current_stream", Stream
        yield torch.cuda, "current_device", lambda: 0
        yield torch.cuda, "default_stream", Stream
        yield torch.cuda, "synchronize", lambda *_: gpu.synchronize("synchronize")
        yield torch.backends.cudnn, "is_acceptable", lambda _: False
        yield torch.nn.Module, "to", _move_module
        yield dropout, "_kernel_works", lambda _: True
        yield gine, "fused_kernels_work", lambda _: True
        yield precision, "has_kernel", lambda *_: True
        yield JITFunction, "run", lambda kernel, *_, **__: gpu.count(f"triton {kernel.__name__}")


def _move_module(module, device):
    """Replace ``Module.to``, which would keep the storage of the parameters."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = torch.nn.Parameter(value.detach().to(device), value.requires_grad)
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = value.to(device)
    return module


class _Functions(TorchFunctionMode):
    """Replaces the device "cuda" in calls of torch, and computes in float32 what autocast computes so on a GPU."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, gpu, name = dict(kwargs or {}), self.gpu, getattr(func, "__name__", "")
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            return self._to(func, *args, **kwargs)
        if name == "numpy" and gpu.has(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func in _FLOAT32 and torch.is_autocast_enabled("cuda") and gpu.has(args[0]) and args[0].itemsize == 2:
            args = tuple(a.float() if isinstance(a, torch.Tensor) else a for a in args)
        if func in (torch.cat, torch.stack) and len({t.dtype for t in args[0]}) == 1:
            # Autocast for a CPU refuses float16 here.
            with torch.autocast("cuda", enabled=False):
                return func(*args, **kwargs)
        is_pinned = kwargs.pop("pin_memory", None)
        on_gpu = _is_cuda(kwargs.get("device"))
        if "device" in kwargs and on_gpu:
            kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        if on_gpu:
            gpu.count(name) if not name.startswith(("empty", "new_empty")) else out.zero_()
            if name in ("tensor", "as_tensor"):
                gpu.synchronize(name)
            gpu.place(out)
        return gpu.pin(out) if is_pinned else out

    def _to(self, func, tensor, *args, **options):
        gpu = self.gpu
        device, dtype = options.pop("device", None), options.pop("dtype", None)
        if func is torch.Tensor.cpu:
            device = "cpu"
        if func is torch.Tensor.cuda:
            device = "cuda"
        for value in args:
            if isinstance(value, torch.Tensor):
                device, dtype = value.device, value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, (str, torch.device)):
                device = value
        non_blocking = options.pop("non_blocking", False)
        if device is not None:
            tensor = gpu.move(tensor, device, non_blocking)
        return torch.Tensor.to(tensor, dtype=dtype, **options) if dtype is not None or options else tensor


class _Operators(TorchDispatchMode):
    """Counts operators with a tensor on the GPU, and runs the bodies of the operators of tracestore."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, gpu, name = kwargs or {}, self.gpu, func._schema.name.split("::")[1]
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        on_gpu = any(map(gpu.has, tensors)) or (not tensors and torch._C._current_autograd_node() is not None)
        if not on_gpu:
            return func(*args, **kwargs)
        if func.namespace == "tracestore":
            # Torch takes both modes off while they handle a call.
            with self, torch._C._EnableTorchFunction(), _Functions(gpu):
                keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
                return func.redispatch(keys, *args, **kwargs)
        if name == "copy_" and gpu.has(args[0]) != gpu.has(args[1]):
            to_gpu = gpu.has(args[0])
            gpu.count("copy_")
            if args[1].numel() > 1 and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                gpu.synchronize("copy to the GPU" if to_gpu else "copy to the CPU")
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name in ("_local_scalar_dense", "item", "is_nonzero"):
            gpu.synchronize(name)
            return out
        if "empty" in name:
            out.zero_()
        elif name.startswith("_fused_adam"):
            parameters = args[0]
            chunks = sum(-(-p.numel() // _CHUNK) for p in parameters)
            gpu.count(name, max(-(-len(parameters) // _FUSED_TENSORS), -(-chunks // _FUSED_CHUNKS)))
        elif not is_view and name not in _NO_LAUNCH:
            gpu.count(name)
            self._synchronize(name, args, kwargs)
        return gpu.place(out)

    def _synchronize(self, name, args, kwargs):
        gpu = self.gpu
        if name in _SYNCHRONIZING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            gpu.synchronize(name)
        if name.removesuffix("_").removeprefix("_unsafe_") in ("index", "index_put", "_index_put_impl"):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    gpu.count("nonzero")
                    gpu.synchronize("nonzero of a mask")
