"""report.html of a training run."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.evaluation.evaluate import RunScores, run_scores
from tracestore.pages.document import Section, document
from tracestore.pages.elements import Html, command, details, element, facts, join, number, paragraph, table
from tracestore.pages.plots import Series, histogram, plot
from tracestore.reports import curves
from tracestore.reports.controls import DESCRIPTIONS
from tracestore.reports.detector_tables import PROBE_NAME, best_of, entries_of, model_table, origin, pair_table, verdict
from tracestore.reports.mistakes import mistake_cards
from tracestore.store.format.provenance import Provenance
from tracestore.store.html import serve_command
from tracestore.store.io.fsio import write_atomic
from tracestore.store.read.store import TraceStore
from tracestore.words import format_size

_MAX_GROUPS = 25


@dataclass(frozen=True)
class RunFacts:
    """Hold what results.json does not.

    Parameters
    ----------
    command : str, optional
        The command of the run.
    finished : datetime, optional
        When the run finished. Default: now.
    peak_bytes : int, optional
        Largest memory of the process.
    """

    command: str | None = None
    finished: datetime.datetime | None = None
    peak_bytes: int | None = None


def write_report(results: Mapping[str, Any], path: Path, store: TraceStore, run_facts: RunFacts | None = None) -> None:
    """Write report.html: one file that needs no network.

    Parameters
    ----------
    results : mapping
        The content of results.json.
    path : Path
    store : TraceStore
        The store of the run, for lengths and the texts of misclassified traces.
    run_facts : RunFacts, optional
    """
    text = report_page(results, store, run_facts or RunFacts(), path.parent)
    write_atomic(path, text.encode("utf-8", "backslashreplace"))


def report_page(results: Mapping[str, Any], store: TraceStore, run_facts: RunFacts, folder: Path) -> str:
    """Return the page of a run with an output folder."""
    entries = dict(entries_of(results))
    scores = test_scores(results)
    controls = results.get("controls") or {}
    best = best_of(entries)
    sections = [
        Section("Verdict", verdict(entries, results.get("comparisons") or [], controls)),
        Section("Models", join([model_table(entries, controls, best), pair_table(results.get("comparisons") or []),
                                _control_note(controls)]),
                "Intervals and tests resample questions; AUROC and AUPRC are means over the runs."),
        Section("Training", _training_plots(results["models"], entries),
                "Means over the runs. The dashed lines are the AUROC of the logistic probe and the best epoch."),
        Section("Ranking", _ranking_plots(entries, scores),
                "Test split; means over the runs. The area under a curve is next to its name."),
        Section("Calibration", _calibration(entries), "Test split, all runs pooled."),
        Section("Scores by class", _plots(_score_plots(entries, scores)), "Tests of all runs."),
        Section("Layers", _layers(entries)),
        Section("Groups", _groups(entries), "AUROC within each group: means over the runs in which it has both classes."),
        Section("Lengths", _lengths(scores, store), "AUROC of traces of similar length; a quarter of the tests each. Without a bar: one class only."),
        Section("Most confident mistakes", join([mistake_cards(store, scores, best), _serve(store, folder, results["config"])]),
                f"Wrong predictions of {best} on the test split, the most confident first."),
        Section("Runs", _runs(results, entries)),
        Section("Out of memory", _events(results["models"])),
        Section("Memory and time", _costs(results["models"], run_facts)),
        Section("Configuration", _configuration(results)),
    ]  # fmt: skip
    return document("Training report", facts=_header(results, run_facts), sections=[s for s in sections if s.content])


def test_scores(results: Mapping[str, Any]) -> dict[str, list[RunScores]]:
    """Return the test scores of each run of each model, and of the probe."""
    found = {name: list(of_model.values()) for name, of_model in run_scores(results).items()}
    if results.get("probe"):
        probes = results.get("probes") or [{"fold": None, **results["probe"]}]
        found[PROBE_NAME] = [RunScores.from_entry(p, p["fold"] or 0) for p in probes]
    return found


def _header(results: Mapping[str, Any], run_facts: RunFacts) -> dict[str, object]:
    store, config = results["store"], results["config"]
    split = results["counts"][0]
    sizes = {name: sum(of.values()) for name, of in split.items()}
    classes = {c: sum(of[c] for of in split.values()) for c in ("hallucinated", "correct")}
    total = max(1, sum(classes.values()))
    folds, seeds = config.get("folds"), config.get("seeds") or 1
    divided = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    origins = [Provenance(p.model, layer_ids=p.layer_ids, tool=p.tool) for p in map(_provenance, store["provenance"])]
    return {
        "store": store["path"],
        "provenance": "; ".join(dict.fromkeys(filter(None, map(str, origins)))) or "unknown",
        "traces": store["num_traces"],
        "classes": ", ".join(f"{count:,} {name} ({100 * count / total:.0f} %)" for name, count in classes.items()),
        "split": f"{folds} folds; first fold: {divided}" if folds else divided,
        "seeds": f"{config['seed']} to {config['seed'] + seeds - 1}" if seeds > 1 else config["seed"],
        **origin(run_facts.command, run_facts.finished, "finished"),
    }


def _provenance(value: Any) -> Provenance:
    return Provenance.from_json(value) if isinstance(value, Mapping) else value


def _plots(plots: Sequence[Html]) -> Html:
    return element("div", *plots, class_="plots") if plots else Html("")


def _control_note(controls: Mapping[str, Any]) -> Html:
    said = [f"{name}: {DESCRIPTIONS[name]}" for name in controls if name in DESCRIPTIONS]
    return paragraph("Controls: ", "; ".join(said), ".", kind="note") if said else Html("")


def _training_plots(models: Mapping[str, Any], entries: Mapping[str, Any]) -> Html:
    plots = []
    probe = entries.get(PROBE_NAME)
    aurocs = []
    for name, entry in models.items():
        history = entry["history"]
        epochs = np.arange(1, len(history["train_loss"]) + 1)
        best = entry.get("best_epoch")
        losses = [
            Series("train", epochs, history["train_loss"], has_marks=True),
            Series("validation", epochs, history["val_loss"], has_marks=True, is_dashed=True),
        ]
        marks = [] if best is None else [("best epoch", "x", best + 1)]
        plots.append(
            plot(f"{name}: loss", losses, x_label="epoch", y_label="loss", is_integer_x=True, references=marks)
        )
        aurocs.append(Series(name, epochs, history["val_auroc"], has_marks=True))
    if not aurocs:
        return Html("")
    lines = [] if probe is None else [(f"{PROBE_NAME}, validation", "y", probe["best_val_auroc"])]
    first = plot(
        "Validation AUROC", aurocs, x_label="epoch", y_label="AUROC", is_integer_x=True,
        references=[*lines, ("chance", "y", 0.5)],
    )  # fmt: skip
    return _plots([first, *plots])


def _ranking_plots(entries: Mapping[str, Any], scores: Mapping[str, Sequence[RunScores]]) -> Html:
    share = float(np.mean(np.concatenate([run.y for runs in scores.values() for run in runs])))
    kinds: list[tuple[str, Any, str, str, str, tuple[str, str, float]]] = [
        ("ROC", curves.roc, "false positive rate", "true positive rate", "auroc", ("chance", "diagonal", 0)),
        ("Precision and recall", curves.precision_recall, "recall", "precision", "auprc", ("chance", "y", share)),
        ("Risk and coverage", curves.risk_coverage, "coverage", "share of hallucinations among the answered", "",
         ("answer at random", "y", share)),
    ]  # fmt: skip
    plots = []
    for title, curve, x_label, y_label, metric, reference in kinds:
        series = []
        for name, runs in scores.items():
            shown = f"{name} {entries[name]['test'][metric]:.3f}" if metric else name
            series.append(Series(shown, *curves.mean_curve(runs, curve), is_dashed=name == PROBE_NAME))
        plots.append(
            plot(title, series, x_label=x_label, y_label=y_label, x_range=(0, 1), y_range=(0, 1.02) if metric else None,
                 is_square=True, height=360, references=[reference])
        )  # fmt: skip
    return _plots(plots)


def _calibration(entries: Mapping[str, Any]) -> Html:
    rows, series = [], []
    for name, entry in entries.items():
        c = entry["calibration"]
        values = (c["ece"], c["scaled"]["ece"], c["brier"], c["scaled"]["brier"], c["temperature"])
        rows.append([name, *map(number, values)])
        bins = c["reliability"]
        total = sum(b["count"] for b in bins)
        x, y = [b["mean_probability"] for b in bins], [b["fraction"] for b in bins]
        sizes = [5 + 25 * (b["count"] / total) ** 0.5 for b in bins]
        texts = [f"{b['count']:,} tests" for b in bins]
        series += [
            Series(name, x, y, is_dashed=name == PROBE_NAME),
            Series(name, x, y, "points", sizes=sizes, texts=texts),
        ]
    figure = plot(
        "Reliability", series, x_label="predicted probability", y_label="share of hallucinations", x_range=(0, 1),
        y_range=(0, 1), is_square=True, height=360, references=[("calibrated", "diagonal", 0)],
        note="The area of a point grows with the number of tests in its bin.",
    )  # fmt: skip
    header = ["model", "ECE", "ECE, scaled", "Brier", "Brier, scaled", "temperature"]
    return join([_plots([figure]), table(header, rows, caption="Calibration")])


def _score_plots(entries: Mapping[str, Any], scores: Mapping[str, Sequence[RunScores]]) -> list[Html]:
    plots = []
    for name, runs in scores.items():
        edges, counts = curves.histograms(runs)
        threshold = 1 / (1 + np.exp(-entries[name]["threshold"]))
        plots.append(
            histogram(name, edges, counts, x_label="probability of a hallucination", y_label="tests",
                      colors={c: c for c in counts},
                      references=[("threshold" if len(runs) == 1 else "mean threshold", "x", float(threshold))])
        )  # fmt: skip
    return plots


def _layers(entries: Mapping[str, Any]) -> Html:
    values = entries.get(PROBE_NAME, {}).get("val_auroc_by_layer", [])
    if not values:
        return Html("")
    figure = plot(
        "Logistic probe by layer", [Series(PROBE_NAME, range(len(values)), values, has_marks=True)], x_label="layer",
        y_label="AUROC on validation", is_integer_x=True, references=[("chance", "y", 0.5)],
        note="The probe is tested with its best layer.",
    )  # fmt: skip
    return _plots([figure])


def _groups(entries: Mapping[str, Any]) -> Html:
    # The entries have the same groups, because the models are tested on the same traces.
    groups = list(zip(*(entry["by_group"] for entry in entries.values()), strict=True))
    if not groups:
        return Html("")
    rows = [
        [of[0]["group"], of[0]["num_traces"], of[0]["num_hallucinated"], *(number(g["auroc"]) for g in of)]
        for of in groups
    ]
    shown = sorted(groups, key=lambda of: -of[0]["num_traces"])[:_MAX_GROUPS]
    series = [
        Series(name, range(len(shown)), [of[k]["auroc"] for of in shown], "points") for k, name in enumerate(entries)
    ]
    figure = plot(
        "AUROC by group", series, x_label="group", y_label="AUROC", x_names=[of[0]["group"] for of in shown],
        is_horizontal=True, references=[("chance", "y", 0.5)], height=120 + 24 * len(shown),
        note="" if len(shown) == len(groups) else f"The {len(shown)} largest of {len(groups):,} groups.",
    )  # fmt: skip
    return join(
        [_plots([figure]), table(["group", "traces", "hallucinated", *entries], rows, caption="AUROC by group")]
    )


def _lengths(scores: Mapping[str, Sequence[RunScores]], store: TraceStore) -> Html:
    num_tokens = store.num_tokens
    tested = np.unique(np.concatenate([run.trace for runs in scores.values() for run in runs]))
    if not (num_tokens[tested] > 0).all():
        return Html("")
    bins = curves.length_bins(num_tokens[tested])
    found = curves.auroc_by_length(scores, num_tokens, bins)
    names = [f"{first} to {last}" for first, last in bins]
    series = [Series(name, range(len(bins)), values, "bars") for name, values in found.items()]
    figure = plot(
        "AUROC by length", series, x_label="tokens of the trace", y_label="AUROC", x_names=names, y_range=(0, 1),
        references=[("chance", "y", 0.5)],
    )  # fmt: skip
    return _plots([figure])


def _serve(store: TraceStore, folder: Path, config: Mapping[str, Any]) -> Html:
    if len(store.internals.members) > 1:  # serve shows one store
        return Html("")
    score = config.get("score") if config.get("score") != store.internals.attributes.default_score else None
    words = serve_command(store.path, folder, score, config.get("score_threshold"))
    return join([paragraph("To list and open all test traces that a model misclassifies:"), command(words)])


def _runs(results: Mapping[str, Any], entries: Mapping[str, Any]) -> Html:
    counts = [
        [f"{k}" if results["config"].get("folds") else "–", name, c["hallucinated"], c["correct"]]
        for k, splits in enumerate(results["counts"])
        for name, c in splits.items()
    ]
    parts = [table(["fold", "split", "hallucinated", "correct"], counts, caption="Traces of the splits")]
    if "runs" in results:
        keys = [(run["fold"], run["seed"]) for run in results["runs"]]
        rows = []
        for name, entry in results["models"].items():
            values = zip(keys, entry["test"]["auroc_by_run"], strict=True)
            rows += [[name, "–" if fold is None else fold, seed, number(value)] for (fold, seed), value in values]
        parts.insert(0, table(["model", "fold", "seed", "test AUROC"], rows, caption="Test AUROC of each run"))
        pooled = [[name, number(entry["test"]["auroc_out_of_fold"])] for name, entry in entries.items()]
        parts.insert(1, table(["model", "AUROC"], pooled, caption="AUROC of all folds pooled, mean over seeds"))
    return join(parts)


def _events(models: Mapping[str, Any]) -> Html:
    events = [(name, e | {"epoch": e["epoch"] + 1}) for name, entry in models.items() for e in entry["oom_events"]]
    if not events:
        return paragraph("No out-of-memory errors.")
    columns = list(dict.fromkeys(key for _, event in events for key in event))
    rows = [[name, *(event.get(c, "") for c in columns)] for name, event in events]
    return table(["model", *(c.replace("_", " ") for c in columns)], rows, caption="Recovered out-of-memory errors")


def _costs(models: Mapping[str, Any], run_facts: RunFacts) -> Html:
    rows, series = [], []
    for name, entry in models.items():
        seconds, history = entry["seconds_per_epoch"], entry["history"]
        rates, waits = (np.nanmean(history.get(k) or [np.nan]) for k in ("traces_per_s", "data_wait_share"))
        rows.append([name, len(seconds), number(float(np.mean(seconds)), 2), number(float(np.sum(seconds)), 1),
                     number(float(rates), 0), number(float(100 * waits), 0)])  # fmt: skip
        series.append(Series(name, np.arange(1, len(seconds) + 1), seconds, has_marks=True))
    if not rows:
        return Html("")
    header = ["model", "epochs", "seconds per epoch", "seconds of all epochs", "traces per second", "data wait (%)"]
    memory = None if run_facts.peak_bytes is None else format_size(run_facts.peak_bytes)
    figure = plot("Seconds per epoch", series, x_label="epoch", y_label="seconds", is_integer_x=True)
    return join([
        facts({"peak memory of the process": memory}),
        table(header, rows, caption="Time of one training, mean over the runs"),
        _plots([figure]),
    ])  # fmt: skip


def _configuration(results: Mapping[str, Any]) -> Html:
    def rows(values: Mapping[str, Any]) -> list[list[str]]:
        return [[name, str(value)] for name, value in values.items()]

    store = dict(results["store"])
    origins = [row for p in store.pop("provenance") for row in rows(_provenance(p).to_json())]
    parts = [
        details(title, table(["name", "value"], of, caption=title))
        for title, of in (
            ("Options of the run", rows(results["config"])), ("Store", rows(store)), ("Provenance", origins)
        )
        if of
    ]  # fmt: skip
    return join(parts)
