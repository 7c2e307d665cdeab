"""Peaks of anonymous memory of separate processes, minus their memory after the imports."""

from pathlib import Path

from .common import GRAPH_MODELS, PICKLED, STEP_SHAPES, Fixtures, convert, measure_steps, pickle_dir, run_measured

MODELS = ("lstm_solo", *GRAPH_MODELS)


class Memory(Fixtures):
    """Memory of tracestore and of loading the pickles: 128 traces of L=30 D=576 H=9.

    Training steps use a batch of 16, which is not counted, nor are mapped files.
    """

    params = (
        [
            *(f"pickle.load of {count} traces, {suffix}" for suffix, count in PICKLED.items()),
            *(f"conversion, {suffix}" for suffix in PICKLED),
            "loading, coo",
            "loading, packed",
            *(f"step, {model}" for model in MODELS),
        ],
    )
    param_names = ("what",)

    def track_peak(self, folder, what):
        """Return the peak in MiB."""
        kind, _, case = what.partition(", ")
        store = Path(folder) / "out.zarr"
        if kind == "step":
            peak = measure_steps(case, next(iter(STEP_SHAPES)), "fused", 1)[1]
        elif kind == "loading":
            convert(pickle_dir(folder, ".pkl"), store)
            peak = run_measured("loading", store, case)[1]
        elif kind == "conversion":
            peak = run_measured("conversion", "convert", pickle_dir(folder, case), store)[1]
        else:
            peak = run_measured("conversion", "load", pickle_dir(folder, case))[1]
        return peak / 2**20

    track_peak.unit = "MiB"
