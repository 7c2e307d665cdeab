"""Run the tests on every supported Python: `nox`, or `nox -s tests-3.12`.

Missing versions of Python are skipped. Without a CPU wheel of PyTorch for a Python, only the tests that
need no torch run.
"""

import nox

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
INSTALL = ("python", "build_tools/install.py")
WITHOUT_TORCH = [
    "tests/core", "tests/store", "tests/ingest", "tests/malicious_inputs", "tests/cli", "tests/convert",
    "tests/project/test_layout.py",
]  # fmt: skip
PYTEST = ("python", "-m", "pytest", "-n", "2", "--dist", "worksteal")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests with the newest versions of the dependencies."""
    try:
        session.run(*INSTALL, "--newest", "--torch", "cpu", "--extras", "dev")
        paths = []
    except nox.command.CommandFailed:
        session.log("no CPU wheel of PyTorch for this Python: running only the tests that need no torch")
        session.run(*INSTALL, "--newest", "--torch", "none", "--extras", "test")
        paths = WITHOUT_TORCH
    session.run(*PYTEST, *(session.posargs or paths), env=ENVIRONMENT)


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """Run the tests that need no torch with the oldest supported numpy, zarr and numcodecs."""
    session.run(*INSTALL, "--newest", "--torch", "none", "--extras", "test")
    session.install("numpy==2.0.0", "zarr==3.1.0", "numcodecs==0.16.1")
    session.run(*PYTEST, *(session.posargs or WITHOUT_TORCH), env=ENVIRONMENT)
