"""Test build_tools/check_resolution.py with an index on localhost."""

import sys
from pathlib import Path

import pytest

from tests.helpers import load_script
from tests.packaging.index import make_wheel, serve_index

PROJECT = """
[project]
name = "project"
version = "1"
requires-python = ">=3.11"
dependencies = ["alpha>=1,<3"]

[project.optional-dependencies]
train = ["beta>=1"]
extract = ["alpha>=1"]
all = ["project[train,extract]"]
dev = ["project[all]", "gamma{gamma}"]
"""


@pytest.fixture(scope="module")
def script():
    return load_script("build_tools/check_resolution.py")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Serve an index where alpha 1 and 2 conflict with gamma 2."""
    if not Path(sys.executable).with_name("uv").exists():
        pytest.skip("uv is not installed")
    folder = tmp_path / "index"
    for name, version, requires in (
        ("alpha", "1.0", []),
        ("alpha", "2.0", []),
        ("beta", "1.0", ["alpha>=1"]),
        ("gamma", "1.0", []),
        ("gamma", "2.0", ["alpha<1"]),
    ):
        make_wheel(folder / name, name, version, requires)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv_cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve_index(folder) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        yield url


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "constraints.txt").write_text("alpha==1.0\n")
    (folder / "pyproject.toml").write_text(PROJECT.format(gamma="==1.0"))
    return folder


@pytest.mark.long
def test_all_cases_are_solved(script, index, project, capsys):
    assert script.main(["--project", str(project)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("5 of 5") == 3 and "15 of 15 solved" in printed


@pytest.mark.long
def test_each_failed_case_is_one_line(script, index, project, capsys):
    (project / "pyproject.toml").write_text(PROJECT.format(gamma="==2.0"))
    assert script.main(["--project", str(project)]) == 1
    *_, first, second, third, last = capsys.readouterr().out.splitlines()
    assert last == "12 of 15 solved"
    for line, mode in zip((first, second, third), script.MODES, strict=True):
        assert line.startswith(f".[dev], {mode}, Linux x86-64, Python 3.11: ") and "gamma" in line


def test_without_a_network_nothing_is_checked(script, index, project, monkeypatch, capsys):
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    assert script.main(["--project", str(project)]) == 0
    assert capsys.readouterr().out.startswith("check_resolution: skipped")


def test_all_covers_platforms_pythons_modes_and_extras(script, project, monkeypatch, capsys):
    monkeypatch.setattr(script.shutil, "which", lambda name, path: "uv")
    monkeypatch.setattr(script, "solve", lambda uv, project, case: "")
    assert script.main(["--all", "--project", str(project)]) == 0
    printed = capsys.readouterr().out
    assert f"{3 * 4 * 3 * 5} of 180 solved" in printed and printed.count("5 of 5") == 3 * 4 * 3


def test_error_is_summarized_in_one_line(script):
    text = "  × No solution found\n  ╰─▶ Because a\n      and b.\n\n      hint: try c"
    assert script.summarize_error(text) == "No solution found Because a and b."


def test_settings_of_the_machine_are_ignored(script, monkeypatch):
    monkeypatch.setenv("UV_FIND_LINKS", "/wheels")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://mirror.example/simple")
    found = script.environment()
    assert "UV_FIND_LINKS" not in found and found["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
