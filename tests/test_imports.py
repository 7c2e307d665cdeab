"""Test what an import loads, each in a process of its own."""

import pytest

from tests.helpers import convert, make_traces, run_cli, write_pickle, write_scores
from tests.tiers import long

HEAVY = {"matplotlib", "pandas", "scipy", "sklearn", "sympy", "torch._dynamo", "torch_geometric", "zarr"}
REPORT = f"; import sys; print(sorted({HEAVY} & set(sys.modules)))"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imports")
    write_pickle(folder / "traces/a.pkl", make_traces(40))
    write_scores(folder / "traces/scores.csv", {f"q{k}": k % 2 for k in range(40)})
    convert(folder / "traces", folder / "s.zarr")
    return folder / "s.zarr"


@pytest.mark.parametrize("name", ["TraceLoader", *long("TraceDataset", "collate_graphs")])
@pytest.mark.long
def test_loader_imports_no_heavy_libraries_but_torch(name):
    assert run_cli("-c", f"import tracestore; tracestore.{name}" + REPORT, check=0).stdout.split() == ["[]"]


@pytest.mark.long
def test_loader_of_sequences_needs_no_pyg(store):
    code = f"import tracestore; list(tracestore.TraceLoader({str(store)!r}, 'sequence'))" + REPORT
    assert run_cli("-c", code, check=0).stdout.split() == ["[]"]


@pytest.mark.long
def test_training_without_the_probe_imports_neither_pyg_nor_scikit_learn(store, tmp_path):
    code = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print(sorted({HEAVY} & set(sys.modules))))\n"
        f"sys.argv = ['train.py', '--store', {str(store)!r}, '--output-dir', {str(tmp_path / 'r')!r}, '--epochs', '1',\n"
        "    '--gnn-hidden', '8', '--latent-dim', '4', '--lstm-hidden', '8', '--num-threads', '1', '--no-probe']\n"
        "runpy.run_path('tools/train.py', run_name='__main__')"
    )
    done = run_cli("-c", code, check=0)
    assert done.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "r/report.html").exists()


def test_a_conversion_imports_nothing_that_takes_as_long_as_a_small_file(store, tmp_path):
    words = ["convert", str(store.parent / "traces"), str(tmp_path / "s.zarr")]
    heavy = {"concurrent.futures", "numpy.ma", "torch", "tracestore.tasks", "tracestore.store.remote"}
    code = f"import sys; from tracestore.cli import main; code = main({words}); print(code, {heavy} & {{*sys.modules}})"
    assert run_cli("-c", code, check=0).stdout.splitlines()[-1] == "0 set()"
