"""Published detectors against values that numpy computes by their formulas, and what their choices read."""

import numpy as np
import pytest
import torch

import tracestore
from tests.detectors.published.conftest import BEGIN, COUNT, make_labeled, write_published
from tests.helpers import make_trace, write_store
from tracestore.detectors.published.linear import candidate, choose, cross_fitted
from tracestore.detectors.published.pooled_mlp import PooledNetwork
from tracestore.detectors.published.pooled_mlp import _components as components_of
from tracestore.detectors.registry import make_detector, registry, select
from tracestore.errors import TrainingError
from tracestore.evaluation.metrics import auroc
from tracestore.evaluation.store_split import inner_bins

TRAIN, TEST = np.arange(40), np.arange(40, COUNT)
LABELS = np.arange(COUNT) % 2
FAST = {"saplma": {"epochs": 2}, "pooled_mlp": {"epochs": 2, "networks": 1, "hidden": 8}}


def make(name, **options):
    return make_detector(name, **FAST.get(name, {}) | options)


def newton(x, y, c):
    """Return weights and intercept at the minimum of |w|^2 / 2 + C sum log(1 + exp(-s (w z + b)))."""
    z = np.c_[(x - x.mean(0)) / x.std(0), np.ones(len(x))]
    penalty = np.diag(np.r_[np.ones(x.shape[1]), 0])
    w = np.zeros(z.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(-z @ w))
        gradient = penalty @ w + c * z.T @ (p - y)
        w -= np.linalg.solve(penalty + c * (z.T * (p * (1 - p))) @ z, gradient)
    return w


def by_newton(x, c):
    """Return the logits of all traces by the regression on the training traces."""
    w = newton(x[TRAIN], LABELS[TRAIN], c)
    return (x - x[TRAIN].mean(0)) / x[TRAIN].std(0) @ w[:-1] + w[-1]


POOLINGS = {
    "probe_last": lambda h: h[:, -1],
    "probe_prompt": lambda h: h[:, BEGIN - 1],
    "probe_mean": lambda h: h[:, BEGIN:].mean(1),
    "probe_max": lambda h: h[:, BEGIN:].max(1),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_probe_is_the_regression_on_the_chosen_layer(name, store):
    detector = make(name).fit(store, TRAIN, LABELS[TRAIN])
    (layer,), c = detector.chosen["layers"], detector.chosen["C"]
    x = np.stack([POOLINGS[name](t.hidden_states.astype("f8"))[layer] for t in store])
    np.testing.assert_allclose(detector.score(store, TEST), by_newton(x, c)[TEST], rtol=1e-5, atol=1e-7)


def test_layer_with_the_signal_is_chosen(tmp_path):
    traces = [make_labeled(k, shift=4.0) for k in range(COUNT)]
    store = tracestore.open(write_published(tmp_path / "strong.zarr", traces))
    detector = make("probe_mean").fit(store, TRAIN, LABELS[TRAIN])
    assert detector.chosen["layers"] == [1] and auroc(LABELS[TEST], detector.score(store, TEST)) > 0.95
    assert detector.provenance(store)["layers"] == [1]


def test_ensemble_is_the_mean_of_the_layers(store):
    detector = make("probe_ensemble").fit(store, TRAIN, LABELS[TRAIN])
    assert sorted(detector.chosen["layers"]) == [0, 1, 2]
    c, logits = detector.chosen["C"], []
    for layer in range(3):
        x = np.stack([t.hidden_states[layer, BEGIN:].astype("f8").mean(0) for t in store])
        logits.append(by_newton(x, c)[TEST])
    np.testing.assert_allclose(detector.score(store, TEST), np.mean(logits, axis=0), rtol=1e-5, atol=1e-7)


def attention_maps(trace):
    return trace.attention.astype("f8").reshape(-1, trace.num_tokens, trace.num_tokens)


def lookback(trace):
    rows = range(BEGIN, trace.num_tokens)
    return [
        np.mean([a[t, :BEGIN].mean() / (a[t, :BEGIN].mean() + a[t, BEGIN : t + 1].mean()) for t in rows])
        for a in attention_maps(trace)
    ]


def eigenvalues(trace):
    values = []
    for a in attention_maps(trace):
        size = len(a)
        laplacian = np.diag(a.sum(0) / (size - np.arange(size))) - a
        found = np.sort(np.linalg.eigvals(laplacian).real)[::-1][:10]
        values += [*found, *[0.0] * (10 - len(found))]
    return values


def logdets(trace):
    hidden = []
    for z in trace.hidden_states[:, BEGIN:].astype("f8"):
        z = z - z.mean(1, keepdims=True)
        hidden.append(np.log(np.linalg.eigvalsh(z @ z.T + 1e-3 * np.eye(len(z)))).mean())
    return hidden + [np.log(np.diag(a)[BEGIN:]).mean() for a in attention_maps(trace)]


@pytest.mark.parametrize(
    ("name", "formula"), [("lookback_lens", lookback), ("lap_eigvals", eigenvalues), ("llm_check_regression", logdets)]
)
def test_regression_on_features_of_all_maps(name, formula, store):
    detector = make(name).fit(store, TRAIN, LABELS[TRAIN])
    x = np.array([formula(trace) for trace in store])
    x = x[:, x[TRAIN].std(0) > 0]  # columns without variance have no effect
    np.testing.assert_allclose(
        detector.score(store, TEST), by_newton(x, detector.chosen["C"])[TEST], rtol=1e-4, atol=1e-5
    )


def test_principal_components_replace_many_columns(store, monkeypatch):
    monkeypatch.setattr("tracestore.detectors.published.attention._MAX_COLUMNS", 5)
    detector = make("lap_eigvals").fit(store, TRAIN, LABELS[TRAIN])
    x = np.array([eigenvalues(trace) for trace in store])
    _, _, components = np.linalg.svd(x[TRAIN] - x[TRAIN].mean(0))
    expected = by_newton(x @ components[:5].T, detector.chosen["C"])[TEST]
    np.testing.assert_allclose(detector.score(store, TEST), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "columns"), [("llm_check_hidden", 3), ("llm_check_attention", 6)])
