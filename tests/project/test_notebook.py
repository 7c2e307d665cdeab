"""The example notebook runs from top to bottom, and shows tables of stores, traces, loaders and results."""

import json
import os

import pytest

from tests.helpers import ROOT

PATH = ROOT / "docs/examples/first_steps.ipynb"


def test_notebook_holds_no_outputs():
    cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)


@pytest.mark.long
def test_notebook_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(PATH, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    client.allow_errors = True
    client.execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    errors = [o["evalue"] for o in outputs if o["output_type"] == "error"]
    assert not errors, (errors, [o.get("text") for o in outputs])
    shown = [o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {})]
    titles = ("TraceStore store.zarr", "Trace 3", "TraceLoader", "Training results")
    assert [next(t for t in titles if f"<h3>{t}</h3>" in text) for text in shown] == list(titles)
    text = "".join(o.get("text", "") for o in outputs)
    assert "80 traces added" in text and "q0,0," in text and (tmp_path / "store.html").stat().st_size > 100_000
