"""Features against values that numpy computes from dense arrays, trace by trace."""

import numpy as np
import pytest

import tracestore
from tests.helpers import command, make_optional, make_trace, write_scores, write_store
from tracestore.data.tokens.answers import answer_span
from tracestore.errors import DiskFullError, UsageError
from tracestore.features import feature_table
from tracestore.features.feature_table import features, token_state_bits
from tracestore.features.trace_features import SMALLEST, STATISTICS

BEGIN = 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep the cache in the folder of the test."""
    monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / "cache"))


def write(path, *, count=5, attention="heads", **options):
    """Write traces of 6 to 9 tokens whose prompt has three."""
    traces = []
    for k in range(count):
        trace = make_trace(k, tokens=6 + k % 4, **options)
        optional = make_optional(6 + k % 4, seed=k)
        kept = {name: optional[name] for name in ("token_logprob", "token_entropy")}
        traces.append(trace | kept | {"prompt_length": BEGIN})
    return tracestore.open(write_store(path, traces, attention=attention))


def test_pooled_states(tmp_path):
    store = write(tmp_path / "s.zarr")
    found = features(store, "hidden") | features(store, "last")
    for k, trace in enumerate(store):
        states = trace.hidden_states.astype("f4")
        np.testing.assert_array_equal(found["last"][:, k], states[:, -1])
        np.testing.assert_array_equal(found["prompt_last"][:, k], states[:, BEGIN - 1])
        np.testing.assert_allclose(found["answer_mean"][:, k], states[:, BEGIN:].mean(1), rtol=1e-6)
        np.testing.assert_array_equal(found["answer_max"][:, k], states[:, BEGIN:].max(1))


@pytest.mark.parametrize("is_made", [False, True])
def test_a_subset_is_refused(tmp_path, is_made):
    """It would get, or leave behind in the cache, the values of other traces."""
    store = write(tmp_path / "s.zarr")
    reads = [lambda s, g=g: features(s, g) for g in ("last", "hidden", "attention", "tokens")]
    for read in [*reads, lambda s: token_state_bits(s, [0])]:
        if is_made:
            read(store)
        with pytest.raises(UsageError, match=r"pass subset\.store and subset\.indices"):
            read(store[2:])


def test_hidden_score_is_the_mean_log_eigenvalue_of_the_covariance(tmp_path):
    store = write(tmp_path / "s.zarr")
    found = features(store, "hidden")["hidden_logdet"]
    for k, trace in enumerate(store):
        for layer in range(3):
            z = trace.hidden_states[layer, BEGIN:].astype("f8").T  # (D, M)
            centering = np.eye(len(z)) - 1 / len(z)
            covariance = z.T @ centering @ z + 1e-3 * np.eye(z.shape[1])
            expected = np.log(np.linalg.svd(covariance, compute_uv=False)).mean()
            np.testing.assert_allclose(found[k, layer], expected, rtol=1e-5)


@pytest.mark.parametrize("attention", ["heads", "mean"])
def test_attention_features(attention, tmp_path):
    store = write(tmp_path / "s.zarr", attention=attention)
    found = features(store, "attention", top_k=8)
    assert found["laplacian"].shape == (5, 3, 2 if attention == "heads" else 1, 8)
    for k, trace in enumerate(store):
        maps = trace.attention.astype("f8").reshape(3, -1, trace.num_tokens, trace.num_tokens)
        for layer, head in np.ndindex(maps.shape[:2]):
            a = maps[layer, head]
            count = len(a)
            laplacian = np.diag([a[:, i].sum() / (count - i) for i in range(count)]) - a
            expected = np.sort(np.linalg.eigvals(laplacian).real)[::-1][:8]
            expected = np.pad(expected, (0, 8 - len(expected)))
            np.testing.assert_allclose(found["laplacian"][k, layer, head], expected, rtol=1e-5, atol=1e-9)
            ratios = []
            for row in range(BEGIN, count):
                context, new = a[row, :BEGIN].mean(), a[row, BEGIN : row + 1].mean()
                ratios.append(context / (context + new))
            np.testing.assert_allclose(found["lookback"][k, layer, head], np.mean(ratios), rtol=1e-5)
            diagonal = np.maximum(np.diag(a)[BEGIN:], SMALLEST)
            np.testing.assert_allclose(found["attention_logdet"][k, layer, head], np.log(diagonal).mean(), rtol=1e-5)


def test_attention_in_blocks_equals_all_at_once(tmp_path, monkeypatch):
    store = write(tmp_path / "s.zarr")
    found = features(store, "attention", top_k=4)
    monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr("tracestore.features.trace_features._BLOCK_VALUES", 60)
    for name, values in features(store, "attention", top_k=4).items():
        np.testing.assert_allclose(values, found[name], rtol=1e-12)


def test_token_statistics(tmp_path):
    store = write(tmp_path / "s.zarr")
    found = features(store, "tokens")["tokens"]
    for k, trace in enumerate(store):
        logprob, entropy = trace.token_logprob[BEGIN:].astype("f8"), trace.token_entropy[BEGIN:].astype("f8")
        expected = [logprob.mean(), logprob.min(), np.exp(-logprob.mean()), entropy.mean(), len(trace.tokens) - BEGIN]
        np.testing.assert_allclose(found[k], expected, rtol=1e-5)
    assert STATISTICS[4] == "length"


def test_states_of_answers(tmp_path):
    store = write(tmp_path / "s.zarr")
    values, offsets = token_state_bits(store, (0, 2))
    for k, trace in enumerate(store):
        expected = trace.hidden_states[[0, 2], BEGIN:].transpose(1, 0, 2)
        np.testing.assert_array_equal(values[offsets[k] : offsets[k + 1]], expected)


def test_answer_span_takes_the_most_exact_field(tmp_path):
    fields = [
        {"answer_span": (1, 3), "generated_mask": np.r_[0, 0, 1, 1, 1, 1], "prompt_length": 4},
        {"generated_mask": np.r_[0, 1, 1, 0, 1, 1], "prompt_length": 3},
        {"prompt_length": 4},
        {"prompt_length": 6},
        {},
    ]
    traces = [make_trace(k, tokens=6) | given for k, given in enumerate(fields)]
    store = tracestore.open(write_store(tmp_path / "s.zarr", traces))
    assert [answer_span(trace, 6) for trace in store] == [(1, 3), (4, 6), (4, 6), None, None]
    # The last token has no hidden state.
    assert [answer_span(store[k], 5) for k in (1, 2)] == [(4, 5), (4, 5)]


def test_what_a_trace_lacks_is_nan(tmp_path):
    traces = [make_trace(0, tokens=4) | {"prompt_length": 2}, make_trace(1, tokens=4)]
    store = tracestore.open(write_store(tmp_path / "s.zarr", traces, attention="none"))
    hidden, attention, tokens = (features(store, name) for name in ("hidden", "attention", "tokens"))
    assert np.isfinite(hidden["answer_mean"][:, 0]).all() and np.isnan(hidden["answer_mean"][:, 1]).all()
    assert np.isnan(attention["lookback"]).all()
    np.testing.assert_array_equal(np.isnan(tokens["tokens"]), [[1, 1, 1, 1, 0], [1] * 5])
    assert token_state_bits(store, (0,))[1].tolist() == [0, 2, 2]


def test_attention_with_nan_has_no_ratio(tmp_path):
    trace = make_trace(0, tokens=5) | {"prompt_length": 2}
    trace["attentions"] = [layer.copy() for layer in trace["attentions"]]
    trace["attentions"][0][:, 3, 0] = np.nan
    store = tracestore.open(write_store(tmp_path / "s.zarr", [trace]))
    found = features(store, "attention")["lookback"][0]
    assert np.isnan(found[0]).all() and np.isfinite(found[1:]).all()


def test_features_are_computed_once_for_a_generation_and_options(tmp_path, monkeypatch):
    path = tmp_path / "s.zarr"
    store, calls = write(path), []
    compute = feature_table.attention_features
    monkeypatch.setattr(feature_table, "attention_features", lambda *args: calls.append(args) or compute(*args))
    first = features(store, "attention")
    np.testing.assert_array_equal(features(tracestore.open(path), "attention")["laplacian"], first["laplacian"])
    assert len(calls) == 5 and not first["lookback"].flags.writeable
    features(store, "attention", top_k=2)
    assert len(calls) == 10
    command("score", path, "--scores", write_scores(tmp_path / "scores.csv", {"q0": 0.5}), check=0)
    features(tracestore.open(path), "attention")
    assert len(calls) == 15
    assert not list((tmp_path / "cache" / "features").glob(".*"))
    assert not list(path.rglob("*.npy"))


def test_full_disk_leaves_no_entry(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    store = write(tmp_path / "s.zarr")
    monkeypatch.setattr(feature_table, "preallocate", full)
    with pytest.raises(DiskFullError):
        features(store, "hidden")
    assert list((tmp_path / "cache" / "features").iterdir()) == []