def test_llm_check_takes_layer_and_sign_from_training(name, columns, store):
    detector = make(name).fit(store, TRAIN, LABELS[TRAIN])
    values = np.array([logdets(trace) for trace in store])
    values = values[:, :3] if columns == 3 else values[:, 3:].reshape(-1, 3, 2).sum(2)
    aurocs = np.array([auroc(LABELS[TRAIN], values[TRAIN, k]) for k in range(3)])
    layer = int(np.abs(aurocs - 0.5).argmax())
    sign = 1 if aurocs[layer] >= 0.5 else -1
    assert detector.chosen == {"layers": [layer], "sign": sign}
    np.testing.assert_allclose(detector.score(store, TEST), sign * values[TEST, layer], rtol=1e-5)


def test_statistics_of_tokens_are_high_for_hallucinations(store):
    logprob = [t.token_logprob[BEGIN:].astype("f8") for t in store]
    entropy = [t.token_entropy[BEGIN:].astype("f8").mean() for t in store]
    expected = {
        "mean_logprob": [-v.mean() for v in logprob],
        "min_logprob": [-v.min() for v in logprob],
        "perplexity": [np.exp(-v.mean()) for v in logprob],
        "mean_entropy": entropy,
        "length": [len(v) for v in logprob],
    }
    for name, values in expected.items():
        found = make(name).fit(store, TRAIN, LABELS[TRAIN]).score(store, np.arange(COUNT))
        np.testing.assert_allclose(found, values, rtol=1e-5)


def test_group_rate_is_that_of_the_training_traces(store):
    detector = make("group_rate").fit(store, np.arange(13), LABELS[:13])
    expected = [2 / 5, 3 / 5, 1 / 3, 6 / 13]
    np.testing.assert_allclose(detector.score(store, np.array([4, 5, 14, 30])), expected)


def test_trace_without_a_group_has_the_share_of_all_training_traces(tmp_path):
    traces = [make_labeled(k) for k in range(12)]
    path = write_store(tmp_path / "s.zarr", traces, label=lambda k: int(k > 8), group=lambda k: "g" * (k % 3 == 0))
    store = tracestore.open(path)
    detector = make("group_rate").fit(store, np.arange(11), (np.arange(11) > 8).astype(int))
    assert detector.score(store, np.arange(12)).tolist() == pytest.approx([1 / 4, 2 / 11, 2 / 11] * 4)


