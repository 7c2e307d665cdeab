"""Print the line coverage of csrc/ from the counts of instrumented programs.

Lines are counted once, however many programs contain their file. The arguments are folders with
.gcno and .gcda files: build/coverage-c of ``make coverage-c``, and the build folder of an extension
module built with ``CFLAGS=--coverage LDFLAGS=--coverage``.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def line_counts(folders: list[Path], gcov: list[str]) -> tuple[dict[str, dict[int, int]], int]:
    """Return the execution counts by file and line, and the number of excluded lines.

    If no function whose name ends with ``_avx512`` ran, the processor lacks AVX-512, and the lines
    of these functions are excluded.
    """
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    wide: dict[str, set[int]] = defaultdict(set)
    others: dict[str, set[int]] = defaultdict(set)
    wide_ran = False
    for data in sorted(path for folder in folders for path in folder.rglob("*.gcda")):
        command = [*gcov, "--json-format", "--stdout", data.name]
        done = subprocess.run(command, cwd=data.parent, capture_output=True, text=True, check=True)
        for document in filter(None, done.stdout.splitlines()):
            report = json.loads(document)
            for file in report["files"]:
                path = Path(report["current_working_directory"], file["file"]).resolve()
                name = f"csrc/{path.name}"
                if path.parent.name != "csrc" or not (ROOT / name).exists():
                    continue
                for function in file["functions"]:
                    is_wide = function["name"].endswith("_avx512")
                    wide_ran |= is_wide and function["execution_count"] > 0
                    inside = range(function["start_line"], function["end_line"] + 1)
                    (wide if is_wide else others)[name].update(inside)
                for line in file["lines"]:
                    number = line["line_number"]
                    counts[name][number] = counts[name].get(number, 0) + line["count"]
    left_out = 0
    for name, numbers in wide.items():
        for number in numbers - others[name] if not wide_ran else ():
            left_out += counts[name].pop(number, None) is not None
    return counts, left_out


def ranges(numbers: list[int]) -> str:
    """Return sorted numbers as text, with consecutive ones joined: "3, 5-7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def main() -> int:
    """Print the coverage. Return 1 if it is below --at-least."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--gcov", type=shlex.split, default=["gcov"])
    parser.add_argument("--at-least", type=float, default=0, help="exit with code 1 below this percentage")
    arguments = parser.parse_args()
    counts, left_out = line_counts(arguments.folders, arguments.gcov)
    total = ran = 0
    for name, lines in sorted(counts.items()):
        missed = sorted(number for number, count in lines.items() if count == 0)
        total, ran = total + len(lines), ran + len(lines) - len(missed)
        percent = 100 * (1 - len(missed) / len(lines))
        print(f"{name:24} {len(lines):5} lines {percent:6.1f} %  {ranges(missed)}")
    percent = 100 * ran / max(total, 1)
    print(f"{'csrc/':24} {total:5} lines {percent:6.1f} %")
    if left_out:
        print(f"without {left_out} lines that need AVX-512, which this processor lacks")
    return int(percent < arguments.at_least)


if __name__ == "__main__":
    sys.exit(main())
