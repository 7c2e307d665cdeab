"""Fixtures: an S3 server, a proxy that injects faults, and the same store here and on the server."""

import itertools
import shutil
from datetime import timedelta

import pytest

from tests.store.remote.server import BUCKET, Proxy, shared_server
from tests.store.remote.stores import make_store, upload

obstore = pytest.importorskip("obstore.store")
pytest.importorskip("moto")

_from_url = obstore.from_url


def _from_url_with_short_pauses(url, *, retry_config, **options):
    pauses = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(seconds=15), "base": 2}
    return _from_url(url, retry_config=retry_config | {"backoff": pauses}, **options)


# As in tests/conftest.py: the servers of the tests recover at once.
obstore.from_url = _from_url_with_short_pauses

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server():
    """URL of an S3 server for all tests."""
    return shared_server()


LOGIN = {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@pytest.fixture
def remote(server, tmp_path, monkeypatch):
    """URL of an empty folder on the server. The disk cache is in tmp_path."""
    settings = LOGIN | {
        "AWS_ENDPOINT_URL": server,
        "TRACESTORE_CACHE_DIR": str(tmp_path / "cache"),
        "TRACESTORE_REMOTE_TIMEOUT": "2",
        "TRACESTORE_REMOTE_RETRY_TIMEOUT": "30",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{next(_numbers)}/store.zarr"


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Path of a store of 36 traces in six segments that no test changes."""
    return make_store(tmp_path_factory.mktemp("written") / "local.zarr")


@pytest.fixture
def local_store(written, tmp_path):
    """Path of a store of 36 traces in six segments."""
    return shutil.copytree(written, tmp_path / "local.zarr")


def upload_once(server, folder):
    """Upload a store for several tests, and return its URL."""
    url = f"s3://{BUCKET}/{next(_numbers)}/store.zarr"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (LOGIN | {"AWS_ENDPOINT_URL": server}).items():
            patch.setenv(name, value)
        upload(folder, url)
    return url


@pytest.fixture(scope="session")
def uploaded(server, written):
    """URL of a copy of `written` on the server."""
    return upload_once(server, written)


@pytest.fixture
def remote_store(remote, uploaded):
    """URL of a copy of `local_store` on the server that no test changes."""
    return uploaded


@pytest.fixture
def own_remote_store(local_store, remote):
    """URL of a copy of `local_store` on the server that this test may change."""
    upload(local_store, remote)
    return remote


@pytest.fixture
def proxy(server, remote, monkeypatch):
    """A proxy that receives all later requests to the server."""
    found = Proxy(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
    yield found
    found.close()
