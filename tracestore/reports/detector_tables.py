"""Tables, sentences and facts that the pages of a run, of several runs and of a benchmark share, and the text table."""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tracestore
from tracestore.pages.elements import Html, TableCell, command, join, number, paragraph, table
from tracestore.pages.notebook import fragment
from tracestore.words import format_p


def origin(line: str | None, time: datetime.datetime | None = None, verb: str = "written") -> dict[str, object]:
    """Return when a page was written or a run finished, the version, and the command line if there is one."""
    written = (time or datetime.datetime.now().astimezone()).strftime("%Y-%m-%d %H:%M %Z")
    return {verb: written, "tracestore": tracestore.__version__, "command": line and command(line)}


def model_table(entries: Mapping[str, dict[str, Any]], controls: Mapping[str, dict[str, Any]], best: str) -> Html:
    """Return the table of detectors and controls with their intervals.

    Parameters
    ----------
    entries : mapping
        Entries of results.json by the name of the detector.
    controls : mapping
        Entries of `control_entries`.
    best : str
        The detector that is marked.
    """
    rows: list[list[object]] = []
    has_std = any(entry["test"].get("auroc_std_over_seeds") is not None for entry in entries.values())
    last = [c for c in (*COLUMNS[2:], "auroc_std_over_seeds") if has_std or c in COLUMNS]
    for name, entry in {**entries, **controls}.items():
        test = entry["test"]
        kind = "control" if name in controls else "baseline" if name == PROBE_NAME else "detector"
        intervals = [_interval(test, c) for c in ("auroc", "auprc")]
        rows.append([f"{name} (best)" if name == best else name, kind, test["num_traces"], test["num_questions"],
                     *intervals, *(number(test.get(c)) for c in last)])  # fmt: skip
    header = ["model", "kind", "n", "questions", "AUROC (95 %)", "AUPRC (95 %)",
              *(TITLES.get(c, c) for c in last)]  # fmt: skip
    return table(header, rows, caption="Test split")


def _interval(test: Mapping[str, Any], name: str) -> TableCell:
    return TableCell(format_interval(test[name], test[f"{name}_interval"]), test[name])


def p_value(value: float | None) -> TableCell:
    """Return the cell of a p-value, a dash for None."""
    return number(None) if value is None else TableCell(format_p(value), value)


def pair_table(pairs: Sequence[Mapping[str, Any]]) -> Html:
    """Return the table of the tests between all pairs of detectors, empty without pairs."""
    rows = [
        [
            pair_name(p),
            TableCell(format_interval(p["difference"], p["interval"], "+"), p["difference"]),
            p_value(p["p"]),
            p_value(p["p_holm"]),
            METHODS.get(p["method"], "–"),
        ]
        for p in pairs
    ]
    if not rows:
        return Html("")
    return table(["pair", "difference in AUROC (95 %)", "p", "p, Holm", "test"], rows, caption="Differences")


def best_of(entries: Mapping[str, dict[str, Any]]) -> str:
    """Return the name of the detector with the highest AUROC."""
    return max(entries, key=lambda name: entries[name]["test"]["auroc"])


def verdict(
    entries: Mapping[str, dict[str, Any]],
    pairs: Sequence[Mapping[str, Any]],
    controls: Mapping[str, dict[str, Any]],
) -> Html:
    """Return what the numbers say: the best detector, which others are as good, and warnings."""
    best = best_of(entries)
    test = entries[best]["test"]
    said = [
        paragraph(
            f"{best} has the highest AUROC: {format_interval(test['auroc'], test['auroc_interval'])} on "
            f"{test['num_traces']:,} test traces of {test['num_questions']:,} questions.",
            kind="verdict",
        )
    ]
    known = {pair_name(p): p for p in pairs}
    worse: list[str] = []
    equal: list[str] = []
    for other in entries:
        if other == best:
            continue
        pair = known.get(f"{best} - {other}") or known.get(f"{other} - {best}")
        if pair is not None and pair["p_holm"] is not None:
            (worse if pair["p_holm"] < 0.05 else equal).append(other)
    if worse:
        said.append(paragraph(f"Its AUROC is higher than that of {_enumerate(worse)} (p < 0.05, adjusted by Holm)."))
    if equal:
        said.append(paragraph(f"The test shows no difference to {_enumerate(equal)} (p ≥ 0.05, adjusted by Holm)."))
    low = test["auroc_interval"][0] if test["auroc_interval"] else test["auroc"]
    for name, entry in controls.items():
        if entry["test"]["auroc"] >= low:
            said.append(
                paragraph(
                    f"The control “{name}” reaches {entry['test']['auroc']:.3f}: the detector may have learned no more.",
                    kind="warning",
                )
            )
    said += [paragraph(reason, kind="warning") for reason in too_few(entries.values())]
    return join(said)


