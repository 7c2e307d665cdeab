"""Tell out-of-memory errors from others."""

import errno
import shutil

import torch

from tracestore.oom.limits import allocatable_bytes
from tracestore.platform_support import shared_memory_folder

DEVICE, HOST, AMBIGUOUS = "device", "host", "ambiguous"

# Below this, an ambiguous error counts as out of memory. Thread stacks, packed weights and
# scratch buffers of oneDNN are of this order.
SHORT_BYTES = 64 << 20

# Never memory, whatever else the text says. The static TLS block has a fixed size that is
# set when the process starts; a file descriptor limit and file permissions are no memory.
_OTHER_TEXTS = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "static tls block",
    "too many open files",
    "operation not permitted",
    "permission denied",
)
_DEVICE_TEXTS = (
    "cuda out of memory",
    "cuda error: out of memory",
    "hip out of memory",
    "hip error: out of memory",
    "xpu out of memory",
    "mps backend out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "hipblas_status_alloc_failed",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
)
_HOST_TEXTS = ("std::bad_alloc", "out of host memory")
# TextFields with several causes. oneDNN reports with the first four that memory ran out, that
# the processor has no kernel for a dtype, and that code could not be generated. Threads
# fail at process limits, mappings at vm.max_map_count. A CUDA library that could not
# initialize had no memory for its workspace, or does not match the driver.
_AMBIGUOUS_TEXTS = (
    "could not create a primitive",
    "could not create a memory",
    "could not execute a primitive",
    "could not initialize a primitive",
    "cannot allocate memory",
    "resource temporarily unavailable",
    "can't start new thread",
    "thread constructor failed",
    "failed to map segment",
    "cublas_status_not_initialized",
    "cudnn_status_not_initialized",
)


def classify(error: BaseException) -> str | None:
    """Return the kind of an out-of-memory error, as far as type and text tell.

    Parameters
    ----------
    error : BaseException

    Returns
    -------
    str or None
        ``"device"``: memory of the device that computes, the CPU's allocator included.
        ``"host"``: MemoryError, a worker that was killed, full shared memory.
        ``"ambiguous"``: the text has several causes, of which memory is one; a second
        sign decides (`is_out_of_memory`, and a smaller case in ``OOMGuard``).
        None: anything else. Illegal memory access and device asserts are never retried.
    """
    text = str(error).lower()
    if any(t in text for t in _OTHER_TEXTS):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        return DEVICE
    if isinstance(error, MemoryError):
        return HOST
    if isinstance(error, OSError):
        if error.errno == errno.ENOSPC:
            return HOST if "/dev/shm" in text else None
        return AMBIGUOUS if error.errno in (errno.ENOMEM, errno.EAGAIN) else None
    if isinstance(error, ImportError):
        # A library that is loaded late.
        return AMBIGUOUS if "failed to map segment" in text or "cannot allocate memory" in text else None
    if not isinstance(error, RuntimeError):
        return None
    if any(t in text for t in _DEVICE_TEXTS):
        return DEVICE
    if any(t in text for t in _HOST_TEXTS):
        return HOST
    if "dataloader worker" in text:
        return _classify_worker(f"{text} {str(error.__cause__).lower()}")
    if "shared memory" in text or "</torch_" in text:
        return _classify_shared_memory(text)
    return AMBIGUOUS if any(t in text for t in _AMBIGUOUS_TEXTS) else None


def _classify_worker(text: str) -> str | None:
    """SIGKILL is the kernel's out-of-memory killer as a rule, SIGBUS a full /dev/shm; other
    signals are errors in the program. "exited unexpectedly" stands for every exit: the
    signal is in the text of the error's cause, if it is known."""
    if "killed by signal" in text:
        return HOST if "signal: killed" in text or "signal: bus error" in text else None
    return AMBIGUOUS if "exited unexpectedly" in text else None


def _classify_shared_memory(text: str) -> str | None:
    if "unable to" not in text:
        return None
    certain = ("(12)", "(28)", "cannot allocate memory", "no space left on device")
    return HOST if any(t in text for t in certain) else AMBIGUOUS


def memory_is_short(needed_bytes: int = SHORT_BYTES) -> bool:
    """Return whether less memory than `needed_bytes` can be allocated: on the host, in /dev/shm or on a GPU in use."""
    if allocatable_bytes() < needed_bytes:
        return True
    shared = shared_memory_folder()
    if shared is not None and shutil.disk_usage(shared).free < SHORT_BYTES:
        return True
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    return any(torch.cuda.mem_get_info(k)[0] < needed_bytes for k in range(torch.cuda.device_count()))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: `classify` is certain, or ambiguous while memory is short.

    Call it while the objects of the failed work are still referenced."""
    kind = classify(error)
    return memory_is_short() if kind == AMBIGUOUS else kind is not None
