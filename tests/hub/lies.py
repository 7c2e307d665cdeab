"""Answers of servers that lie: without end, of the wrong length, too slow, or in circles.

Each function of LIES sends an answer for the bytes `data` through a handler of http.server. It returns when the client
has closed the connection.
"""

import contextlib
import functools
import gzip
import time
from pathlib import Path

_BLOCK = bytes(1 << 18)
_PAUSE_S = 0.05


def _head(handler, status=200, **headers):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()


def _without_end(handler, block=_BLOCK, pause_s=0.0):
    while True:
        handler.wfile.write(block)
        time.sleep(pause_s)


def _chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def _stall(handler):
    handler.wfile.flush()
    handler.connection.settimeout(30)
    handler.rfile.read(1)  # Until the client has closed the connection.


def endless_body(handler, data):
    _head(handler, Content_Length=1 << 40)
    _without_end(handler)


def endless_chunks(handler, data):
    _head(handler, Transfer_Encoding="chunked")
    _without_end(handler, _chunk(_BLOCK))


def endless_chunks_behind_the_right_length(handler, data):
    _head(handler, Content_Length=len(data), Transfer_Encoding="chunked")
    _without_end(handler, _chunk(_BLOCK))


def endless_body_behind_the_right_length(handler, data):
    _head(handler, Content_Length=len(data))
    handler.wfile.write(data)
    _without_end(handler)


def endless_body_without_length(handler, data):
    _head(handler, Connection="close")
    _without_end(handler)


def endless_trailers(handler, data):
    _head(handler, Transfer_Encoding="chunked")
    handler.wfile.write(_chunk(data) + b"0\r\n")
    _without_end(handler, b"X-A: " + b"a" * 1000 + b"\r\n")


def endless_chunk_size(handler, data):
    _head(handler, Transfer_Encoding="chunked")
    _without_end(handler, b"0" * 1000)


def tiny_chunks(handler, data):
    _head(handler, Transfer_Encoding="chunked")
    _without_end(handler, _chunk(b"x;" * 2) * 1000)


def negative_chunk(handler, data):
    _head(handler, Transfer_Encoding="chunked")
    handler.wfile.write(b"-5\r\n")
    _without_end(handler)


def a_byte_more(handler, data):
    _head(handler, Transfer_Encoding="chunked")
    handler.wfile.write(_chunk(data + b"x") + b"0\r\n\r\n")


def a_byte_less(handler, data):
    _head(handler, Content_Length=len(data) - 1)
    handler.wfile.write(data[:-1])


def cut_in_the_middle(handler, data):
    _head(handler, Content_Length=len(data))
    handler.wfile.write(data[: len(data) // 2])


def slow_body(handler, data):
    _head(handler, Content_Length=len(data))
    for k in range(len(data)):
        handler.wfile.write(data[k : k + 1])
        time.sleep(_PAUSE_S)


def slow_headers(handler, data):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: ")
    _without_end(handler, b"a", _PAUSE_S)


def stall_before_the_headers(handler, data):
    _stall(handler)


def stall_after_the_headers(handler, data):
    _head(handler, Content_Length=len(data))
    _stall(handler)


def stall_in_the_body(handler, data):
    _head(handler, Content_Length=len(data))
    handler.wfile.write(data[: len(data) // 2])
    _stall(handler)


def endless_headers(handler, data):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    _without_end(handler, b"X-A: " + b"a" * 1000 + b"\r\n")


def endless_continue(handler, data):
    _without_end(handler, b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def slow_continue(handler, data):
    _without_end(handler, b"HTTP/1.1 100 Continue\r\n\r\n", _PAUSE_S)


def no_http(handler, data):
    _without_end(handler)


def redirect_to_itself(handler, data):
    _head(handler, 302, Location=handler.path, Content_Length=0)


def endless_redirects(handler, data):
    _head(handler, 302, Location=f"{handler.path}?x", Content_Length=0)


def redirect_with_an_endless_body(handler, data):
    _head(handler, 302, Location=handler.path, Transfer_Encoding="chunked")
    _without_end(handler, _chunk(_BLOCK))


def redirect_to_a_file(handler, data):
    _head(handler, 302, Location=Path(__file__).as_uri(), Content_Length=0)


def missing_without_end(handler, data):
    _head(handler, 404, Transfer_Encoding="chunked")
    _without_end(handler, _chunk(_BLOCK))


def refused_without_end(handler, data):
    _head(handler, 403, Transfer_Encoding="chunked")
    _without_end(handler, _chunk(_BLOCK))


def broken_without_end(handler, data):
    _head(handler, 500, Content_Length=1 << 40)
    _without_end(handler)


@functools.cache
def bomb():
    """Return a compressed bomb. Making it takes longer than an impatient client waits."""
    return gzip.compress(bytes(32 << 20))


def compressed_bomb(handler, data):
    _head(handler, Content_Encoding="gzip", Content_Length=len(bomb()))
    handler.wfile.write(bomb())


# The exit codes of a command that reads a file whose size it knows.
LIES = {
    endless_body: {3},
    endless_chunks: {3},
    endless_chunks_behind_the_right_length: {3},
    endless_body_behind_the_right_length: {0},
    endless_body_without_length: {3},
    endless_trailers: {0, 1},
    endless_chunk_size: {1},
    tiny_chunks: {1, 3},
    negative_chunk: {1, 3},
    a_byte_more: {3},
    a_byte_less: {3},
    cut_in_the_middle: {1},
    slow_body: {1},
    slow_headers: {1},
    stall_before_the_headers: {1},
    stall_after_the_headers: {1},
    stall_in_the_body: {1},
    endless_headers: {1},
    endless_continue: {1},
    slow_continue: {1},
    no_http: {1},
    redirect_to_itself: {2},
    endless_redirects: {2},
    redirect_with_an_endless_body: {1},
    redirect_to_a_file: {2},
    missing_without_end: {2, 3},
    refused_without_end: {2},
    broken_without_end: {1},
    compressed_bomb: {3},
}


def tell(lie, handler, data):
    """Send the answer, and close the connection."""
    handler.close_connection = True
    with contextlib.suppress(OSError):
        lie(handler, data)


def disk_bytes(folder):
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
