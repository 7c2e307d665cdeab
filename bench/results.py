"""Write the newest results of asv into the tables of RESULTS.md and README.md.

python bench/results.py

`make results` runs the benchmarks before. The rows of ROWS are found by their first cell.
"""

import itertools
import json
import os
import platform
import re
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import ROOT

PAGES = (ROOT / "bench/RESULTS.md", ROOT / "README.md")
COMMAND = "`make results`"
Measured = dict[tuple[str, ...], float]


class Value(NamedTuple):
    """A number of a row: how it is computed and printed, and the bound that it keeps."""

    compute: Callable[[Measured], float]
    format: str
    at_least: float | None = None
    at_most: float | None = None

    def text(self, measured: Measured) -> str:
        """Return the value, marked if it misses its bound before rounding."""
        value = self.compute(measured)
        low = self.at_least is not None and value < self.at_least
        high = self.at_most is not None and value > self.at_most
        return self.format.format(value) + (" (**missed**)" if low or high else "")

    def bound(self) -> str:
        """Return the text of the bound."""
        bound = self.at_most if self.at_least is None else self.at_least
        return "" if bound is None else re.sub(r"{[^}]*}", f"{bound:g}", self.format)


def speed(benchmark: str, *params: str, at_least: float) -> Value:
    """Return the speed as a multiple of the limit's, of a benchmark that measures time over the limit's time."""
    return Value(lambda m: 1 / m[benchmark, *params], "{:.2f}", at_least=at_least)


def cost(benchmark: str, format: str, at_most: float, scale: float = 1) -> Value:
    """Return the value of a benchmark without parameters."""
    return Value(lambda m: scale * m[(benchmark,)], format, at_most=at_most)


def memory(count: int, suffix: str) -> Value:
    """Return the peak of a conversion over that of pickle.load."""
    ours, theirs = f"conversion, {suffix}", f"pickle.load of {count} traces, {suffix}"
    return Value(lambda m: m["memory.Memory.track_peak", ours] / m["memory.Memory.track_peak", theirs], "{:.2f}")


CONVERSION, LOADING = "conversion.Conversion.track_limit", "loading.Loading.track_limit"
STEP = ("gnn_det_lstm", "L=30 D=576, 45-65 tokens")
ROWS = {
    "speed of `.pkl` over `pickle.load`, write, fsync: head mean; every head": [
        speed(CONVERSION, ".pkl", "mean", at_least=1),
        speed(CONVERSION, ".pkl", "heads", at_least=1),
    ],
    "speed of `.pkl.gz` over isal's inflate: head mean; every head": [
        speed(CONVERSION, ".pkl.gz", "mean", at_least=0.9),
        speed(CONVERSION, ".pkl.gz", "heads", at_least=0.9),
    ],
    "peak memory over `pickle.load`'s: `.pkl`; `.pkl.gz`": [memory(128, ".pkl"), memory(48, ".pkl.gz")],
    "speed of small graph batches over memcpy: coo; packed": [
        speed(LOADING, "small", "coo", at_least=0.85),
        speed(LOADING, "small", "packed", at_least=0.9),
    ],
    "speed of large graph batches over memcpy: coo; packed": [
        speed(LOADING, "large", "coo", at_least=0.8),
        speed(LOADING, "large", "packed", at_least=0.85),
    ],
    "speed of two stores opened as one over the merged one: coo; packed": [
        Value(lambda m: m["loading.Joined.track_throughput", "coo"], "{:.2f}", at_least=0.97),
        Value(lambda m: m["loading.Joined.track_throughput", "packed"], "{:.2f}", at_least=0.97),
    ],
    "1,000,000 traces: open; `index_of`; shuffle of an id; order and lookup over the copy; index": [
        cost("scale.Scale.time_open", "{:.1f} ms", 50, 1e3),
        cost("scale.Scale.track_lookup", "{:.1f} µs", 2),
        cost("scale.Scale.time_shuffle_of_a_million", "{:.0f} ns", 100, 1e3),
        cost("scale.Scale.track_limit", "{:.1f} %", 1),
        cost("scale.Scale.track_index_size", "{:.1f} bytes a trace", 64),
    ],
    "speed of a step of gnn_det_lstm over PyG's, two threads": [
        Value(lambda m: 100 / m["training.StepsLimit.track_limit", *STEP], "{:.1f}", at_least=10)
    ],
    "lstm_solo: wait for data; guard against running out of memory": [
        cost("training.Shares.track_waiting_for_data", "{:.1f} % of an epoch", 5),
        cost("training.Shares.track_guard", "{:.2f} % of a step", 0.2),
    ],
}


def read_results(folder: Path) -> Measured:
    """Return the values of the newest results of asv by benchmark and parameters."""
    newest = max(folder.glob("*/*-existing-*.json"), key=lambda path: path.stat().st_mtime)
    found: Measured = {}
    for name, (values, params, *_) in json.loads(newest.read_text())["results"].items():
        for value, words in zip(values, itertools.product(*params), strict=True):
            if value is not None:
                found[name, *(word.strip("'") for word in words)] = value
    return found


def write_rows(text: str, measured: Measured, where: str) -> str:
    """Return the page with the rows of ROWS replaced. Columns that a table lacks are left out."""
    columns: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
        if cells[:1] == ["what"]:
            columns = cells
        elif cells and cells[0] in ROWS:
            values = ROWS[cells[0]]
            row = {
                "what": cells[0],
                "result": "; ".join(value.text(measured) for value in values),
                "bound": "; ".join(filter(None, (value.bound() for value in values))),
                "command": COMMAND,
                "where": where,
            }
            lines[number] = f"| {' | '.join(row[column] for column in columns)} |"
    return "\n".join(lines) + "\n"


def count_missed(text: str) -> str:
    """Return the page with the number of its rows that miss a bound."""
    found = re.findall(r"^\| [^|]+ \| ([^|]+) \|[^|]*\|[^|]*\| [^|]+ \|$", text, re.MULTILINE)
    num_missed = sum("**missed**" in result for result in found if result != "result")
    return re.sub(r"in \d+ of \d+ rows", f"in {num_missed} of {len(found) - found.count('result')} rows", text)


def machine() -> str:
    """Describe the machine, its load in the last five minutes, and the versions that matter."""
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    model = f"{len(models)} x {models[0]}" if models else platform.machine()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "zarr"))
    system = f"{model}, {platform.system()}, load {os.getloadavg()[1]:.1f}, Python {platform.python_version()}"
    return f"**R**, the machine of `make results`: {system}, {versions}."


def main() -> None:
    """Run the program."""
    measured = read_results(ROOT / "build/asv/results")
    for page in PAGES:
        text = count_missed(write_rows(page.read_text(encoding="utf-8"), measured, f"R {date.today():%m-%d}"))
        page.write_text(re.sub(r"^\*\*R\*\*, .*$", lambda _: machine(), text, flags=re.MULTILINE), encoding="utf-8")


if __name__ == "__main__":
    main()
