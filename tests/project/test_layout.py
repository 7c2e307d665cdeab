"""Test the imports between packages, and the sizes of modules and folders."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.helpers import ROOT

PACKAGE, TESTS = ROOT / "tracestore", ROOT / "tests"
# Names in capitals are groups. Every package may import itself, the modules of BASE, and what its row lists. Only
# commands import the detectors' wing; the packages of TORCH import torch.
ROWS = """
BASE: errors extras console pages process platform_support split words
PARTS: _core store.trace_fields store.format store.html store.lens store.io store.remote store.read store.vocabulary
    store.write
STORE: PARTS store.maintain
TRAIN: data data.batches oom detectors detectors.layers evaluation train
WING: detectors detectors.graph detectors.layers detectors.published evaluation train inference planning features
    benchmark experiment reports
TORCH: TRAIN data.tokens detectors.graph inference planning experiment reports benchmark
    detectors.published extract export bridges
_core:
store:
store.trace_fields: _core store.format
store.format: _core
store.io: _core store.format
store.html: store.format
store.lens: store.format
store.vocabulary: store.format
store.remote: _core store.format store.io
store.read: _core store.trace_fields store.format store.html store.lens store.io store.remote
store.write: PARTS
store.maintain: STORE
ingest.files: _core store.format store.io
ingest.pickles: _core store.format store.io ingest.files
ingest.readers: _core store.format store.io ingest.files ingest.pickles
ingest: STORE ingest.execute ingest.files ingest.pickles ingest.readers
ingest.layout: store.format store.vocabulary
ingest.execute: store.format store.io store.vocabulary store.write ingest.layout ingest.readers
ingest.propose: store.format store.io store.vocabulary store.write ingest.execute ingest.layout ingest.readers
ingest.builtin: STORE ingest ingest.execute ingest.files ingest.layout ingest.pickles ingest.readers
convert: STORE ingest ingest.builtin ingest.execute ingest.files ingest.layout ingest.propose
tasks: STORE convert ingest ingest.builtin ingest.exports ingest.files ingest.layout
export: STORE ingest ingest.builtin
hub: STORE
extract: STORE __init__ export ingest
data.batches: STORE
data.tokens: STORE data.batches
data: STORE data.batches data.tokens
oom: _core
detectors.layers: STORE data data.batches
detectors.graph: STORE data data.batches detectors.layers
detectors: STORE __init__ data data.batches detectors.graph detectors.layers oom
evaluation: STORE data detectors
train: STORE TRAIN data.tokens detectors.graph
inference: STORE TRAIN detectors.graph
planning: STORE TRAIN
features: STORE data.tokens
detectors.published: STORE data.tokens detectors evaluation features oom
benchmark: STORE TRAIN detectors.published features inference ingest reports
run_results: store.format store.io
experiment: STORE TRAIN planning reports run_results
bridges: STORE data data.batches
reports: STORE TRAIN __init__ data.tokens
trace_view: STORE
store_page: STORE __init__ trace_view
serve: STORE run_results trace_view
cli: _core store.format store.io __init__ cli.commands
cli.commands: STORE TRAIN __init__ benchmark cli convert experiment export extract hub inference ingest ingest.builtin
    ingest.execute ingest.propose planning reports serve store_page tasks trace_view
