"""Check with a real resolver, without downloads, that the package and each extra can be installed.

    .venv/bin/python build_tools/check_resolution.py --all

uv resolves each extra with the newest versions, with constraints.txt, and with the oldest allowed versions
of the direct dependencies. It reads the metadata of the wheels at the package index, and ignores local
wheels, source distributions and the settings of this machine. The script prints a table by platform and
Python, and one line for each failed case. Exit codes: 0 all cases are solved, or there is no network; 1 some
cases failed; 2 uv is missing.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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
PYTHONS = {"3.11": "3.11.5", "3.12": "3.12.1", "3.13": "3.13.0", "3.14": "3.14.0"}
# Environment variables of uv that are kept: those of the index, the connection and the cache.
KEPT_VARIABLES = (
    "UV_DEFAULT_INDEX",
    "UV_INDEX_URL",
    "UV_CACHE_DIR",
    "UV_HTTP_TIMEOUT",
    "UV_HTTP_RETRIES",
    "UV_SYSTEM_CERTS",
    "UV_NATIVE_TLS",
)


@dataclass(frozen=True)
class Case:
    """One resolution: a platform, a Python, an extra and a mode of MODES."""

    platform: str
    python: str
    extra: str
    mode: str

    def __str__(self) -> str:
        name = f".[{self.extra}]" if self.extra else "."
        return f"{name}, {self.mode}, {self.platform}, Python {self.python}"


@dataclass(frozen=True)
class Result:
    """The result of a case. `problem` is empty if it was solved."""

    case: Case
    problem: str


def cases(platforms: Iterable[str], pythons: Iterable[str]) -> list[Case]:
    """Return the cases of some platforms and Pythons, with every extra and mode."""
    return [Case(*c) for c in itertools.product(platforms, pythons, EXTRAS, MODES)]


def environment() -> dict[str, str]:
    """Return the environment variables without the settings of uv, except KEPT_VARIABLES."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UV_") or k in KEPT_VARIABLES}
    return kept | {"MACOSX_DEPLOYMENT_TARGET": MACOS}


def solve(uv: str, project: Path, case: Case) -> Result:
    """Resolve a case with uv."""
    command = [uv, "pip", "compile", "pyproject.toml", "--quiet", "--no-config", "--only-binary", ":all:"]
    command += ["--python-platform", PLATFORMS[case.platform], "--python-version", PYTHONS[case.python]]
    command += ["--extra", case.extra] if case.extra else []
    # uv needs an interpreter, but the options above override its platform and version.
    command += ["--python", sys.executable, *MODES[case.mode]]
    done = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True)
    return Result(case, "" if done.returncode == 0 else summarize_error(done.stderr))


def summarize_error(text: str) -> str:
    """Return a message of uv as one line, without its frame and hints."""
    text = re.split(r"\n\s*hint:", re.sub(r"[×╰│─▶]+", "", text))[0]
    return " ".join(text.split()) or "uv failed without a message"


def is_unreachable(result: Result) -> bool:
    """Return whether uv could not reach the index."""
    return re.search(r"Failed to fetch|[Cc]onnection|error sending request|dns error", result.problem) is not None


def table(results: Sequence[Result]) -> str:
    """Return the number of solved cases by platform, Python and mode."""
    solved, tried = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for result in results:
        key = (result.case.platform, result.case.python, result.case.mode)
        tried[key] += 1
        solved[key] += not result.problem
    lines = [f"{'':15}{'Python':8}" + "".join(f"{mode:>13}" for mode in MODES)]
    for platform, python in dict.fromkeys((r.case.platform, r.case.python) for r in results):
        keys = [(platform, python, mode) for mode in MODES]
        lines.append(f"{platform:15}{python:8}" + "".join(f"{f'{solved[k]} of {tried[k]}':>13}" for k in keys))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the script and return its exit code."""
    parser = argparse.ArgumentParser(description="Check that the package and each of its extras can be installed.")
    add = parser.add_argument
    add("--all", action="store_true", help="every platform and Python, not only Linux x86-64 and Python 3.11")
    add("--project", type=Path, default=ROOT, help="folder of pyproject.toml and constraints.txt")
    add("--jobs", type=int, default=4, help="number of parallel resolutions (default: %(default)s)")
    args = parser.parse_args(argv)

    of_environment = Path(sys.executable).with_name("uv")
    uv = str(of_environment) if of_environment.exists() else shutil.which("uv")
    if uv is None:
        print("check_resolution: needs uv: pip install uv", file=sys.stderr)
        return 2
    chosen = cases(PLATFORMS, PYTHONS) if args.all else cases(["Linux x86-64"], ["3.11"])
    first = solve(uv, args.project, chosen[0])
    if is_unreachable(first):
        print(f"check_resolution: skipped, the package index cannot be reached: {first.problem}")
        return 0
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda case: solve(uv, args.project, case), chosen))
    print(table(results))
    failed = [r for r in results if r.problem]
    for result in failed:
        print(f"{result.case}: {result.problem}")
    print(f"{len(results) - len(failed)} of {len(results)} solved")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
