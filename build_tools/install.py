"""Install this checkout and a suitable PyTorch into the virtual environment of the running Python.

    .venv/bin/python build_tools/install.py --extras train,extract

With --wheel, install a wheel of tracestore instead, and its dependencies from wheels only.

On a machine without a GPU, the script looks for a CPU wheel of PyTorch in the sources of pip's configuration,
then in PyTorch's index of CPU wheels. It installs with uv from the same sources, or with pip if uv is not
available or fails. It needs only Python and pip.
"""

import argparse
import ast
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

# Vendored by pip, and therefore available before anything is installed.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UV = "uv>=0.8,<1"
TRITON = "triton>=3.2,<4"
# Settings of pip: the options of uv that take their words, those that they switch on, and variables of uv.
UV_OPTIONS = {
    "index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host", "constraint": "-c",
}  # fmt: skip
UV_SWITCHES = {"no-index": "--no-index", "pre": "--prerelease=allow", "no-cache-dir": "--no-cache"}
UV_VARIABLES = {
    "cert": ["SSL_CERT_FILE"], "proxy": ["HTTP_PROXY", "HTTPS_PROXY"],
    "timeout": ["UV_HTTP_TIMEOUT"], "default-timeout": ["UV_HTTP_TIMEOUT"],
}  # fmt: skip
# Settings of pip that do not affect what is installed.
IGNORED_SETTINGS = {
    "cache-dir", "config-file", "disable-pip-version-check", "exists-action", "log", "no-color", "no-input",
    "no-python-version-warning", "no-warn-script-location", "prefer-binary", "progress-bar", "quiet",
    "require-virtualenv", "retries", "root-user-action", "verbose",
}  # fmt: skip


class TorchChoice(NamedTuple):
    """The PyTorch to install.

    Parameters
    ----------
    requirements : tuple of str
        Requirements for the installer. Empty if the installed PyTorch fits.
    reason : str
        Explanation for the user, in one line.
    index : str, optional
        Package index in addition to those of pip's configuration.
    """

    requirements: tuple[str, ...]
    reason: str
    index: str | None = None


def pip_output(python: Path, *arguments: str, **options: Any) -> str:
    """Return the standard output of pip, or "" if it fails."""
    done = subprocess.run([python, "-m", "pip", *arguments], capture_output=True, text=True, **options)
    return done.stdout if done.returncode == 0 else ""


def pip_settings(python: Path) -> dict[str, str]:
    """Return the settings of `pip install`, from pip's files and the environment."""
    return parse_pip_settings(pip_output(python, "config", "list"))


def parse_pip_settings(listed: str) -> dict[str, str]:
    """Return the output of `pip config list` as a dict. The environment precedes [install], then [global]."""
    levels: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for section, key, value in re.findall(r"^(.*)\.(.*?)=(.*)$", listed, re.MULTILINE):
        levels.get(section, {})[key] = ast.literal_eval(value)
    return levels["global"] | levels["install"] | levels[":env:"]


def uv_settings(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the options and environment variables of uv that correspond to settings of pip.

    Raises
    ------
    ValueError
        uv has no counterpart of a setting. The message is its name.
    """
    options, environment = [], {}
    for key, value in settings.items():
        if key in UV_OPTIONS:
            options += [item for word in value.split() for item in (UV_OPTIONS[key], word)]
        elif key in UV_SWITCHES:
            options += [UV_SWITCHES[key]] if value.lower() in ("1", "y", "yes", "t", "true", "on") else []
        elif key in UV_VARIABLES:
            environment |= dict.fromkeys(UV_VARIABLES[key], value)
        elif key not in IGNORED_SETTINGS:
            raise ValueError(key)
    # Like pip: the newest version of all sources.
    return [*options, "--index-strategy", "unsafe-best-match"], environment


def has_gpu() -> bool:
    """Return whether this machine has a GPU that PyTorch supports: NVIDIA, AMD or Apple."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")) or sys.platform == "darwin"


