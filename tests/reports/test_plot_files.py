"""Test the plots that are files: their names, values and texts."""

from xml.etree import ElementTree

import numpy as np
import pytest

from tests.pages.example import MALICIOUS
from tests.reports.synthetic import MODELS, NUM_EPOCHS
from tracestore.pages.plots import Series
from tracestore.reports.plot_files import drawing, write_plots
from tracestore.store.io.fsio import read_json

SVG = "{http://www.w3.org/2000/svg}"


def points_of(picture):
    """Return the points (n, 2) of each line of a picture."""
    return [
        np.array([p.split(",") for p in line.get("points").split()], float) for line in picture.iter(f"{SVG}polyline")
    ]


@pytest.mark.long
def test_each_plot_of_a_run_is_a_file(report):
    results = read_json(report.parent / "first/results.json")
    paths = write_plots(results, report.parent)
    assert [p.name for p in paths] == ["loss.svg", "auroc.svg", "roc.svg", "precision_recall.svg"]
    loss, auroc, roc, _ = (ElementTree.parse(path).getroot() for path in paths)
    texts = [t.text for t in auroc.iter(f"{SVG}text")]
    assert set(MODELS) < set(texts) and {"Validation AUROC", "epoch", "AUROC"} < set(texts)
    assert {"1", "3", "5", "8", "10", "12"} < set(texts)
    assert [len(p) for p in points_of(auroc)] == [NUM_EPOCHS] * 3 and len(points_of(loss)) == 6
    for points in points_of(roc):
        assert points[0, 0] == 60 and points[-1].tolist() == [480, 40] and points[:, 1].max() <= 350
        assert (np.diff(points[:, 0]) > 0).all() and (np.diff(points[:, 1]) <= 0).all()
    assert len(points_of(roc)) == 4 and write_plots({**results, "models": {}}, report.parent) == []


def test_lines_are_interrupted_and_texts_escaped():
    lines = [Series(text, [1, 2, 3, 4], [0, np.nan, 1, 2]) for text in MALICIOUS] + [Series("none", [1], [np.nan])]
    text = drawing(MALICIOUS[0], lines, x_label=MALICIOUS[1], y_label="y")
    picture = ElementTree.fromstring(text.encode("utf-8", "backslashreplace"))
    assert [len(p) for p in points_of(picture)] == [1, 2] * len(MALICIOUS)
    assert {e.tag.removeprefix(SVG) for e in picture.iter()} == {"svg", "rect", "text", "path", "polyline"}
    assert not any(name.startswith("on") for e in picture.iter() for name in e.attrib)
