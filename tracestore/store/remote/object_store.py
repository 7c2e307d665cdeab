"""A folder of an object store or web server: its objects as bytes, asked for again after a failure."""

import contextlib
import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError, RemoteError, UsageError
from tracestore.extras import needs
from tracestore.store.io.files import RemoteURL

SCHEMES = ("s3", "gs", "http", "https")
# Without a byte for so long, a request is given up and made again.
TIMEOUT_S = 30.0
# Without progress for so long, whoever waits gets the error.
PATIENCE_S = 120.0
# Slower than this for so long as it is waited for is no progress: a server may send a byte now and then.
_LEAST_BYTES_PER_S = 1024
# Of an object that is read as a whole, and of a page that lists a folder.
_MAX_SMALL_BYTES = 64 << 20
# No store has so many objects.
_MAX_NAMES = 4_000_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CHUNK_BYTES = 1 << 20
_ATTEMPTS_TO_GO_ON = 2
_AT_ONCE = 16
_ATTEMPTS_OF_ONE_REQUEST = 2
# Who has no credentials is taken for a machine of the cloud, and asks this address for some.
_INSTANCE_METADATA = "169.254.169.254"

T = TypeVar("T")

# What a server says of an object's state: an entity tag, a version, or both.
Version = dict[str, str]

# The process whose threads talk to servers, once there are some: a fork does not take them along.
_talking: int | None = None


def seconds_of(variable: str, default: float) -> float:
    """A duration that an environment variable sets. UsageError where it is none."""
    text = os.environ.get(variable)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"found {variable}={text}, expected seconds")
    return value


def summarize_error(error: BaseException) -> str:
    """What a server's error says, without the document that it came in."""
    text = str(error).split("\n", 1)[0].split(": <?xml", 1)[0]
    return " ".join(re.sub(r"Debug source:.*", "", text).split())[:300]


