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
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

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


class Rule(NamedTuple):
    """A phrase, what to write instead, and the paths where it is allowed."""

    pattern: re.Pattern[str]
    instead: str
    allowed_in: tuple[str, ...]


class Passage(NamedTuple):
    """A docstring, comment, string or paragraph, and the number of its first line."""

    line: int
    text: str
    is_docstring: bool = False
    is_imperative: bool = False


def read_rules(text: str) -> list[Rule]:
    """Return the rules of dialect.txt."""
    rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    exceptions = [(row[1], row[0][1:]) for row in rows if row[0].startswith("!")]
    rules = []
    for phrase, instead, *_ in (row for row in rows if not row[0].startswith("!")):
        pattern = re.compile(phrase.replace(" ", r"\s+"), re.IGNORECASE)
        rules.append(Rule(pattern, instead, tuple(path for other, path in exceptions if other == phrase)))
    return rules


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
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno not in docstrings:
            string = str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
            if len(string.split()) >= MIN_WORDS:
                yield Passage(node.lineno, string)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    for _, group in groupby(enumerate(comments), key=lambda pair: pair[1] - pair[0]):  # consecutive lines
        lines = [line for _, line in group]
        yield Passage(lines[0], "\n".join(comments[line] for line in lines))


def matched_passages(pattern: str, text: str) -> Iterator[Passage]:
    """Yield the matches of a pattern, with the comment signs of C and Cython removed."""
    for match in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
        is_docstring = match[0].startswith('"""')
        content = re.sub(r'^\s*(?:/?\*+/?|#|//)[ ]?|\*/$|"""', "", match[0], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        yield Passage(line, content.strip("\n") if is_docstring else content, is_docstring)


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
    match path.suffix:
        case ".py" | ".pyi":
            yield from python_passages(path.read_text(encoding="utf-8"))
        case ".pyx" | ".pxd" | ".pxi":
            pattern = r'""".*?"""|(?:^[ \t]*#[^\n]*\n)+'
            yield from matched_passages(pattern, path.read_text(encoding="utf-8"))
        case ".c" | ".h":
            yield from matched_passages(r"/\*.*?\*/|//[^\n]*", path.read_text(encoding="utf-8"))
        case ".md":
            yield from markdown_passages(path.read_text(encoding="utf-8"))


def check_file(path: Path, name: str, rules: list[Rule]) -> Iterator[str]:
    """Yield a message for each finding in a file."""
    rules = [rule for rule in rules if not any(fnmatch(name, allowed) for allowed in rule.allowed_in)]
    for passage in passages(path):
        is_fragment = passage.is_docstring and OPENING.match(passage.text)
        if passage.is_imperative and NOT_IMPERATIVE.match(passage.text) and not IMPERATIVE.match(passage.text):
            is_fragment = True
        if is_fragment:
            yield f'{name}:{passage.line}: the docstring begins with "{passage.text.split()[0]}"; begin with a verb'
        for rule in rules:
            for match in rule.pattern.finditer(passage.text):
                line = passage.line + passage.text.count("\n", 0, match.start())
                yield f'{name}:{line}: "{" ".join(match[0].split())}"; write: {rule.instead}'


def main() -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(description="Check the prose of this repository.")
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / name for name in ROOTS], metavar="PATH")
    rules = read_rules((ROOT / "build_tools" / "dialect.txt").read_text(encoding="utf-8"))
    num_findings = 0
    for path in (path.resolve() for path in parser.parse_args().paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(ROOT).as_posix()
            if file.is_file() and not any(fnmatch(name, skipped) for skipped in SKIPPED):
                for message in check_file(file, name, rules):
                    print(message)
                    num_findings += 1
    print(f"check_language: {num_findings} findings", file=sys.stderr)
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
