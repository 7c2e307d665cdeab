"""Test releases and workflows: one version, existing make targets, the same versions of Python."""

import re
import shutil
import subprocess
import tomllib

import pytest
import yaml

import tracestore
from tests.helpers import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def load(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def uses(jobs):
    """Yield each action or workflow that the jobs use."""
    for job in jobs.values():
        yield from (part["uses"] for part in (job, *job.get("steps", ())) if "uses" in part)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_workflow_is_restricted_and_runs_existing_targets(path):
    workflow = load(path)
    # YAML reads the key `on` as True.
    assert workflow[True] and workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 90, name
        granted = set(job.get("permissions", {}))
        assert granted <= {"pages", "id-token", "contents"}, name
    for action in uses(workflow["jobs"]):
        assert action.startswith("./") or re.search(r"@(v\d+|release/v1)$", action), action
    called = re.findall(r"\bmake (?:--silent )?([a-z][\w-]*)", re.sub(r"#.*", "", path.read_text(encoding="utf-8")))
    assert set(called) <= TARGETS


def test_workflows_run_the_documented_targets():
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    commands = ("bash .ci/run", *(f"make {t}" for t in ("test", "check-ports", "check-resolution", "wheel", "docs")))
    for command in commands:
        assert command in text, command
    assert "make check" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_publishing_needs_no_stored_token():
    jobs = load(".github/workflows/release.yml")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "pypa/gh-action-pypi-publish@release/v1" in uses(jobs)
    assert not any("secrets." in path.read_text(encoding="utf-8") for path in WORKFLOWS)


def test_versions_of_python_agree():
    prefix = "Programming Language :: Python :: 3."
    minors = [c.removeprefix(prefix) for c in PROJECT["project"]["classifiers"] if c.startswith(prefix)]
    assert f">=3.{minors[0]}" == PROJECT["project"]["requires-python"]
    assert PROJECT["tool"]["cibuildwheel"]["build"] == [f"cp3{minor}-*" for minor in minors]
    matrix = load(".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == [f"3.{minor}" for minor in minors]


def test_configuration_files_parse():
    for hook in (h for repository in load(".pre-commit-config.yaml")["repos"] for h in repository["hooks"]):
        assert hook["entry"].removeprefix("make ") in TARGETS
    assert {u["package-ecosystem"] for u in load(".github/dependabot.yml")["updates"]} == {"github-actions", "pip"}
    for form in ("bug", "feature"):
        assert {"name", "description", "body"} <= set(load(f".github/ISSUE_TEMPLATE/{form}.yml"))


def test_citation_and_project_agree():
    citation, project = load("CITATION.cff"), PROJECT["project"]
    assert citation["cff-version"] == "1.2.0" and citation["message"]
    assert (citation["title"], citation["license"]) == (project["name"], project["license"])
    assert citation["repository-code"] == project["urls"]["Repository"]
    assert [a["name"] for a in citation["authors"]] == [a["name"] for a in project["authors"]]


def test_version_matches_the_changelog():
    assert "version" not in PROJECT["project"]
    latest = re.search(r"^## (\S+), (unreleased|\d{4}-\d{2}-\d{2})$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    # After a release, the changes of the next one are fragments.
    assert latest and (latest[1] == tracestore.__version__ or latest[2] != "unreleased")


@pytest.mark.parametrize(
    ("tag", "heading", "code", "text"),
    [
        ("v1.2.0", "1.2.0, 2026-11-30", 0, "- New.\n"),
        ("v1.3.0", "1.2.0, 2026-11-30", 2, "found TAG=v1.3.0, expected TAG=v1.2.0"),
        ("v1.2.0", "1.2.0, unreleased", 2, 'no section "## 1.2.0, YYYY-MM-DD"'),
    ],
)
def test_release_notes(tmp_path, tag, heading, code, text):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tracestore").mkdir()
    (tmp_path / "tracestore/__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n- New.\n\n## 1.1.0, 2026-01-01\n\n- Old.\n")
    command = ["make", "--silent", "release-notes", f"TAG={tag}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and text in done.stdout + done.stderr, done
    assert "Old" not in done.stdout
