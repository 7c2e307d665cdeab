"""A folder of an object store or web server: its objects as bytes, asked for again after a failure."""

import contextlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from tracestore.errors import RemoteError, StoreDamagedError, UsageError
from tracestore.store.files import Address

SCHEMES = ("s3", "gs", "http", "https")
# Without a byte for so long, a request is given up and made again.
TIMEOUT_S = 30.0
# Without progress for so long, whoever waits gets the error.
PATIENCE_S = 120.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CHUNK_BYTES = 1 << 20
_ATTEMPTS_OF_ONE_REQUEST = 2

T = TypeVar("T")


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


def one_line(error: BaseException) -> str:
    """What a server's error says, without the document that it came in."""
    text = str(error).split("\n", 1)[0].split(": <?xml", 1)[0]
    return " ".join(re.sub(r"Debug source:.*", "", text).split())[:300]


class Bucket:
    """Objects by their path below `address`.

    The environment says who asks and where, as for other programs: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, AWS_SKIP_SIGNATURE=true for public
    buckets, GOOGLE_APPLICATION_CREDENTIALS, ... 5xx, timeouts and cut connections are tried again
    for patience_s; what stays is a RemoteError, no permission a UsageError, and no such
    object a FileNotFoundError. Safe to use from threads, not across a fork."""

    def __init__(self, address: str, *, timeout_s: float | None = None, patience_s: float | None = None) -> None:
        self.address = Address(address.rstrip("/"))
        self.patience_s = seconds_of("TRACESTORE_REMOTE_PATIENCE", PATIENCE_S) if patience_s is None else patience_s
        timeout_s = seconds_of("TRACESTORE_REMOTE_TIMEOUT", TIMEOUT_S) if timeout_s is None else timeout_s
        scheme = address.split("://", 1)[0]
        if scheme not in SCHEMES:
            raise UsageError(f"{address}: found {scheme}://, expected one of {', '.join(f'{s}://' for s in SCHEMES)}")
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise UsageError(
                f"{address}: stores of other machines need obstore: pip install tracestore[remote]"
            ) from None
        self._obstore = obstore
        self._pid = os.getpid()
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        options: dict[str, Any] = {
            "timeout": "1h",
            "read_timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(10.0, timeout_s)),
        }
        if scheme == "http" or (scheme == "s3" and endpoint.startswith("http://")):
            options["allow_http"] = True
        retries: Any = {"max_retries": _ATTEMPTS_OF_ONE_REQUEST, "retry_timeout": timedelta(seconds=self.patience_s)}
        try:
            make: Any = from_url
            self._store: Any = make(str(self.address), client_options=options, retry_config=retries)
        except Exception as error:  # what is wrong with an address, each kind of store says in its own way
            raise UsageError(f"{address}: {one_line(error)}") from None
        self.can_list = scheme in ("s3", "gs")

    # Asking

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked since: the threads that talk to the server did not come along."""
        return self._pid != os.getpid()

    def again(self, what: str, call: Callable[[], T], progress: Callable[[], Any] = lambda: None) -> T:
        """The call, repeated until it succeeds or has failed for patience_s while `progress`
        stayed what it was."""
        if self.is_of_parent:
            raise UsageError(f"{self.address}: was opened before this process was forked: open it anew")
        errors = self._obstore.exceptions
        since, before, pause = time.monotonic(), progress(), _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except FileNotFoundError:
                raise
            except (errors.AlreadyExistsError, errors.PreconditionError, errors.InvalidPathError):
                raise
            except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
                raise self._refused(what, error) from None
            except (errors.BaseError, _CutError) as error:
                if "404 Not Found" in str(error):  # what a listing in a bucket that is not there gives
                    raise FileNotFoundError(2, os.strerror(2), f"{self.address}/{what}") from None
                if "403 Forbidden" in str(error):
                    raise self._refused(what, error) from None
                now = progress()
                if now != before:
                    since, before, pause = time.monotonic(), now, _FIRST_PAUSE_S
                if time.monotonic() - since > self.patience_s:
                    raise RemoteError(
                        f"{self.address}/{what}: failed for {self.patience_s:g} s: {one_line(error)}"
                    ) from None
            # Not all that failed together ask again together.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _refused(self, what: str, error: BaseException) -> UsageError:
        return UsageError(f"{self.address}/{what}: no permission: {one_line(error)}")

    # Reading

    def read(self, path: str) -> bytes:
        """All bytes of an object."""
        return self.again(path, lambda: bytes(self._obstore.get(self._store, path).bytes()))

    def stream(self, path: str, size: int, take: Callable[[Any, int], None]) -> None:
        """Has `take` have each piece of an object of `size` bytes and the offset of that, in their
        order. What was cut goes on where it was cut. StoreDamagedError where it has another size."""
        done = 0

        def go_on() -> None:
            nonlocal done
            options: Any = {"range": {"offset": done}} if done else {}
            result = self._obstore.get(self._store, path, options=options)
            found = int(result.meta["size"])
            if found != size:
                raise _AnotherSizeError(found)
            for piece in result.stream(min_chunk_size=_CHUNK_BYTES):
                take(piece, done)
                done += len(piece)
            if done < size:
                raise _CutError(f"cut after {done:,} of {size:,} bytes")

        if size == 0:
            return
        try:
            self.again(path, go_on, lambda: done)
        except _AnotherSizeError as error:
            raise StoreDamagedError(
                f"{path}: {error.size} bytes at {self.address} where {size} were committed"
            ) from None

    def size(self, path: str) -> int | None:
        """Of an object, in bytes; None where there is none."""
        try:
            return int(self.again(path, lambda: self._obstore.head(self._store, path))["size"])
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """Names of the objects right in a folder and of the folders in it, in order.

        Web servers have no common way to say so: of those the page that they show of a
        folder is read, or the file `newest` in it."""
        if self.can_list:
            try:
                return self.again(folder, lambda: sorted(self._list(folder)))
            except FileNotFoundError:
                return []
        try:
            page = self.read(f"{folder}/").decode("utf-8", "replace")
            found = sorted({m.rstrip("/") for m in re.findall(r'href="(?:\./)?([^"/?#:]+/?)"', page)})
            if found:
                return found
        except (FileNotFoundError, UsageError):
            pass
        try:
            return [self.read(f"{folder}/newest").decode("ascii", "replace").strip()]
        except FileNotFoundError:
            return []

    def _list(self, folder: str) -> Iterator[str]:
        result = self._obstore.list_with_delimiter(self._store, folder)
        for found in result["objects"]:
            yield found["path"].rsplit("/", 1)[-1]
        for prefix in result["common_prefixes"]:
            yield prefix.rstrip("/").rsplit("/", 1)[-1]

    def walk(self, folder: str) -> list[str]:
        """Paths of all objects below a folder, in order."""
        return self.again(
            folder, lambda: sorted(o["path"] for found in self._obstore.list(self._store, folder) for o in found)
        )

    # Writing

    def require_writable(self) -> None:
        if not self.can_list:
            raise UsageError(f"{self.address}: web servers cannot be written to: use s3:// or gs://")

    def put(self, path: str, data: bytes | Path) -> None:
        """An object with these bytes, in place of one that may be there."""
        self._put(path, data)

    def _put(self, path: str, data: bytes | Path, **how: Any) -> None:
        try:
            self.again(path, lambda: self._obstore.put(self._store, path, data, **how))
        except FileNotFoundError:
            raise UsageError(f"{self.address}: no such bucket") from None

    def put_new(self, path: str, data: bytes) -> bool:
        """Makes an object where there is none; False where there is one with other bytes."""
        try:
            self._put(path, data, mode="create", use_multipart=False)
            return True
        except self._obstore.exceptions.AlreadyExistsError:
            # It may be this very call that made it, where the answer was lost.
            return self.read(path) == data

    def version(self, path: str) -> str | None:
        """What changes when the object is written; None where there is none."""
        try:
            return str(self.again(path, lambda: self._obstore.head(self._store, path))["e_tag"])
        except FileNotFoundError:
            return None

    def replace(self, path: str, version: str, data: bytes) -> bool:
        """Writes over this version of an object; False where it is another one by now."""
        mode: Any = {"e_tag": version}
        try:
            self.again(path, lambda: self._obstore.put(self._store, path, data, mode=mode, use_multipart=False))
            return True
        except (self._obstore.exceptions.PreconditionError, FileNotFoundError):
            try:
                return self.read(path) == data
            except FileNotFoundError:
                return False

    def delete(self, paths: list[str]) -> None:
        """Removes objects; those that are not there are no error."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self.again(path, lambda p=path: self._obstore.delete(self._store, p))  # type: ignore[misc]


class _CutError(Exception):
    """An answer ended before its end."""


class _AnotherSizeError(Exception):
    def __init__(self, size: int) -> None:
        self.size = size
