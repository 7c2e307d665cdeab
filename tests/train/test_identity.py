"""A run continues with its own options and traces only, and results have a digest of their traces."""

import dataclasses
import hashlib
import json
import shutil
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import command, error_of, make_traces, write_store
from tests.machine import assert_within
from tests.train.runs import FAST, ONLY, outcome, write_labeled
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.evaluation.store_split import Split
from tracestore.train.config import TrainConfig, TrainState
from tracestore.train.model_runner import fit_standardizer
from tracestore.train.trainer import Trainer


def train(store, folder, *more, check=0, model="lstm_solo"):
    words = ["train", "--store", store, "--output-dir", folder, *FAST, *ONLY[model], "--epochs", 1, "--no-probe"]
    return command(*words, *more, check=check)


def changed(path, change):
    """Write the store of `write_labeled` with a change of its traces."""
    traces = make_traces(64, tokens=lambda k: 2 + k % 4)
    for trace in traces[1::2]:
        trace["hidden_states"] = [h + np.float16(1.5) for h in trace["hidden_states"]]
    traces = change(traces)
    score = {f"q{k}": None if k >= 60 else 0.9 - 0.8 * (k % 2) for k in range(64)}
    return write_store(path, traces, score=lambda k: score[traces[k]["question_id"]])


def with_other_traces(traces):
    others = make_traces(64, tokens=lambda k: 2 + k % 4, seed=1)
    return others


def with_one_bit(traces):
    traces[7]["hidden_states"][2][-1, 3] += np.float16(0.25)
    return traces


def with_other_attention(traces):
    traces[7]["attentions"][1][0, 1, 0] += np.float16(0.25)
    return traces


def exchanged(traces):
    first, second = traces[2]["question_id"], traces[4]["question_id"]
    traces[2]["question_id"], traces[4]["question_id"] = second, first
    traces[2], traces[4] = traces[4], traces[2]
    return traces


@pytest.mark.long
@pytest.mark.parametrize("change", [with_other_traces, with_one_bit, with_other_attention, exchanged])
def test_another_store_of_the_same_ids_and_labels_is_refused(change, tmp_path):
    one, other = write_labeled(tmp_path / "one.zarr"), changed(tmp_path / "other.zarr", change)
    train(one, tmp_path / "r")
    before = (tmp_path / "r/results.json").read_bytes()
    with tracestore.open(one) as a, tracestore.open(other) as b:
        assert list(a.question_ids) == list(b.question_ids)
        assert np.array_equal(a.targets(), b.targets(), equal_nan=True)
    words = ("train", "--store", other, "--output-dir", tmp_path / "r", *FAST, *ONLY["lstm_solo"], "--no-probe")
    error = error_of(*words, "--epochs", 1, "--resume", code=2)
    assert "was trained on other traces of the same questions; continue with the store of the run" in error
    assert (tmp_path / "r/results.json").read_bytes() == before
    error_of(*words, "--epochs", 2, "--resume", code=2)  # one that is not finished


def with_prompts(length):
    return lambda traces: [trace | {"prompt_length": length} for trace in traces]


@pytest.mark.long
def test_other_positions_of_the_answers_are_refused_where_they_are_read(tmp_path):
    """And compare names them. The states are the same, and so are the traces for a detector that reads last tokens."""
    one, other = (changed(tmp_path / f"{length}.zarr", with_prompts(length)) for length in (1, 2))
    for model in ("gnn_det_lstm", "lstm_solo"):
        train(one, tmp_path / model, model=model)
    error = train(other, tmp_path / "gnn_det_lstm", "--resume", model="gnn_det_lstm", check=2).stderr
    assert "was trained on other positions of the answers; continue with the store of the run" in error
    assert "already finished" in train(other, tmp_path / "lstm_solo", "--resume").stdout
    last = ("--pooling", "last", "--skip", "last")
    train(one, tmp_path / "last", *last, model="gnn_det_lstm")
    assert "already finished" in train(other, tmp_path / "last", *last, "--resume", model="gnn_det_lstm").stdout
    train(other, tmp_path / "other", model="gnn_det_lstm")
    note = "was trained on other positions of the answers than"
    assert note in command("compare", tmp_path / "gnn_det_lstm", tmp_path / "other", check=0).stdout
    assert note not in command("compare", tmp_path / "last", tmp_path / "other", check=0).stdout


