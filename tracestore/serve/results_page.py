"""The page of results: metrics side by side, predictions and training curves."""

import numpy as np

from tracestore.pages.document import Section
from tracestore.pages.elements import Html, element, join, number, paragraph, table
from tracestore.pages.plots import Series, histogram, plot
from tracestore.serve.forms import address
from tracestore.serve.results import Results
from tracestore.serve.search import Query, TraceSearch

_BINS = np.linspace(0, 1, 41)
_PROBABILITY, _RANK = "probability of a hallucination", "rank of the score in its fold"


def results_sections(search: TraceSearch) -> list[Section]:
    """Return the sections of the page."""
    results = search.results
    if not results.probabilities and not results.test:
        text = "Give the folder that tracestore train or benchmark wrote, or a file of scores, as often as there are results to compare:"
        option = element("code", "tracestore serve STORE --results DIR --results SCORES.csv")
        return [Section("No results", paragraph(text, " ", option))]
    sections = []
    if results.test:
        names = list(results.test)
        metrics = dict.fromkeys(key for test in results.test.values() for key in test)
        rows = [[key, *(_metric(results.test[name].get(key)) for name in names)] for key in metrics]
        sections.append(Section("Test split", table(["metric", *names], rows, caption="Metrics of the test split")))
    if results.probabilities:
        notes = []
        if results.num_unknown:
            notes.append(f"{results.num_unknown:,} predictions are for traces that this store lacks.")
        if results.ranked:
            notes.append(
                "Scores of a benchmark are ranks: the share of the fold's traces with a lower score; equal ones count half. "
                "As many of the highest are predicted hallucinated as are labeled so."
            )
        if results.margins:
            notes.append(
                "A detector without a threshold was trained several times: it predicts a hallucination where its logits are "
                "on average at or above the thresholds of their trainings."
            )
        if num_others := search.num_other_labels:
            notes.append(
                f"{num_others:,} traces have another label in these results: those of this page, which --score and "
                "--score-threshold choose, decide what is misclassified."
            )
        sections.append(Section("Predictions", _predictions(search), " ".join(notes)))
    curves = _curves(results)
    if curves:
        sections.append(Section("Training", element("div", *curves, class_="plots")))
    return sections


def _metric(value: float | None) -> object:
    return value if isinstance(value, int) else number(value)


def _predictions(search: TraceSearch) -> Html:
    rows, plots = [], []
    for name, values in search.results.probabilities.items():
        threshold = search.results.threshold(name)
        missed = search.is_missed(name)
        false_alarms = int((missed & (search.targets < 0.5)).sum())
        link = element("a", "list the traces", href=address("/store", Query(missed=name).arguments()))
        known = int((~np.isnan(values)).sum())
        rows.append(
            [name, known, number(threshold), int(missed.sum()), false_alarms, int(missed.sum()) - false_alarms, link]
        )
        counts = {
            label: np.histogram(values[chosen & ~np.isnan(values)], _BINS)[0]
            for label, chosen in (("correct", search.targets < 0.5), ("hallucinated", search.targets >= 0.5))
        }
        plots.append(
            histogram(name, _BINS, counts, x_label=_RANK if name in search.results.ranked else _PROBABILITY,
                      colors={label: label for label in counts}, references=[] if threshold is None else [("threshold", "x", threshold)])
        )  # fmt: skip
    header = [
        "detector",
        "traces",
        "threshold",
        "misclassified",
        "false alarms",
        "missed hallucinations",
        "traces misclassified",
    ]
    found = table(header, rows, caption="Predictions at the threshold of each detector")
    return join([found, element("div", *plots, class_="plots")])


def _curves(results: Results) -> list[Html]:
    plots = []
    for name, history in results.history.items():
        for kind in ("loss", "auroc"):
            series = [
                Series(curve.replace("_", " "), range(1, len(values) + 1), values, has_marks=True)
                for curve, values in history.items()
                if curve.endswith(kind) and values
            ]
            if series:
                title = f"{name}: {kind}"
                plots.append(plot(title, series, x_label="epoch", y_label=kind, is_integer_x=True))
    return plots
