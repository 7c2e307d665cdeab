"""The checker of the prose: build_tools/check_language.py."""

import pytest

from tests.helpers import ROOT, load_script


@pytest.fixture(scope="module")
def checker():
    return load_script("build_tools/check_language.py")


RULES = "# comment\n\\bthe house\\b\tthe repository\tan example\n\\banew\\b\tagain\tan example\n!docs/*\t\\banew\\b\n"
SOURCE = {
    "a.py": '"""Of a module."""\n\n# Rules of the\n# house.\nNAME = "the house"\nTEXT = "a message about the house"\n',
    "a.pyx": '"""Return one."""\n# Rules of the\n# house.\n',
    "a.c": "/* Rules of the\n * house. */\nint anew;\n",
    "a.md": "Made anew.\n\n    anew = code\n\n```\nanew\n```\n`anew`\n",
}


@pytest.mark.parametrize(
    ("name", "lines"), [("a.py", [1, 3, 6]), ("a.pyx", [2]), ("a.c", [1]), ("a.md", [1])], ids=lambda v: str(v)
)
def test_findings_name_the_line(checker, tmp_path, name, lines):
    path = tmp_path / name
    path.write_text(SOURCE[name])
    found = list(checker.check_file(path, name, checker.read_rules(RULES)))
    assert sorted(int(message.split(":")[1]) for message in found) == lines


@pytest.mark.parametrize(
    ("docstring", "is_fragment"),
    [
        ("Return the sum.", False),
        ("Process all files.", False),
        ("Embed the tokens.", False),
        ("The sum.", True),
        ("All traces.", True),
        ("36 traces.", True),
        ("Returns the sum.", True),
        ("Computing the sum.", True),
        ("Whether the sum is 0.", True),
    ],
)
def test_docstrings_of_functions_begin_with_a_verb(checker, tmp_path, docstring, is_fragment):
    path = tmp_path / "a.py"
    path.write_text(f'def sum():\n    """{docstring}"""\n')
    assert bool(list(checker.check_file(path, "a.py", []))) == is_fragment


def test_docstrings_of_properties_fixtures_and_tests_may_be_descriptions(checker, tmp_path):
    functions = ("@property\ndef a(self):", "@pytest.fixture(scope='module')\ndef b():", "def test_c():")
    path = tmp_path / "a.py"
    path.write_text("\n".join(f'{function}\n    """The sum."""' for function in functions))
    assert list(checker.check_file(path, "a.py", [])) == []


def test_an_exception_allows_a_phrase(checker, tmp_path):
    path = tmp_path / "a.md"
    path.write_text(SOURCE["a.md"])
    assert list(checker.check_file(path, "docs/a.md", checker.read_rules(RULES))) == []


def test_the_rules_are_valid(checker):
    text = (ROOT / "build_tools" / "dialect.txt").read_text()
    rules = checker.read_rules(text)
    rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith(("#", "!"))]
    assert len(rules) == len(rows) > 40
    for rule, (pattern, _, example) in zip(rules, rows, strict=True):
        assert rule.pattern.search(example), pattern
