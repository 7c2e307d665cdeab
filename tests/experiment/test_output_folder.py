"""The output folder: which files a run replaces, locking, running out of memory, non-finite values."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

import tracestore
from tests.experiment.quiet import train_quietly
from tests.helpers import command, make_traces, write_store
from tests.train.runs import outcome
from tracestore.errors import InsufficientMemoryError, OutputDirLockedError, TrainingError, UsageError
from tracestore.evaluation import probe
from tracestore.evaluation.store_split import make_split
from tracestore.train import trainer
from tracestore.train.batches import BatchFeed
from tracestore.train.config import TrainConfig
from tracestore.train.model_runner import ModelRunner
from tracestore.train.output_dir import lock_output_dir
from tracestore.train.signals import StopReason

CONFIG = TrainConfig(epochs=1, loader_threads=1)
SMALL = {"lstm_hidden": 4, "gnn_hidden": 4, "latent_dim": 4}


def train(store, folder, config=CONFIG, names=("lstm_solo",), sizes=SMALL, **options):
    return train_quietly(store, folder, names, config, sizes, **({"overwrite": True} | options))


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.long
def test_files_of_others_are_kept(labeled, tmp_path):
    """Folders of source files can have the names of detectors."""
    names = ("lstm_solo/preprocessed_0.pt", "gnn/preprocessed_0.pt", "seed-1/x/a.pt", "lstm_solo/events/events.log")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"other")
    for options in ({}, {"seeds": 1}, {"folds": 2}):
        train(labeled, tmp_path, **options)
        train(labeled, tmp_path, replace(CONFIG, resume=True), **options)
    assert all((tmp_path / name).read_bytes() == b"other" for name in names)


@pytest.mark.parametrize("way", [{"overwrite": True}, {"overwrite": False}, {"config": replace(CONFIG, resume=True)}])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("results.json", '{"accuracy": 0.9}'),
        ("results.json", "["),
        ("results.json", "{}"),
        ("split.json", '{"train": ["q0"], "test": ["q1"]}'),
        ("folds.json", '{"train": ["q0"], "val": [], "test": ["q1"]}'),
        ("folds.json", "[1]"),
    ],
)
def test_a_file_of_another_program_is_not_replaced(labeled, tmp_path, way, name, text):
    """A folder of sources holds the results of an evaluation [results.json of the user is lost]."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=f"{name}: not the|earlier run"):
        train(labeled, tmp_path, **way)
    assert (tmp_path / name).read_text() == text


@pytest.mark.long
@pytest.mark.parametrize("left", ["results.json", "split.json", "folds.json"])
def test_what_is_left_of_a_run_is_replaced(labeled, tmp_path, left):
    train(labeled, tmp_path / "r", **({"folds": 2} if left == "folds.json" else {}))
    (tmp_path / "new").mkdir()
    (tmp_path / "r" / left).rename(tmp_path / "new" / left)
    train(labeled, tmp_path / "new")
    assert files(tmp_path / "new").keys() >= {"results.json", "split.json"}
    # A damaged file next to checkpoints is that of the run.
    (tmp_path / "new/results.json").write_text("{")
    train(labeled, tmp_path / "new")


@pytest.mark.long
def test_a_run_in_a_folder_of_another_one_is_its_own(labeled, tmp_path):
    train(labeled, tmp_path / "seed-7", replace(CONFIG, seed=7))
    before = files(tmp_path / "seed-7")
    train(labeled, tmp_path)
    train(labeled, tmp_path, replace(CONFIG, resume=True, epochs=2))
    assert files(tmp_path / "seed-7") == before


@pytest.mark.long
def test_a_new_run_replaces_an_earlier_one(labeled, tmp_path):
    train(labeled, tmp_path, replace(CONFIG, seed=1), names=("lstm_solo", "gnn_det_lstm"))
    train(labeled, tmp_path)
    assert (tmp_path / "lstm_solo/last.pt").exists() and not (tmp_path / "gnn_det_lstm/last.pt").exists()


@pytest.mark.parametrize("options", [{}, {"seeds": 2}, {"folds": 2}])
def test_a_refused_run_leaves_an_earlier_run_unchanged(labeled, tmp_path, options):
    out, one_class, holed = tmp_path / "r", tmp_path / "one.zarr", tmp_path / "nan.zarr"
    for path in (one_class, holed):
        traces = make_traces(40, tokens=3)
        if path == holed:
            for trace in traces:
                trace["hidden_states"][0][0, 0] = np.nan
        write_store(path, traces, score=0.9 if path == one_class else lambda k: k % 2)
    train(labeled, out, **options)
    before = files(out)
    for store, refused in (
        (labeled, {"memory_budget": 1 << 20}),
        (one_class, {}),
        (holed, {"names": ["gnn_det_lstm"]}),
    ):
        with pytest.raises(UsageError):
            train(store, out, **options, **refused)
        assert files(out) == before


