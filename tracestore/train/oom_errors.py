"""Which errors mean that memory ran out, and whose."""

import errno

import torch

DEVICE, HOST = "device", "host"

_FATAL_TEXTS = ("illegal memory access", "device-side assert", "unspecified launch failure")
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
# What C++ below Python says when malloc, mmap or pthread_create found nothing. oneDNN has
# one text for every cause; that of a wrong argument is not among them.
_HOST_TEXTS = (
    "std::bad_alloc",
    "cannot allocate memory",
    "could not create a primitive",
    "could not create a memory object",
    "could not create a memory",
    "out of host memory",
    "can't start new thread",
    "thread constructor failed",
    "resource temporarily unavailable",
    "no space left on device",
)
_HOST_ERRNO = frozenset({errno.ENOMEM, errno.EAGAIN})


def _is_worker_killed(text: str) -> bool:
    return "dataloader worker" in text and ("killed" in text or "exited unexpectedly" in text)


def classify(error: BaseException) -> str | None:
    """ "device" (memory of the device that computes, also the CPU's allocator), "host"
    (MemoryError, a killed worker, full shared memory, no memory for a thread), or None
    for anything else: illegal access and device asserts are never retried."""
    text = str(error).lower()
    if any(t in text for t in _FATAL_TEXTS):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        return DEVICE
    if isinstance(error, MemoryError):
        return HOST
    if isinstance(error, OSError):
        full_shared_memory = error.errno == errno.ENOSPC and "/dev/shm" in text
        return HOST if error.errno in _HOST_ERRNO or full_shared_memory else None
    if isinstance(error, ImportError):
        # A library that is loaded late: "failed to map segment", "cannot allocate memory in static TLS block".
        return HOST if "failed to map segment" in text or "cannot allocate memory" in text else None
    if not isinstance(error, RuntimeError):
        return None
    if any(t in text for t in _DEVICE_TEXTS):
        return DEVICE
    if any(t in text for t in _HOST_TEXTS) or _is_worker_killed(text):
        return HOST
    return HOST if "unable to" in text and "shared memory" in text else None
