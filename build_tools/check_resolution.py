"""Check that the package and each of its extras can be installed, by a real resolver and without downloads.

    .venv/bin/python build_tools/check_resolution.py --all

uv solves each set of extras alone, with constraints.txt, and with the oldest version that each dependency
of this project allows, from the metadata of wheels at the package index: no local wheels, no source
distributions, no settings of this machine. A line for each platform and Python, and one for each set that
cannot be solved. Exit codes: 0 all are solved, 1 some are not, 2 there is no uv. Without a network: 0, and
a line saying that nothing was checked.
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
# What uv calls them; wheels of today's torch need macOS 14.
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
}
MACOS = "14.0"
# A few packages do without the first releases of a Python.
PYTHONS = {"3.11": "3.11.5", "3.12": "3.12.1", "3.13": "3.13.0", "3.14": "3.14.0"}
# Of the environment uv keeps what says where the index is and how it is reached, and its cache.
KEPT = (
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
    """One thing to solve."""

    platform: str
    python: str
    extra: str
    mode: str

    def __str__(self) -> str:
        name = f".[{self.extra}]" if self.extra else "."
        return f"{name}, {self.mode}, {self.platform}, Python {self.python}"


@dataclass(frozen=True)
class Answer:
    """The result of uv for a case; `problem` is "" where it is solved."""

    case: Case
    problem: str


def cases(platforms: Iterable[str], pythons: Iterable[str]) -> list[Case]:
    return [Case(*c) for c in itertools.product(platforms, pythons, EXTRAS, MODES)]


def environment() -> dict[str, str]:
    """Return this environment without uv's settings, but for those that reach the index."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UV_") or k in KEPT}
    return kept | {"MACOSX_DEPLOYMENT_TARGET": MACOS}


def solve(uv: str, project: Path, case: Case) -> Answer:
    """Let uv solve a case from the metadata at the index."""
    command = [uv, "pip", "compile", "pyproject.toml", "--quiet", "--no-config", "--only-binary", ":all:"]
    command += ["--python-platform", PLATFORMS[case.platform], "--python-version", PYTHONS[case.python]]
    command += ["--extra", case.extra] if case.extra else []
    # The interpreter that runs uv is not asked about anything.
    command += ["--python", sys.executable, *MODES[case.mode]]
    done = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True)
    return Answer(case, "" if done.returncode == 0 else summarize_error(done.stderr))


def summarize_error(text: str) -> str:
    """Return uv's message in one line, without its frame and hints."""
    text = re.split(r"\n\s*hint:", re.sub(r"[×╰│─▶]+", "", text))[0]
    return " ".join(text.split()) or "uv failed and said nothing"


def is_unreachable(answer: Answer) -> bool:
    """Return whether uv could not reach the index."""
    return re.search(r"Failed to fetch|[Cc]onnection|error sending request|dns error", answer.problem) is not None


def table(answers: Sequence[Answer]) -> str:
    """Return a line for each platform and Python: how many cases of each mode are solved."""
    solved, tried = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for answer in answers:
        key = (answer.case.platform, answer.case.python, answer.case.mode)
        tried[key] += 1
        solved[key] += not answer.problem
    lines = [f"{'':15}{'Python':8}" + "".join(f"{mode:>13}" for mode in MODES)]
    for platform, python in dict.fromkeys((a.case.platform, a.case.python) for a in answers):
        keys = [(platform, python, mode) for mode in MODES]
        lines.append(f"{platform:15}{python:8}" + "".join(f"{f'{solved[k]} of {tried[k]}':>13}" for k in keys))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check that the package and each of its extras can be installed.")
    add = parser.add_argument
    add("--all", action="store_true", help="every platform and Python, not only Linux x86-64 and Python 3.11")
    add("--project", type=Path, default=ROOT, help="folder of pyproject.toml and constraints.txt")
    add("--jobs", type=int, default=4, help="how many cases are solved at once (default: %(default)s)")
    args = parser.parse_args(argv)

    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        print("check_resolution: needs uv: pip install uv", file=sys.stderr)
        return 2
    chosen = cases(PLATFORMS, PYTHONS) if args.all else cases(["Linux x86-64"], ["3.11"])
    first = solve(uv, args.project, chosen[0])
    if is_unreachable(first):
        print(f"check_resolution: skipped, the package index cannot be reached: {first.problem}")
        return 0
    with ThreadPoolExecutor(args.jobs) as pool:
        answers = list(pool.map(lambda case: solve(uv, args.project, case), chosen))
    print(table(answers))
    problems = [a for a in answers if a.problem]
    for answer in problems:
        print(f"{answer.case}: {answer.problem}")
    print(f"{len(answers) - len(problems)} of {len(answers)} solved")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
