"""Fixtures: the browser, and a page with every element."""

import pytest

from tests.browser import chromium
from tests.pages.example import example_page

__all__ = ["chromium"]


@pytest.fixture(scope="session")
def example(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "example.html"
    path.write_bytes(example_page().encode("utf-8", "backslashreplace"))
    return path
