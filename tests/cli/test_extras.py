"""Test that the error for a missing library is one line that names the extra."""

import json
import tomllib

import pytest

from tests.helpers import ROOT, make_trace, run_cli, write_pickle
from tests.train.runs import FAST, write_labeled
from tracestore.extras import EXTRAS, PACKAGES

# Runs usages (arguments of `tracestore`, or Python statements) with some modules blocked, and prints the results.
WITHOUT_MODULES = """
import contextlib, io, json, sys
blocked, usages = json.loads(sys.argv[1])
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from tracestore.cli import main
answers = []
for usage in usages:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if isinstance(usage, list):
            answers.append([main(usage), None])
        else:
            try:
                answers.append([exec(usage), None])
            except ImportError as error:
                answers.append([type(error).__name__, str(error)])
    if isinstance(usage, list):
        answers[-1][1] = err.getvalue()
print(json.dumps(answers))
"""


def run_without(modules, usages):
    """Return [exit code, standard error] for each command, [type, message] of the ImportError for each statement."""
    usages = [usage if isinstance(usage, str) else [str(word) for word in usage] for usage in usages]
    return json.loads(run_cli("-c", WITHOUT_MODULES, json.dumps([list(modules), usages]), check=0).stdout)


@pytest.fixture
def usages(tmp_path):
    """Return the usages that need each extra."""
    store = write_labeled(tmp_path / "store.zarr")
    run = ["train", "--store", store, *FAST, "--output-dir", tmp_path / "run"]
    (tmp_path / "best.pt").touch()
    write_pickle(tmp_path / "a.pkl", [make_trace(0)])
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    (tmp_path / "a.arrow").write_bytes(b"ARROW1\0\0")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    questions = ("--questions", "package:facts", "--limit", 1, "--out", tmp_path / "traces")
    return {
        "train": [
            run,
            ["predict", "--checkpoint", tmp_path / "best.pt", "--store", store],
            ["plan", store],
            ["export", store, tmp_path / "out", "--format", "pt-gnn"],
            "import tracestore; tracestore.TraceLoader",
            "from tracestore import TraceDataset",
            "from tracestore.train import OOMGuard",
        ],
        "pictures": [["view", store, "q0", "--save", tmp_path / "q0.png"]],
        "extract": [["extract", "--model", "package:json", *questions], "from tracestore.extract import capture"],
        "remote": [["info", "s3://bucket/store.zarr"], "import tracestore; tracestore.open('s3://bucket/store.zarr')"],
        "inputs": [["convert", tmp_path / name, tmp_path / "new.zarr"] for name in ("a.h5", "a.arrow", "a.parquet")],
        "hub": [
            ["push", store, "user/name"],
            ["pull", "user/name", tmp_path / "pulled.zarr"],
            ["export", store, tmp_path / "out", "--format", "datasets"],
            "import tracestore.hub.push",
        ],
        "serve": [
            ["serve", store],
            ["report", store, "--output", tmp_path / "report.html"],
            "import tracestore.serve as s; s.make_server(None)",
        ],
        "dask": [["convert", tmp_path / "a.pkl", tmp_path / "new.zarr", "--dask", "local"]],
        **{logger: [[*run, "--logger", logger]] for logger in ("tensorboard", "wandb", "mlflow")},
        "completion": [["completion", "bash"]],
        "bridges": [
            f"import tracestore; tracestore.open({str(store)!r}).to_pandas()",
            "import tracestore.bridges.lightning",
            "import tracestore.bridges.pyg",
            "import tracestore.bridges.huggingface",
        ],
    }


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.long
def test_error_for_a_missing_library_names_the_extra(usages, extra):
    for usage, (code, text) in zip(usages[extra], run_without(EXTRAS[extra], usages[extra]), strict=True):
        line = f" is not installed; run: pip install 'tracestore[{extra}]'"
        if isinstance(usage, str):
            assert code == "MissingExtraError" and text.endswith(line), (usage, text)
        else:
            assert code == 2 and text.endswith(f"{line}\n") and text.count("\n") == 1, (usage, text)
            assert text.startswith(f"tracestore {usage[0]}: ")


@pytest.mark.long
@pytest.mark.parametrize("module", EXTRAS["train"])
def test_training_checks_its_libraries_before_it_starts(usages, module, tmp_path):
    train = usages["train"][0]
    ((code, text),) = run_without([module], [train])
    assert code == 2 and text.startswith(f"tracestore train: {PACKAGES.get(module, module)} is not installed")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_commands_without_extras_run_without_their_libraries(usages, tmp_path):
    all_modules = sorted({module for modules in EXTRAS.values() for module in modules})
    store = tmp_path / "store.zarr"
    plain = [
        ["--help"],
        *([name, "--help"] for name in ("train", "predict", "compare", "extract", "plan", "serve")),
        ["convert", tmp_path / "a.pkl", tmp_path / "new.zarr"],
        ["info", store],
        ["verify", store],
        ["view", store, "q0"],
        ["doctor", "--folder", tmp_path],
        ["merge", store, tmp_path / "merged.zarr"],
        ["subset", store, tmp_path / "part.zarr", "--split", "train"],
        ["export", store, tmp_path / "out"],
        ["export", store, tmp_path / "tensors", "--format", "safetensors"],
    ]
    assert run_without(all_modules, plain) == [[0, ""]] * len(plain)


def test_extras_match_pyproject():
    """EXTRAS holds the modules of exactly the libraries that pyproject.toml lists."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]

    def packages(extra):
        found = set()
        for requirement in extras[extra]:
            name = requirement.partition(";")[0].strip()
            if name.startswith("tracestore["):
                for inner in name.removeprefix("tracestore[").rstrip("]").split(","):
                    found |= packages(inner)
            else:
                found.add(name.split(">")[0].split("=")[0].split("<")[0].split("!")[0].strip())
        return found

    for extra, modules in EXTRAS.items():
        assert packages(extra) == {PACKAGES.get(module, module) for module in modules}, extra
    for_developers = {"all", "docs", "dev", "test", "demo"}
    assert set(extras) - for_developers == set(EXTRAS)
