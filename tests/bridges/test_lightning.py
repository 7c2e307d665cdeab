"""The Lightning DataModule, with the real library."""

import numpy as np
import pytest
import torch

import tracestore
from tests.tiers import long
from tracestore.errors import UsageError


def observer(lightning):
    """Return a model class that records the question ids of its batches."""

    class Observer(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen, self.validated = torch.nn.Linear(8, 1), [], []

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    return Observer


def make_trainer(lightning, **options):
    """Return a trainer on the CPU that prints nothing."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(accelerator="cpu", **quiet, **options)


@pytest.mark.long
@pytest.mark.parametrize("view", ["sequence", "graph"])
def test_batches_and_splits(path, tmp_path, view):
    lightning = pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    class Model(observer(lightning)):
        def training_step(self, batch, _):
            self.seen += batch.question_id
            x = batch.sequences[:, -1] if view == "sequence" else batch.x
            return self.layer(x.float()).square().mean()

        def validation_step(self, batch, _):
            self.validated += batch.question_id

        def test_step(self, batch, _):
            self.seen += batch.question_id

    module = TraceDataModule(path, view=view, batch_size=4)
    model = Model()
    trainer = make_trainer(lightning, max_epochs=2, default_root_dir=tmp_path)
    trainer.fit(model, datamodule=module)
    ids = tracestore.open(path).question_ids
    expected = sorted(ids[int(k)] for k in module.split["train"])
    size = len(expected)
    assert sorted(model.seen[:size]) == sorted(model.seen[size:]) == expected
    assert model.seen[:size] != model.seen[size:], "each epoch has its own order"
    assert set(model.validated) == {ids[int(k)] for k in module.split["val"]}
    model.seen = []
    trainer.test(model, datamodule=module, verbose=False)
    assert sorted(model.seen) == sorted(ids[int(k)] for k in module.split["test"])
    assert set(np.concatenate(list(module.split.values()))) == set(np.flatnonzero(~np.isnan(module.store.scores)))


@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_training_continues_from_a_checkpoint(path, tmp_path, stop):
    lightning = pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    class Model(observer(lightning)):
        def training_step(self, batch, _):
            self.seen.append(tuple(batch.question_id))
            return self.layer(batch.sequences[:, -1].float()).square().mean()

        def validation_step(self, batch, _):
            pass

    def run(steps, checkpoint=None):
        model = Model()
        trainer = make_trainer(lightning, max_steps=steps, default_root_dir=tmp_path, enable_checkpointing=False)
        trainer.fit(model, datamodule=TraceDataModule(path, batch_size=4), ckpt_path=checkpoint, weights_only=False)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return model.seen

    whole = run(10)  # 4 batches an epoch
    assert run(stop) + run(10, tmp_path / f"{stop}.ckpt") == whole


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_by": "tokens", "max_batch_cost": 13}])
def test_training_continues_from_each_step_with_all_traces(path, tmp_path, options):
    """[the last step of an epoch, when the state is at its end; epochs with more batches than the first]"""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tracestore.bridges.lightning import TraceDataModule

    class Model(observer(lightning)):
        def training_step(self, batch, _):
            self.seen.append((self.current_epoch, tuple(batch.question_id)))
            return self.layer(batch.sequences[:, -1].float()).square().mean()

    def run(checkpoint=None, **more):
        model, module = Model(), TraceDataModule(path, seed=1, **options)
        more |= {"max_epochs": 3, "limit_val_batches": 0, "reload_dataloaders_every_n_epochs": "batch_by" in options}
        trainer = make_trainer(lightning, default_root_dir=tmp_path, **more)
        trainer.fit(model, datamodule=module, ckpt_path=checkpoint, weights_only=False)
        return model.seen, module

    each = ModelCheckpoint(tmp_path / "steps", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole, module = run(callbacks=[each])
    for epoch in range(3):
        trained = [question_id for number, batch in whole if number == epoch for question_id in batch]
        assert len(set(trained)) == len(trained) == len(module.split["train"])
    for step in range(1, len(whole)):
        assert run(tmp_path / f"steps/step={step}.ckpt", enable_checkpointing=False)[0] == whole[step:], step


def test_epochs_that_lightning_would_cut_are_refused(path, tmp_path):
    lightning = pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    class Model(observer(lightning)):
        def training_step(self, batch, _):
            raise AssertionError

    trainer = make_trainer(lightning, max_epochs=2, default_root_dir=tmp_path)
    with pytest.raises(UsageError, match="reload_dataloaders_every_n_epochs=1"):
        trainer.fit(Model(), datamodule=TraceDataModule(path, batch_by="tokens", max_batch_cost=13))


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 2}, {"reload_dataloaders_every_n_epochs": 1}])
def test_each_epoch_has_its_own_order(path, tmp_path, options, validates):
    lightning = pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    class Model(observer(lightning)):
        def on_train_epoch_start(self):
            self.seen.append([])

        def training_step(self, batch, _):
            self.seen[-1].append(tuple(batch.question_id))
            return self.layer(batch.sequences[:, -1].float()).square().mean()

    if validates:
        Model.validation_step = lambda self, batch, _: None
    model = Model()
    checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    trainer = make_trainer(lightning, max_epochs=3, callbacks=[checkpoint], **options)
    module = TraceDataModule(path, batch_size=4)
    trainer.fit(model, datamodule=module)
    orders = []
    for epoch in range(3):
        loader = module.train_dataloader()
        loader.set_epoch(epoch)
        orders.append([tuple(b.question_id) for b in loader][: options.get("limit_train_batches")])
    assert model.seen == orders
    # A checkpoint at the end of an epoch continues with the next one.
    resumed = Model()
    trainer = make_trainer(lightning, max_epochs=3, enable_checkpointing=False, **options)
    module = TraceDataModule(path, batch_size=4)
    trainer.fit(resumed, datamodule=module, ckpt_path=tmp_path / "epoch=0.ckpt", weights_only=False)
    assert [seen for seen in resumed.seen if seen] == orders[1:]


def test_a_subset_is_split_by_question(path):
    pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    with tracestore.open(path) as store:
        part = store.filter(group=["g0", "g1", "g2", "g3"])
        module = TraceDataModule(part, batch_size=4, seed=1, dtype="float32")
        module.setup()
        expected = part.split(seed=1)
        assert {name: indices.tolist() for name, indices in module.split.items()} == {
            name: expected[name].indices.tolist() for name in ("train", "val", "test")
        }
        seen = [k for batch in module.train_dataloader() for k in batch.trace_index.tolist()]
        assert sorted(seen) == sorted(expected.train.indices)


def test_a_float32_model_that_gets_float16_batches_is_told_what_to_do(path, tmp_path):
    lightning = pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    class Model(observer(lightning)):
        def training_step(self, batch, _):
            return self.layer(batch.sequences[:, -1]).square().mean()

    trainer = make_trainer(lightning, max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=False)
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(Model(), datamodule=TraceDataModule(path, batch_size=4))
    (note,) = raised.value.__notes__
    assert "float16" in note and 'pass dtype="float32" to the loader' in note
    trainer = make_trainer(lightning, max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=False)
    trainer.fit(Model(), datamodule=TraceDataModule(path, batch_size=4, dtype="float32"))


@pytest.mark.parametrize("batch_size", [1, 4, 5, 16, 100])
@pytest.mark.parametrize(
    "options",
    [{}, {"drop_last": True}, {"pad_last": True}, {"epoch_size": 7}, {"epoch_size": 50}, {"weights": [2]},
     {"weights": [1], "epoch_size": 3, "pad_last": True}, {"batch_by": "tokens", "max_batch_cost": 6, "drop_last": True}],
)  # fmt: skip
def test_validation_and_test_have_each_trace_once(path, options, batch_size):
    """Options that leave out or repeat traces are those of training: metrics are of whole splits."""
    pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    module = TraceDataModule(path, batch_size=batch_size, **options)
    for name in ("val", "test", "predict"):
        loader = getattr(module, f"{name}_dataloader")()
        expected = module.split["test" if name == "predict" else name].tolist()
        for _ in range(2):
            assert [k for batch in loader for k in batch.trace_index.tolist()] == expected
    assert len(module.train_dataloader()) == len(
        tracestore.TraceLoader(path, indices=module.split["train"], batch_size=batch_size, seed=42, **options)
    )


@pytest.mark.parametrize("view", ["sequence", "tokens"])
@pytest.mark.parametrize("world_size", [1, 2, 3, *long(4, 5, 6)])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 16])
def test_each_rank_has_a_trace_of_each_batch(path, batch_size, world_size, view):
    """The mean loss of no traces is NaN, and so is then the mean over all ranks."""
    pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    def loaders(name, **options):
        given = {"view": view, "batch_size": batch_size, "world_size": world_size, **options}
        modules = [TraceDataModule(path, rank=rank, **given) for rank in range(given["world_size"])]
        return [getattr(module, f"{name}_dataloader")() for module in modules]

    for name in ("val", "test"):
        ranks = loaders(name)
        count = ranks[0].planner.num_samples
        if count < world_size:
            with pytest.raises(UsageError, match=f"{count} traces for {world_size} ranks"):
                iter(ranks[0])
            continue
        slices = [[batch.trace_index.tolist() for batch in loader] for loader in ranks]
        assert all(len(part) for parts in slices for part in parts) and len(set(map(len, slices))) == 1
        whole = [k for parts in zip(*slices, strict=True) for part in parts for k in part]
        assert whole == [k for batch in loaders(name, world_size=1)[0] for k in batch.trace_index.tolist()]
    for options in ({}, {"drop_last": True}, {"pad_last": True}):
        ranks = loaders("train", **options)
        sizes = np.diff([ranks[0].planner.plan(0).batches.bounds(k) for k in range(len(ranks[0]))])
        if world_size > 1 and sizes.size and sizes.min() < world_size:
            for loader in ranks:
                with pytest.raises(UsageError, match=f"for {world_size} ranks.* drop_last or pad_last"):
                    iter(loader)
        else:
            assert all(len(batch) for loader in ranks for batch in loader)


def test_batches_of_a_cost_have_a_trace_for_each_rank_or_are_refused(path):
    pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    options = {"batch_by": "tokens", "rank": 1, "world_size": 2}
    assert len(list(TraceDataModule(path, max_batch_cost=10**6, **options).train_dataloader())) == 1
    with pytest.raises(UsageError, match="has 1 trace for 2 ranks"):
        iter(TraceDataModule(path, max_batch_cost=1, **options).train_dataloader())


@pytest.mark.parametrize("option", [{"shuffle": True}, {"indices": [0]}])
def test_the_split_chooses_traces_and_order(path, option):
    pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    with pytest.raises(UsageError, match=f"found {next(iter(option))}, which the split"):
        TraceDataModule(path, **option)
