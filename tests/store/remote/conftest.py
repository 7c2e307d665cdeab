import itertools

import pytest

from tests.store.remote.server import BUCKET, Proxy, s3_server

pytest.importorskip("obstore")
pytest.importorskip("moto")

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server():
    with s3_server() as url:
        yield url


@pytest.fixture
def remote(server, tmp_path, monkeypatch):
    """URL of an empty folder on the server. The disk cache is in tmp_path."""
    settings = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "TRACESTORE_CACHE_DIR": str(tmp_path / "cache"),
        "TRACESTORE_REMOTE_TIMEOUT": "2",
        "TRACESTORE_REMOTE_RETRY_TIMEOUT": "30",
        "TRACESTORE_REMOTE_LOCK_TTL": "3",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{next(_numbers)}/store.zarr"


@pytest.fixture
def proxy(server, remote, monkeypatch):
    """A proxy that receives all later requests to the server."""
    found = Proxy(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
    yield found
    found.close()
