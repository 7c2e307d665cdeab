"""Count lines of code by package, without docstrings, comments and blank lines.

python build_tools/count_lines.py [ROOT]
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
ROOTS = ("tracestore", "csrc", "tools", "build_tools", "setup.py", "noxfile.py", "bench", "tests")


def docstring_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold docstrings."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        may_have_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if may_have_docstring and ast.get_docstring(node, clean=False) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def count_python(text: str) -> int:
    """Return the number of lines of code of a Python module."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(text))


def count_c(text: str) -> int:
    """Return the number of lines of code of a C file."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in text.splitlines())


def count_cython(text: str) -> int:
    """Return the number of lines of code of a Cython module. Strings in triple quotes count as docstrings."""
    text = re.sub(r'^\s*"""(?:.*?)"""\s*$', "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines())


COUNTERS = {".py": count_python, ".c": count_c, ".h": count_c, ".pyx": count_cython, ".pxd": count_cython}


def package_of(path: Path) -> str:
    """Return the package that a file counts toward: the subpackage of tracestore/, or else the top folder."""
    parts = path.parts
    return "/".join(parts[:2]) if parts[0] == "tracestore" and len(parts) > 2 else parts[0]


def main() -> None:
    """Print the number of lines of each package."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    counts: Counter[str] = Counter()
    for name in ROOTS:
        top = root / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top] if top.exists() else []:
            counter = COUNTERS.get(path.suffix)
            if counter is not None and path.is_file():
                counts[package_of(path.relative_to(root))] += counter(path.read_text(encoding="utf-8"))
    for package, count in sorted(counts.items()):
        print(f"{count:7,}  {package}")
    product = sum(n for package, n in counts.items() if package.split("/")[0] not in ("tests", "bench"))
    print(f"{product:7,}  without tests/ and bench/\n{sum(counts.values()):7,}  in all")


if __name__ == "__main__":
    main()
