"""The recipes of docs/tasks.md, as printed. A process of each is killed while it writes a task."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.machine import wait_until
from tests.project.test_docs import blocks
from tests.tasks.test_tasks import check_equal, files_of, run_tasks
from tests.tiers import long

# By the names of their stores.
RECIPES = {code.partition(".zarr")[0].split()[-1].lstrip('"'): code for _, code, _ in blocks("docs/tasks.md")}
LIBRARIES = {"dask": "distributed", "ray": "ray", "spark": "pyspark"}


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a recipe or command; one of its processes is killed."""
    folders = [Path(sys.executable).parent, Path(__file__).parent / "recipes"]
    environment = os.environ | {
        "PATH": ":".join(map(str, [*folders, os.environ["PATH"]])),
        "PYTHONPATH": f"{ROOT}:{folders[1]}",
        "PYSPARK_SUBMIT_ARGS": "--master local[2,4] pyspark-shell",  # as on a cluster: four attempts
        "KILLED": str(tmp_path),
    }

    def start(code):
        words = [sys.executable] if "\nfrom tracestore" in code else ["bash"]
        return subprocess.Popen([*words, "-c", code], cwd=tmp_path, env=environment)

    return start


@pytest.mark.parametrize("name", long(*RECIPES))
def test_a_recipe_stores_all_traces_though_a_process_is_killed(data, start, tmp_path, name):
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    run_tasks(data, tmp_path / "one.zarr")
    data.rename(tmp_path / "traces_data")
    recipe = start(RECIPES[name])
    if name == "shards":
        wait_until((tmp_path / "killed").exists)
        assert start("tracestore work tasks.json").wait(60) == 0
    elif name == "processes":
        assert recipe.wait(60) == 1
        recipe = start(RECIPES[name])
    assert recipe.wait(120) == 0 and (tmp_path / "killed").exists()
    check_equal(tmp_path / f"{name}.zarr", tmp_path / "one.zarr")
    assert files_of(tmp_path / f"{name}.zarr") == files_of(tmp_path / "one.zarr")


def test_recipes_are_short():
    assert {*LIBRARIES, "shards", "slurm", "ranks", "processes"} == set(RECIPES)
    assert all(code.count("\n") <= 15 for code in RECIPES.values())