@pytest.mark.long
@pytest.mark.parametrize("of", ["an older version", "a newer version"])
def test_a_run_with_other_options_is_of_another_version(of, tmp_path):
    store, last = write_labeled(tmp_path / "s.zarr"), tmp_path / "r/lstm_solo/last.pt"
    train(store, tmp_path / "r")
    saved = torch.load(last, weights_only=True)
    if of == "an older version":
        del saved["config"]["lr"]
    else:
        saved["config"]["momentum"] = 0.9
    torch.save(saved, last)
    error = train(store, tmp_path / "r", "--resume", check=2).stderr
    assert "last.pt is of another version of tracestore; train without --resume" in error


@pytest.mark.long
@pytest.mark.parametrize("how", ["copied", "moved", "appended", "merged", "compressed", "rewritten in segments"])
def test_the_same_traces_in_another_store_continue(how, tmp_path):
    store, again = write_labeled(tmp_path / "s.zarr"), tmp_path / "again.zarr"
    train(store, tmp_path / "r")
    expected = outcome(tmp_path / "r")
    if how in ("copied", "moved"):
        (shutil.copytree if how == "copied" else shutil.move)(store, again)
    elif how == "appended":
        with tracestore.create(store, append=True, attention="mean") as writer:
            for trace in make_traces(5, tokens=3, seed=2):
                writer.append(trace | {"question_id": f"new {trace['question_id']}"}, score=0.9)
        again = store
    elif how == "rewritten in segments":
        write_labeled(again, commit_after=range(0, 64, 7))
    else:
        more = ["--codec", "zstd"] if how == "compressed" else []
        write_store(tmp_path / "more.zarr", make_traces(5, tokens=3, seed=2) [:0] or [
            t | {"question_id": f"m{k}"} for k, t in enumerate(make_traces(5, tokens=3, seed=2))])  # fmt: skip
        command("merge", store, tmp_path / "more.zarr", again, *more, check=0)
    done = train(again, tmp_path / "r", "--resume")
    assert "already finished" in done.stdout
    assert how != "appended" or "69 traces, 4 without a label or score; train" in done.stdout
    assert outcome(tmp_path / "r")["models"] == expected["models"]


def test_the_digest_does_not_depend_on_the_order(tmp_path):
    traces = make_traces(40, tokens=3)
    traces = [t | {"sample": k % 2, "question_id": f"q{k // 2}"} for k, t in enumerate(traces)]
    one = tracestore.open(write_store(tmp_path / "one.zarr", traces, commit_after=(3, 9)))
    two = tracestore.open(write_store(tmp_path / "two.zarr", traces[::-1]))
    assert one.digest(one.indices) == two.digest(two.indices) == one.digest(one.indices[::-1])
    assert one.digest(np.arange(5)) != one.digest(np.arange(6)) and one.digest(np.arange(0)) == two.digest(np.arange(0))
    assert one.digest(np.array([0, 3])) == two.digest(np.array([39, 36]))


@pytest.mark.long
def test_results_name_the_traces_and_compare_reports_others(tmp_path):
    one, other = write_labeled(tmp_path / "one.zarr"), changed(tmp_path / "other.zarr", with_one_bit)
    train(one, tmp_path / "r1")
    train(other, tmp_path / "r2")
    train(one, tmp_path / "r3", "--lr", 0.01)
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("r1", "r2", "r3")]
    assert results[0]["traces"] == results[2]["traces"] != results[1]["traces"]
    page = tmp_path / "page.html"
    done = command("compare", tmp_path / "r1", tmp_path / "r2", "--output", page, check=0)
    note = f"note: {tmp_path / 'r2'} was trained on other traces of the same questions than {tmp_path / 'r1'}"
    assert note in done.stdout and "other traces of the same questions" in page.read_text()
    assert "note:" not in command("compare", tmp_path / "r1", tmp_path / "r3", check=0).stdout


