"""The commands and code of README and docs, run in a folder like a user's, and the documentation site."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers import ROOT, make_traces, write_pickle, write_scores
from tracestore import errors
from tracestore.cli import COMMANDS
from tracestore.detectors.registry import registry
from tracestore.errors import TracestoreError
from tracestore.extras import EXTRAS
from tracestore.ingest.builtin.library import builtins
from tracestore.ingest.layout.fields import FIELDS
from tracestore.store.format import manifest, schema
from tracestore.store.vocabulary import SCORES, WORDS

PAGES = ("tutorial", "tutorial_machines", "tutorial_detector", "scores", "export", "loading", "memory")
PAGES += ("migration", "bridges", "reading")
PAGES = (*(f"docs/{name}.md" for name in PAGES), "README.md")


def blocks(page):
    """Return (language, code, output) of each fenced shell, Python and TOML block of a page, in order.

    The output is what is indented behind a block, and the comments of numbers behind print().
    """
    text = (ROOT / page).read_text(encoding="utf-8").replace("``` { .python }", "```python")
    text = re.sub(r'^--8<-- "(.*)"$', lambda included: (ROOT / included[1]).read_text(), text, flags=re.MULTILINE)
    found = re.findall(r"^```(sh|python|toml)\n(.*?)^```$\n?((?:(?: {4}[^\n]*)?\n)*)", text, re.MULTILINE | re.DOTALL)
    return [
        (*block, output + "\n".join(re.findall(r"^print\(.*\)  # ([\d ]+)$", block[1], re.MULTILINE)))
        for *block, output in found
    ]


def masked(line):
    """Return a line of output without its numbers, names and units."""
    return re.sub(r"(\S*[\d_/]\S* ?([KMG]iB\S*)? ?)+", "0 ", " ".join(line.split())).split()


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_commands_and_code_of_a_page_run(tmp_path, page):
    traces = make_traces(120, tokens=5)
    data = tmp_path / "traces_data"
    write_pickle(data / "trivia_qa_traces_batch_0000.pkl", traces[:40])
    write_pickle(data / "trivia_qa_traces_batch_0001.pkl.gz", traces[40:])
    write_scores(data / "scores.csv", {t["question_id"]: k % 2 for k, t in enumerate(traces)}, "score")
    (data / "provenance.json").write_text('{"model": "model_0"}')
    scripts = str(Path(sys.executable).parent)
    paths = os.pathsep.join([str(tmp_path / "installed"), str(ROOT)])
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": paths}
    # The environment of the tests stays unchanged, and nothing is downloaded.
    install = "python -m pip install --quiet --no-index --no-build-isolation --no-deps --target installed"
    found = blocks(page)
    assert found
    for language, text, shown in found:
        if (file := re.match(r"# (\S+\.\w+)\n", text)) is not None:
            (tmp_path / file[1]).parent.mkdir(exist_ok=True)
            (tmp_path / file[1]).write_text(text)
            continue
        code = text.replace("pip install", install)
        # Commands that set up a machine are left out: this test itself runs in such a setup.
        lines = [line for line in code.splitlines() if not line.startswith(("make", "git clone", "cd "))]
        command = ["bash", "-ec", "\n".join(lines)] if language == "sh" else [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, f"{page}:\n{code}\n{done.stdout}\n{done.stderr}"
        printed = [masked(line) for line in (done.stdout + done.stderr).splitlines()]
        for line in filter(None, map(str.strip, shown.splitlines())):
            assert masked(line) in printed or line in done.stdout, f"{page}: {line}\n{done.stdout}\n{done.stderr}"


def test_links_have_targets():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if not link.startswith(("http", "gallery/")):  # created when the site is built
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_files_that_pages_include_exist():
    for page in (ROOT / "docs").glob("*.md"):
        for line in re.findall(r"^-+ ?8.*$", page.read_text(encoding="utf-8"), re.MULTILINE):
            included = re.fullmatch(r'--8<-- "([\w/.]+)(:\w+)?"', line)
            assert included is not None and (ROOT / included[1]).exists(), f"{page.name}: {line}"


def test_the_pages_are_short():
    excess = sum(page.stat().st_size for page in (ROOT / "docs").rglob("*.md")) - 180_000
    assert excess <= 0, f"docs/ has {excess} bytes too many: shorten a page"


@pytest.mark.long
def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    pages = {p.stem for p in (ROOT / "docs").glob("*.md")} | {"results"}
    assert pages <= {p.stem for p in (tmp_path / "site").glob("*.html")}
    drawn = re.findall(r"\(gallery/(\w+\.png)\)", (ROOT / "docs/gallery.md").read_text())
    assert len(drawn) == 5
    for name in drawn:
        assert (tmp_path / "site" / "gallery" / name).stat().st_size > 10_000
    listed = (ROOT / "mkdocs.yml").read_text()
    assert all(f"{page}.md" in listed for page in pages)
    names = ("commands", "fields", "benchmark", "builtin_layout")
    commands, fields, benchmark, layouts = ((tmp_path / "site" / f"{name}.html").read_text() for name in names)
    assert [name for name in COMMANDS if f"tracestore {name}" not in commands] == []
    made = [name for name, rule in FIELDS.items() if rule.kind != "known"]
    assert [name for name in (*made, *SCORES, *WORDS) if f"<code>{name}</code>" not in fields] == []
    own = [name for name, entry in registry().items() if entry.model is None and not entry.is_foreign]
    assert [name for name in own if f"<td><code>{name}</code></td>" not in benchmark] == []
    assert [b.name for b in builtins() if f"<td><code>{b.name}</code></td>" not in layouts] == []
    # The pages load nothing from other hosts.
    for page in (tmp_path / "site").glob("*.html"):
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?://(?!squidfunk)", page.read_text())


def test_the_pages_for_contributors_name_what_exists():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    packages = text.split("\n## Packages\n")[1].split("\n## ")[0].partition("|")[2]
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    changes = contributing.split("\n## Where do I change what?\n")[1].split("\n## ")[0]
    package = ROOT / "tracestore"
    folders = {p.parent.relative_to(package).as_posix() for p in package.rglob("__init__.py")}
    listed = re.findall(r"`([\w/]+)`", packages)
    assert {f for f in folders if f not in (".", "store", "cli/commands", "detectors/graph")} == set(listed)
    code = "\n".join(
        path.read_text(encoding="utf-8") for suffix in ("py", "pyx") for path in package.rglob(f"*.{suffix}")
    )
    classes = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", text)) - {"PyTorch"}
    assert {
        name for name in classes if not re.search(rf"^class {name}\b|^cdef class {name}\b", code, re.MULTILINE)
    } == set()
    for name in re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:py|pyx|c))`", text):
        assert any((folder / name).exists() for folder in (ROOT, package, package / "ingest")), name
    for name in re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|c|h))?)`", changes):
        assert any((folder / name).exists() for folder in (ROOT, package, ROOT / "tests")), name


def test_format_page_names_every_array():
    text = (ROOT / "docs/format.md").read_text(encoding="utf-8")
    section = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE))
    cells = " ".join(re.findall(r"^\| ([^|]+) \|", section["A segment"], re.MULTILINE))
    arrays = {name.removesuffix("_offsets") for name in (*schema.LARGE_ARRAYS, *schema.ROW_ARRAYS)}
    columns = {*manifest.PART_DTYPES} - {f"{name}_offsets" for name in manifest.STRINGS}

    assert sorted(arrays - set(re.findall(r"\w+", cells))) == [], "add it to docs/format.md"
    assert sorted(columns - set(re.findall(r"`(\w+)`", section["Index part"]))) == []
    assert sorted({*schema.COLUMN_DTYPES} - set(re.findall(r"`(\w+)`", section["Columns"]))) == []
    assert sorted({*schema.FIELD_BITS} - set(re.findall(r"\w+", section["A segment"]))) == []


def test_the_page_of_errors_names_each_exception_at_its_exit_code():
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d, ]+) \|.*\| ([\w, ]*) \|$", page, re.MULTILINE)
    listed = {name: codes for codes, names in rows for name in filter(None, names.split(", "))}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TracestoreError)]
    expected = {kind.__name__: str(kind.exit_code) for kind in kinds if kind is not TracestoreError}
    assert listed == expected | {"RunInterruptedError": "130, 143"}


def test_the_readme_says_which_extras_all_has():
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("`all` are the extras ")[2]
    own, _, others = text.partition("`completion`; ")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (names,) = (re.findall(r"[a-z]+", requirement.partition("[")[2]) for requirement in extras["all"])
    assert sorted([*re.findall(r"`([a-z]+)`", own), "completion"]) == sorted(names)
    assert {f"`{name}`" for name in EXTRAS.keys() - set(names)} <= set(
        re.findall(r"`[a-z]+`", others.partition(". ")[0])
    )


def test_the_page_of_rules_has_those_that_the_code_cites():
    page = (ROOT / "docs/rules.md").read_text()
    texts = [path.read_text() for path in (ROOT / "tracestore").rglob("*.py")]
    cited = {name for text in texts for name in re.findall(r"\b[Rr]ules? (\d+[a-c]?)\b", text)}

    assert len(cited) > 20
    assert {name for name in cited if not re.search(rf"(\| |[ .]){name}(:| \|)", page)} == set()
