"""Test the contents of the sdist and the wheel, and that the wheel works in an empty environment without a compiler."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tracestore
from tests.helpers import ROOT, make_traces, write_store

pytestmark = pytest.mark.long

# Files that building and testing leave in a checkout, and git ignores.
IGNORED = (".git", ".venv*", "build", "dist", "demo", "results", "*.egg-info", "*.so", "*.o", "__pycache__", ".*_cache")
IGNORED += (".hypothesis", ".nox")


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Return the sdist and the wheel that is built from it, or those in the folder TRACESTORE_DIST."""
    folder = Path(os.environ.get("TRACESTORE_DIST") or tmp_path_factory.mktemp("package") / "dist")
    if "TRACESTORE_DIST" not in os.environ:
        source = folder.parent / "source"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*IGNORED))
        done = subprocess.run(
            [sys.executable, "-m", "build", "--outdir", folder, source], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2_000:] + done.stdout[-2_000:]
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.timeout(600)
def test_sdist_holds_the_checkout(dist):
    with tarfile.open(dist[0]) as archive:
        names = {m.name.split("/", 1)[-1] for m in archive.getmembers() if m.isfile()}
    assert {"setup.py", "Makefile", "LICENSE", "csrc/gather.c", "tests/conftest.py", "CITATION.cff"} <= names
    assert not any(n.endswith((".so", ".pyc")) for n in names)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True) if (ROOT / ".git").exists() else None
    if listed is not None and listed.returncode == 0:
        tracked = {n for n in listed.stdout.split("\0") if n and (ROOT / n).exists()}
        made = {n for n in names if n in ("PKG-INFO", "setup.cfg") or ".egg-info/" in n}
        assert names - made == tracked


@pytest.mark.timeout(600)
def test_wheel_holds_only_the_package(dist):
    with zipfile.ZipFile(dist[1]) as archive:
        names = set(archive.namelist())
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        assert f"\nVersion: {tracestore.__version__}\n" in archive.read(metadata).decode()
    assert {
        "tracestore/py.typed",
        "tracestore/__main__.py",
        "tracestore/cli/commands/train.py",
        "tracestore/extract/facts.csv",
        "tracestore/_core/gather.pyi",
        *(str(path.relative_to(ROOT)) for path in ROOT.glob("tracestore/ingest/builtin/tools/*.toml")),
    } <= names
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)
    (extension,) = (n for n in names if n.endswith(".so"))
    assert extension.startswith("tracestore/_core/_native.")
    assert all(n.startswith(("tracestore/", "tracestore-")) for n in names)
    assert not any(n.endswith((".c", ".h", ".pyx", ".pxd", ".pxi")) for n in names)


@pytest.mark.timeout(600)
def test_wheel_installs_and_runs_in_an_empty_environment(dist, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    scripts = tmp_path / "venv" / "bin"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    # No compiler is available.
    environment |= {"PATH": str(scripts), "CC": "/bin/false", "CXX": "/bin/false"}
    run = {"cwd": tmp_path / "elsewhere", "env": environment, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    install = [scripts / "pip", "install", "-q", "--only-binary", ":all:", "-c", ROOT / "constraints.txt", dist[1]]
    done = subprocess.run(install, **run)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([scripts / "python", "-I", ROOT / "tests/smoke.py", "--without-torch"], **run)
    assert done.returncode == 0, done.stdout + done.stderr
    write_store(tmp_path / "elsewhere" / "s.zarr", make_traces(1))
    command = scripts / "tracestore"
    findings = json.loads(subprocess.run([command, "doctor", "--json"], **run).stdout)
    assert any(f["name"] == "torch" for f in findings)
    # Commands that need an extra name it in one line.
    for words, extra in (
        (["serve", "s.zarr"], "serve"),
        (["plan", "s.zarr"], "train"),
        (["train", "--store", "s.zarr"], "train"),
        (["extract", "--model", "m", "--questions", "package:facts", "--out", "t"], "extract"),
    ):
        done = subprocess.run([command, *words], **run)
        assert done.returncode == 2 and f"pip install 'tracestore[{extra}]'" in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    code = "import tracestore; print(tracestore.open('s.zarr').to_pandas())"
    done = subprocess.run([scripts / "python", "-c", code], **run)
    assert "pip install 'tracestore[bridges]'" in done.stderr