__main__: cli
__init__: STORE data export tasks
"""
ALLOWED: dict[str, set[str]] = {}
for row in re.sub(r"\n +", " ", ROWS).split("\n")[1:-1]:
    name, _, words = row.partition(":")
    ALLOWED[name] = {package for word in words.split() for package in ALLOWED.get(word * word.isupper(), {word})}
BASE, _, _, _, WING, TORCH = (ALLOWED.pop(name) for name in ("BASE", "PARTS", "STORE", "TRAIN", "WING", "TORCH"))
ALLOWED |= dict.fromkeys(BASE, BASE)
FOR_COMMANDS = {*WING, "serve", "hub"}
# Modules whose functions import torch when they are called.
TORCH_ON_CALL = {"store.trace_fields"}
MAX_MODULES = 12
# Of a function, conditions and comprehensions included; ruff counts those of statements (C901).
MAX_BRANCHES, MAX_BRANCHES_OF_READERS = 25, 20
MAX_LINES = 400
# Folders that may hold more modules, and the reason.
LARGE_FOLDERS = {
    "cli/commands": "one module a command",
    "_core": "one Cython module a concern, with its stub",
    "store/read": "one module a concern of a reader; a folder for several stores as one would import this one",
    "store/write": "one module a step from a record to a commit, and one for what another process has written",
    "ingest/execute": "one module a step of reading, and one for layouts of which one item is a trace",
    "train": "one module a part of the loop, and one for services that track its numbers",
}
# Commands whose work is done by a module of the same name. The list only shrinks.
COMMANDS_WITH_A_MODULE = {"clean", "commit", "lint", "merge", "plan", "predict", "pull", "push", "subset", "verify"}

FILES = sorted(PACKAGE.rglob("*.py"))
# Packages whose tests are in another folder than the one of the same name.
TESTED_ELSEWHERE = {"_core": "core", "cli/commands": "cli", "detectors/graph": "detectors"}


def module_name(path):
    """Return the dotted name below tracestore, "__init__" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts) or "__init__"


MODULES = {module_name(path): path for path in FILES}


def package_of(module):
    """Return the longest name in ALLOWED that contains the module, "__main__" for each module of that name."""
    if module.endswith("__main__"):
        return "__main__"
    names = [name for name in ALLOWED if module == name or module.startswith(name + ".")]
    return max(names, key=len)


def resolve(name):
    """Return the module that a dotted name refers to. The name may continue with names in the module."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or "__init__"


def test_only_commands_import_the_wing_of_the_detectors_the_server_and_the_hub():
    for package in ALLOWED.keys() - FOR_COMMANDS - {"cli.commands"}:
        assert not ALLOWED[package] & FOR_COMMANDS, package
    for package in WING:
        assert not ALLOWED[package] & {"serve", "hub"}, package


def test_a_file_name_stands_once():
    names = Counter(path.stem for path in FILES if not path.stem.startswith("__"))
    assert {name for name, count in names.items() if count > 1} == COMMANDS_WITH_A_MODULE


@functools.cache
def tree_of(path):
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def test_a_class_name_stands_once():
    classes = Counter(node.name for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []


@functools.cache
def imports(path):
    """Return (absolute name, when it is imported) for each import of a file.

    An import is for type checkers only ("types"), when a function is called ("call"), or at once ("import").
    """
    found = []

    def visit(node, when):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            when = "types"
        elif isinstance(node, ast.FunctionDef) and when == "import":
            when = "call"
        if isinstance(node, ast.Import):
            found.extend((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.extend((f"{node.module}.{alias.name}", when) for alias in node.names)
        elif isinstance(node, ast.stmt | ast.Module | ast.excepthandler | ast.match_case):
            for child in ast.iter_child_nodes(node):
                visit(child, when)

    visit(tree_of(path), "import")
    return found


def test_imports_follow_the_table():
    for path, name, when in [(file, *found) for file in FILES for found in imports(file)]:
        package, head = package_of(module_name(path)), name.split(".")[0]
        if head in ("torch", "torch_geometric") and when != "types":
            assert package in TORCH or (package in TORCH_ON_CALL and when == "call"), f"{path} imports {name}"
        assert head != "zarr", f"{path} imports {name}"
        if head == "numcodecs":
            assert module_name(path).startswith("store."), f"{path} imports {name}"
        if head == "tracestore":
            target = package_of(resolve(name)) if not name.startswith("tracestore._core") else "_core"
            assert target in {package, *BASE, *ALLOWED[package]}, f"{path} imports {name}"


def import_cycle(graph):
    """Return a cycle of modules that import each other, or an empty list."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_modules_do_not_import_each_other_in_a_cycle():
    graph = {}
    for path in FILES:
        targets = {resolve(name) for name, _ in imports(path) if name.split(".")[0] == "tracestore"}
        graph[module_name(path)] = targets - {module_name(path)}
    assert import_cycle({"a": {"b"}, "b": {"a"}})
    assert import_cycle(graph) == []


@functools.cache
def folder_of(module):
    """Return the folder of a module; a module next to packages stands for itself."""
    path = MODULES[module]
    return module if path.parent == PACKAGE else module_name(path.parent / "__init__.py")


