"""Out-of-memory errors are told from others by type and message."""

import pytest
import torch

from tests.helpers import run_cli
from tests.oom.failing import NO_KERNEL
from tracestore.errors import UsageError, explain_dtype
from tracestore.oom import errors
from tracestore.oom.errors import StepOutcome, classify, is_out_of_memory
from tracestore.oom.guard import OOMGuard

_, DEVICE_OOM, HOST_OOM, OTHER_ERROR, AMBIGUOUS = StepOutcome


@pytest.mark.parametrize(
    "error,outcome",
    [
        (torch.OutOfMemoryError("x"), DEVICE_OOM),
        (RuntimeError("CUDA out of memory. Tried"), DEVICE_OOM),
        (RuntimeError("CUDA error: out of memory"), DEVICE_OOM),
        (RuntimeError("HIP out of memory"), DEVICE_OOM),
        (RuntimeError("XPU out of memory"), DEVICE_OOM),
        (RuntimeError("MPS backend out of memory"), DEVICE_OOM),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), DEVICE_OOM),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), DEVICE_OOM),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), DEVICE_OOM),
        (MemoryError(), HOST_OOM),
        (RuntimeError("std::bad_alloc"), HOST_OOM),
        # Workers: SIGKILL and SIGBUS are out of memory, SIGSEGV is not, an exit is ambiguous.
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), HOST_OOM),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that"), HOST_OOM),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Segmentation fault."), OTHER_ERROR),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), AMBIGUOUS),
        # Shared memory: the error number decides if there is one.
        (RuntimeError("unable to mmap 12 bytes from file </torch_1>: Cannot allocate memory (12)"), HOST_OOM),
        (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), HOST_OOM),
        (RuntimeError("unable to open shared memory object </torch_1> in read-write mode"), AMBIGUOUS),
        (
            RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)"),
            OTHER_ERROR,
        ),
        (
            RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Permission denied (13)"),
            OTHER_ERROR,
        ),
        (OSError(28, "No space left on device", "/dev/shm/x"), HOST_OOM),
        (OSError(28, "No space left on device", "/data/x"), OTHER_ERROR),
        (RuntimeError("file write failed: No space left on device"), OTHER_ERROR),
        # oneDNN: memory, a missing kernel or failed code generation.
        (RuntimeError(NO_KERNEL), AMBIGUOUS),
        (RuntimeError("could not create a primitive"), AMBIGUOUS),
        (RuntimeError("could not create a memory object"), AMBIGUOUS),
        (RuntimeError("could not execute a primitive"), AMBIGUOUS),
        # Threads: memory or a process limit. Mappings: memory or vm.max_map_count.
        (RuntimeError("can't start new thread"), AMBIGUOUS),
        (RuntimeError("thread constructor failed: Resource temporarily unavailable"), AMBIGUOUS),
        (OSError(11, "Resource temporarily unavailable"), AMBIGUOUS),
        (OSError(12, "Cannot allocate memory"), AMBIGUOUS),
        (OSError(2, "No such file or directory"), OTHER_ERROR),
        # Libraries: no memory to map them, a file system mounted noexec, a full static TLS block.
        (ImportError("libx.so: failed to map segment from shared object"), AMBIGUOUS),
        (ImportError("libx.so: failed to map segment from shared object: Operation not permitted"), OTHER_ERROR),
        (ImportError("libx.so: cannot allocate memory in static TLS block"), OTHER_ERROR),
        (ImportError("No module named x"), OTHER_ERROR),
        # CUDA libraries: no memory for their workspace, or another driver version.
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), AMBIGUOUS),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), OTHER_ERROR),
        (RuntimeError("CUDA error: device-side assert triggered"), OTHER_ERROR),
        (RuntimeError("shape mismatch"), OTHER_ERROR),
        (ValueError("out of memory"), OTHER_ERROR),
    ],
)
def test_classification(error, outcome, monkeypatch):
    assert classify(error) == outcome
    for is_short in (False, True):
        monkeypatch.setattr(errors, "memory_is_short", lambda is_short=is_short: is_short)
        assert is_out_of_memory(error) == (is_short if outcome == AMBIGUOUS else outcome != OTHER_ERROR)


@pytest.mark.parametrize("signal,outcome", [("Killed", HOST_OOM), ("Segmentation fault", OTHER_ERROR)])
def test_the_cause_of_a_worker_error_decides(signal, outcome):
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = RuntimeError(f"DataLoader worker (pid 7) is killed by signal: {signal}.")
    assert classify(error) == outcome


def test_memory_is_short_under_a_limit_of_the_data_segment():
    """The limit leaves 100 MiB."""
    code = """
import resource
from tracestore.oom.limits import allocatable_bytes
from tracestore.platform_support import memory_use
from tracestore.oom.errors import memory_is_short
assert allocatable_bytes() > 200 << 20
resource.setrlimit(resource.RLIMIT_DATA, (memory_use().data + (100 << 20), resource.RLIM_INFINITY))
assert 50 << 20 < allocatable_bytes() <= 100 << 20
print(memory_is_short(40 << 20), memory_is_short(120 << 20))
"""
    assert run_cli("-c", code, check=0).stdout == "False True\n"


LAYERS = {
    "linear": lambda: torch.nn.Linear(8, 4),
    "lstm": lambda: torch.nn.LSTM(8, 4, batch_first=True),
    "conv": lambda: torch.nn.Conv1d(3, 4, 1),
    "attention": lambda: torch.nn.TransformerEncoderLayer(8, 2, batch_first=True),
    "bilinear": lambda: torch.nn.Bilinear(8, 8, 2),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_a_float32_model_that_gets_float16_batches_is_told_what_to_do(name, dtype):
    layer, x = LAYERS[name](), torch.zeros(2, 3, 8, dtype=dtype)
    guard = OOMGuard(layer, torch.optim.SGD(layer.parameters(), lr=0.1))

    def loss(begin, end):
        out = layer(*[x[begin:end]] * (2 if name == "bilinear" else 1))
        return (out[0] if isinstance(out, tuple) else out).float().sum()

    for attempt in (lambda: guard.step(2, loss), lambda: guard.evaluate(2, loss)):
        with pytest.raises(UsageError, match='pass dtype="float32" to the loader') as raised:
            attempt()
        assert "float16" in str(raised.value) and isinstance(raised.value.__cause__, RuntimeError | ValueError)
        assert "\n" not in str(raised.value)


def test_other_errors_are_not_explained():
    for error in (RuntimeError("shape '[2]' is invalid for input of size 3"), KeyError("Half != float")):
        assert explain_dtype(error) is error
