"""Stores in the terms of other libraries, with the real libraries."""

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import make_trace, make_traces, read_all
from tracestore.data import datasets as own_datasets
from tracestore.errors import InvalidInputError, MissingFieldError, UsageError


def make_store(path, count=24, segments=1, **options):
    with tracestore.create(path, **options) as writer:
        for k in range(count):
            trace = make_trace(k, tokens=2 + k % 5)
            score = None if k % 8 == 7 else k % 2
            writer.append(trace | {"question": f"question {k}"}, score=score, group=f"g{k % 3}")
            if (k + 1) % (-(-count // segments)) == 0:
                writer.flush()
    return path


@pytest.fixture
def path(tmp_path):
    return make_store(tmp_path / "s.zarr")


@pytest.mark.parametrize(
    "options",
    [{}, {"segments": 3}, {"codec": "blosc-zstd"}, {"codec": "zstd", "segments": 2}, {"dtype": "keep"}],
)
def test_features_are_the_last_tokens(tmp_path, options):
    with tracestore.open(make_store(tmp_path / "s.zarr", **options)) as store:
        for layer in range(-store.num_layers, store.num_layers):
            found = store.features(layer)
            assert found.dtype == np.float16 and found.shape == (24, store.hidden_dim)
            assert np.array_equal(found, np.stack([t.last_token[layer] for t in store]))
        assert np.array_equal(store.features(), store.features(store.num_layers - 1))
        for layer in (store.num_layers, -store.num_layers - 1):
            with pytest.raises(UsageError, match="layer"):
                store.features(layer)


def test_features_are_a_view_where_they_can_be(path, tmp_path):
    with tracestore.open(path) as store:
        view = store.features()
        assert not view.flags.owndata and not view.flags.writeable
        assert np.shares_memory(view, store[3].last_token)
    with tracestore.open(make_store(tmp_path / "t.zarr", segments=2)) as store:
        assert store.features().flags.writeable


def test_features_of_bfloat16(tmp_path):
    traces = make_traces(5)
    with tracestore.create(tmp_path / "b.zarr", dtype="keep") as writer:
        for trace in traces:
            hidden = [torch.from_numpy(h.astype("f4")).bfloat16() for h in trace["hidden_states"]]
            writer.append(trace | {"hidden_states": hidden})
    with tracestore.open(tmp_path / "b.zarr") as store:
        expected = [torch.from_numpy(t["hidden_states"][1][-1].astype("f4")).bfloat16().float().numpy() for t in traces]
        assert np.array_equal(store.features(1), np.stack(expected)) and store.features(1).dtype == np.float32


def test_features_train_scikit_learn(path):
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with tracestore.open(path) as store:
        known = ~np.isnan(store.targets())
        model = make_pipeline(StandardScaler(), LogisticRegression())
        features = store.features(-1)[known].astype("f4")
        model.fit(features, store.targets()[known])
        assert model.n_features_in_ == store.hidden_dim and model.predict_proba(features).shape == (21, 2)


def test_pandas(path):
    with tracestore.open(path) as store:
        frame = store.to_pandas(texts=True)
        assert list(frame.columns[:5]) == ["question_id", "sample", "score", "label", "group"]
        assert frame["question_id"].tolist() == store.question_ids[:] and frame["question"][3] == "question 3"
        assert frame["score"].isna().sum() == 3 and frame["group"].tolist() == [f"g{k % 3}" for k in range(24)]
        assert frame["num_tokens"].tolist() == store.num_tokens.tolist()
        assert frame["source"][5] == store[5].source[0]
        assert "question" not in store.to_pandas().columns
        means = frame.groupby("group")["score"].mean()
        assert set(means.index) == {"g0", "g1", "g2"}


def observer(lightning):
    """A model that keeps what it is shown."""

    class Observer(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(8, 1), []

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    return Observer


@pytest.mark.parametrize("view", ["sequence", "graph"])
def test_lightning(path, tmp_path, view):
    lightning = pytest.importorskip("lightning")
    from tracestore.bridges.lightning import TraceDataModule

    class Model(observer(lightning)):
        def training_step(self, batch, _):
            self.seen += batch.question_id
            x = batch.sequences[:, -1] if view == "sequence" else batch.x
            return self.layer(x.float()).square().mean()

        def validation_step(self, batch, _):
            assert len(batch.question_id)

        def test_step(self, batch, _):
            self.seen += batch.question_id

    module = TraceDataModule(path, view=view, batch_size=4)
    model = Model()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=module)
    ids = tracestore.open(path).question_ids
    expected = sorted(ids[int(k)] for k in module.split["train"])
    size = len(expected)
    assert sorted(model.seen[:size]) == sorted(model.seen[size:]) == expected
    assert model.seen[:size] != model.seen[size:], "each epoch has an order of its own"
    model.seen = []
    trainer.test(model, datamodule=module, verbose=False)
    assert sorted(model.seen) == sorted(ids[int(k)] for k in module.split["test"])
    assert set(np.concatenate(list(module.split.values()))) == set(np.flatnonzero(~np.isnan(module.store.scores)))


@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_lightning_goes_on_where_a_checkpoint_was_written(path, tmp_path, stop):
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
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(model, datamodule=TraceDataModule(path, batch_size=4), ckpt_path=checkpoint, weights_only=False)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return model.seen

    whole = run(10)  # 4 batches an epoch
    assert run(stop) + run(10, tmp_path / f"{stop}.ckpt") == whole


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 2}, {"reload_dataloaders_every_n_epochs": 1}])
def test_lightning_has_another_order_in_each_epoch(path, tmp_path, options, validates):
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
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[checkpoint], **options,
    )  # fmt: skip
    module = TraceDataModule(path, batch_size=4)
    trainer.fit(model, datamodule=module)
    orders = []
    for epoch in range(3):
        loader = module._loader("train", "global")
        loader.set_epoch(epoch)
        orders.append([tuple(b.question_id) for b in loader][: options.get("limit_train_batches")])
    assert model.seen == orders
    # What a checkpoint at the end of an epoch goes on with is the next one.
    resumed = Model()
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **options,
    )  # fmt: skip
    module = TraceDataModule(path, batch_size=4)
    trainer.fit(resumed, datamodule=module, ckpt_path=tmp_path / "epoch=0.ckpt", weights_only=False)
    assert [seen for seen in resumed.seen if seen] == orders[1:]


