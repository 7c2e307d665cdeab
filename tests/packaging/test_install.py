"""Test build_tools/install.py: the choice of PyTorch, and the settings of pip for uv."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, load_script
from tests.packaging.index import make_wheel, serve_index

SUPPORTED = ">=2.6,<3"
NOWHERE = "http://127.0.0.1:9/"


@pytest.fixture(scope="module")
def script():
    return load_script("build_tools/install.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the interpreter of an environment with pip only."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    return folder / "venv" / "bin" / "python"


@pytest.fixture
def supported(script):
    return script.SpecifierSet(SUPPORTED)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    """Remove the settings of pip and uv of this machine."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv_cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def on_cpu(monkeypatch, script):
    monkeypatch.setattr(script, "has_gpu", lambda: False)


@pytest.fixture
def plain_index(tmp_path, monkeypatch):
    """Serve an index for pip, whose torch requires packages of NVIDIA."""
    folder = tmp_path / "plain"
    for version in ("2.5.0", "2.9.0", "2.15.0", "3.0.0"):
        make_wheel(folder / "torch", "torch", version, ["nvidia-runtime"])
    make_wheel(folder / "nvidia-runtime", "nvidia_runtime", "13.0")
    with serve_index(folder) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        yield url


@pytest.fixture
def cpu_index(tmp_path):
    """Serve an index that replaces PyTorch's index of CPU wheels."""
    folder = tmp_path / "cpu"
    for version in ("2.5.0+cpu", "2.8.0+cpu", "2.14.0+cpu", "3.0.0+cpu"):
        make_wheel(folder / "torch", "torch", version)
    with serve_index(folder) as url:
        yield url


def test_environment_and_install_settings_take_precedence(script):
    listed = "\n".join(
        [
            "global.find-links='/a /b'",
            "global.index-url='https://one.example/simple'",
            "install.index-url='https://two.example/simple'",
            "download.index-url='https://three.example/simple'",
            ":env:.find-links='/c'",
            "global.extra-index-url='\\nhttps://four.example/simple\\nfile:///five'",
        ]
    )
    settings = script.parse_pip_settings(listed)
    assert settings["find-links"] == "/c"
    assert settings["index-url"] == "https://two.example/simple"
    assert settings["extra-index-url"].split() == ["https://four.example/simple", "file:///five"]


def test_settings_of_pip_become_options_of_uv(script):
    settings = {
        "index-url": "https://one.example/simple",
        "extra-index-url": "https://two.example/simple\nhttps://three.example/simple",
        "find-links": "/a /b",
        "trusted-host": "one.example",
        "no-index": "false",
        "pre": "1",
        "cert": "/certificates.pem",
        "proxy": "http://proxy.example:3128",
        "default-timeout": "180",
        "disable-pip-version-check": "1",
    }
    options, environment = script.uv_settings(settings)
    pairs = list(itertools.pairwise(options))
    for pair in (
        ("--default-index", "https://one.example/simple"),
        ("--index", "https://two.example/simple"),
        ("--index", "https://three.example/simple"),
        ("--find-links", "/a"),
        ("--find-links", "/b"),
        ("--allow-insecure-host", "one.example"),
        ("--index-strategy", "unsafe-best-match"),
    ):
        assert pair in pairs
    assert "--prerelease=allow" in options and "--no-index" not in options
    assert environment["SSL_CERT_FILE"] == "/certificates.pem" and environment["UV_HTTP_TIMEOUT"] == "180"
    assert environment["HTTPS_PROXY"] == "http://proxy.example:3128"
    with pytest.raises(ValueError, match="client-cert"):
        script.uv_settings({"client-cert": "/client.pem"})


def test_range_of_torch_matches_pyproject(script):
    supported = script.supported_torch(ROOT)
    assert "2.13.0" in supported and "2.13.0+cpu" in supported and "3.0.0" not in supported