def _enumerate(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


class TrainingResults(dict[str, Any]):
    """The content of results.json, shown as tables in a notebook."""

    def _repr_html_(self) -> str:
        entries = {name: entry for name, entry in entries_of(self) if "test" in entry}
        store = self["store"]
        values = {"store": store["path"], "traces": store["num_traces"], "seed": self["config"]["seed"]}
        tables = model_table(entries, {}, ""), pair_table(self.get("comparisons") or [])
        return fragment("Training results", *tables, values=values)


COLUMNS = ("auroc", "auprc", "brier", "ece", "accuracy", "precision", "recall", "f1")
TITLES = {"auroc": "AUROC", "auprc": "AUPRC", "brier": "Brier", "ece": "ECE", "f1": "F1",
          "auroc_std_over_seeds": "std over seeds"}  # fmt: skip
PROBE_NAME = "logistic probe"
METHODS = {"delong": "DeLong", "bootstrap": "bootstrap"}


def entries_of(results: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the entry of each model, and of the probe if there is one."""
    entries = list(results["models"].items())
    if results.get("probe"):
        entries.append((PROBE_NAME, results["probe"]))
    return entries


def pair_name(pair: Mapping[str, Any]) -> str:
    """Return "first - second" for a pair of `compare`."""
    return " - ".join(PROBE_NAME if pair[k] == "logistic_probe" else pair[k] for k in ("first", "second"))


def format_table(results: dict[str, Any]) -> str:
    """Return a text table with a row for each model, for the probe and for each compared pair."""
    pairs = results.get("comparisons") or []
    width = max([14, *(len(pair_name(p)) for p in pairs)])
    rest = " ".join(f"{TITLES.get(c, c):>9}" for c in COLUMNS[1:])
    lines = [f"{'model':{width}} {'n':>6} {'AUROC':>6} {'95 % interval':>16} {rest}"]
    for name, entry in entries_of(results):
        test = entry["test"]
        values = " ".join(f"{test[c]:9.3f}" for c in COLUMNS[1:])
        interval = _limits(test["auroc_interval"])
        lines.append(f"{name:{width}} {test['num_traces']:6,} {test['auroc']:6.3f} {interval:>16} {values}")
    if pairs:
        lines.append(f"{'difference':{width}} {'':6} {'AUROC':>6} {'95 % interval':>16} {'p':>9} {'Holm':>9}  test")
    for pair in pairs:
        lines.append(
            f"{pair_name(pair):{width}} {'':6} {pair['difference']:+6.3f} {_limits(pair['interval'], '+'):>16} "
            f"{format_p(pair['p']):>9} {format_p(pair['p_holm']):>9}  {METHODS.get(pair['method'], '-')}"
        )
    return "\n".join([*lines, *too_few(entry for _, entry in entries_of(results))])


def _limits(interval: Sequence[float] | None, sign: str = "") -> str:
    return "-" if interval is None else f"{interval[0]:{sign}.3f} to {interval[1]:{sign}.3f}"


def too_few(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the distinct reasons why entries have no intervals."""
    reasons = (entry["test"]["too_few"] for entry in entries)
    return list(dict.fromkeys(reason for reason in reasons if reason is not None))


def format_interval(value: float, interval: Sequence[float] | None, sign: str = "") -> str:
    """Return a value with its interval in parentheses."""
    return f"{value:{sign}.3f}" + ("" if interval is None else f" ({_limits(interval, sign)})")
