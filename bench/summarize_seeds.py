"""Mean test AUROC over runs: of each model, of the one chosen on validation, of the probe.

python bench/summarize_seeds.py demo/results_600_*/results.json
"""

import json
import sys
from pathlib import Path
from statistics import mean


def main() -> None:
    runs = [json.loads(Path(p).read_text()) for p in sys.argv[1:]]
    rows: dict[str, list[float]] = {}
    for run in runs:
        for name, entry in run["models"].items():
            rows.setdefault(name, []).append(entry["test"]["auroc"])
        chosen = max(run["models"].values(), key=lambda entry: entry["best_val_auroc"])
        rows.setdefault("chosen on validation", []).append(chosen["test"]["auroc"])
        rows.setdefault("logistic probe", []).append(run["probe"]["test"]["auroc"])
    for name, values in rows.items():
        print(f"{name:22} mean {mean(values):.3f}  ({', '.join(f'{v:.3f}' for v in values)})")


if __name__ == "__main__":
    main()
