"""Which parts of the package may import which."""

import ast
import subprocess
import sys

import pytest

from tests.helpers import ROOT

# Every part may import these.
FOR_ALL = ("errors", "extras", "console", "page", "cgroup", "platform_support")
# A part may import itself, the parts listed, and FOR_ALL.
ALLOWED = {
    "errors": set(),
    "console": set(),
    "page": set(),
    "cgroup": set(),
    "platform_support": set(),
    "_core": set(),
    "store": {"_core"},
    "ingest": {"store", "_core"},
    "convert": {"ingest", "store", "_core"},
    "export": {"store", "_core"},
    "view": {"store", "_core"},
    "doctor": {"store", "_core"},
    "serve": {"view", "store", "_core"},
    "report": {"store", "_core"},
    "batch_loader": {"export", "ingest", "store", "_core"},
    "data": {"store", "_core"},
    "bridges": {"data", "train", "store", "_core"},
    "train": {"data", "store", "_core"},
    "extract": {"store", "_core"},
    "extras": set(),
    "cli": {
        "convert",
        "doctor",
        "export",
        "extract",
        "ingest",
        "report",
        "serve",
        "store",
        "train",
        "view",
        "_core",
        "tracestore",
    },
    "__main__": {"cli"},
    "__init__": {"batch_loader", "store", "data"},
}
TORCH = {"data", "train", "extract", "export", "bridges"}


def imports(path):
    """Names of modules that a file imports, those under TYPE_CHECKING left out."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "tracestore")


@pytest.mark.parametrize("path", sorted((ROOT / "tracestore").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows(path):
    # The __main__.py of a part is a program: it stands above the commands.
    part = (
        "__main__" if path.name == "__main__.py" else path.relative_to(ROOT / "tracestore").parts[0].removesuffix(".py")
    )
    for name in imports(path):
        head = name.split(".")
        if head[0] in ("torch", "torch_geometric"):
            assert part in TORCH, f"{path} imports {name}"
        if head[0] in ("zarr", "numcodecs"):
            assert part == "store", f"{path} imports {name}"
        if head[0] == "tracestore" and len(head) > 1:
            target = head[1]
            inside = {p.stem for p in (ROOT / "tracestore").iterdir()}
            if target in inside and target not in (part, *FOR_ALL):
                assert target in ALLOWED[part], f"{path} imports {name}"


@pytest.mark.parametrize("module", ["tracestore", "tracestore.convert.conversion", "tracestore.cli"])
def test_torch_is_not_imported(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_no_file_is_unpickled_anywhere():
    for path in [*(ROOT / "tracestore").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = getattr(node.func.value, "id", "")
                assert (owner, node.func.attr) not in {("pickle", "load"), ("pickle", "loads")}, path
                if (owner, node.func.attr) == ("torch", "load"):
                    assert any(k.arg == "weights_only" and k.value.value is True for k in node.keywords), path
