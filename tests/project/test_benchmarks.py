"""The benchmarks are found by asv, have units, and measure anonymous memory. They run in `make asv`."""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tracestore.extract.questions import FACTS, read_questions

BENCH = ROOT / "bench"
MODULES = ("conversion", "loading", "memory", "scale", "training")


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return [importlib.import_module(f"benchmarks.{name}") for name in MODULES]


def test_every_tracked_value_has_a_unit(benchmarks):
    found = 0
    for module in benchmarks:
        for _, cls in inspect.getmembers(module, inspect.isclass):
            for name, function in inspect.getmembers(cls, inspect.isfunction):
                if name.startswith("track_"):
                    assert function.unit, f"{module.__name__}.{cls.__name__}.{name}"
                    found += 1
                assert not name.startswith(("peakmem_", "mem_")), "counts mapped files"
    assert found > 8


def test_peak_counts_touched_memory_of_children(benchmarks):
    from benchmarks.common import Peak

    code = "import sys; a = bytearray(b'x') * (64 << 20); print('there', flush=True); sys.stdin.readline()"
    shell = ["sh", "-c", f'"{sys.executable}" -c "{code}"; true']
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "there\n"
        peak = Peak(process.pid)
        process.communicate("\n")
        assert 64 << 20 <= peak.stop() < 128 << 20


def test_imports_of_the_benchmarks_exist():
    """Imports within functions included, which no other test reaches."""
    for path in BENCH.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tracestore"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    where = f"{path.name}: from {node.module} import {alias.name}"
                    assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), where


def test_asv_writes_to_build_only():
    config = json.loads((BENCH / "asv.conf.json").read_text())
    assert config["benchmark_dir"] == "benchmarks"
    for name in ("env_dir", "results_dir", "html_dir"):
        assert config[name].startswith("../build/asv/")


def test_the_readme_lists_every_script_and_benchmark(benchmarks):
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    for path in sorted(BENCH.glob("*.py")):
        assert f"| {path.name} |" in text
    for module in benchmarks:
        for cls_name, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and any(n.startswith(("track_", "time_")) for n in dir(cls)):
                assert cls_name in text


def test_questions_of_both_confirmations_are_those_drawn():
    """No detector may be chosen on them: the list must stay unchanged."""
    content = (BENCH / "confirmation_questions.txt").read_bytes()
    digest = "8195a94a7bc8ede082a373571e8a01b21a57862cfaf1a253e724f653b557dbe8"  # codespell:ignore ede
    assert hashlib.sha256(content).hexdigest() == digest
    others = [question.question_id for question in read_questions(FACTS)[600:]]
    others.sort(key=lambda question: hashlib.sha256(f"confirmation {question}".encode()).digest())
    assert content.decode().splitlines() == sorted(others[:500])
    second = "".join(f"{question}\n" for question in sorted(others[500:]))
    digest = "542c194f1bb4e02b2b49c565e132d588166aef034d7a57d4c56a48131aa80030"
    assert hashlib.sha256(second.encode()).hexdigest() == digest