def test_pyg(path):
    from torch_geometric.loader import DataLoader

    from tracestore.bridges.pyg import TraceGraphs

    with tracestore.open(path) as store:
        graphs = TraceGraphs(store)
        assert len(graphs) == 24 * store.num_layers
        batch = next(iter(DataLoader(graphs, batch_size=2 * store.num_layers)))
        ours = next(iter(tracestore.TraceLoader(store, "graph", batch_size=2, shuffle="none")))
        assert torch.equal(batch.x, ours.x) and torch.equal(batch.edge_index, ours.edge_index)
        assert torch.equal(batch.edge_attr, ours.edge_attr) and torch.equal(batch.batch, ours.batch)
        assert batch.trace_index.tolist() == [0] * store.num_layers + [1] * store.num_layers
        assert batch.layer.tolist() == 2 * list(range(store.num_layers)) and batch.question_id[-1] == "q1"
        last = TraceGraphs(store, layer=-1)
        assert len(last) == 24 and torch.equal(last[5].x, graphs[5 * store.num_layers + store.num_layers - 1].x)
        assert last[5].question_id == store.question_ids[5] and last[5].y.item() == 0 and last[5].score.item() == 1
        assert last[7].y.isnan() and last[7].layer == store.num_layers - 1
        with pytest.raises(UsageError, match="layer"):
            TraceGraphs(store, layer=3)