@pytest.mark.long
@pytest.mark.parametrize(("name", "num_layers"), [("probe_logprob", 1), ("probes_logprob", 2)])
def test_combination_is_a_regression_on_cross_fitted_logits(store, name, num_layers):
    detector = make(name, num_layers=num_layers).fit(store, TRAIN, LABELS[TRAIN])
    probe = make("probe_mean", num_layers=num_layers).fit(store, TRAIN, LABELS[TRAIN])
    layers, c = probe.chosen["layers"], probe.chosen["C"]
    assert len(layers) == num_layers
    x = np.stack([t.hidden_states[layers, BEGIN:].astype("f4").mean(1) for t in store], axis=1)
    bins = inner_bins(store, TRAIN, LABELS[TRAIN], 3, 0, "question")
    inner = np.mean([cross_fitted(states[TRAIN], LABELS[TRAIN], bins, candidate(c)) for states in x], axis=0)
    logprob = np.array([t.token_logprob[BEGIN:].astype("f8").mean() for t in store])
    both = np.c_[np.r_[inner, probe.score(store, TEST)], logprob]
    np.testing.assert_allclose(detector.score(store, TEST), by_newton(both, 1.0)[TEST], rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_an_infinite_log_probability_leaves_its_trace_out(tmp_path):
    traces = [make_labeled(k) for k in range(COUNT)]
    for k in (3, 50):
        traces[k]["token_logprob"][4] = -np.inf
    store = tracestore.open(write_published(tmp_path / "s.zarr", traces))
    detector = make("probe_logprob").fit(store, TRAIN, LABELS[TRAIN])
    assert np.isnan(detector.score(store, TEST)).tolist() == (TEST == 50).tolist()


def test_saplma_is_the_network_of_its_weights(store):
    detector = make("saplma").fit(store, TRAIN, LABELS[TRAIN])
    (layer,), network = detector.chosen["layers"], detector._network[2:]
    assert [w.shape for w in network[::2]] == [(8, 256), (256, 128), (128, 64), (64, 1)]
    last = np.stack([t.last_token[layer].astype("f8") for t in store])
    h = (last - last[TRAIN].mean(0)) / last[TRAIN].std(0)
    for k, (weight, bias) in enumerate(zip(network[::2], network[1::2], strict=True)):
        h = h @ weight + bias
        h = np.maximum(h, 0) if k < 3 else h
    np.testing.assert_allclose(detector.score(store, TEST), h[TEST, 0], rtol=1e-4, atol=1e-4)


def test_pooled_network_by_formula():
    torch.manual_seed(0)
    network = PooledNetwork(torch.ones(6), 2 * torch.ones(6), torch.randn(6, 5), 4).eval().double()
    x = torch.randn(3, 5, 6).double()
    mask = torch.arange(5) < torch.tensor([5, 2, 1])[:, None]
    w = {name: value.numpy() for name, value in network.state_dict().items()}
    for k, count in enumerate((5, 2, 1)):
        z = (x[k, :count].numpy() - 1) / 2 @ w["projection"]
        h = np.maximum(z @ w["encode.weight"].T + w["encode.bias"], 0)
        e = np.exp(h @ w["attend.weight"][0] + w["attend.bias"])
        expected = (e / e.sum()) @ h @ w["head.weight"][0] + w["head.bias"][0]
        assert network(x, mask)[k].item() == pytest.approx(expected, rel=1e-9)


def test_principal_components_of_the_tokens():
    tokens = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 7)
    tokens[:, 1] = tokens[:, 0] + 0.1 * tokens[:, 1]
    mean, std, projection = components_of(tokens, 6)
    standardized = ((tokens - mean) / std).numpy().astype("f8")
    _, singular, right = np.linalg.svd(standardized, full_matrices=False)
    expected = np.abs(standardized @ right.T) * 50**0.5 / singular[0]
    np.testing.assert_allclose(
        np.abs((torch.from_numpy(standardized).float() @ projection).numpy()), expected, atol=1e-4
    )


@pytest.mark.parametrize("value", [0.0, 3.0, 300.3])
def test_column_that_is_constant_in_training_is_only_centered(value):
    tokens = torch.randn(5000, 6, generator=torch.Generator().manual_seed(0))
    tokens[:, 2] = value
    mean, std, _ = components_of(tokens, 4)
    assert std[2] == 1 and mean[2].item() == pytest.approx(value, rel=1e-6)
    np.testing.assert_allclose(std[:2].numpy(), tokens[:, :2].numpy().std(0, ddof=1), rtol=1e-5)


