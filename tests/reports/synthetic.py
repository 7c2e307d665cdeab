"""Results that were never computed: a training of 600 traces, 3 models, 5 folds x 3 seeds; a benchmark."""

import itertools

import numpy as np

from tests.helpers import make_trace
from tests.pages.example import MALICIOUS
from tracestore.console import nan_to_none
from tracestore.evaluation.evaluate import RunScores, evaluate_split
from tracestore.evaluation.significance import compare
from tracestore.evaluation.store_split import class_counts, make_folds
from tracestore.experiment.folds import aggregate_runs
from tracestore.reports.controls import control_entries

MODELS = {"lstm_solo": 0.8, "gnn_det_lstm": 1.6, "gvae_lstm": 1.4}
NUM_TRACES, NUM_FOLDS, NUM_SEEDS, NUM_EPOCHS, NUM_LAYERS = 600, 5, 3, 12, 16


def write_traces(writer):
    """Append the traces, about a third of them hallucinated, with texts and log-probabilities, in 12 groups."""
    rng = np.random.default_rng(0)
    for k in range(NUM_TRACES):
        tokens = int(rng.integers(6, 20))
        trace = make_trace(k, tokens=tokens, layers=2, dim=4)
        trace |= {
            "question": f"Which city is the capital of country number {k}?",
            "generated_answer_clean": f"The capital of country number {k} is city {k * 7 % 100}.",
            "reference": f"city {k * 3 % 100}",
            "tokens_decoded": [f" word{j}" for j in range(tokens)],
            "token_logprob": -rng.exponential(1, tokens).astype("f4"),
        }
        writer.append(trace, score=0.1 if rng.random() < 1 / 3 else 0.9, group=f"topic {k % 12}")


def make_results(store):
    """Return the content of results.json."""
    rng = np.random.default_rng(1)
    targets = store.targets(0.5)
    splits = make_folds(store, targets, NUM_FOLDS, 42)

    def entry(split, quality):
        test = split.indices["test"]
        y = (targets[test] >= 0.5).astype(int)
        logit = quality * (2 * y - 1) + rng.normal(size=len(y))
        return {**evaluate_split(store, test, y, logit, 0.0, 1.0, 42), "best_val_auroc": 0.7 + quality / 10}

    def trained(split, quality):
        epochs = np.arange(1, NUM_EPOCHS + 1)
        history = {
            "train_loss": (0.7 * np.exp(-epochs / 6 * quality)).tolist(),
            "val_loss": (0.7 * np.exp(-epochs / 9 * quality) + epochs / 200).tolist(),
            "val_auroc": (1 - 0.5 * np.exp(-epochs / 4 * quality)).tolist(),
            "traces_per_s": [300.0] * NUM_EPOCHS,
            "data_wait_share": [0.1] * NUM_EPOCHS,
        }
        costs = {"oom_events": [], "seconds_per_epoch": [1.5] * NUM_EPOCHS, "best_epoch": 9}
        return {**entry(split, quality), **costs, "history": history}

    runs = [
        {"fold": fold, "seed": seed, "models": {name: trained(split, q) for name, q in MODELS.items()}}
        for fold, split in enumerate(splits)
        for seed in range(42, 42 + NUM_SEEDS)
    ]
    layers = (0.5 + 0.4 * np.sin(np.arange(NUM_LAYERS) / 6)).tolist()
    probes = [{**entry(split, 1.5), "layer": 9, "val_auroc_by_layer": layers} for split in splits]
    of_model = {name: [(r["fold"], r["seed"], r["models"][name]) for r in runs] for name in MODELS}
    of_model["logistic_probe"] = [(fold, 42, probe) for fold, probe in enumerate(probes)]
    scores = {name: [RunScores.from_entry(e, fold) for fold, _, e in of] for name, of in of_model.items()}
    aggregated = {name: aggregate_runs(of, 42) for name, of in of_model.items()}
    counts = [class_counts(split, targets) for split in splits]
    results = {
        "probe": aggregated.pop("logistic_probe"),
        "models": aggregated,
        "runs": runs,
        "probes": [{"fold": fold, **probe} for fold, probe in enumerate(probes)],
        "comparisons": compare(scores, 42),
        "controls": control_entries(store, splits, targets, 42),
        "counts": [{name: {"hallucinated": h, "correct": c} for name, (h, c) in of.items()} for of in counts],
        "config": {"epochs": NUM_EPOCHS, "seed": 42, "folds": NUM_FOLDS, "seeds": NUM_SEEDS, "lr": 0.001},
        "store": {**store.info(), "path": "store.zarr"},
        "traces": store.digest(np.arange(len(store))),
        "answers": None,
    }
    return nan_to_none(results)


DETECTORS = {"length": "control", "group_rate": "control", "perplexity": "untrained", "llm_check_attention": "untrained",
             "lookback_lens": "trained", "lap_eigvals": "trained", "saplma": "trained", "probe_last": "trained",
             "probe_mean": "trained", "probe_ensemble": "trained", "judge": "external", MALICIOUS[0]: "trained"}  # fmt: skip


def make_benchmark():
    """Return the content of a benchmark.json: random metrics of 12 detectors on two stores, and transfer."""
    rng = np.random.default_rng(2)
    stores = {name: _benchmark_store(rng) for name in ("trivia", MALICIOUS[1])}
    transfer = [
        {"detector": name, "trained_on": a, "tested_on": b, "auroc": 0.5 + 0.3 * rng.random()}
        for name in list(DETECTORS)[2:]
        for a, b in itertools.permutations(stores, 2)
    ]
    return {"config": {"score": None, "score_threshold": None}, "stores": stores, "transfer": transfer}


def _benchmark_store(rng):
    def test(quality):
        return {
            "auroc": quality, "interval_by_question": [quality - 0.08, quality + 0.08], "interval_by_group": None,
            "too_few": {"group": "2 groups; a jackknife needs at least 3"}, "within_group_auroc": quality - 0.03,
            "auprc": quality - 0.1, "prr": quality - 0.3, "risk_coverage_area": 1 - quality, "brier": 0.2, "ece": 0.1,
            "num_without_score": 0,
        }  # fmt: skip

    detectors = {
        name: {
            "kind": kind, "schemes": {s: test(0.5 + 0.4 * rng.random()) for s in ("question", "group")}, "fit_s": 1.25,
            "score_s": 0.5, "peak_bytes": 40 << 20,
        }
        for name, kind in DETECTORS.items()
    }  # fmt: skip
    pairs = [
        {"scheme": scheme, "unit": unit, "first": first, "second": second, "p_holm": float(rng.random() / 5)}
        for scheme, unit in itertools.product(("question", "group"), repeat=2)
        for first, second in itertools.combinations(DETECTORS, 2)
    ]
    return {
        "store": {"path": "store.zarr"}, "label_sources": None, "num_traces": 600, "num_hallucinated": 200, "folds": {"num_folds": 5, "schemes": ["question", "group"]},
        "detectors": detectors, "comparisons": pairs, "skipped": {"probe_prompt": f"needs prompt_length {MALICIOUS[2]}"},
    }  # fmt: skip