class ObjectStore:
    """Objects by their path below `address`.

    The environment says who asks and where, as for other programs: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, AWS_SKIP_SIGNATURE=true for public
    buckets, GOOGLE_APPLICATION_CREDENTIALS, ... 5xx, timeouts and cut connections are tried again
    for patience_s; what stays is a RemoteError, no permission a UsageError, and no such
    object a FileNotFoundError. Safe to use from threads, not across a fork."""

    def __init__(self, address: str, *, timeout_s: float | None = None, patience_s: float | None = None) -> None:
        self.address = RemoteURL(address.rstrip("/"))
        self.patience_s = (
            seconds_of("TRACESTORE_REMOTE_RETRY_TIMEOUT", PATIENCE_S) if patience_s is None else patience_s
        )
        timeout_s = seconds_of("TRACESTORE_REMOTE_TIMEOUT", TIMEOUT_S) if timeout_s is None else timeout_s
        scheme, _, rest = address.partition("://")
        if scheme not in SCHEMES:
            raise UsageError(f"{address}: found {scheme}://, expected one of {', '.join(f'{s}://' for s in SCHEMES)}")
        # What an address parser would take for something else, or leave out.
        if re.search(r"[?#\s\\]|//|(^|/)\.{1,2}(/|$)", rest.rstrip("/")) or not rest.strip("/"):
            raise UsageError(f"{address}: found an address with an empty part, '..', a blank, '?' or '#'")
        with needs("remote"):
            import obstore
            from obstore.store import HTTPStore, from_url
        self._obstore = obstore
        # Called before each attempt to change something; may raise.
        self.before_write: Callable[[], None] = lambda: None
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        options: dict[str, Any] = {
            # Of one request; what is larger goes on where it was cut.
            "timeout": timedelta(seconds=max(self.patience_s, timeout_s)),
            "read_timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(10.0, timeout_s)),
        }
        if scheme == "http" or (scheme == "s3" and endpoint.startswith("http://")):
            options["allow_http"] = True
        retries: Any = {"max_retries": _ATTEMPTS_OF_ONE_REQUEST, "retry_timeout": timedelta(seconds=self.patience_s)}
        try:
            make: Any = from_url if scheme in ("s3", "gs") else HTTPStore.from_url
            self._store: Any = make(str(self.address), client_options=options, retry_config=retries)
        except Exception as error:  # what is wrong with an address, each kind of store says in its own way
            raise UsageError(f"{address}: {summarize_error(error)}") from None
        self.can_list = scheme in ("s3", "gs")

    # Asking

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked since: the threads that talk to the server did not come along."""
        return _talking is not None and _talking != os.getpid()

    def retry(self, what: str, call: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """The call, repeated until it succeeds or has failed for patience_s while `progress`, a number
        of bytes, grew by less than _LEAST_BYTES_PER_S."""
        if self.is_forked:
            raise UsageError(
                f"{self.address}: this process was forked from one that talks to a server: open the store "
                "before the fork, or start processes by spawn or forkserver"
            )
        global _talking
        _talking = os.getpid()
        errors = self._obstore.exceptions
        since, before, pause = time.monotonic(), progress(), _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except FileNotFoundError:
                raise
            except (errors.AlreadyExistsError, errors.PreconditionError):
                raise
            except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
                raise self._refused(what, error) from None
            except (errors.NotSupportedError, errors.InvalidPathError) as error:
                raise UsageError(f"{self.address}/{what}: {summarize_error(error)}") from None
            except (errors.BaseError, _CutError) as error:
                self._raise_lasting(what, error)
                now = progress()
                if now - before > _LEAST_BYTES_PER_S * (time.monotonic() - since):
                    since, before, pause = time.monotonic(), now, _FIRST_PAUSE_S
                if time.monotonic() - since > self.patience_s:
                    raise RemoteError(
                        f"{self.address}/{what}: failed for {self.patience_s:g} s: {summarize_error(error)}"
                    ) from None
            # Not all that failed together ask again together.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _raise_lasting(self, what: str, error: BaseException) -> None:
        """Raises what asking again would not change."""
        if _INSTANCE_METADATA in str(error):
            raise UsageError(f"{self.address}: found no credentials (docs/remote.md)")
        found = re.search(r"status code: (\d{3})", str(error))
        status = 0 if found is None else int(found[1])
        if status == 404:  # what a listing in a bucket that is not there gives
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.address}/{what}")
        if status in (401, 403):
            raise self._refused(what, error)
        if 300 <= status < 500 and status not in (408, 409, 425, 429):
            raise UsageError(f"{self.address}/{what}: {summarize_error(error)}")

    def _refused(self, what: str, error: BaseException) -> UsageError:
        return UsageError(f"{self.address}/{what}: no permission: {summarize_error(error)}")

    # Reading

    def read(self, path: str, max_bytes: int = _MAX_SMALL_BYTES) -> bytes:
        """All bytes of an object. CorruptStoreError where it has more than max_bytes."""

        def whole() -> bytes:
            found = self._obstore.get(self._store, path)
            size = int(found.meta["size"])
            if size > max_bytes:
                raise CorruptStoreError(f"{path}: {size} bytes at {self.address}, expected at most {max_bytes}")
            return bytes(found.bytes())

        return self.retry(path, whole)

    def stream(self, path: str, size: int, take: Callable[[Any, int], None]) -> int:
        """Has `take` have each piece of an object of `size` bytes and the offset of that, in their
        order. What was cut goes on where it was cut, or from 0 again where a server has only whole
        objects. -> crc32c of all of it. CorruptStoreError where it has another size."""
        done = furthest = attempts = crc = 0

        def go_on() -> None:
            nonlocal done, furthest, attempts, crc
            attempts = attempts + 1 if done else 0
            if attempts > _ATTEMPTS_TO_GO_ON:
                done = attempts = crc = 0
            options: Any = {"range": {"offset": done}} if done else {}
            result = self._obstore.get(self._store, path, options=options)
            found = int(result.meta["size"])
            if found != size:
                raise _AnotherSizeError(found)
            for piece in result.stream(min_chunk_size=_CHUNK_BYTES):
                take(piece, done)
                crc = crc32c(memoryview(piece), crc)
                done, attempts = done + len(piece), 0
                furthest = max(furthest, done)
            if done < size:
                raise _CutError(f"cut after {done:,} of {size:,} bytes")

        if size == 0:
            return 0
        try:
            self.retry(path, go_on, lambda: furthest)
            return crc
        except _AnotherSizeError as error:
            raise CorruptStoreError(
                f"{path}: {error.size} bytes at {self.address} where {size} were committed"
            ) from None

    def size(self, path: str) -> int | None:
        """Of an object, in bytes; None where there is none."""
        try:
            return int(self.retry(path, lambda: self._obstore.head(self._store, path))["size"])
        except FileNotFoundError:
            return None

    def list_dir(self, folder: str) -> list[str]:
        """Names of the objects right in a folder and of the folders in it, in order. Web servers have
        no common way to say so: of those the page that they show of a folder is read."""
        if self.can_list:
            try:
                return self.retry(folder, lambda: sorted(self._list(folder)))
            except FileNotFoundError:
                return []
        try:
            page = self.read(f"{folder}/").decode("utf-8", "replace")
        except (FileNotFoundError, UsageError):
            return []
        return sorted({m.rstrip("/") for m in re.findall(r'href="(?:\./)?([^"/?#:]+/?)"', page)})

    def list_files(self, folder: str) -> list[str]:
        """Names of the objects right in a folder that has no folders, in order; as `names`, but a list
        without an end is a RemoteError."""
        if not self.can_list:
            return self.list_dir(folder)
        return sorted(
            path.rsplit("/", 1)[-1] for path in self.list_recursive(folder) if path.count("/") == folder.count("/") + 1
        )

    def _list(self, folder: str) -> Iterator[str]:
        result = self._obstore.list_with_delimiter(self._store, folder)
        for found in result["objects"]:
            yield found["path"].rsplit("/", 1)[-1]
        for prefix in result["common_prefixes"]:
            yield prefix.rstrip("/").rsplit("/", 1)[-1]

    def list_recursive(self, folder: str) -> list[str]:
        """Paths of all objects below a folder, in order."""
        began = time.monotonic()

        def listed() -> list[str]:
            paths: list[str] = []
            for found in self._obstore.list(self._store, folder):
                paths += (str(o["path"]) for o in found)
                # 1,000 names a request: a list that goes on for so long has no end.
                is_slow = time.monotonic() - began > self.patience_s * (1 + len(paths) / 10_000)
                if len(paths) > _MAX_NAMES or is_slow:
                    raise RemoteError(f"{self.address}/{folder}: a list of more than {len(paths):,} objects")
            return sorted(paths)

        try:
            return self.retry(folder, listed)
        except FileNotFoundError:
            return []

    # Writing

    def require_writable(self) -> None:
        if not self.can_list:
            raise UsageError(f"{self.address}: web servers cannot be written to: use s3:// or gs://")

    def put(self, path: str, data: bytes | Path) -> None:
        """An object with these bytes, in place of one that may be there."""
        self._put(path, data)

    def _put(self, path: str, data: bytes | Path, **how: Any) -> Version:
        def call() -> Any:
            self.before_write()
            return self._obstore.put(self._store, path, data, **how)

        try:
            return _version(self.retry(path, call))
        except FileNotFoundError:
            raise UsageError(f"{self.address}: no such bucket") from None

    def put_if_absent(self, path: str, data: bytes) -> Version | None:
        """Makes an object where there is none, and gives its version; None where there is one with other
        bytes."""
        try:
            return self._put(path, data, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError:
            # It may be this very call that made it, where the answer was lost.
            return self._version_if(path, data)

    def _version_if(self, path: str, data: bytes) -> Version | None:
        """Of the object, if it has these bytes."""
        version = self.version(path)
        try:
            return version if version is not None and self.read(path) == data else None
        except FileNotFoundError:
            return None

    def version(self, path: str) -> Version | None:
        """What changes when the object is written; None where there is none."""
        try:
            return _version(self.retry(path, lambda: self._obstore.head(self._store, path)))
        except FileNotFoundError:
            return None

    def put_if_match(self, path: str, version: Version, data: bytes) -> Version | None:
        """Writes over this version of an object; None where it is another one by now."""
        try:
            return self._put(path, data, mode=version, use_multipart=False)
        except (self._obstore.exceptions.PreconditionError, UsageError):
            return self._version_if(path, data)

    def delete(self, paths: list[str]) -> None:
        """Removes objects; those that are not there are no error."""

        def remove(path: str) -> None:
            def call() -> None:
                self.before_write()
                self._obstore.delete(self._store, path)

            with contextlib.suppress(FileNotFoundError):
                self.retry(path, call)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(remove, paths))


def _version(found: Any) -> Version:
    version = {name: str(found[name]) for name in ("e_tag", "version") if found.get(name) is not None}
    if not version:
        raise UsageError("the server gives objects neither entity tags nor versions: it cannot be written to safely")
    return version


class _CutError(Exception):
    """An answer ended before its end."""


class _AnotherSizeError(Exception):
    def __init__(self, size: int) -> None:
        self.size = size