def test_folders_do_not_import_each_other_in_a_circle():
    graph = {}
    for path in FILES:
        source = folder_of(module_name(path))
        targets = {
            resolve(name) for name, when in imports(path) if name.split(".")[0] == "tracestore" and when != "types"
        }
        # The package itself names what is public, and imports it when it is asked for.
        found = {folder_of(target) for target in targets - {"__init__"}} - {source}
        if source != "__init__":
            graph.setdefault(source, set()).update(found)
    assert import_cycle(graph) == []


def num_branches(function):
    """Return the branches of a function: conditions, loops, handlers, comprehensions, each `and` and `or`."""
    count, pending = 0, list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.If | ast.For | ast.While | ast.ExceptHandler | ast.IfExp | ast.match_case):
            count += 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        pending += ast.iter_child_nodes(node)
    return count


def test_functions_have_few_branches():
    for path in FILES:
        limit = MAX_BRANCHES_OF_READERS if path.is_relative_to(PACKAGE / "ingest") else MAX_BRANCHES
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                assert num_branches(node) <= limit, f"{path}: {node.name} has {num_branches(node)} branches"


def test_folders_and_modules_are_small():
    for folder in {path.parent for path in (*FILES, *TESTS.rglob("*.py"))}:
        name = str(folder.relative_to(PACKAGE if folder.is_relative_to(PACKAGE) else ROOT))
        count = len([p for p in folder.iterdir() if p.suffix in (".py", ".pyx") and p.stem != "__init__"])
        assert count <= MAX_MODULES or name in LARGE_FOLDERS, f"{name}: {count} modules"
    for path in [*FILES, *PACKAGE.rglob("*.pyx"), *(ROOT / "csrc").glob("*.[ch]")]:
        lines = path.read_text().splitlines()
        assert len(lines) <= MAX_LINES or "One module of over 400 lines" in "\n".join(lines[:12]), (
            f"{path}: {len(lines)} lines, and no reason"
        )


def test_tests_mirror_the_packages():
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in FILES}
    for name in folders:
        assert list((TESTS / TESTED_ELSEWHERE.get(name, name)).glob("test_*.py")) or name in (".", "store"), name


def test_every_module_of_the_c_core_has_a_header_and_a_test():
    for path in (ROOT / "csrc").glob("*.c"):
        assert path.with_suffix(".h").exists(), path
        assert f"void test_{path.stem}(void)" in (TESTS / f"c/test_{path.stem}.c").read_text(), path
        assert f"TEST({path.stem})" in (TESTS / "c/test_core.h").read_text(), path


def test_headers_of_the_c_core_document_every_function():
    declaration = re.compile(r"(\*/\n)?^((?:TS_WARN_UNUSED\n)?[a-z][\w ]*[ *])(ts_\w+)\([^;{}]*\);", re.MULTILINE)
    for path in sorted((ROOT / "csrc").glob("*.h")):
        if path.name.startswith("gine_"):  # included several times by gine.c; not an interface
            continue
        text = path.read_text()
        assert text.startswith("/**\n") and ("thread" in text or "concurren" in text), path
        documented = ""
        for match in declaration.finditer(text):
            # One comment may document a function for several scalar types.
            name = re.sub(r"_f\d+$", "", match[3])
            assert match[1] or documented == name, f"{path}: {match[3]} has no comment"
            if match[1]:
                comment = text[text.rindex("/**", 0, match.start()) : match.start()]
            assert "TS_WARN_UNUSED" in match[2] or not re.search(r"@return.*TS_ERR", comment, re.DOTALL), match[3]
            documented = name


@pytest.mark.parametrize("module", ["tracestore", "tracestore.convert.runner", "tracestore.cli"])
def test_torch_is_not_imported(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_no_file_is_unpickled_anywhere():
    for path in [*(ROOT / "tracestore").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = getattr(node.func.value, "id", "")
                assert (owner, node.func.attr) not in {("pickle", "load"), ("pickle", "loads")}, path
                if (owner, node.func.attr) == ("torch", "load"):
                    assert any(k.arg == "weights_only" and k.value.value is True for k in node.keywords), path
