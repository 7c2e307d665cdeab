"""Upload of a store to the Hugging Face Hub, whose errors become tracestore's."""

import errno
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracestore.errors import CorruptStoreError, DiskFullError, RemoteError, TracestoreError, UsageError
from tracestore.extras import needs
from tracestore.hub.card import make_card
from tracestore.hub.data_set import IS_OFFLINE, NO_ACCESS, NO_REVISION, NOT_AN_ID, README, DataSet
from tracestore.store.format import paths
from tracestore.store.io.files import RemoteURL, parse_location
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.maintain.verify import verify_store
from tracestore.store.read.store import TraceStore, open_store
from tracestore.store.write.commit import root_metadata
from tracestore.words import plural

with needs("hub"):
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors, utils

REPO_TYPE = "dataset"
# The base class of errors of the HTTP library, whose name differs between versions of huggingface_hub.
_HTTPError: type[Exception] = errors.HfHubHTTPError.__bases__[0]
_TEXTS = {
    errors.HFValidationError: NOT_AN_ID,
    errors.RevisionNotFoundError: NO_REVISION,
    errors.OfflineModeIsEnabled: IS_OFFLINE,
}
_SILENT = 60  # above logging.CRITICAL
_FILES_PER_UPLOAD, _FILES_PER_COMMIT = 16, 1000
_MAX_README_BYTES = 1 << 20
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


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
    verbosity, were_disabled = utils.logging.get_verbosity(), utils.are_progress_bars_disabled()
    utils.logging.set_verbosity(_SILENT)
    utils.disable_progress_bars()
    try:
        yield HfApi(library_name="tracestore")
    except TracestoreError:
        raise
    except (OSError, RuntimeError, ValueError, _HTTPError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _converted(error, repo_id) from error
    finally:
        utils.logging.set_verbosity(verbosity)
        if not were_disabled:
            utils.enable_progress_bars()


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
        response = item.response if isinstance(item, errors.HfHubHTTPError) else None
        status = 0 if response is None else response.status_code
        if isinstance(item, errors.LocalTokenNotFoundError) or status in (401, 404):
            return UsageError(f"{repo_id}: {NO_ACCESS}")
        if status == 403:
            return UsageError(f"{repo_id}: no permission; the token may lack the right to write")
    if isinstance(error, ValueError) and README in text:
        return UsageError(f"{repo_id}: {text}")
    return RemoteError(f"{repo_id}: {' '.join(str(chain[-1]).split())[:200] or type(chain[-1]).__name__}")


@dataclass
class PushReport:
    """The result of an upload.

    Attributes
    ----------
    store, repo_id, url, commit : str
        The store, the data set, its page, and the commit that holds the store.
    generation, num_traces, num_files, num_bytes : int
        Of the store; the files include those that the data set had already.
    """

    store: str
    repo_id: str
    url: str
    commit: str
    generation: int
    num_traces: int
    num_files: int
    num_bytes: int


def push_store(
    store: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PushReport:
    """Verify a store and upload its newest generation, with a data set card.

    The manifest is in the last commit, so that readers see a complete store at any time. Files of a store that this
    generation does not name are removed in that commit; other files of the data set stay. Of an existing README.md,
    only the metadata and the part between the marks of tracestore change. After an interruption the same call
    continues.

    Parameters
    ----------
    store : str or PathLike
        A folder.
    repo_id : str
        The data set, USER/NAME; it is created if it does not exist.
    private : bool
        Create a private data set. An existing one keeps its visibility.
    revision : str, optional
        The branch, which is created if it does not exist. Default: main.
    license : str, optional
        Identifier of the license on the Hub, such as "cc-by-4.0".
    progress : callable, optional
        Called with the files done and the total.

    Returns
    -------
    PushReport

    Raises
    ------
    UsageError
        If there is no such store, the user may not write the data set, or it is public and `private` was asked for.
    CorruptStoreError
        If the store is damaged.
    RemoteError
        If the server fails or cannot be reached.
    """
    place = parse_location(store)
    if isinstance(place, RemoteURL):
        raise UsageError(f"{place}: push needs a folder; copy the store with tracestore merge first")
    if license is not None and _LICENSE.fullmatch(license) is None:
        raise UsageError(f"found license {license!r}, expected an identifier such as mit or cc-by-4.0")
    with map_os_errors(place), open_store(place) as opened, hub_calls(repo_id) as api:
        api.whoami()  # a wrong token is reported before the store is read
        report = verify_store(place)
        if report.damaged:
            name, problem = min(report.damaged.items())
            raise CorruptStoreError(f"{place}: {name}: {problem}; see tracestore verify {shlex.quote(str(place))}")
        url = api.create_repo(repo_id, private=private, repo_type=REPO_TYPE, exist_ok=True)
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(url.repo_id, branch=revision, repo_type=REPO_TYPE, exist_ok=True)
        info = api.dataset_info(url.repo_id, revision=revision)
        if private and not info.private:
            raise UsageError(f"{repo_id}: the data set exists and is public; make it private on its page")
        target = {"repo_id": url.repo_id, "repo_type": REPO_TYPE, "revision": revision}
        return _Upload(api, opened, place, target, str(info.sha), progress).run(str(url), license)


@dataclass
class _Upload:
    """The upload of one generation to a data set that exists, with its newest commit."""

    api: HfApi
    store: TraceStore
    folder: Path
    target: dict[str, Any]
    commit: str
    progress: Callable[[int, int], None] | None
    done: int = 0
    total: int = 0

    def run(self, url: str, license: str | None) -> PushReport:
        """Upload the files in several commits, the manifest in the last one."""
        internals, manifest = self.store.internals, self.store.internals.manifest
        segments = map(internals.segment, range(manifest.num_segments))
        data = [path for segment in segments for path in (*segment.entries, segment.rows_path)]
        last: dict[str, str | bytes] = {
            "zarr.json": root_metadata(manifest.attributes),
            paths.manifest(manifest.generation): manifest.to_bytes(),
            paths.manifest_copy(manifest.generation): manifest.to_bytes(),
            paths.NEWEST: paths.newest(manifest.generation),
            **{file.path: str(self.folder / file.path) for file in manifest.small_files()},
        }
        self.total = len(data) + len(last)
        found = DataSet(self.target["repo_id"], self.commit)
        old, _ = found.list_files()
        readme = make_card(self.store, self.target["repo_id"], license, _old_readme(found))
        stale = sorted(old.keys() - last.keys() - set(data))
        while len(data) > _FILES_PER_COMMIT:
            self._send({path: str(self.folder / path) for path in data[:_FILES_PER_COMMIT]}, "Upload segments")
            del data[:_FILES_PER_COMMIT]
        last |= {path: str(self.folder / path) for path in data}
        message = f"Upload generation {manifest.generation}, {plural(manifest.num_traces, 'trace')}"
        last[README] = readme.encode()
        self._send(last, message, stale)
        counts = (manifest.generation, manifest.num_traces, self.total, manifest.num_bytes)
        return PushReport(str(self.folder), self.target["repo_id"], url, self.commit, *counts)

    def _send(self, files: dict[str, str | bytes], message: str, deleted: list[str] | None = None) -> None:
        """Upload files and commit them, given by their path on this machine or their bytes."""
        additions = [CommitOperationAdd(path, content) for path, content in files.items()]
        for begin in range(0, len(additions), _FILES_PER_UPLOAD):
            chosen = additions[begin : begin + _FILES_PER_UPLOAD]
            self.api.preupload_lfs_files(**self.target, additions=chosen, free_memory=False)
            self.done += len(chosen)
            if self.progress is not None:
                self.progress(min(self.done, self.total), self.total)
        operations: list[Any] = [*additions, *(CommitOperationDelete(p, is_folder=False) for p in deleted or ())]
        self.commit = self.api.create_commit(
            **self.target, operations=operations, commit_message=message, parent_commit=self.commit
        ).oid


def _old_readme(data_set: DataSet) -> str:
    """Return the README.md of the data set, "" if it has none."""
    try:
        return data_set.files.read(README, _MAX_README_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except CorruptStoreError as error:
        raise UsageError(f"{data_set.repo_id}: {error}") from None