@pytest.mark.long
def test_training_trace_with_nan_is_left_out_of_every_detector(tmp_path):
    """One such trace changes no score, or the detector cannot be fitted; never are all scores missing."""
    traces = [make_labeled(k) for k in range(COUNT)]
    clean = tracestore.open(write_published(tmp_path / "clean.zarr", traces))
    traces[3]["hidden_states"] = [h.copy() for h in traces[3]["hidden_states"]]
    for hidden in traces[3]["hidden_states"]:
        hidden[-1, 0] = np.nan
    dirty = tracestore.open(write_published(tmp_path / "dirty.zarr", traces))
    rows = np.delete(TRAIN, 3)
    for name in select("features"):
        if {"hidden_states", "last_token"} & {*make(name).fields} and "samples" not in make(name).fields:
            try:
                found = make(name).fit(dirty, TRAIN, LABELS[TRAIN]).score(dirty, TEST)
            except TrainingError as error:
                assert "--drop-nonfinite" in str(error)
                continue
            if name == "pooled_mlp":
                expected = make(name).fit(clean, rows, LABELS[rows]).score(clean, TEST)
                np.testing.assert_allclose(found, expected)
            assert np.isfinite(found).all(), name


@pytest.mark.long
def test_pooled_network_learns(tmp_path):
    traces = [make_labeled(k, shift=9.0) for k in range(COUNT)]
    store = tracestore.open(write_published(tmp_path / "strong.zarr", traces))
    detector = make_detector("pooled_mlp", epochs=80, hidden=16).fit(store, TRAIN, LABELS[TRAIN])
    assert auroc(LABELS[TEST], detector.score(store, TEST)) > 0.9


# Detectors of several answers to a question are in test_samples.py.
OWN = [name for name in select("features") if registry()[name].package == "tracestore"]
NAMES = [name for name in OWN if "samples" not in make(name).fields]


@pytest.mark.parametrize("name", NAMES)
def test_poisoned_test_traces_change_no_fitted_weights(name, store, tmp_path):
    poisoned = [make_labeled(k) for k in range(COUNT)]
    for trace in poisoned[40:]:
        trace["hidden_states"] = [h * 50 + 1000 for h in trace["hidden_states"]]
        trace["attentions"] = [np.tril(np.full_like(a, 0.9)) for a in trace["attentions"]]
        trace["token_logprob"] = trace["token_logprob"] * 100
    other = tracestore.open(write_published(tmp_path / "poisoned.zarr", poisoned))
    fitted = make(name).fit(store, TRAIN, LABELS[TRAIN])
    again = make(name).fit(other, TRAIN, LABELS[TRAIN])
    assert fitted.chosen == again.chosen
    # The scores of the clean test traces are a function of everything that was fitted.
    np.testing.assert_array_equal(fitted.score(store, TEST), again.score(store, TEST))


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_finite_and_independent_of_other_traces(name, store):
    detector = make(name).fit(store, TRAIN, LABELS[TRAIN])
    scores = detector.score(store, TEST)
    assert scores.shape == (len(TEST),) and np.isfinite(scores).all()
    np.testing.assert_allclose(detector.score(store, TEST[::-3]), scores[::-3], rtol=1e-5, atol=1e-6)
    for attribute in ("reference", "cost", "layers", "kind"):
        assert getattr(detector, attribute), f"{name} states no {attribute}"


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("group_rate", "length")])
def test_traces_without_the_features_have_no_score(name, tmp_path):
    traces = [make_labeled(k) for k in range(COUNT)]
    bare = [make_trace(100, tokens=1)]
    bare[0]["hidden_states"][1][:] = np.inf
    bare[0]["hidden_states"][0][:] = np.nan
    store = tracestore.open(write_published(tmp_path / "s.zarr", traces + bare))
    labels = np.arange(COUNT + 1) % 2
    indices = np.r_[TRAIN, COUNT]
    detector = make(name).fit(store, indices, labels[indices])
    scores = detector.score(store, np.r_[COUNT, TEST])
    assert np.isfinite(scores[1:]).all()
    # A trace without an answer has attention and a last token; the layers chosen may be those without NaN.
    if not {*detector.fields} <= {"attention", "last_token"}:
        assert np.isnan(scores[0])


def test_training_traces_of_one_class_are_refused(tmp_path):
    store = tracestore.open(write_store(tmp_path / "s.zarr", [make_labeled(k) for k in range(8)], label=0))
    for name in ("probe_mean", "lookback_lens", "saplma", "pooled_mlp", "llm_check_hidden"):
        with pytest.raises(TrainingError, match="not of both classes"):
            make(name).fit(store, np.arange(8), np.zeros(8, int))


def test_layers_with_infinite_values_are_left_out():
    rng = np.random.default_rng(0)
    states = rng.standard_normal((3, 30, 4)).astype("f4")
    states[1, 0, 0] = np.inf
    y, bins = np.arange(30) % 2, np.arange(30) % 3
    assert set(choose(lambda k: states[k], range(3), y, bins)[0]) == {0, 2}
    with pytest.raises(TrainingError, match="no layer without NaN"):
        choose(lambda k: states[1], range(3), y, bins)
