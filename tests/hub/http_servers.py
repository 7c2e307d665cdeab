"""HTTP servers in threads of the tests."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Handles requests without a log."""

    protocol_version = "HTTP/1.1"
    # Otherwise the body of an answer waits until the client has acknowledged the headers, which takes 40 ms.
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """Serves requests in a thread until it is closed; `url` is its address.

    Clients that close a connection before its answer are ignored.
    """

    daemon_threads = True

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_):
        pass

    def close(self):
        self.shutdown()
        self.server_close()
