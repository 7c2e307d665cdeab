"""Fixtures: a server like the Hugging Face Hub, and the library directed to it."""

import pytest

from tests.hub.server import TOKEN, Hub

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Start a server, and let the library of this process and its children use it."""
    server = Hub()
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    values = {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(tmp_path / "hf" / "hub"),
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    environment = {
        "HF_ENDPOINT": server.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": TOKEN,
        "TRACESTORE_REMOTE_TIMEOUT": "1",
        "TRACESTORE_REMOTE_RETRY_TIMEOUT": "1.5",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()
