"""A folder of an object store or web server: its objects as bytes, with retries after failures.

One module of over 400 lines: reading, listing and writing are requests of one client with one set of retries.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError, RemoteError, UsageError
from tracestore.extras import needs
from tracestore.store.format.entries import FileEntry, size_mismatch
from tracestore.store.io.files import RemoteURL
from tracestore.store.remote.retries import Server, summarize_error
from tracestore.store.remote.web_server import TransferError, WebServer

SCHEMES = ("s3", "gs", "http", "https")
# Bound for objects that are read whole, and for the page of a web server that lists a folder.
_MAX_SMALL_BYTES = 4 << 20
# More objects than any store has.
_MAX_NAMES = 4_000_000
_CHUNK_BYTES = 1 << 20
# Size of the parts in which a file is uploaded.
_PART_BYTES = 64 << 20
_ATTEMPTS_TO_GO_ON = 2
_ATTEMPTS_OF_ONE_REQUEST = 2
# Without credentials the client assumes a cloud machine, and asks this address for some.
_INSTANCE_METADATA = "169.254.169.254"

T = TypeVar("T")


class ListedObject(NamedTuple):
    """An object of a listing: its path, its size in bytes, when it was written in seconds since 1970, its entity tag."""

    path: str
    size: int
    written: float
    tag: str


# The process that started the client threads. They do not survive a fork.
_client_pid: int | None = None


class ObjectStore(Server):
    """Objects by their path below `address`.

    Safe to use from threads, not across a fork. Responses 408, 409, 425, 429 and 5xx, timeouts and
    cut connections are retried.

    Parameters
    ----------
    address : str
        A URL. The usual environment variables select endpoint and credentials: AWS_ACCESS_KEY_ID,
        AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, AWS_SKIP_SIGNATURE=true for public buckets,
        GOOGLE_APPLICATION_CREDENTIALS, ...
    timeout_s, patience_s : float, optional
        See Server.
    login : str
        Value of the header Authorization for a web server.

    Raises
    ------
    RemoteError
        From every method, if the server keeps failing.
    UsageError
        If the address is invalid, or from every method without permission.
    FileNotFoundError
        From methods that need an object, if it does not exist.
    """

    def __init__(
        self, address: str, *, timeout_s: float | None = None, patience_s: float | None = None, login: str = ""
    ) -> None:
        super().__init__(address, timeout_s=timeout_s, patience_s=patience_s)
        scheme, _, rest = address.partition("://")
        if scheme not in SCHEMES:
            raise UsageError(f"{address}: found {scheme}://, expected one of {', '.join(f'{s}://' for s in SCHEMES)}")
        # A URL parser would drop these parts or read them as something else.
        if re.search(r"[?#\s\\]|//|(^|/)\.{1,2}(/|$)", rest.rstrip("/")) or not rest.strip("/"):
            raise UsageError(f"{address}: found an address with an empty part, '..', a blank, '?' or '#'")
        self.can_list = scheme in ("s3", "gs")
        self.has_ranges = True  # until the server answers a request for a range with a whole object
        self._web: WebServer | None = None
        self._errors: Any = None
        if self.can_list:
            self._open_client(scheme)
        else:
            self._web = WebServer(str(self.address), self.timeout_s, self.patience_s, login)

    def _open_client(self, scheme: str) -> None:
        with needs("remote"):
            import obstore
            from obstore.store import from_url
        self._obstore, self._errors = obstore, obstore.exceptions
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        options: dict[str, Any] = {
            # For one request; a larger transfer continues where it was cut.
            "timeout": timedelta(seconds=max(self.patience_s, self.timeout_s)),
            "read_timeout": timedelta(seconds=self.timeout_s),
            "connect_timeout": timedelta(seconds=min(10.0, self.timeout_s)),
        }
        if scheme == "s3" and endpoint.startswith("http://"):
            options["allow_http"] = True
        retries: Any = {"max_retries": _ATTEMPTS_OF_ONE_REQUEST, "retry_timeout": timedelta(seconds=self.patience_s)}
        make: Any = from_url
        try:
            self._store: Any = make(str(self.address), client_options=options, retry_config=retries)
        except Exception as error:  # Each kind of store has its own error for an invalid address.
            raise UsageError(f"{self.address}: {summarize_error(error)}") from None

    # Retries

    @property
    def is_forked(self) -> bool:
        """True if this process was forked after the client threads started: it has none of them."""
        return self._web is None and _client_pid is not None and _client_pid != os.getpid()

    def retry(self, what: str, call: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """See Server. UsageError in a process that `is_forked`."""
        if self.is_forked:
            raise UsageError(
                f"{self.address}: this process was forked from one that talks to a server: open the store "
                "before the fork, or start processes by spawn or forkserver"
            )
        global _client_pid
        _client_pid = os.getpid() if self._web is None else _client_pid
        return super().retry(what, call, progress)

    def translate(self, what: str, error: Exception) -> Exception:
        """See Server."""
        errors = self._errors
        # The results of conditional writes.
        kept = () if errors is None else (errors.AlreadyExistsError, errors.PreconditionError)
        if errors is None or not isinstance(error, errors.BaseError) or isinstance(error, kept):
            return super().translate(what, error)
        if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError)):
            return self.refused(what, error)
        if isinstance(error, (errors.NotSupportedError, errors.InvalidPathError)):
            return UsageError(f"{self.address}/{what}: {summarize_error(error)}")
        if _INSTANCE_METADATA in str(error):
            return UsageError(f"{self.address}: found no credentials (docs/remote.md)")
        found = re.search(r"status code: (\d{3})", str(error))
        return self.of_status(what, 0 if found is None else int(found[1]), error)

    # Reading

    @contextlib.contextmanager
    def _opened(
        self, path: str, max_bytes: int, offset: int = 0, end: int | None = None
    ) -> Iterator[tuple[int | None, int, Iterator[Any]]]:
        """Request an object, or its bytes from an offset to `end`, and yield its size, offset and pieces.

        The size is None if unknown. No more than a piece beyond max_bytes is read, whatever the server sends.
        """
        if self._web is not None:
            with self._web.request(path, offset=offset, end=end) as answer:
                yield answer.size, answer.offset, answer.pieces(max_bytes - answer.offset)
            return
        options: Any = {"range": {"offset": offset} if end is None else (offset, end)} if offset or end else {}
        try:
            result = self._obstore.get(self._store, path, options=options)
        except self._errors.GenericError as error:
            if "non-partial response" not in str(error):
                raise
            yield None, -1, iter(())  # the whole object, not a part
            return
        yield int(result.meta["size"]), offset, result.stream(min_chunk_size=_CHUNK_BYTES)

    def read(self, path: str, max_bytes: int = _MAX_SMALL_BYTES) -> bytes:
        """Return all bytes of an object. CorruptStoreError if it has more than max_bytes."""

        def whole() -> bytes:
            data = bytearray()
            with self._opened(path, max_bytes) as (size, _, pieces):
                expected = max_bytes if size is None else size
                while expected <= max_bytes and len(data) <= expected and (piece := next(pieces, None)) is not None:
                    data += piece
            if max(len(data), expected) > max_bytes:
                found = expected if expected > max_bytes else f"more than {max_bytes}"
                raise CorruptStoreError(f"{path}: {found} bytes at {self.address}, expected at most {max_bytes}")
            if len(data) > expected:
                raise CorruptStoreError(f"{path}: more bytes at {self.address} than the {expected} that it states")
            if size is not None and len(data) < size:
                raise TransferError(f"{len(data):,} bytes of an object of {size:,}")
            return bytes(data)

        return self.retry(path, whole)

    def stream(self, path: str, size: int, take: Callable[[Any, int], None], done: int = 0, crc: int = 0) -> int:
        """Call ``take(piece, offset)`` for each chunk of an object, in order. `take` never gets more than `size` bytes.

        A cut transfer continues at its offset, or starts again at 0 if the server has no range requests. An earlier
        call may have transferred the first `done` bytes, whose crc32c is `crc`.

        Returns
        -------
        int
            crc32c of all bytes.

        Raises
        ------
        CorruptStoreError
            If the object has another size than `size`.
        """
        furthest, attempts = done, 0

        def transfer() -> None:
            nonlocal done, furthest, attempts, crc
            attempts = attempts + 1 if done else 0
            if attempts > _ATTEMPTS_TO_GO_ON:
                done = attempts = crc = 0
            with self._opened(path, size, done) as (found, offset, pieces):
                if found is not None and found != size:
                    raise CorruptStoreError(f"{path}: {found} bytes at {self.address} where {size} were committed")
                if offset != done:
                    done = crc = 0
                for piece in pieces:
                    if done + len(piece) > size:
                        raise CorruptStoreError(
                            f"{path}: more bytes at {self.address} than the {size} that were committed"
                        )
                    take(piece, done)
                    crc = crc32c(memoryview(piece), crc)
                    done, attempts = done + len(piece), 0
                    furthest = max(furthest, done)
            if done < size:
                raise TransferError(f"cut after {done:,} of {size:,} bytes")

        if done < size:
            self.retry(path, transfer, lambda: furthest)
        return crc

    def stream_range(self, entry: FileEntry, begin: int, end: int, take: Callable[[Any, int], None]) -> bool:
        """Call ``take(piece, offset)`` for each chunk of the bytes begin .. end - 1 of an object, in order.

        A cut transfer continues at its offset. False if the server has no range requests, as `has_ranges` tells from
        now on; CorruptStoreError if the object has another size than `entry`.
        """
        done = begin

        def transfer() -> None:
            nonlocal done
            with self._opened(entry.path, end, done, end) as (found, offset, pieces):
                if found is not None and found != entry.size:
                    raise size_mismatch(entry, found)
                self.has_ranges &= offset == done
                for piece in pieces if self.has_ranges else ():
                    part = memoryview(piece)[: end - done]
                    take(part, done)
                    done += len(part)
                    if done == end:
                        return
            if done < end and self.has_ranges:
                raise TransferError(f"cut after {done - begin:,} of {end - begin:,} bytes")

        self.retry(entry.path, transfer, lambda: done)
        return self.has_ranges

    def size(self, path: str) -> int | None:
        """Return the size of an object in bytes, or None if it does not exist."""

        def ask() -> int:
            if self._web is None:
                return int(self._obstore.head(self._store, path)["size"])
            with self._web.request(path, method="HEAD") as answer:
                if answer.size is None:
                    raise TransferError("the server does not tell the size")
                return answer.size

        try:
            return self.retry(path, ask)
        except FileNotFoundError:
            return None

    def list_dir(self, folder: str) -> list[str]:
        """Return the names of the objects and folders directly in a folder, in order. Errors are those of list_recursive.

        Web servers have no common listing: the links of the page that they show for the folder are returned.
        """
        if self.can_list:
            begin = len(folder) + 1 if folder else 0
            return sorted({path[begin:].partition("/")[0] for path in self.list_recursive(folder)})
        try:
            page = self.read(f"{folder}/").decode("utf-8", "replace")
        except (FileNotFoundError, UsageError):
            return []
        return sorted({m.rstrip("/") for m in re.findall(r'href="(?:\./)?([^"/?#:]+/?)"', page)})

    def list_names(self) -> list[str]:
        """Return the names of the objects and folders directly below the address, with one request for 1,000 of them.

        UsageError if there is no such bucket.
        """

        def listed() -> list[str]:
            found = self._obstore.list_with_delimiter(self._store)
            return [*found["common_prefixes"], *(str(o["path"]) for o in found["objects"])]

        with self._naming_bucket():
            return self.retry("", listed)

    def list_recursive(self, folder: str) -> list[str]:
        """Return the paths of all objects below a folder, in order. RemoteError for an endless listing."""
        return [found.path for found in self.list_objects(folder)]

    def list_objects(self, folder: str) -> list[ListedObject]:
        """Return all objects below a folder, in the order of their paths. RemoteError for an endless listing."""
        began = time.monotonic()

        def listed() -> list[ListedObject]:
            objects: list[ListedObject] = []
            for found in self._obstore.list(self._store, folder):
                objects += (
                    ListedObject(str(o["path"]), int(o["size"]), o["last_modified"].timestamp(), str(o.get("e_tag")))
                    for o in found
                )
                # 1,000 names a request: a listing that takes longer has no end.
                is_slow = time.monotonic() - began > self.patience_s * (1 + len(objects) / 10_000)
                if len(objects) > _MAX_NAMES or is_slow:
                    raise RemoteError(f"{self.address}/{folder}: a list of more than {len(objects):,} objects")
            return sorted(objects)

        try:
            return self.retry(folder, listed)
        except FileNotFoundError:
            return []

    # Writing

    def require_writable(self) -> None:
        """Raise UsageError if this is a web server, which cannot be written to."""
        if not self.can_list:
            raise UsageError(f"{self.address}: web servers cannot be written to: use s3:// or gs://")

    def put(self, path: str, data: bytes | Path, **how: Any) -> None:
        """Write an object; `how` are options of obstore. By default an object is replaced."""
        if isinstance(data, Path):
            how = {"chunk_size": _PART_BYTES, "max_concurrency": 1} | how

        def call() -> None:
            found = self._obstore.put(self._store, path, data, **how)
            if not (found.get("e_tag") or found.get("version")):  # it may ignore conditions
                raise UsageError(
                    "the server gives objects neither entity tags nor versions: it cannot be written to safely"
                )

        with self._naming_bucket():
            try:
                self.retry(path, call)
            except FileNotFoundError:
                if not isinstance(data, Path):
                    raise
                # If the answer to the end of an upload in parts is lost, the server knows the upload no longer.
                self.retry(path, call)

    def shares_bucket(self, other: "ObjectStore") -> bool:
        """Return whether the objects of another store are in the same bucket."""
        return self._place[0] == other._place[0]

    @property
    def _place(self) -> tuple[str, str]:
        """The URL of the bucket, and the folder in it."""
        *bucket, folder = f"{self.address}/".split("/", 3)
        return "/".join(bucket), folder.strip("/")

    def copy_from(self, other: "ObjectStore", entry: FileEntry, path: str) -> None:
        """Let the server copy an object of a store in the same bucket. CorruptStoreError if it has another size."""
        size = other.size(entry.path)
        if size != entry.size:
            raise size_mismatch(entry, size)
        bucket = ObjectStore(RemoteURL(self._place[0]))
        old, new = (
            f"{folder}/{name}".strip("/") for folder, name in ((other._place[1], entry.path), (self._place[1], path))
        )
        self.retry(path, lambda: self._obstore.copy(bucket._store, old, new))

    @contextlib.contextmanager
    def _naming_bucket(self) -> Iterator[None]:
        """Raise UsageError if a request that needs no object finds nothing."""
        try:
            yield
        except FileNotFoundError:
            raise UsageError(f"{self.address}: no such bucket") from None

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create an object; return False, with nothing changed, if one with other bytes exists."""
        try:
            self.put(path, data, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError:
            # This call may have created it, if the answer was lost.
            with contextlib.suppress(FileNotFoundError):
                return self.read(path) == data
            return False
        return True

    def delete(self, paths: list[str]) -> None:
        """Remove objects, with one request for 1,000 of them on S3. A missing object is no error."""
        if not paths:
            return
        try:
            self.retry(paths[0], lambda: self._obstore.delete(self._store, paths))
        except FileNotFoundError:
            # Other servers get a request for each object, and the first missing one ends the call.
            for path in paths if len(paths) > 1 else ():
                self.delete([path])
