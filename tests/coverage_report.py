"""Report the coverage of the whole suite, and how much of it the tests of `make test` reach.

python tests/coverage_report.py FAST.coverage WHOLE.coverage

Both files are coverage.py's data, combined over processes. Exits with 1 where a bound does not hold.
"""

import argparse
import sys
from pathlib import Path

import coverage

MIN_BRANCH_PERCENT = 90.0
MIN_SHARE_OF_FAST_PERCENT = 90.0


def executed_lines(path: Path) -> tuple[coverage.Coverage, set[tuple[str, int]]]:
    """Return the measurement, and the (file, line) pairs that it holds of statements."""
    measured = coverage.Coverage(data_file=str(path))
    measured.load()
    lines = set()
    for name in measured.get_data().measured_files():
        _, statements, _, missing, _ = measured.analysis2(name)
        lines |= {(name, line) for line in set(statements) - set(missing)}
    return measured, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fast", type=Path)
    parser.add_argument("whole", type=Path)
    args = parser.parse_args()
    _, fast = executed_lines(args.fast)
    whole_measured, whole = executed_lines(args.whole)
    percent = whole_measured.report(skip_covered=True, sort="cover")
    share = 100 * len(fast & whole) / len(whole)
    print(f"whole suite: {percent:.1f} % of statements and branches (at least {MIN_BRANCH_PERCENT:.0f})")
    print(f"make test: {share:.1f} % of the lines that the whole suite runs (at least {MIN_SHARE_OF_FAST_PERCENT:.0f})")
    return int(percent < MIN_BRANCH_PERCENT or share < MIN_SHARE_OF_FAST_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
