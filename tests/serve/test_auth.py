"""Test authentication and read-only access, without a browser."""

import http.client
import socket

import pytest

from tests.helpers import command
from tests.serve.conftest import start, stop
from tracestore.pages.document import SERVER_POLICY


def request(served, path, *, method="GET", host=None, cookie=None, headers=()):
    """Return status, headers and body of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{served.port}")
    if cookie:
        connection.putheader("Cookie", f"tracestore-{served.port}={cookie}")
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read()


@pytest.mark.long
def test_token_sets_a_cookie_that_opens_the_page(served):
    status, headers, body = request(served, f"/?token={served.token}")
    assert status == 200 and b"url=/store" in body
    cookie = headers["Set-Cookie"]
    assert cookie.startswith(f"tracestore-{served.port}={served.token};")
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    status, headers, body = request(served, "/store", cookie=served.token)
    assert status == 200 and b"viewer.js" in body
    assert headers["Content-Security-Policy"] == SERVER_POLICY and headers["Server"] == "tracestore"
    assert request(served, "/", cookie=served.token)[0] == 200


@pytest.mark.parametrize("path", ["/", "/store", "/trace/3", "/assets/bokeh.min.js", "/?token=", "/picture/3"])
@pytest.mark.parametrize("cookie", [None, "x", "é" * 8])
def test_requests_without_the_token_are_rejected(served, path, cookie):
    cookie = cookie and cookie.encode().decode("latin-1")
    assert request(served, path, cookie=cookie)[0] == 403
    assert request(served, path + ("&" if "?" in path else "?") + "token=wrong", cookie=cookie)[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", "127.0.0.1.:{port}"]
)
def test_foreign_host_names_are_rejected(served, host):
    """DNS rebinding: a page of another site points its host name to 127.0.0.1."""
    host = host.format(port=served.port)
    for path in (f"/?token={served.token}", "/store", "/trace/3"):
        assert request(served, path, host=host, cookie=served.token)[0] == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "null", "https://127.0.0.1:{port}"])
def test_foreign_origins_are_rejected(served, origin):
    headers = [("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Version", "13")]
    headers += [("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="), ("Sec-WebSocket-Protocol", "bokeh, ")]
    headers += [("Origin", origin.format(port=served.port))]
    for path in ("/store", "/trace/3", "/assets/bokeh.min.js"):
        assert request(served, path, cookie=served.token, headers=headers)[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_and_head_are_allowed(served, method):
    for path in ("/store", "/", "/assets/bokeh.min.js"):
        assert request(served, path, method=method, cookie=served.token)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../../../../../../etc/passwd",
        "/assets/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/assets/..%2f..%2f..%2f..%2f..%2fetc/passwd",
        "/assets//etc/passwd",
        "/assets/js/../../../../../../../etc/passwd",
        "/etc/passwd",
        "/store/../manifest",
        "/assets/extensions/../../../etc/passwd",
    ],
)
def test_no_other_files_are_served(served, path):
    status, _, body = request(served, path, cookie=served.token)
    assert status in (403, 404) and b"root:" not in body


def test_closed_connections_do_not_stop_the_server(served):
    message = f"GET /assets/bokeh.min.js HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n"
    message += f"Cookie: tracestore-{served.port}={served.token}\r\n\r\n"
    for _ in range(20):
        # Several responses: the first write to a closed connection is an error, the next one raises a signal.
        with socket.create_connection(("127.0.0.1", served.port)) as visitor:
            visitor.sendall(8 * message.encode())
    assert request(served, "/store", cookie=served.token)[0] == 200


def test_other_interfaces_do_not_listen(served):
    with socket.socket() as probe:
        probe.settimeout(2)
        assert probe.connect_ex(("127.0.0.2", served.port)) != 0


@pytest.mark.long
def test_two_servers_have_different_ports_and_tokens(served, served_store):
    other = start(served_store)
    try:
        assert other.port != served.port and other.token != served.token
        assert request(other, "/store", cookie=served.token)[0] == 403
        taken = command("serve", served_store, "--port", served.port, check=2)
        assert taken.stderr.count("\n") == 1 and "--port" in taken.stderr
    finally:
        assert stop(other) == (0, "stopped\n")


@pytest.mark.parametrize(
    "options, word",
    [
        (("--port", "x"), "port"),
        (("--port", "70000"), "65535"),
        (("--port", "00000070000"), "65535"),
        (("--results", "nowhere"), "results.json"),
        (("--prt", "1"), "did you mean --port?"),
    ],
)
def test_usage_errors_are_one_line(served_store, options, word):
    done = command("serve", served_store, *options, check=2)
    assert word in done.stderr and done.stderr.count("\n") == 1 and not done.stdout
    command("serve", "nowhere.zarr", check=2)
