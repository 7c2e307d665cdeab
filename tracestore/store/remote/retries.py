"""Requests to a server: time limits, and retries after failures that may pass."""

import errno
import os
import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

from tracestore.errors import RemoteError, UsageError
from tracestore.store.io.files import RemoteURL
from tracestore.store.remote.web_server import LEAST_BYTES_PER_S, StatusError, TransferError

# A request that receives no byte for this time is repeated.
TIMEOUT_S = 30.0
# A call that makes no progress for this time fails.
PATIENCE_S = 120.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

T = TypeVar("T")


def seconds_of(variable: str, default: float) -> float:
    """Return the seconds that an environment variable sets. UsageError if its value is not a positive number."""
    text = os.environ.get(variable)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"found {variable}={text}, expected seconds")
    return value


def summarize_error(error: BaseException) -> str:
    """Return the message of a server error on one line, without its XML document."""
    text = str(error).split("\n", 1)[0].split(": <?xml", 1)[0]
    return " ".join(re.sub(r"Debug source:.*", "", text).split())[:300]


class Server:
    """A server with its time limits.

    Parameters
    ----------
    address : str
        A URL, which begins every message.
    timeout_s : float, optional
        Seconds without a byte after which a request is repeated (TRACESTORE_REMOTE_TIMEOUT, 30).
    patience_s : float, optional
        Seconds without progress after which a call fails (TRACESTORE_REMOTE_RETRY_TIMEOUT, 120).
    """

    def __init__(self, address: str, *, timeout_s: float | None = None, patience_s: float | None = None) -> None:
        self.address = RemoteURL(address.rstrip("/"))
        self.patience_s = (
            seconds_of("TRACESTORE_REMOTE_RETRY_TIMEOUT", PATIENCE_S) if patience_s is None else patience_s
        )
        self.timeout_s = seconds_of("TRACESTORE_REMOTE_TIMEOUT", TIMEOUT_S) if timeout_s is None else timeout_s

    def retry(self, what: str, call: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """Repeat a call until it succeeds, or fails for patience_s without progress.

        `progress` returns the bytes that were transferred so far; `what` names the object in errors.
        """
        since, before, pause = time.monotonic(), progress(), _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except Exception as error:
                failure = self.translate(what, error)
                if failure is error and not isinstance(error, TransferError):
                    raise
                if not isinstance(failure, TransferError):
                    raise failure from None
                now = progress()
                if now - before > LEAST_BYTES_PER_S * (time.monotonic() - since):
                    since, before, pause = time.monotonic(), now, _FIRST_PAUSE_S
                if time.monotonic() - since > self.patience_s:
                    raise RemoteError(f"{self.address}/{what}: failed for {self.patience_s:g} s: {failure}") from None
            # Jitter: calls that failed together do not repeat together.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def translate(self, what: str, error: Exception) -> Exception:
        """Return the error to raise for an error of a client; a TransferError if a retry may solve it."""
        return self.of_status(what, error.status, error) if isinstance(error, StatusError) else error

    def of_status(self, what: str, status: int, error: Exception) -> Exception:
        """Return the error for the status of an answer; 0 if there was none."""
        if status == 404:
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.address}/{what}")
        if status in (401, 403):
            return self.refused(what, error)
        if 300 <= status < 500 and status not in (408, 409, 425, 429):
            return UsageError(f"{self.address}/{what}: {summarize_error(error)}")
        return TransferError(summarize_error(error))

    def refused(self, what: str, error: Exception) -> UsageError:
        """Return the error of a missing permission."""
        return UsageError(f"{self.address}/{what}: no permission: {summarize_error(error)}")
