"""The suites on every supported Python: `nox`, or `nox -s tests-3.12`. A Python that is missing is skipped.

Where there is a CPU wheel of PyTorch for a Python, everything runs; elsewhere what needs no torch.
"""

import nox

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
INSTALL = ("python", "build_tools/install.py")
WITHOUT_TORCH = [
    "tests/core", "tests/store", "tests/ingest", "tests/malicious_inputs", "tests/cli", "tests/convert",
    "tests/test_layout.py",
]  # fmt: skip
PYTEST = ("python", "-m", "pytest", "-n", "2", "--dist", "worksteal")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests with the newest versions of what is required."""
    try:
        session.run(*INSTALL, "--newest", "--torch", "cpu", "--extras", "dev")
        paths = []
    except nox.command.CommandFailed:
        session.log("no CPU wheel of PyTorch for this Python: only what needs no torch")
        session.run(*INSTALL, "--newest", "--torch", "none", "--extras", "test")
        paths = WITHOUT_TORCH
    session.run(*PYTEST, *(session.posargs or paths), env=ENVIRONMENT)


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """Run what needs no torch with the oldest numpy, zarr and numcodecs."""
    session.run(*INSTALL, "--newest", "--torch", "none", "--extras", "test")
    session.install("numpy==2.0.0", "zarr==3.1.0", "numcodecs==0.16.1")
    session.run(*PYTEST, *(session.posargs or WITHOUT_TORCH), env=ENVIRONMENT)