@pytest.mark.long
def test_a_refused_run_leaves_no_new_folder(tmp_path):
    one_class = write_store(tmp_path / "one.zarr", make_traces(40, tokens=3), score=0.9)
    (tmp_path / "empty").mkdir()
    for name in ("train", "benchmark"):
        for folder in (tmp_path / "new" / "folder", tmp_path / "empty"):
            assert "both classes" in command(name, one_class, "--output", folder, check=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "one.zarr"]


def test_one_training_at_a_time(labeled, tmp_path):
    """The lock belongs to the process, so a second process has to meet it."""
    child, (said, say) = 0, os.pipe()
    with lock_output_dir(tmp_path):
        child = os.fork()
        if not child:
            try:
                train(labeled, tmp_path)
            except OutputDirLockedError as error:
                os.write(say, f"{error.exit_code} {error}".encode())
            os._exit(0)
        os.waitpid(child, 0)
    os.close(say)
    with os.fdopen(said) as pipe:
        assert pipe.read() == f"5 {tmp_path}: another run writes there; pass another --output"
    train(labeled, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "3", '{"train": []}', '{"train": 1, "val": 2, "test": 3}', '{"train": [[]], "val": [], "test": []}'],
)
def test_malformed_splits_are_refused(labeled, tmp_path, text):
    for name, words, options in (("split", "the split", {}), ("folds", "the folds", {"folds": 2})):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(text if name == "split" else f"[{text}, {text}]")
        with pytest.raises(UsageError, match=f"not {words}"):
            train(labeled, tmp_path / name, replace(CONFIG, resume=True), **options)


@pytest.mark.parametrize(("names", "options"), [(("lstm_solo", "lstm_solo_v0"), {}), (("lstm_solo",), {"folds": 2})])
def test_resume_has_no_fewer_epochs_than_the_run(labeled, tmp_path, names, options):
    train(labeled, tmp_path, replace(CONFIG, epochs=3), **options)
    before = (tmp_path / "results.json").read_bytes()
    for epochs in (1, 2):
        with pytest.raises(UsageError, match=r"last.pt has more epochs than .*: pass --epochs 3 or more"):
            train(
                labeled, tmp_path, replace(CONFIG, epochs=epochs, resume=True), names=names, overwrite=False, **options
            )
        assert (tmp_path / "results.json").read_bytes() == before
    results = train(labeled, tmp_path, replace(CONFIG, epochs=4, resume=True), overwrite=False, **options)
    assert results["config"]["epochs"] == len(results["models"]["lstm_solo"]["history"]["train_loss"]) == 4


def test_no_memory_to_load_a_checkpoint(labeled, tmp_path, monkeypatch):
    """The checkpoint is not reported as damaged: the message names the command that continues, and the file stays."""
    train(labeled, tmp_path)
    before = files(tmp_path)

    def load(*_, **__):
        raise MemoryError

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(InsufficientMemoryError, match="--resume"):
        train(labeled, tmp_path, replace(CONFIG, resume=True, epochs=2))
    assert files(tmp_path)["lstm_solo/last.pt"] == before["lstm_solo/last.pt"]


def test_no_memory_to_score_the_test_split(labeled, tmp_path, monkeypatch):
    """The message names the checkpoint that the last epoch saved; the resumed run scores the test split only."""
    expected = train(labeled, tmp_path / "whole")
    original, splits = trainer.score_split, []

    def score(*arguments):
        splits.append(len(splits))
        return StopReason.OUT_OF_MEMORY if len(splits) == 2 else original(*arguments)

    monkeypatch.setattr(trainer, "score_split", score)
    with pytest.raises(InsufficientMemoryError, match=r"test split; kept .*last\.pt; free memory, then: .*--resume"):
        train(labeled, tmp_path / "stopped")
    results = train(labeled, tmp_path / "stopped", replace(CONFIG, resume=True))
    assert len(splits) == 3 and results["models"]["lstm_solo"]["test"] == expected["models"]["lstm_solo"]["test"]


