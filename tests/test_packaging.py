"""What `pip install` gives somebody: built from the sdist, in an environment with nothing else in it."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.helpers import ROOT, make_traces, write_pickle

BUILT = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "csrc", "tracestore")


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    # Without what building in the checkout left there.
    pack = subprocess.Popen(
        ["tar", "--exclude=*.so", "--exclude=__pycache__", "-cf", "-", *BUILT], cwd=ROOT, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-xf", "-"], cwd=source, stdin=pack.stdout, check=True)
    assert pack.wait() == 0
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder / "dist", source], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2_000:] + done.stdout[-2_000:]
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.mark.timeout(600)
def test_sdist_and_wheel_hold_what_they_should(dist):
    sdist, wheel = dist
    with tarfile.open(sdist) as archive:
        names = {n.split("/", 1)[-1] for n in archive.getnames()}
    assert {"setup.py", "csrc/gather.c", "csrc/gather.h", "tracestore/_core/gather.pyx", "LICENSE"} <= names
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "tracestore/py.typed",
        "tracestore/cli/train.py",
        "tracestore/extract/facts.csv",
        "tracestore/_core/gather.pyi",
    } <= names
    extensions = {n for n in names if n.endswith(".so")}
    assert {re.sub(r".*/(\w+)\..*", r"\1", n) for n in extensions} == {
        p.stem for p in ROOT.glob("tracestore/_core/*.pyx")
    }
    assert not any(n.startswith(("tests/", "bench/", "tools/")) or n.endswith((".c", ".h")) for n in names)


@pytest.mark.timeout(600)
def test_installs_and_runs_where_nothing_else_is(dist, tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": True}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], **run)
    scripts = tmp_path / "venv" / "bin"
    subprocess.run([scripts / "pip", "install", "-q", "-c", ROOT / "constraints.txt", dist[1]], **run)
    (tmp_path / "traces").mkdir()
    write_pickle(tmp_path / "traces" / "a.pkl", make_traces(5))
    tracestore = scripts / "tracestore"
    subprocess.run([tracestore, "convert", "traces", "s.zarr"], **run)
    info = json.loads(subprocess.run([tracestore, "info", "s.zarr", "--json"], **run).stdout)
    assert info["num_traces"] == 5
    subprocess.run([tracestore, "verify", "s.zarr"], **run)
    findings = json.loads(subprocess.run([tracestore, "doctor", "--json"], **run).stdout)
    assert any(f["name"] == "torch" for f in findings)
    # What needs more says what to install, in one line.
    options = run | {"check": False}
    for command, extra in (
        (["serve", "s.zarr"], "serve"),
        (["plan", "s.zarr"], "train"),
        (["train", "--store", "s.zarr"], "train"),
        (["extract", "--model", "m", "--questions", "package:facts", "--out", "t"], "extract"),
    ):
        done = subprocess.run([tracestore, *command], **options)
        assert done.returncode == 2 and f"pip install 'tracestore[{extra}]'" in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    code = "import tracestore; print(tracestore.open('s.zarr').to_pandas())"
    done = subprocess.run([scripts / "python", "-c", code], **options)
    assert "pip install 'tracestore[bridges]'" in done.stderr