@pytest.mark.long
def test_cpu_wheel_of_the_configured_sources_is_first_choice(
    script, python, supported, on_cpu, plain_index, cpu_index, tmp_path, monkeypatch
):
    make_wheel(tmp_path / "wheels", "torch", "2.10.0+cpu")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    choice = script.choose_torch(python, supported, "auto", cpu_index)
    assert choice.requirements == ("torch==2.10.0+cpu",) and choice.index is None
    assert "pip's configured sources" in choice.reason


@pytest.mark.long
@pytest.mark.parametrize("requires, is_taken", [(["sympy"], True), (["nvidia-runtime"], False)])
def test_wheel_without_a_local_version_needs_no_nvidia_packages(
    script, python, supported, on_cpu, plain_index, tmp_path, monkeypatch, requires, is_taken
):
    wheel = make_wheel(tmp_path / "wheels", "torch", "2.10.0", requires)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (requirement,) = script.choose_torch(python, supported, "auto", NOWHERE).requirements
    assert requirement == (f"torch @ {wheel.as_uri()}" if is_taken else "torch<3,>=2.6")


@pytest.mark.long
def test_pytorchs_cpu_index_is_second_choice(script, python, supported, on_cpu, plain_index, cpu_index):
    choice = script.choose_torch(python, supported, "auto", cpu_index)
    assert choice.requirements == ("torch==2.14.0+cpu",) and choice.index == cpu_index


@pytest.mark.long
def test_wheel_of_the_index_is_last_choice(script, python, supported, on_cpu, plain_index):
    choice = script.choose_torch(python, supported, "auto", NOWHERE)
    assert choice.requirements == ("torch<3,>=2.6",) and choice.index is None and NOWHERE in choice.reason
    with pytest.raises(SystemExit, match="no CPU wheel"):
        script.choose_torch(python, supported, "cpu", NOWHERE)


@pytest.mark.long
def test_with_a_gpu_the_wheel_of_the_index_is_chosen(script, python, supported, plain_index, cpu_index, monkeypatch):
    monkeypatch.setattr(script, "has_gpu", lambda: True)
    assert script.choose_torch(python, supported, "auto", cpu_index).requirements == ("torch<3,>=2.6",)
    assert script.choose_torch(python, supported, "cpu", cpu_index).requirements == ("torch==2.14.0+cpu",)
    assert script.choose_torch(python, supported, "torch==2.9.0", cpu_index).requirements == ("torch==2.9.0",)


def test_installed_version_is_kept(script, supported, plain_index, cpu_index, monkeypatch):
    monkeypatch.setattr(script, "installed_torch", lambda python: "2.9.0+cu130")
    assert script.choose_torch(Path(sys.executable), supported, "auto", cpu_index).requirements == ()


@pytest.mark.long
@pytest.mark.parametrize("installer", ["uv", "pip", "uv that fails"])
def test_installs_from_both_indexes(script, python, plain_index, cpu_index, capfd, installer):
    uv, real_uv = python.with_name("uv"), Path(sys.executable).with_name("uv")
    if installer == "uv" and not real_uv.exists():
        pytest.skip("uv is not installed")
    uv.unlink(missing_ok=True)
    if installer == "uv that fails":
        uv.write_text("#!/bin/sh\nexit 1\n")
        uv.chmod(0o755)
    else:
        uv.symlink_to(real_uv)
    arguments = ["--reinstall-package=tracestore", "torch==2.14.0+cpu", "nvidia-runtime"]
    subprocess.run([python, "-m", "pip", "uninstall", "-qy", "torch"], check=True)
    assert script.install(python, arguments, cpu_index, "pip" if installer == "pip" else "auto")
    assert script.installed_torch(python) == "2.14.0+cpu"
    assert ("trying pip" in capfd.readouterr().out) == (installer == "uv that fails")
    assert not script.install(python, ["not-in-any-index"], cpu_index, "pip" if installer == "pip" else "auto")