def test_no_memory_for_the_model(labeled, tmp_path, monkeypatch):
    def forward(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(trainer, "ModelRunner", forward)
    with pytest.raises(InsufficientMemoryError, match=r"free memory, then: .*--resume"):
        train(labeled, tmp_path)
    monkeypatch.undo()
    train(labeled, tmp_path, replace(CONFIG, resume=True))


@pytest.mark.long
def test_scoring_continues_with_less_memory(labeled, tmp_path, monkeypatch):
    """In a run with workers, host memory runs out once in each batch of validation and test."""
    expected = train(labeled, tmp_path / "whole", replace(CONFIG, batch_size=4))
    original, tried, shrunk = BatchFeed.batches, set(), []

    def batches(self):
        shrunk.append(self.num_workers)
        for batch in original(self):
            if self.loader.planner.shuffle == "none" and batch.number not in tried:
                tried.add(batch.number)
                raise MemoryError
            yield batch

    monkeypatch.setattr(BatchFeed, "batches", batches)
    results = train(labeled, tmp_path / "short", replace(CONFIG, batch_size=4, num_workers=1))
    assert len(tried) > 1 and results["models"]["lstm_solo"]["test"] == expected["models"]["lstm_solo"]["test"]
    assert shrunk[0] == 1
    found = [outcome(tmp_path / name)["models"] for name in ("whole", "short")]
    assert found[0] == found[1]


@pytest.mark.long
def test_a_killed_worker_ends_the_use_of_workers(labeled, tmp_path, monkeypatch):
    expected = train(labeled, tmp_path / "whole", replace(CONFIG, batch_size=4))
    original, calls = BatchFeed.batches, []

    def batches(self):
        calls.append(self.num_workers)
        for batch in original(self):
            if self.num_workers and batch.number == 2:
                raise RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed.")
            yield batch

    monkeypatch.setattr(BatchFeed, "batches", batches)
    results = train(labeled, tmp_path / "short", replace(CONFIG, batch_size=4, num_workers=2))
    assert calls[:2] == [2, 0]
    assert results["models"]["lstm_solo"]["test_scores"] == expected["models"]["lstm_solo"]["test_scores"]


@pytest.mark.long
def test_a_step_without_memory_ends_the_use_of_workers(labeled, tmp_path, monkeypatch):
    expected = train(labeled, tmp_path / "whole", replace(CONFIG, batch_size=4))
    original, calls, failed = BatchFeed.batches, [], []

    def batches(self):
        calls.append(self.num_workers)
        return original(self)

    def step_loss(self, step, begin, end):
        if step.batches[0].number == 2 and not failed:
            failed.append(1)
            raise MemoryError
        return step_loss.original(self, step, begin, end)

    step_loss.original = ModelRunner.step_loss
    monkeypatch.setattr(BatchFeed, "batches", batches)
    monkeypatch.setattr(ModelRunner, "step_loss", step_loss)
    results = train(labeled, tmp_path / "short", replace(CONFIG, batch_size=4, num_workers=2))
    assert calls[:2] == [2, 0] and len(results["models"]["lstm_solo"]["oom_events"]) == 1
    assert results["models"]["lstm_solo"]["test_scores"] == expected["models"]["lstm_solo"]["test_scores"]


@pytest.mark.parametrize("options", [{}, {"folds": 2}, {"seeds": 1}, {"probe": True}])
@pytest.mark.parametrize("names", [("lstm_solo",), ("gnn_det_lstm",), ("lstm_solo_v0",)])
@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_non_finite_values_of_a_used_trace_are_an_error(tmp_path, part, names, options):
    """Also those that no detector reads, such as a first token, or a layer that --layers leaves out."""
    path, sizes = tmp_path / "s.zarr", SMALL | {"layers": (0, 2)}
    traces = make_traces(42, tokens=3)
    score = [None if k >= 40 else k % 2 for k in range(42)].__getitem__
    with tracestore.open(write_store(path, traces, score=score)) as store:
        wrong = int(make_split(store, store.targets(), CONFIG.seed).indices[part][3])
    for k, (layer, token, value) in enumerate([(0, 0, np.nan), (1, 2, np.inf), (2, 2, np.nan)]):
        traces[41]["hidden_states"][0][0, 0] = np.nan  # without a label: not used
        holed = [trace | {"hidden_states": [h.copy() for h in trace["hidden_states"]]} for trace in traces]
        holed[wrong]["hidden_states"][layer][token, 2] = value
        path = write_store(tmp_path / f"{k}.zarr", holed, score=score)
        with pytest.raises(
            TrainingError, match=rf"question 'q{wrong}' holds NaN or .* \(1 such trace\); --drop-nonfinite"
        ):
            train(path, tmp_path / "r", names=names, sizes=sizes, **options)
    assert not (tmp_path / "r/split.json").exists()


def test_the_probe_may_hold_one_layer_at_a_time(labeled, monkeypatch):
    with tracestore.open(labeled) as store:
        targets = store.targets()
        split = make_split(store, targets, 0)
        expected = probe.run_probe(store, split, targets, 0)
        monkeypatch.setattr(probe, "_FEATURE_BYTES", 1)
        np.testing.assert_equal(probe.run_probe(store, split, targets, 0), expected)


@pytest.mark.parametrize("options", [{}, {"seeds": 2}, {"folds": 2}])
def test_an_earlier_run_is_not_replaced_without_overwrite(labeled, tmp_path, options):
    """A run that stopped early, and left only a checkpoint, counts as well."""
    train(labeled, tmp_path, **options)
    before = files(tmp_path)
    with pytest.raises(UsageError, match="continue it with --resume, or replace it with --overwrite"):
        train(labeled, tmp_path, overwrite=False, **options)
    assert files(tmp_path) == before
    for path in tmp_path.iterdir():
        if path.is_file():
            path.unlink()
    with pytest.raises(UsageError, match="earlier run"):
        train(labeled, tmp_path, overwrite=False)
    train(labeled, tmp_path / "new", overwrite=False)


@pytest.mark.parametrize(
    ("first", "resumed"),
    [
        ({"names": ("lstm_solo", "gnn_det_lstm")}, {"names": ("lstm_solo",)}),
        ({"names": ("lstm_solo",)}, {"names": ("gnn_det_lstm",)}),
        ({"names": ("lstm_solo",)}, {"names": ("lstm_solo_v0",)}),
        ({}, {"folds": 2}),
        ({}, {"seeds": 1}),
        ({}, {"seeds": 2}),
        ({"seeds": 2}, {}),
        ({"seeds": 2}, {"seeds": 1}),
        ({"seeds": 2}, {"seeds": 2, "seed": 43}),
        ({"seeds": 2}, {"folds": 2}),
        ({"folds": 2}, {}),
        ({"folds": 2}, {"seeds": 2}),
        ({"folds": 2, "seeds": 2}, {"folds": 2}),
    ],
)
def test_resume_loses_no_training(labeled, tmp_path, first, resumed):
    """A command that leaves out a model, seed or fold of the run is refused, and leaves the folder unchanged."""
    train(labeled, tmp_path, **first)
    before = files(tmp_path)
    seed = resumed.pop("seed", CONFIG.seed)
    with pytest.raises(UsageError, match=r"last\.pt|best\.pt"):
        train(labeled, tmp_path, replace(CONFIG, resume=True, seed=seed), overwrite=False, **resumed)
    assert files(tmp_path) == before


@pytest.mark.parametrize("options", [{}, {"seeds": 1}])
def test_resume_loses_no_probe(labeled, tmp_path, options):
    train(labeled, tmp_path, probe=True, **options)
    before = files(tmp_path)
    with pytest.raises(UsageError, match="has results of the probe; pass --probe"):
        train(labeled, tmp_path, replace(CONFIG, resume=True), overwrite=False, probe=False, **options)
    assert files(tmp_path) == before


@pytest.mark.long
def test_resume_adds_models_and_seeds(labeled, tmp_path):
    train(labeled, tmp_path, seeds=1)
    names = ("lstm_solo", "lstm_solo_v0")
    results = train(labeled, tmp_path, replace(CONFIG, resume=True), names, overwrite=False, seeds=2)
    assert [(run["seed"], [*run["models"]]) for run in results["runs"]] == [(42, [*names]), (43, [*names])]


@pytest.mark.long
def test_nothing_of_a_replaced_run_is_left(labeled, tmp_path, monkeypatch):
    """Folds of an earlier run do not become those of a later one, nor do its results stay if the new one stops."""
    train(labeled, tmp_path, replace(CONFIG, seed=1), folds=2)
    train(labeled, tmp_path)
    assert not (tmp_path / "folds.json").exists()
    monkeypatch.setattr(trainer.Trainer, "run", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(labeled, tmp_path, replace(CONFIG, seed=2))
    names = ("results.json", "report.html", "predictions.csv", "roc.svg")
    assert not any((tmp_path / name).exists() for name in names)
