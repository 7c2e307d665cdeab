"""Out-of-memory errors are told from others by type and message."""

import pytest
import torch

from tests.helpers import run_cli
from tests.oom.failing import NO_KERNEL
from tracestore.errors import UsageError, explain_dtype
from tracestore.oom import oom_errors
from tracestore.oom.error_texts import AMBIGUOUS_TEXTS, DEVICE_TEXTS, HOST_TEXTS
from tracestore.oom.guard import OOMGuard
from tracestore.oom.oom_errors import StepOutcome, classify, is_out_of_memory

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
        monkeypatch.setattr(oom_errors, "memory_is_short", lambda is_short=is_short: is_short)
        assert is_out_of_memory(error) == (is_short if outcome == AMBIGUOUS else outcome != OTHER_ERROR)


# What each back end writes, and a word of the table that recognizes it.
BY_BACK_END = [
    ("cuda driver error", "CUDA driver error: out of memory", DEVICE_OOM),
    ("cuda_error_out", "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY", DEVICE_OOM),
    ("cusolver", "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`", DEVICE_OOM),
    ("cufft", "cuFFT error: CUFFT_ALLOC_FAILED", DEVICE_OOM),
    ("triton error [cuda]", "Triton Error [CUDA]: out of memory", DEVICE_OOM),
    ("hip driver error", "HIP driver error: out of memory", DEVICE_OOM),
    ("hip error", "HIP error: out of memory\nHIP kernel errors might be asynchronously reported", DEVICE_OOM),
    ("hiperror", "hipMalloc: hipErrorOutOfMemory", DEVICE_OOM),
    ("hipblas", "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", DEVICE_OOM),
    ("rocblas", "rocblas_status_memory_error", DEVICE_OOM),
    ("miopen", "miopenStatusAllocFailed", DEVICE_OOM),
    ("triton error [hip]", "Triton Error [HIP]: Code: 2, Message: out of memory", DEVICE_OOM),
    ("triton error [hip]", "Triton Error [HIP]:  Code: 2, Messsage: out of memory", DEVICE_OOM),
    ("ur_result", "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", DEVICE_OOM),
    ("ze_result", "Native API failed. ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", DEVICE_OOM),
    ("npu out", "NPU out of memory. Tried to allocate 386.00 MiB (NPU 0; 61.27 GiB total capacity", DEVICE_OOM),
    ("acl_error", "call aclrtMalloc failed: ACL_ERROR_RT_MEMORY_ALLOCATION", DEVICE_OOM),
    ("mps backend", "MPS backend out of memory (MPS allocated: 17.21 GiB, max allowed: 20.13 GiB)", DEVICE_OOM),
    ("invalid buffer size", "Invalid buffer size: 48.00 GiB", DEVICE_OOM),
    ("kiogpu", "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", DEVICE_OOM),
    ("ur_result", "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)", HOST_OOM),
    # Registers or handles of an Intel GPU, or its memory.
    ("ur_result", "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)", AMBIGUOUS),
    ("pi_error", "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)", AMBIGUOUS),
    # Not memory, on the same devices.
    (None, "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", OTHER_ERROR),
    (None, "CUDA driver error: invalid argument", OTHER_ERROR),
    (None, "Triton Error [HIP]: Code: 1, Messsage: invalid argument", OTHER_ERROR),
    (None, "CUSOLVER_STATUS_EXECUTION_FAILED", OTHER_ERROR),
    (None, "HIP error: an illegal memory access was encountered", OTHER_ERROR),
    (None, "ACL_ERROR_RT_PARAM_INVALID", OTHER_ERROR),
]


@pytest.mark.parametrize(("word", "text", "outcome"), BY_BACK_END)
def test_every_back_end_is_recognized_by_its_text(word, text, outcome):
    assert classify(RuntimeError(text)) == outcome
    tables = {DEVICE_OOM: DEVICE_TEXTS, HOST_OOM: HOST_TEXTS, AMBIGUOUS: AMBIGUOUS_TEXTS}
    if word is not None:
        assert [t for t in tables[outcome] if t.startswith(word) and t in text.lower()]


def test_every_text_of_the_table_has_a_source_and_is_found_in_lower_case():
    for texts, outcome in ((DEVICE_TEXTS, DEVICE_OOM), (HOST_TEXTS, HOST_OOM), (AMBIGUOUS_TEXTS, AMBIGUOUS)):
        for text, source in texts.items():
            assert text == text.lower() and source
            assert classify(RuntimeError(f"A step failed: {text.upper()}")) == outcome, text


@pytest.mark.parametrize("signal,outcome", [("Killed", HOST_OOM), ("Segmentation fault", OTHER_ERROR)])
def test_the_cause_of_a_worker_error_decides(signal, outcome):
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = RuntimeError(f"DataLoader worker (pid 7) is killed by signal: {signal}.")
    assert classify(error) == outcome


@pytest.mark.long
def test_memory_is_short_under_a_limit_of_the_data_segment():
    """The limit leaves 100 MiB."""
    code = """
import resource
from tracestore.oom.memory_limits import allocatable_bytes
from tracestore.platform_support import memory_use
from tracestore.oom.oom_errors import memory_is_short
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
