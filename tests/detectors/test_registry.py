"""Detectors by name, detectors of other packages, and what they need of a store."""

import json

import numpy as np
import pytest

import tracestore
from tests.detectors.plugins import PLUGIN, install
from tests.helpers import command, make_optional, make_traces, write_store
from tests.train.runs import write_labeled
from tracestore.detectors import registry
from tracestore.detectors.interface import missing_fields
from tracestore.detectors.registry import MODELS
from tracestore.errors import MissingFieldError, UsageError


@pytest.fixture(autouse=True)
def fresh_registry():
    """Read the entry points again in each test."""
    registry.registry.cache_clear()
    yield
    registry.registry.cache_clear()


@pytest.mark.long
def test_detector_of_another_package_is_listed_and_made(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(install(tmp_path / "site")))
    store = tracestore.open(write_labeled(tmp_path / "s.zarr"))
    detector = registry.make_detector("norm", order=1)
    indices, labels = np.arange(60), np.arange(60) % 2
    scores = detector.fit(store, indices, labels).score(store, indices)
    assert scores.shape == (60,) and detector.parameters == {"order": 1}
    read = detector.provenance(store)
    assert read["fields"] == ["last_token"] and read["layers"] == "one, chosen" and read["parameters"] == {"order": 1}
    assert read["store"] == {"num_layers": 3, "hidden_dim": 8, "generation": store.generation}
    assert len((PLUGIN / "norm_detector.py").read_text().splitlines()) <= 40
    rows = {row["name"]: row for row in json.loads(command("detectors", "--json", check=0).stdout)}
    assert rows["norm"]["package"] == "norm-detector" and rows["norm"]["kind"] == "untrained"
    assert rows["norm"]["summary"] == "Norm of the last token in one layer."
    assert set(MODELS) <= set(rows)


@pytest.mark.long
@pytest.mark.parametrize(
    ("entry_point", "message"),
    [
        ("norm = nowhere:Detector", "norm-detector: detector norm cannot be loaded: ModuleNotFoundError"),
        ("norm = norm_detector:np.float64", "norm is a float64, expected a tracestore.detectors.interface.Detector"),
    ],
)
def test_detector_that_cannot_be_loaded_names_its_package(entry_point, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(install(tmp_path, entry_point)))
    with pytest.raises(UsageError, match=message):
        registry.make_detector("norm")
    assert message in command("detectors", check=0).stdout


def test_detector_with_a_known_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(install(tmp_path, "lstm_solo = norm_detector:NormDetector")))
    with pytest.raises(UsageError, match="norm-detector: its detector lstm_solo has the name of one of tracestore"):
        registry.registry()


def test_unknown_names_and_options_are_refused():
    with pytest.raises(UsageError, match="no detector nowhere, expected one of"):
        registry.make_detector("nowhere")
    with pytest.raises(UsageError, match=r"lstm_solo: .*unexpected keyword argument 'depth'"):
        registry.make_detector("lstm_solo", depth=3)
    with pytest.raises(UsageError, match="no detector nowhere, expected all, features"):
        registry.select("lstm_solo,nowhere")
    with pytest.raises(UsageError, match="no detector in ','"):
        registry.select(",")


def test_selection_is_in_the_order_of_the_registry():
    names = list(registry.registry())
    assert registry.select("all") == names
    assert registry.select("gvae_lstm, lstm_solo") == ["lstm_solo", "gvae_lstm"]
    assert set(registry.select("features")).isdisjoint(MODELS)


def test_missing_fields_are_named(tmp_path):
    bare = tracestore.open(write_store(tmp_path / "bare.zarr", make_traces(4), attention="none"))
    assert list(missing_fields(bare, ("last_token", "hidden_states"))) == []
    found = list(missing_fields(bare, ("attention", "answer", "token_logprob", "group")))
    for text, part in zip(found, ("no graphs", "answer_span", "token_logprob", "has a group"), strict=True):
        assert part in text and str(bare.path) in text
    with pytest.raises(MissingFieldError, match="no graphs"):
        registry.make_detector("gnn_det_lstm").check(bare)
    with pytest.raises(UsageError, match="found field 'nowhere'"):
        list(missing_fields(bare, ("nowhere",)))
    traces = [trace | make_optional(len(trace["tokens"])) for trace in make_traces(4)]
    full = tracestore.open(write_store(tmp_path / "full.zarr", traces, group="g"))
    assert list(missing_fields(full, ("attention", "answer", "token_logprob", "group"))) == []
    assert "cannot run: " in command("detectors", bare.path, check=0).stdout
