"""The library of the Hugging Face Hub, which uploads: its errors as errors of tracestore, and its output silenced."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tracestore.errors import DiskFullError, RemoteError, TracestoreError, UsageError
from tracestore.extras import needs
from tracestore.hub.data_set import IS_OFFLINE, NO_ACCESS, NO_REVISION, NOT_AN_ID, README

with needs("hub"):
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

REPO_TYPE = "dataset"
# The base class of errors of the HTTP library, whose name differs between versions of huggingface_hub.
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]
_TEXTS = {HFValidationError: NOT_AN_ID, RevisionNotFoundError: NO_REVISION, OfflineModeIsEnabled: IS_OFFLINE}
_SILENT = 60  # above logging.CRITICAL


@contextmanager
def hub_calls(repo_id: str) -> Iterator[HfApi]:
    """Yield the client of the library, for calls that concern a data set.

    Raises
    ------
    UsageError
        If the data set or its revision does not exist, or the user may not access it.
    DiskFullError
        If there is no space left.
    RemoteError
        If the server fails or cannot be reached.
    """
    verbosity, were_disabled = logging.get_verbosity(), are_progress_bars_disabled()
    logging.set_verbosity(_SILENT)
    disable_progress_bars()
    try:
        yield HfApi(library_name="tracestore")
    except TracestoreError:
        raise
    except (OSError, RuntimeError, ValueError, _HTTPError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _converted(error, repo_id) from error
    finally:
        logging.set_verbosity(verbosity)
        if not were_disabled:
            enable_progress_bars()


def _converted(error: Exception, repo_id: str) -> TracestoreError:
    """Return the error of tracestore for an error of the library."""
    chain: list[BaseException] = [error]
    while len(chain) < 10 and (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    text = " ".join(str(error).split())[:300]
    if any(os.strerror(errno.ENOSPC) in str(item) for item in chain):
        return DiskFullError(f"{repo_id}: no space left on the disk")
    for item in chain:
        for kind, meaning in _TEXTS.items():
            if isinstance(item, kind):
                return UsageError(f"{repo_id}: {meaning}")
        status = item.response.status_code if isinstance(item, HfHubHTTPError) and item.response is not None else 0
        if isinstance(item, LocalTokenNotFoundError) or status in (401, 404):
            return UsageError(f"{repo_id}: {NO_ACCESS}")
        if status == 403:
            return UsageError(f"{repo_id}: no permission; the token may lack the right to write")
    if isinstance(error, ValueError) and README in text:
        return UsageError(f"{repo_id}: {text}")
    return RemoteError(f"{repo_id}: {' '.join(str(chain[-1]).split())[:200] or type(chain[-1]).__name__}")