def test_torchdata(path, monkeypatch):
    """StatefulDataLoader goes on where its state says."""
    loader_of = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make(workers):
        data = tracestore.TraceIterableDataset(path, "sequence", batch_size=4, shuffle="buffer", seed=3)
        return loader_of(data, batch_size=None, num_workers=workers)

    read = []
    gather = own_datasets.gather_batch
    monkeypatch.setattr(own_datasets, "gather_batch", lambda *args: read.append(1) or gather(*args))
    for workers in (0, 2):
        whole = [b.question_id for b in make(workers)]
        loader = make(workers)
        batches = iter(loader)
        first = [next(batches).question_id for _ in range(3)]
        state = loader.state_dict()
        resumed = make(workers)
        resumed.load_state_dict(state)
        read.clear()
        rest = [b.question_id for b in resumed]
        assert first + rest == whole
        assert workers or len(read) == len(rest), "what was read before was read again"
        # The next epoch has an order of its own.
        assert workers or [b.question_id for b in resumed] != whole


def test_hugging_face_both_ways(path, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from tracestore.bridges.huggingface import from_datasets, to_datasets

    with tracestore.open(path) as store:
        rows = to_datasets(store, ("last_token", "hidden_states", "attention")).with_format("numpy")
        assert len(rows) == 24
        for k in (0, 7, 23):
            assert rows[k]["question_id"] == store.question_ids[k] and rows[k]["question"] == f"question {k}"
            assert np.array_equal(rows[k]["last_token"], store[k].last_token.astype("f4"))
            assert np.array_equal(np.array(rows[k]["hidden_states"].tolist()), store[k].hidden_states.astype("f4"))
            assert rows[k]["tokens"].tolist() == store[k].tokens.tolist()
        with pytest.raises(UsageError, match="found array 'x'"):
            to_datasets(store, ("x",))
    traces = [t | {"score": k % 2, "group": "g"} for k, t in enumerate(make_traces(6))]
    plain = [
        {k: [a.astype("f4").tolist() for a in v] if k in ("hidden_states", "attentions") else v for k, v in t.items()}
        for t in traces
    ]
    plain = [t | {"tokens": t["tokens"].tolist()} for t in plain]
    assert from_datasets(datasets.Dataset.from_list(plain), tmp_path / "one.zarr") == 6
    streamed = datasets.Dataset.from_list(plain).to_iterable_dataset()
    assert from_datasets(streamed, tmp_path / "two.zarr", attention="none") == 6
    with tracestore.create(tmp_path / "own.zarr") as writer:
        for trace in make_traces(6):
            writer.append(trace, score=int(trace["question_id"][1:]) % 2)
    with tracestore.open(tmp_path / "one.zarr") as found, tracestore.open(tmp_path / "own.zarr") as own:
        assert read_all(found) == read_all(own) and found.group(0) == "g"
    with pytest.raises(UsageError, match="row 0: no tokens"):
        from_datasets(
            datasets.Dataset.from_list([{k: v for k, v in plain[0].items() if k != "tokens"}]), tmp_path / "x"
        )
    with pytest.raises(InvalidInputError):
        from_datasets(datasets.Dataset.from_list([plain[0] | {"tokens": [1, 2, 3]}]), tmp_path / "y")


def test_a_store_of_the_same_name_is_not_taken_from_the_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from tracestore.bridges.huggingface import to_datasets

    for seed in (0, 1):
        with tracestore.create(tmp_path / "s.zarr", overwrite=True) as writer:
            for trace in make_traces(4, seed=seed):
                writer.append(trace)
        with tracestore.open(tmp_path / "s.zarr") as store:
            rows = to_datasets(store).with_format("numpy")
            assert np.array_equal(rows[1]["last_token"], store[1].last_token.astype("f4"))


def test_hugging_face_says_what_is_missing(tmp_path):
    pytest.importorskip("datasets")
    from tracestore.bridges.huggingface import to_datasets

    with tracestore.open(make_store(tmp_path / "n.zarr", attention="none")) as store, pytest.raises(MissingFieldError):
        to_datasets(store, ("attention",))
