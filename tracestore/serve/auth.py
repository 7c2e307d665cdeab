"""Who may come in: browsers on this machine that were given the token, and they may only look.

A page of another site can send requests to 127.0.0.1, under a name of its own that it points
there. So every request must carry this server's own host name, and the token: once in the
address, from then on in a cookie that no other site's page can send. The pages are told to load
nothing from elsewhere.
"""

import hmac
import logging
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from bokeh.server.util import bind_sockets
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.web import OutputTransform, RequestHandler

from tracestore.errors import UsageError, escape_unprintable

ADDRESS = "127.0.0.1"
PAGE = "/store"


class _Headers(OutputTransform):
    """What every answer says of itself."""

    def transform_first_chunk(
        self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, HTTPHeaders, bytes]:
        # Bokeh's pages carry scripts of their own and compile their templates.
        headers["Content-Security-Policy"] = (
            "default-src 'self' 'unsafe-inline' 'unsafe-eval'; connect-src 'self'; img-src 'self' data: blob:; "
            "font-src 'self' data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'; object-src 'none'"
        )
        headers["X-Content-Type-Options"] = "nosniff"
        headers["Referrer-Policy"] = "no-referrer"
        headers["Cross-Origin-Resource-Policy"] = "same-origin"
        headers["Server"] = "tracestore"
        return status_code, headers, chunk


class ErrorHandler(RequestHandler):
    def initialize(self, status: int, reason: str) -> None:
        self._refused = status, reason

    def prepare(self) -> None:
        status, reason = self._refused
        self.set_status(status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(reason + "\n")


class TokenHandler(RequestHandler):
    """Takes the token out of the address, where histories and logs keep it, into a cookie."""

    def initialize(self, cookie: str, token: str) -> None:
        self._cookie, self._token = cookie, token

    def get(self) -> None:
        self.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict", path="/")
        self.set_header("Cache-Control", "no-store")
        # Not a redirect: where a link on another page led here, that would come without the cookie.
        self.finish(f'<!doctype html><title>tracestore</title><meta http-equiv="refresh" content="0; url={PAGE}">')


class AuthenticatedApp(BokehTornado):
    """Bokeh's application behind the door."""

    def __init__(self, applications: dict[str, Application], port: int, token: str) -> None:
        names = (ADDRESS, "localhost")
        # Browsers leave out the port that http has anyway.
        self._hosts = {f"{name}:{port}" for name in names} | (set(names) if port == 80 else set())
        # By port: browsers give a host's cookies to all of its ports.
        self._cookie, self._token = f"tracestore-{port}", token
        super().__init__(applications, extra_websocket_origins=sorted(self._hosts), use_index=False)
        self.transforms.append(_Headers)

    def find_handler(self, request: HTTPServerRequest, **options: Any) -> Any:
        refusal = self._refusal(request)
        if refusal is not None:
            return self.get_handler_delegate(
                request, ErrorHandler, dict(zip(("status", "reason"), refusal, strict=True))
            )
        if request.path == "/":
            return self.get_handler_delegate(request, TokenHandler, {"cookie": self._cookie, "token": self._token})
        return super().find_handler(request, **options)

    def _refusal(self, request: HTTPServerRequest) -> tuple[int, str] | None:
        if request.host not in self._hosts:
            return 421, "not a host of this server"
        if request.method not in ("GET", "HEAD"):
            return 405, "this server only shows"
        origin = request.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return 403, "asked for by a page from elsewhere"
        in_cookie = request.cookies.get(self._cookie)
        shown = in_cookie.value if in_cookie is not None else ""
        if request.path == "/":
            shown = request.query_arguments.get("token", [shown.encode()])[-1].decode("utf-8", "replace")
        if not hmac.compare_digest(shown.encode(), self._token.encode()):
            return 403, "open the address that tracestore serve printed: it carries the token"
        return None


class _OneLine(logging.Handler):
    """Errors of the server, each in a line of its own; TRACESTORE_DEBUG shows where they come from."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and os.environ.get("TRACESTORE_DEBUG"):
            traceback.print_exception(error)
            return
        text = record.getMessage() if error is None else f"{type(error).__name__}: {error}"
        print(f"tracestore: serve: {escape_unprintable(text)}", file=sys.stderr, flush=True)


class ServeServer:
    """A server of documents that `make` fills, on `port` (0: any free one). UsageError where the
    port is taken."""

    def __init__(self, make: Callable[[Document], None], port: int = 0) -> None:
        try:
            sockets, self.port = bind_sockets(ADDRESS, port)
        except OSError as error:
            raise UsageError(f"port {port}: {error.strerror}; choose another with --port") from None
        self.token = secrets.token_urlsafe(24)
        application = AuthenticatedApp({PAGE: Application(FunctionHandler(make))}, self.port, self.token)
        http = HTTPServer(application, max_header_size=1 << 14, max_body_size=1 << 16)
        http.add_sockets(sockets)
        self._loop = IOLoop.current()
        self._server = BaseServer(self._loop, application, http)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    def run(self) -> None:
        """Serves until it is interrupted."""
        # A browser that goes away in the middle of an answer must not end the server.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        for name in ("bokeh", "tornado"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [_OneLine(logging.ERROR)], False
        self._server.start()
        try:
            self._loop.start()
        finally:
            self._server.stop()
