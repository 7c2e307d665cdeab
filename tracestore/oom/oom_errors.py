"""Tell out-of-memory errors from others."""

import errno
import shutil
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeVar

import torch

from tracestore.oom.error_texts import AMBIGUOUS_TEXTS, DEVICE_TEXTS, HOST_TEXTS
from tracestore.oom.memory_limits import allocatable_bytes
from tracestore.platform_support import shared_memory_folder

T = TypeVar("T")
# Below this, an ambiguous error counts as out of memory. Thread stacks, packed weights and
# scratch buffers of oneDNN are of this order.
SHORT_BYTES = 64 << 20


class StepOutcome(IntEnum):
    """Outcome of an attempt. Ranks reduce their outcomes to the largest one."""

    SUCCESS = 0
    DEVICE_OOM = 1
    HOST_OOM = 2
    OTHER_ERROR = 3
    # A rank resolves its own ambiguous errors before outcomes are exchanged.
    AMBIGUOUS = 4


# Errors with other causes, even if the rest of the message mentions memory. The static TLS
# block has a fixed size that is set when the process starts.
_OTHER_TEXTS = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "static tls block",
    "too many open files",
    "operation not permitted",
    "permission denied",
)


def classify(error: BaseException) -> StepOutcome:
    """Classify an error by its type and message.

    Parameters
    ----------
    error : BaseException

    Returns
    -------
    StepOutcome
        DEVICE_OOM: memory of the device that computes, the CPU's allocator included.
        HOST_OOM: `MemoryError`, a worker killed for memory, full shared memory.
        AMBIGUOUS: memory is one of several causes of this message; a second sign decides
        (`is_out_of_memory`, and a smaller case in ``OOMGuard``).
        OTHER_ERROR: anything else, for example illegal memory access and device asserts,
        which are never retried.
    """
    text = str(error).lower()
    if any(t in text for t in _OTHER_TEXTS):
        return StepOutcome.OTHER_ERROR
    if isinstance(error, torch.OutOfMemoryError):
        return StepOutcome.DEVICE_OOM
    if isinstance(error, MemoryError):
        return StepOutcome.HOST_OOM
    if isinstance(error, OSError):
        if error.errno == errno.ENOSPC:
            return StepOutcome.HOST_OOM if "/dev/shm" in text else StepOutcome.OTHER_ERROR
        return StepOutcome.AMBIGUOUS if error.errno in (errno.ENOMEM, errno.EAGAIN) else StepOutcome.OTHER_ERROR
    # ImportError: a shared library that is loaded on first use.
    if not isinstance(error, RuntimeError | ImportError):
        return StepOutcome.OTHER_ERROR
    if any(t in text for t in DEVICE_TEXTS):
        return StepOutcome.DEVICE_OOM
    if any(t in text for t in HOST_TEXTS):
        return StepOutcome.HOST_OOM
    if "dataloader worker" in text:
        return _classify_worker(f"{text} {str(error.__cause__).lower()}")
    if "shared memory" in text or "</torch_" in text:
        return _classify_shared_memory(text)
    return StepOutcome.AMBIGUOUS if any(t in text for t in AMBIGUOUS_TEXTS) else StepOutcome.OTHER_ERROR


def _classify_worker(text: str) -> StepOutcome:
    """Classify the end of a DataLoader worker.

    SIGKILL usually comes from the kernel's out-of-memory killer and SIGBUS from a full /dev/shm;
    other signals are errors in the program. "exited unexpectedly" reports every exit; the message
    of the error's cause names the signal, if it is known.
    """
    if "killed by signal" in text:
        is_memory = "signal: killed" in text or "signal: bus error" in text
        return StepOutcome.HOST_OOM if is_memory else StepOutcome.OTHER_ERROR
    return StepOutcome.AMBIGUOUS if "exited unexpectedly" in text else StepOutcome.OTHER_ERROR


def _classify_shared_memory(text: str) -> StepOutcome:
    if "unable to" not in text:
        return StepOutcome.OTHER_ERROR
    certain = ("(12)", "(28)", "cannot allocate memory", "no space left on device")
    return StepOutcome.HOST_OOM if any(t in text for t in certain) else StepOutcome.AMBIGUOUS


def memory_is_short(needed_bytes: int = SHORT_BYTES) -> bool:
    """Return whether less than `needed_bytes` can be allocated on the host, in /dev/shm or on a GPU in use."""
    if allocatable_bytes() < needed_bytes:
        return True
    shared = shared_memory_folder()
    if shared is not None and shutil.disk_usage(shared).free < SHORT_BYTES:
        return True
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    return any(torch.cuda.mem_get_info(k)[0] < needed_bytes for k in gpus)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: `classify` is certain, or ambiguous while memory is short.

    Call it while the objects of the failed work are still referenced.
    """
    outcome = classify(error)
    return memory_is_short() if outcome == StepOutcome.AMBIGUOUS else outcome != StepOutcome.OTHER_ERROR


def unless_out_of_memory(call: Callable[[], T]) -> T | None:
    """Return what a call returns, or None if memory ran out: no traceback keeps what it has made then."""
    try:
        return call()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None


def resolve(outcome: StepOutcome, parameters: Sequence[torch.Tensor]) -> StepOutcome:
    """Return the outcome; an ambiguous one counts as out of memory while memory is short.

    The threshold is what one item needs at least: packed copies of the weights, and scratch.
    """
    if outcome != StepOutcome.AMBIGUOUS:
        return outcome
    weights_bytes: int = sum(p.numel() * p.element_size() for p in parameters)
    is_short = memory_is_short(SHORT_BYTES + 2 * weights_bytes)
    return StepOutcome.HOST_OOM if is_short else StepOutcome.OTHER_ERROR
