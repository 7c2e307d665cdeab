"""Check the prose of this repository: docstrings, comments, messages and documents.

python build_tools/check_language.py [PATH ...]

Reports the words and phrases listed in dialect.txt, docstrings that begin with a subordinate clause
("Of ...", "What ..."), and docstrings of functions that do not begin with a verb in the imperative. Without
PATH it checks the files in ROOTS. Spelling is checked by codespell (see pyproject.toml). Exit codes: 0 no
findings, 1 findings.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOTS = (
    "tracestore",
    "csrc",
    "bench",
    "build_tools",
    "tools",
    "tests",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
SKIPPED = (
    "build_tools/dialect.txt",
    "build_tools/check_language.py",
    "tests/golden/*",
    "tests/project/test_check_language.py",
)
OPENING = re.compile(r"(?:Of|As|What|Whether|Who|Whose|Whoever|Where|Why|How|That|Which|Because|Beside)\b|->")
# First words of a function's docstring that are not verbs in the imperative: articles, pronouns, numerals,
# adverbs, prepositions, plurals, participles, and the third person.
NOT_IMPERATIVE = re.compile(
    r"(?:An?|The|This|These|Its?|They|All|Any|Both|Each|Every|Either|Few|Many|More|Most|Some|Several|None|No|Not|One"
    r"|Two|Three|Four|After|Also|At|Before|Between|By|For|From|If|In|Like|On|Only|Same|So|To|True|False|When|With"
    r"|Without)\b|[\d(\[]|[a-z]|\w+(?:[^s\W]s|ing|ed)\b"
)
IMPERATIVE = re.compile(r"(?:Bring|Embed|Exceed|Feed|Focus|Need|Proceed|Ring|Seed|Shed|Spring|String)\b")
# Decorators of functions whose docstring describes a value.
DESCRIBED = ("property", "fixture")
# Shorter strings are names and keys rather than sentences.
MIN_WORDS = 3


@dataclass(frozen=True)
class Rule:
    """A phrase, what to write instead, and the paths where it is allowed."""

    pattern: re.Pattern[str]
    instead: str
    allowed_in: tuple[str, ...] = ()


@dataclass(frozen=True)
class Passage:
    """A docstring, comment, string or paragraph, and the number of its first line."""

    line: int
    text: str
    is_docstring: bool = False
    is_imperative: bool = False


def read_rules(text: str) -> list[Rule]:
    """Return the rules of dialect.txt."""
    rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    allowed: dict[str, list[str]] = {}
    for row in rows:
        if row[0].startswith("!"):
            allowed.setdefault(row[1], []).append(row[0][1:])
    return [
        Rule(re.compile(row[0].replace(" ", r"\s+"), re.IGNORECASE), row[1], tuple(allowed.get(row[0], ())))
        for row in rows
        if not row[0].startswith("!")
    ]


def is_action(node: ast.AST) -> bool:
    """Return whether a docstring describes an action: that of a function, not of a property, a fixture or a test."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
        return False
    return not any(word in ast.unparse(decorator) for decorator in node.decorator_list for word in DESCRIBED)


def python_passages(text: str) -> Iterator[Passage]:
    """Yield the docstrings, comments and longer strings of a Python module."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            content = ast.get_docstring(node)
            if content is not None:
                docstrings.add(node.body[0].lineno)
                yield Passage(node.body[0].lineno, content, is_docstring=True, is_imperative=is_action(node))
    comment: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            if comment and line != last + 1:
                yield Passage(last - len(comment) + 1, "\n".join(comment))
                comment = []
            comment.append(token.string.lstrip("# "))
            last = line
        elif token.type == tokenize.STRING and line not in docstrings and len(token.string.split()) >= MIN_WORDS:
            yield Passage(line, token.string)
    if comment:
        yield Passage(last - len(comment) + 1, "\n".join(comment))


def matched_passages(pattern: str, text: str) -> Iterator[Passage]:
    """Yield the matches of a pattern, with the comment signs of C and Cython removed."""
    for match in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
        is_docstring = match[0].startswith('"""')
        content = re.sub(r'^\s*(?:/?\*+/?|#|//)[ ]?|\*/$|"""', "", match[0], flags=re.MULTILINE)
        yield Passage(
            text.count("\n", 0, match.start()) + 1, content.strip("\n") if is_docstring else content, is_docstring
        )


def markdown_passages(text: str) -> Iterator[Passage]:
    """Yield the lines of a document outside code."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield Passage(number, re.sub(r"`[^`]*`", "``", line))


def passages(path: Path) -> Iterator[Passage]:
    """Yield the prose of a file."""
    if path.suffix not in (".py", ".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h", ".md"):
        return
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".py", ".pyi"):
        yield from python_passages(text)
    elif path.suffix in (".pyx", ".pxd", ".pxi"):
        yield from matched_passages(r'""".*?"""|(?:^[ \t]*#[^\n]*\n)+', text)
    elif path.suffix in (".c", ".h"):
        yield from matched_passages(r"/\*.*?\*/|//[^\n]*", text)
    else:
        yield from markdown_passages(text)


def check_file(path: Path, name: str, rules: list[Rule]) -> Iterator[tuple[str, str]]:
    """Yield (kind, message) for everything found in a file."""
    for passage in passages(path):
        if passage.is_docstring and (opening := OPENING.match(passage.text)):
            yield "opening", f'{name}:{passage.line}: the docstring begins with "{opening[0]}"; begin with a verb'
        elif passage.is_imperative and NOT_IMPERATIVE.match(passage.text) and not IMPERATIVE.match(passage.text):
            first = passage.text.split()[0]
            yield "imperative", f'{name}:{passage.line}: the docstring begins with "{first}"; begin with a verb'
        for rule in rules:
            if any(fnmatch(name, allowed) for allowed in rule.allowed_in):
                continue
            for match in rule.pattern.finditer(passage.text):
                line = passage.line + passage.text.count("\n", 0, match.start())
                found = " ".join(match[0].split())
                yield rule.instead, f'{name}:{line}: "{found}"; write: {rule.instead}'


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the files at and below some paths."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(ROOT).as_posix()
            if file.is_file() and not any(fnmatch(name, skipped) for skipped in SKIPPED):
                yield file


def main() -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(description="Check the prose of this repository.")
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / name for name in ROOTS], metavar="PATH")
    parser.add_argument("--summary", action="store_true", help="print only the number of findings by folder and kind")
    args = parser.parse_args()
    rules = read_rules((ROOT / "build_tools" / "dialect.txt").read_text(encoding="utf-8"))
    kinds: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for path in files([p.resolve() for p in args.paths]):
        name = path.relative_to(ROOT).as_posix()
        for kind, message in check_file(path, name, rules):
            kinds[kind] += 1
            folders["/".join(name.split("/")[:2])] += 1
            if not args.summary:
                print(message)
    if args.summary:
        for counts in (folders, kinds):
            print("\n".join(f"{count:6}  {name}" for name, count in counts.most_common()), end="\n\n")
    print(f"check_language: {sum(kinds.values())} findings", file=sys.stderr)
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