def supported_torch(project: Path) -> SpecifierSet:
    """Return the range of PyTorch versions that the extras allow for this Python."""
    extras = tomllib.loads((project / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = [r for r in map(Requirement, extras["train"]) if r.name == "torch"]
    return SpecifierSet(",".join(str(r.specifier) for r in found if r.marker is None or r.marker.evaluate()))


def cpu_version(python: Path, supported: SpecifierSet, *options: str) -> str | None:
    """Return the newest CPU version, such as 2.13.0+cpu, that pip finds."""
    listed = pip_output(python, "index", "versions", "torch", "--retries", "1", *options)
    found = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    versions = found[1].split(", ") if found else []
    return next((v for v in versions if v.endswith("+cpu") and v in supported), None)


def installed_torch(python: Path) -> str | None:
    """Return the installed version of PyTorch, or None."""
    found = re.search(r"^Version: (.*)$", pip_output(python, "show", "torch"), re.MULTILINE)
    return found[1] if found else None


def local_cpu_wheel(python: Path, supported: SpecifierSet, settings: dict[str, str]) -> str | None:
    """Return the URL of a wheel in the find-links folders that requires no packages of NVIDIA."""
    folders = []
    for link in settings.get("find-links", "").split():
        path = Path(url2pathname(urlsplit(link).path)) if link.startswith("file:") else Path(link).expanduser()
        if any(path.glob("torch-*.whl")):
            folders += ["--find-links", str(path)]
    if not folders:
        return None
    command = ["install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--no-index", *folders]
    environment = {k: v for k, v in os.environ.items() if k != "PIP_FIND_LINKS"}
    report = pip_output(python, *command, "--report", "-", f"torch{supported}", env=environment)
    if not report:
        return None
    (wheel,) = json.loads(report)["install"]
    if any(re.match("nvidia|cuda|triton|pytorch-triton", r) for r in wheel["metadata"].get("requires_dist", [])):
        return None
    url: str = wheel["download_info"]["url"]
    return url


def choose_torch(python: Path, supported: SpecifierSet, wanted: str, cpu_index: str) -> TorchChoice:
    """Return the PyTorch to install.

    Parameters
    ----------
    python : Path
        Interpreter of the virtual environment.
    supported : SpecifierSet
        Supported versions.
    wanted : str
        "auto", "cpu", "default" (the wheel of the index, with CUDA on Linux), "none" or a requirement.
    cpu_index : str
        URL of the index of CPU wheels.
    """
    if wanted == "none":
        return TorchChoice((), "not installed, as requested")
    if wanted not in ("auto", "cpu", "default"):
        return TorchChoice((wanted,), f"{wanted}, as requested")
    plain = (f"torch{supported}",)
    installed = installed_torch(python)
    if installed is not None and installed in supported:
        return TorchChoice((), f"{installed}, which is installed")
    if wanted == "default":
        return TorchChoice(plain, "the wheel of the index, as requested")
    if wanted == "auto" and has_gpu():
        return TorchChoice(plain, "the wheel of the index, for the GPU of this machine")
    if version := cpu_version(python, supported):
        return TorchChoice((f"torch=={version}",), f"{version}, a CPU wheel of pip's configured sources")
    if wheel := local_cpu_wheel(python, supported, pip_settings(python)):
        return TorchChoice((f"torch @ {wheel}",), f"{wheel.rpartition('/')[2]}, a CPU wheel of pip's find-links")
    if version := cpu_version(python, supported, "--index-url", cpu_index, "--timeout", "10"):
        return TorchChoice((f"torch=={version}",), f"{version}, a CPU wheel of {cpu_index}", cpu_index)
    if wanted == "cpu":
        raise SystemExit(f"install: no CPU wheel of torch{supported} in pip's sources, and none at {cpu_index}")
    reason = "the wheel of the index: no CPU wheel found in pip's sources, and none at " + cpu_index
    if platform.system() == "Linux":
        reason += "; with CUDA, about 3 GB to download and 6 GB on disk"
    return TorchChoice(plain, reason)


def uv_command(python: Path) -> tuple[list[str], dict[str, str]] | None:
    """Return the command and the environment of `uv pip install` after installing uv if missing, or None."""
    uv = python.with_name("uv")
    try:
        options, environment = uv_settings(pip_settings(python))
    except ValueError as error:
        print(f"install: using pip: uv has no counterpart of pip's setting {error}", flush=True)
        return None
    if not uv.exists():
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV])
    if not uv.exists():
        return None
    return [str(uv), "pip", "install", "--quiet", "--python", str(python), *options], os.environ | environment


