"""Objects of web servers over HTTP. A server can make no wait endless, and no answer larger than what is asked for.

The standard library sends the requests. obstore would read the body of an error into memory, whatever its size.
"""

import base64
import functools
import http.client
import io
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from email.message import Message
from typing import IO, Any

from tracestore.errors import UsageError

# A slower transfer counts as no progress: a server may send a byte now and then.
LEAST_BYTES_PER_S = 1024
# Status lines, headers, and the bodies of redirects.
_MAX_HEAD_BYTES = 64 << 10
_PIECE_BYTES = 256 << 10
_LOGIN = "Authorization"


class TransferError(Exception):
    """A request failed in a way that may pass: no connection, no answer in time, or an answer that was cut."""


class StatusError(Exception):
    """A server answered with the status of an error."""

    def __init__(self, status: int, reason: str, headers: Message) -> None:
        super().__init__(f"status {status} {reason}")
        self.status, self.headers = status, headers


class _Wire(io.RawIOBase):
    """The bytes that a server sends: at most `allowed`, and not slower than LEAST_BYTES_PER_S for patience_s."""

    def __init__(self, raw: Any, patience_s: float) -> None:
        self._raw, self._patience_s = raw, patience_s
        self.allowed = _MAX_HEAD_BYTES
        self._since, self._count = time.monotonic(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.allowed <= 0:
            raise TransferError("the server sends more than was asked for")
        elapsed = time.monotonic() - self._since
        if elapsed > self._patience_s:
            if self._count < LEAST_BYTES_PER_S * elapsed:
                raise TransferError(f"{self._count:,} bytes in {elapsed:.0f} s")
            self._since, self._count = time.monotonic(), 0
        count: int = self._raw.readinto(memoryview(buffer)[: self.allowed])
        self.allowed -= count
        self._count += count
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, patience_s: float, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self.wire = _Wire(sock.makefile("rb", buffering=0), patience_s)
        self.fp = io.BufferedReader(self.wire)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to web servers, at most ten. A login is for the first server only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urllib.parse.urlsplit(newurl).scheme not in ("http", "https"):
            raise StatusError(code, "with a redirect to another kind of server", headers)
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        login = req.unredirected_hdrs.get(_LOGIN)
        if found is not None and login and (found.type, found.host) == (req.type, req.host):
            found.add_unredirected_header(_LOGIN, login)
        return found


class Answer:
    """The answer to a request for an object. Use it as a context manager.

    Attributes
    ----------
    size : int or None
        Bytes of the object; None if the server does not tell.
    offset : int
        Offset of the first byte of the body in the object: 0 if the server ignores ranges.
    headers : Message
    """

    def __init__(self, response: _Response) -> None:
        self._response = response
        length, found = response.headers.get("Content-Length", ""), response.headers.get("Content-Range", "")
        self.headers = response.headers
        self.size = self._length = int(length) if length.isdecimal() else None
        self.offset = 0
        if response.chunked:
            self._length = None
        if response.status == 206:
            begin, _, total = found.removeprefix("bytes ").partition("/")
            begin = begin.partition("-")[0]
            if not begin.isdecimal():
                raise TransferError(f"part of an object without its range: {found[:60]!r}")
            self.offset, self.size = int(begin), int(total) if total.isdecimal() else None

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def pieces(self, max_bytes: int) -> Iterator[bytes]:
        """Yield the body. It ends after one byte more than max_bytes, whatever the server sends."""
        left = max_bytes + 1 if self._length is None else min(max_bytes + 1, self._length)
        # Chunks of a body have lines of their own.
        self._response.wire.allowed += 2 * left
        while left > 0 and (piece := _checked(self._response.read1, min(left, _PIECE_BYTES))):
            left -= len(piece)
            yield piece

    def read(self, max_bytes: int) -> bytes:
        """Return the body. TransferError if it has more bytes, or fewer than the server told."""
        data = b"".join(self.pieces(max_bytes))
        if len(data) > max_bytes or (self._length is not None and len(data) < self._length):
            raise TransferError(f"{len(data):,} bytes, expected {self._length or f'at most {max_bytes:,}'}")
        return data


class WebServer:
    """Objects by their path below an address.

    Parameters
    ----------
    address : str
        A URL, ``http://`` or ``https://``, with user and password if the server asks for them. Proxies come from the
        usual environment variables.
    timeout_s, patience_s : float
        Seconds without a byte, and seconds with less than 1 KiB per second, after which a request fails.
    login : str
        Value of the header Authorization.
    """

    def __init__(self, address: str, timeout_s: float, patience_s: float, login: str = "") -> None:
        parts = urllib.parse.urlsplit(address)
        try:
            port, host = parts.port, parts.hostname
        except ValueError:
            host = None
        if not host:
            raise UsageError(f"{address}: no valid host and port")
        host = f"[{host}]" if ":" in host else host
        self._root = f"{parts.scheme}://{host}{f':{port}' if port else ''}{urllib.parse.quote(parts.path, safe='/%')}"
        self._login = login
        if parts.username:
            words = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._login = f"Basic {base64.b64encode(words.encode()).decode()}"
        self._timeout_s = timeout_s
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            _BoundedHandler(patience_s),
            _Redirects(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
        ):
            self._opener.add_handler(handler)

    def request(self, path: str, *, offset: int = 0, end: int | None = None, method: str = "GET") -> Answer:
        """Return the answer to a request for an object, from an offset on, to `end`.

        Raises
        ------
        StatusError
            If the server refuses.
        TransferError
            If it does not answer, or not with HTTP.
        """
        request = urllib.request.Request(f"{self._root}/{path}", method=method)
        if offset or end is not None:
            request.add_header("Range", f"bytes={offset}-{'' if end is None else end - 1}")
        if self._login:
            request.add_unredirected_header(_LOGIN, self._login)
        return Answer(_checked(self._opener.open, request, timeout=self._timeout_s))


class _BoundedHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens connections whose answers are bounded."""

    def __init__(self, patience_s: float) -> None:
        urllib.request.AbstractHTTPHandler.__init__(self)
        self._patience_s = patience_s

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        """The certificates of this machine, which take 40 ms to read."""
        return ssl.create_default_context()

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(functools.partial(self._connection, http.client.HTTPConnection), req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(functools.partial(self._connection, http.client.HTTPSConnection, context=self._tls), req)

    def _connection(self, kind: Any, host: str, **options: Any) -> Any:
        connection = kind(host, **options)
        connection.response_class = functools.partial(_Response, patience_s=self._patience_s)
        return connection


def _checked(call: Any, *arguments: Any, **options: Any) -> Any:
    """Return the result of a call of the HTTP library; its errors become those of this module."""
    try:
        return call(*arguments, **options)
    except urllib.error.HTTPError as error:
        error.close()
        raise StatusError(error.code, _reason(error.headers, error.reason), error.headers) from None
    except urllib.error.URLError as error:
        raise TransferError(str(error.reason)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise TransferError(f"{type(error).__name__}: {error}"[:200]) from None


def _reason(headers: Message, reason: object) -> str:
    return f"{reason}, redirected to {headers['Location']}"[:200] if headers.get("Location") else str(reason)[:200]
