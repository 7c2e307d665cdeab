"""Check with a real resolver, without downloads, that the package and each extra can be installed.

    .venv/bin/python build_tools/check_resolution.py --all

uv resolves each extra with the newest versions, with constraints.txt, and with the oldest allowed versions
of the direct dependencies. It reads the metadata of the wheels at the package index, and ignores local
wheels, source distributions and the settings of this machine. The script prints the numbers of solved cases
by platform and Python, and one line for each failed case. Exit codes: 0 all cases are solved, or there is no
network; 1 some cases failed; 2 uv is missing.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("", "train", "extract", "all", "dev")
MODES = {
    "newest": (),
    "constraints": ("--constraint", "constraints.txt"),
    "oldest": ("--resolution", "lowest-direct"),
}
# Names of the platforms in uv. Current wheels of torch need macOS 14.
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
}
MACOS = "14.0"
# Some packages exclude the first patch releases of a Python.
PYTHONS = {"3.11": "3.11.0", "3.12": "3.12.1", "3.13": "3.13.0", "3.14": "3.14.0"}
# Environment variables of uv that are kept: those of the index, the connection and the cache.
KEPT_VARIABLES = re.compile(r"(?!UV_)|UV_(DEFAULT_INDEX|INDEX_URL|CACHE_DIR|HTTP_\w+|SYSTEM_CERTS|NATIVE_TLS)$")
PARALLEL_RESOLUTIONS = 4


class Case(NamedTuple):
    """One resolution: a platform, a Python, a mode of MODES and an extra."""

    platform: str
    python: str
    mode: str
    extra: str

    def __str__(self) -> str:
        name = f".[{self.extra}]" if self.extra else "."
        return f"{name}, {self.mode}, {self.platform}, Python {self.python}"


def environment() -> dict[str, str]:
    """Return the environment variables without the settings of uv, except KEPT_VARIABLES."""
    kept = {name: value for name, value in os.environ.items() if KEPT_VARIABLES.match(name)}
    return kept | {"MACOSX_DEPLOYMENT_TARGET": MACOS}


def solve(uv: str, project: Path, case: Case) -> str:
    """Resolve a case with uv. Return the problem, or "" if it is solved."""
    command = [uv, "pip", "compile", "pyproject.toml", "--quiet", "--no-config", "--only-binary", ":all:"]
    command += ["--python-platform", PLATFORMS[case.platform], "--python-version", PYTHONS[case.python]]
    command += ["--extra", case.extra] if case.extra else []
    # uv needs an interpreter, but the options above override its platform and version.
    command += ["--python", sys.executable, *MODES[case.mode]]
    done = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True)
    return summarize_error(done.stderr) if done.returncode else ""


def summarize_error(text: str) -> str:
    """Return a message of uv as one line, without its frame and hints."""
    text = re.split(r"\n\s*hint:", re.sub(r"[×╰│─▶]+", "", text))[0]
    return " ".join(text.split()) or "uv failed without a message"


def main(argv: list[str] | None = None) -> int:
    """Run the script and return its exit code."""
    parser = argparse.ArgumentParser(description="Check that the package and each of its extras can be installed.")
    add = parser.add_argument
    add("--all", action="store_true", help="every platform and Python, not only Linux x86-64 and Python 3.11")
    add("--project", type=Path, default=ROOT, help="folder of pyproject.toml and constraints.txt")
    args = parser.parse_args(argv)

    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        print("check_resolution: needs uv: pip install uv", file=sys.stderr)
        return 2
    platforms, pythons = (PLATFORMS, PYTHONS) if args.all else (["Linux x86-64"], ["3.11"])
    cases = [Case(*values) for values in itertools.product(platforms, pythons, MODES, EXTRAS)]
    problem = solve(uv, args.project, cases[0])
    if re.search(r"Failed to fetch|[Cc]onnection|error sending request|dns error", problem):
        print(f"check_resolution: skipped, the package index cannot be reached: {problem}")
        return 0
    with ThreadPoolExecutor(PARALLEL_RESOLUTIONS) as pool:
        problems = dict(zip(cases, pool.map(lambda case: solve(uv, args.project, case), cases), strict=True))
    for (platform, python, mode), group in itertools.groupby(cases, key=lambda case: case[:3]):
        solved = [not problems[case] for case in group]
        print(f"{platform:15} Python {python:6} {mode:13}{sum(solved)} of {len(solved)}")
    failed = {case: problem for case, problem in problems.items() if problem}
    for case, problem in failed.items():
        print(f"{case}: {problem}")
    print(f"{len(cases) - len(failed)} of {len(cases)} solved")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