@pytest.mark.long
def test_a_digest_takes_less_time_than_a_loop_over_the_traces(tmp_path):
    trace = make_traces(1, tokens=1, layers=1, dim=1, heads=1)[0]
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for k in range(4_000):
            writer.append(trace | {"question_id": f"question {k}"})
    with tracestore.open(tmp_path / "s.zarr") as store:
        loop = lambda: [hashlib.blake2b(name.encode()).digest() for name in store.question_ids]  # noqa: E731
        assert_within(1, lambda: store.digest(store.indices), loop)


# Options whose other value is not the next choice or a number that is 3 higher, which need not be one that the flag
# allows, what an option needs to have an effect, and those that choose traces or where numbers go, or give the same
# weights up to rounding.
OTHER = {
    "shuffle_buffer": 8,
    "top_k": 0.5,
    "layers": (0, 1),
    "neighbors": 1,
    "dropout": 0.5,
    "mask_sinks": 0,
    "pooling": "last",
}
NEEDS = {"shuffle_buffer": {"shuffle": "buffer"}}
ELSEWHERE = {"score", "score_threshold", "drop_nonfinite", "allow_mixed_provenance", "logger", "message_passing"}
SIZES = {"gnn_hidden": 4, "lstm_hidden": 4, "latent_dim": 4, "num_readers": 1}
OPTIONS = [
    field
    for field in (*dataclasses.fields(TrainConfig), *dataclasses.fields(ModelConfig))
    if field.metadata.get("text") is not None and field.name not in ELSEWHERE
]


@pytest.fixture(scope="module")
def with_heads(tmp_path_factory):
    """Return the path of a store with the attention of every head."""
    return write_labeled(tmp_path_factory.mktemp("heads") / "store.zarr", attention="heads")


def other(field):
    """Return another value of an option than the default."""
    if field.name in OTHER:
        return OTHER[field.name]
    if get_origin(field.type) is Literal:
        return next(choice for choice in get_args(field.type) if choice != field.default)
    return not field.default if field.type is bool else field.default + 3


def weights(path, folder, options):
    """Return the validation loss of an untrained gvae_lstm, and its weights after an epoch."""
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    model = SIZES | {name: value for name, value in options.items() if name in names}
    options = {"loader_threads": 1} | {name: value for name, value in options.items() if name not in names}
    indices = np.arange(48)
    with tracestore.open(path) as store:
        split = Split(dict.fromkeys(("train", "val", "test"), indices), {})
        sizes = ModelConfig.from_store(store, **model)
        folder.mkdir()
        run = Trainer(
            "gvae_lstm", store, split, np.arange(64) % 2, sizes, TrainConfig(**options), folder, lambda _: None
        )
        run._setup()
        fit_standardizer(run.model, store, indices, "graph", run.ranks)
        loss = run._score("val", None).loss
        run._train_epoch(TrainState())
        return loss, torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.parametrize("field", OPTIONS, ids=[field.name for field in OPTIONS])
def test_an_option_changes_the_weights_unless_a_run_may_resume_with_another_value(field, with_heads, tmp_path):
    needed = NEEDS.get(field.name, {})
    loss, default = weights(with_heads, tmp_path / "default", needed)
    loss_changed, changed = weights(with_heads, tmp_path / "changed", needed | {field.name: other(field)})
    assert torch.equal(default, changed) == field.metadata["is_resumable"]
    # An option of training alone changes no validation loss of the same weights.
    assert loss == loss_changed or field.name not in TrainConfig.__annotations__ or field.name == "seed"