def install(python: Path, arguments: list[str], index: str | None = None, installer: str = "auto") -> bool:
    """Run `pip install` with uv, or with pip if uv fails.

    Parameters
    ----------
    python : Path
        Interpreter of the virtual environment.
    arguments : list of str
        Arguments of `pip install`.
    index : str, optional
        Package index in addition to those of pip's configuration.
    installer : str
        "auto", or "pip" to skip uv.

    Returns
    -------
    bool
        Whether the installation succeeded.
    """
    uv = uv_command(python) if installer != "pip" else None
    if uv is not None:
        command, environment = uv
        command += ["--index", index] if index else []
        if subprocess.run([*command, *arguments], env=environment).returncode == 0:
            return True
        print("install: uv failed; trying pip", flush=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--extra-index-url", index] if index else []
    # A flag of uv that pip lacks and does not need: pip always reinstalls an editable package.
    arguments = [a for a in arguments if not a.startswith("--reinstall-package")]
    return subprocess.run([*command, *arguments]).returncode == 0


def main(argv: list[str] | None = None) -> int:
    """Run the script and return its exit code."""
    parser = argparse.ArgumentParser(description="Install this checkout into the environment of this Python.")
    add = parser.add_argument
    add("--extras", default="train,extract", help="extras of the package (default: %(default)s)")
    add("--wheel", type=Path, help="install this wheel instead of the checkout, and compile nothing")
    add("--no-deps", action="append", default=[], metavar="REQUIREMENT", help="install this without its dependencies")
    text = "with a CPU wheel of torch, also install Triton, whose interpreter the tests use"
    add("--triton", action="store_true", help=text)
    add("--torch", default="auto", help="auto, cpu, default, none or a requirement (default: %(default)s)")
    add("--newest", action="store_true", help="install the newest versions instead of those of constraints.txt")
    add("--installer", choices=("auto", "pip"), default="auto")
    args = parser.parse_args(argv)

    if sys.prefix == sys.base_prefix:
        parser.error("run this with the Python of a virtual environment: python3 -m venv .venv")
    python = Path(sys.executable)
    choice = choose_torch(python, supported_torch(ROOT), args.torch, CPU_INDEX)
    print(f"install: PyTorch is {choice.reason}", flush=True)
    extras = f"[{args.extras}]" if args.extras else ""
    if args.wheel is None:
        package = ["-e", f"{ROOT}{extras}"]
    else:
        package = ["--only-binary", ":all:", f"tracestore{extras} @ {args.wheel.resolve().as_uri()}"]
    arguments = ["--reinstall-package=tracestore"]
    arguments += [] if args.newest else ["--constraint", str(ROOT / "constraints.txt")]
    if not install(python, [*arguments, *choice.requirements, *package], choice.index, args.installer):
        return 1
    if args.no_deps and not install(python, ["--no-deps", *args.no_deps], installer=args.installer):
        return 1
    # Triton has wheels for Linux only, and PyTorch with CUDA installs its own.
    is_linux = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    is_wanted = args.triton and is_linux and (installed_torch(python) or "").endswith("+cpu")
    if is_wanted and not install(python, ["--no-deps", TRITON], installer=args.installer):
        print("install: no Triton; the tests of the GPU kernels will be skipped", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
