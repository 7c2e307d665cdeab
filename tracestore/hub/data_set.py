"""Reading a data set of the Hugging Face Hub, which may come from anyone: bounded answers and waits."""

import json
import time
from typing import Any
from urllib.parse import quote

from tracestore.errors import RemoteError, UsageError
from tracestore.extras import needs
from tracestore.store.format import paths
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.remote.retries import Server
from tracestore.store.remote.web_server import StatusError, TransferError, WebServer

with needs("hub"):
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

README, _ATTRIBUTES = "README.md", ".gitattributes"
# What an error of this module or of the library means.
NOT_AN_ID = "not the id of a data set of the Hugging Face Hub, such as USER/NAME"
NO_ACCESS = "no such data set on the Hugging Face Hub, or no access to it; log in with 'hf auth login', or set HF_TOKEN"
NO_REVISION, IS_OFFLINE = "no such revision", "HF_HUB_OFFLINE is set"
# An answer of the interface; a page of a list has 1,000 files.
_MAX_PAGE_BYTES = 4 << 20
# A list of files. A page counts as 4 KiB at least.
MAX_LIST_BYTES, _LEAST_PAGE_BYTES = 256 << 20, 4 << 10
# A Hub that cannot be reached at all is reported after this time.
_FIRST_PATIENCE_S = 10.0
_FILES_IN_PATIENCE = 10_000


class DataSet(Server):
    """One commit of a data set.

    Parameters
    ----------
    repo_id : str
        USER/NAME.
    revision : str, optional
        Branch, tag or commit. Default: main.

    Attributes
    ----------
    repo_id, commit : str
    files : ObjectStore
        The files of the commit by path.

    Raises
    ------
    UsageError
        From every method, if the data set or its revision does not exist, or the user may not access it.
    RemoteError
        From every method, if the server fails or cannot be reached.
    """

    def __init__(self, repo_id: str, revision: str | None = None) -> None:
        self.repo_id = repo_id
        try:
            validate_repo_id(repo_id)
        except HFValidationError:
            raise UsageError(f"{repo_id}: {NOT_AN_ID}") from None
        if constants.HF_HUB_OFFLINE:
            raise UsageError(f"{repo_id}: {IS_OFFLINE}")
        super().__init__(f"{constants.ENDPOINT}/api/datasets")
        self._num_bytes = 0
        token = get_token()
        login = f"Bearer {token}" if token else ""
        self._web = WebServer(self.address, self.timeout_s, self.patience_s, login)
        patience_s, self.patience_s = self.patience_s, min(self.patience_s, _FIRST_PATIENCE_S)
        found, _ = self._ask(f"{repo_id}/revision/{quote(revision or 'main', safe='')}?expand=sha")
        self.patience_s = patience_s
        self.commit = str(found.get("sha")) if isinstance(found, dict) else ""
        if not self.commit.isalnum():
            raise RemoteError(f"{repo_id}: the server does not tell the commit")
        self.files = ObjectStore(f"{constants.ENDPOINT}/datasets/{repo_id}/resolve/{self.commit}", login=login)

    def _ask(self, path: str) -> tuple[Any, str]:
        """Return an answer of the interface, and the path of its next page, "" after the last one."""

        def call() -> tuple[Any, str]:
            with self._web.request(path) as answer:
                data, link = answer.read(_MAX_PAGE_BYTES), str(answer.headers.get("Link", ""))
            self._num_bytes += max(len(data), _LEAST_PAGE_BYTES)
            url, _, kind = link.partition(">")
            try:
                value = json.loads(data)
            except (ValueError, RecursionError):
                raise TransferError("an answer that is not JSON") from None
            return value, url.strip().removeprefix("<") if 'rel="next"' in kind else ""

        return self.retry(path, call)

    def translate(self, what: str, error: Exception) -> Exception:
        """See Server."""
        if isinstance(error, StatusError):
            if error.headers.get("X-Error-Code") == "RevisionNotFound":
                return UsageError(f"{self.repo_id}: {NO_REVISION}")
            if error.status in (401, 404):
                return UsageError(f"{self.repo_id}: {NO_ACCESS}")
        return super().translate(what, error)

    def list_files(self) -> tuple[dict[str, int], list[str]]:
        """Return the sizes of the files that can be files of a store by path, and the paths of the others.

        The card and the file with git's attributes are in neither.
        """
        sizes: dict[str, int] = {}
        others: list[str] = []
        began, seen = time.monotonic(), set()
        path, self._num_bytes = f"{self.repo_id}/tree/{self.commit}?recursive=true", 0
        while path:
            seen.add(hash(path))
            items, url = self._ask(path)
            for item in items if isinstance(items, list) else ():
                match item:  # folders have no size
                    case {"type": "file", "path": str() as name, "size": int() as size}:
                        if paths.is_own(name, is_folder=False):
                            sizes[name] = size
                        elif name not in (README, _ATTRIBUTES):
                            others.append(name)
            is_here = url.startswith(f"{self.address}/")
            path = url.removeprefix(f"{self.address}/") if is_here else ""
            count = len(sizes) + len(others)
            is_slow = time.monotonic() - began > self.patience_s * (1 + count / _FILES_IN_PATIENCE)
            if hash(path) in seen or self._num_bytes > MAX_LIST_BYTES or is_slow or bool(url) > is_here:
                raise RemoteError(
                    f"{self.repo_id}: the list of files has no end, or more than {MAX_LIST_BYTES >> 20} MiB: "
                    f"{count:,} files so far"
                )
        return sizes, others
