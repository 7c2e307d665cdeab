"""Authenticate local browsers and serve pages to them. Access is read-only.

The main thread checks requests and sends replies; four threads compute pages.

A page of another site can send requests to 127.0.0.1, also under a host name of its own (DNS rebinding).
Every request must therefore carry the host name of this server and a secret token: first in the address,
then in a cookie that pages of other sites cannot send. A content security policy keeps the pages from
loading anything from other sites.
"""

import hmac
import logging
import os
import secrets
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from tracestore.errors import UsageError, escape_unprintable
from tracestore.pages.document import SERVER_POLICY
from tracestore.serve.app import Viewer

ADDRESS = "127.0.0.1"
PAGE = "/store"
_NUM_THREADS = 4
_HEADERS = {
    "Content-Security-Policy": SERVER_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "tracestore",
}


class _Handler(RequestHandler):
    """Base of handlers. Every response, an error too, has the security headers."""

    def set_default_headers(self) -> None:
        """Set the security headers."""
        for name, value in _HEADERS.items():
            self.set_header(name, value)


class _Reply(_Handler):
    """Answer a request with a fixed text, and possibly a cookie."""

    def initialize(self, status: int, kind: str, text: str, cookie: tuple[str, str] | None = None) -> None:
        """Set the status, the content type, the text and the cookie (name, value) of the response."""
        self._status, self._kind, self._text, self._cookie = status, kind, text, cookie

    def prepare(self) -> None:
        """Send the response."""
        self.set_status(self._status)
        self.set_header("Content-Type", f"{self._kind}; charset=utf-8")
        if self._cookie is not None:
            self.set_cookie(*self._cookie, httponly=True, samesite="Strict", path="/")
            self.set_header("Cache-Control", "no-store")
        self.finish(self._text + "\n")


class _Pages(_Handler):
    """Answer a request with a page of the viewer, computed in a thread."""

    def initialize(self, viewer: Viewer, threads: ThreadPoolExecutor) -> None:
        """Set the viewer, and the threads that compute its pages."""
        self._viewer, self._threads = viewer, threads

    async def get(self) -> None:
        """Send the response."""
        arguments = {name: self.get_query_argument(name) for name in self.request.query_arguments}
        respond = self._viewer.respond
        status, kind, body = await IOLoop.current().run_in_executor(
            self._threads, respond, self.request.path, arguments
        )
        self.set_status(status)
        self.set_header("Content-Type", kind)
        # A page shows the results that the server was started with. Its scripts and styles do not change.
        self.set_header(
            "Cache-Control", "private, max-age=86400" if status == 200 and "html" not in kind else "no-store"
        )
        self.finish(body)

    head = get


class AuthenticatedApp(Application):
    """The pages of a viewer, for authenticated requests only."""

    def __init__(self, viewer: Viewer, port: int, token: str) -> None:
        names = (ADDRESS, "localhost")
        # Browsers omit the default port of HTTP.
        self._hosts = {f"{name}:{port}" for name in names} | (set(names) if port == 80 else set())
        # Named after the port, because browsers send the cookies of a host to all of its ports.
        self._cookie, self._token = f"tracestore-{port}", token
        threads = ThreadPoolExecutor(_NUM_THREADS, "page")
        super().__init__([(".*", _Pages, {"viewer": viewer, "threads": threads})], compress_response=True)

    def find_handler(self, request: HTTPServerRequest, **options: Any) -> Any:
        """Return the handler of a request, after checking its authentication."""
        error = self._check(request)
        if error is not None:
            status, reason = error
            return self.get_handler_delegate(request, _Reply, {"status": status, "kind": "text/plain", "text": reason})
        if request.path == "/":
            # The token moves from the address, which browsers and logs record, to a cookie. A page, not a redirect:
            # after a link on another site, the redirected request would lack the cookie.
            text = f'<!doctype html><title>tracestore</title><meta http-equiv="refresh" content="0; url={PAGE}">'
            reply = {"status": 200, "kind": "text/html", "text": text, "cookie": (self._cookie, self._token)}
            return self.get_handler_delegate(request, _Reply, reply)
        return super().find_handler(request, **options)

    def _check(self, request: HTTPServerRequest) -> tuple[int, str] | None:
        """Return the HTTP status and the reason of a rejection, or None for a valid request."""
        if request.host not in self._hosts:
            return 421, "not a host name of this server"
        if request.method not in ("GET", "HEAD"):
            return 405, "this server is read-only"
        origin = request.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return 403, "requested by a page of another site"
        in_cookie = request.cookies.get(self._cookie)
        token = in_cookie.value if in_cookie is not None else ""
        if request.path == "/":
            token = request.query_arguments.get("token", [token.encode()])[-1].decode("utf-8", "replace")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return 403, "open the address that tracestore serve printed: it contains the token"
        return None


class _OneLineHandler(logging.Handler):
    """Print each error of the server as one line. TRACESTORE_DEBUG=1 prints tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and os.environ.get("TRACESTORE_DEBUG"):
            traceback.print_exception(error)
            return
        text = record.getMessage() if error is None else f"{type(error).__name__}: {error}"
        print(f"tracestore: serve: {escape_unprintable(text)}", file=sys.stderr, flush=True)


class ServeServer:
    """A server of a viewer on 127.0.0.1.

    Parameters
    ----------
    viewer : Viewer
        Makes the pages.
    port : int
        Port. 0: any free port.

    Raises
    ------
    UsageError
        The port is in use.
    """

    def __init__(self, viewer: Viewer, port: int = 0) -> None:
        try:
            sockets = bind_sockets(port, ADDRESS)
        except OSError as error:
            raise UsageError(f"port {port}: {error.strerror}; choose another with --port") from None
        self.port = sockets[0].getsockname()[1]
        self.token = secrets.token_urlsafe(24)
        application = AuthenticatedApp(viewer, self.port, self.token)
        self._loop = IOLoop.current()
        self._server = HTTPServer(application, max_header_size=1 << 14, max_body_size=1 << 16)
        self._server.add_sockets(sockets)

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    def run(self) -> None:
        """Serve until interrupted."""
        logger = logging.getLogger("tornado")
        logger.handlers, logger.propagate = [_OneLineHandler(logging.ERROR)], False
        try:
            self._loop.start()
        finally:
            self._server.stop()
