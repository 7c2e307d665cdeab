"""The batches that a detector is trained and evaluated on."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import make_traces, write_store
from tests.train.runs import select_layers
from tracestore.data.loader import TraceLoader
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import MODELS, make_model
from tracestore.oom.guard import OOMGuard
from tracestore.store.read.batch_sources import chunk_keys
from tracestore.store.read.store import open_store
from tracestore.train import batches
from tracestore.train.batches import BatchFeed
from tracestore.train.config import TrainConfig
from tracestore.train.distributed import DistributedContext
from tracestore.train.model_runner import fit_standardizer

LAYERS = 30
SIZES = {"gnn_hidden": 8, "latent_dim": 8, "lstm_hidden": 8, "dropout": 0.0}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("batches") / "store.zarr"
    traces = make_traces(6, tokens=lambda k: 5 + 3 * k, layers=LAYERS, dim=16, heads=2)
    write_store(path, [t | {"prompt_length": 2 + k} for k, t in enumerate(traces)], score=lambda k: k % 2)
    with open_store(path) as opened:
        yield opened


def feed_of(store, name, options=None, **changes):
    config = TrainConfig(batch_size=len(store), loader_threads=1, **changes)
    model_config = ModelConfig.from_store(store, **(SIZES | (options or {})))
    return BatchFeed(name, store, np.arange(len(store)), config, model_config, DistributedContext(), shuffle="none")


def all_layers(feed, **options):
    """Return a loader of the same batches with every layer of the store."""
    form = feed.loader.format
    options |= {"edge_format": form.edge_format, "as_pyg": False, "shuffle": "none"}
    return TraceLoader(feed.loader.store, form.view, batch_size=feed.loader.batch_size, **options)


def num_bytes(loader):
    """Return the bytes of the batches of an epoch, and the bytes of the store that they are gathered from."""
    jobs = [loader._gatherer.job(loader.batch_indices(k)) for k in range(len(loader))]
    return sum(job.num_bytes for job in jobs), sum(source.num_bytes for job in jobs for source in job.sources)


@pytest.mark.parametrize("message_passing", ["fused", "pyg"])
@pytest.mark.parametrize("name", [n for n, spec in MODELS.items() if spec.reads_middle])
def test_graph_detectors_read_at_most_0_65_of_the_bytes(store, name, message_passing):
    feed = feed_of(store, name, {"message_passing": message_passing})
    for mine, every in zip(num_bytes(feed.loader), num_bytes(all_layers(feed)), strict=True):
        assert mine <= 0.65 * every
    (batch,) = feed.next_batches(1)
    assert batch.inputs.num_layers == 18 and batch.inputs.held_layers == tuple(range(8, 26))


@pytest.mark.parametrize("layers", [(0,), (0, 29), (3, 4, 5, 6), tuple(range(30))])
@pytest.mark.parametrize("name", ["lstm_solo", "gnn_det_lstm_v0", "lstm_solo_v0", "gvae_lstm_v0"])
def test_detectors_read_only_the_layers_of_their_option(store, name, layers):
    feed = feed_of(store, name, {"layers": layers})
    mine, every = num_bytes(feed.loader)[1], num_bytes(all_layers(feed))[1]
    assert mine == every * len(layers) // LAYERS


def test_a_compressed_store_decodes_no_chunks_of_other_layers(tmp_path):
    traces = make_traces(2, tokens=24, layers=LAYERS, dim=2048)
    path = write_store(tmp_path / "z.zarr", traces, score=lambda k: k % 2, codec="zstd")
    with open_store(path) as store:
        feed = feed_of(store, "gnn_det_lstm")
        form, internals, indices = feed.loader.format, feed.loader.store.internals, np.arange(2)
        some, every = (len(chunk_keys(internals, indices, "graph", n)) for n in (form.layer_numbers(store), None))
        keys = []
        cache = internals.chunk_cache
        original = cache.get
        cache.get = lambda key, *rest: (keys.append(key), original(key, *rest))[1]
        feed.next_batches(1)
        assert some < every and len(set(keys)) == some


@pytest.mark.parametrize("name", MODELS)
def test_batches_of_fewer_layers_give_the_results_of_batches_of_all(store, name):
    options = {"layers": (3, 4, 9, 20)} if MODELS[name].view == "sequence" else {}
    feed = feed_of(store, name, options)
    torch.manual_seed(0)
    model = make_model(name, ModelConfig.from_store(store, **SIZES, **options)).eval()
    view = MODELS[name].view
    fit_standardizer(model, store, np.arange(len(store)), view, DistributedContext())
    (batch,) = feed.next_batches(1)
    whole = next(iter(all_layers(feed)))
    if view == "sequence":
        expected = model(whole.sequences[:, list(model.layers_read)]).logits
    else:
        every = type(batch.inputs).from_batch(whole, 0.0, batch.inputs.answer)
        expected = model(select_layers(every, model.layers_read)).logits
    assert torch.equal(model(batch.traces(0, batch.size).inputs).logits, expected)


@pytest.mark.parametrize("message_passing", ["fused", "pyg"])
def test_graphs_of_one_layer_are_standardized_as_that_layer(store, message_passing):
    """A detector that computes layer by layer gives each layer its own statistics."""
    options = SIZES | {"message_passing": message_passing}
    model = make_model("gnn_det_lstm", ModelConfig.from_store(store, **options)).eval().double()
    fit_standardizer(model, store, np.arange(len(store)), "graph", DistributedContext())
    whole = next(iter(all_layers(feed_of(store, "gnn_det_lstm"))))
    inputs = feed_of(store, "gnn_det_lstm").next_batches(1)[0].inputs
    inputs = type(inputs).from_batch(whole, 0.0, inputs.answer)
    encoder = model.encoder
    one_by_one = [encoder.encode(select_layers(inputs, [k])) for k in model.layers_read]
    torch.testing.assert_close(
        torch.cat(one_by_one, dim=1), encoder(select_layers(inputs, model.layers_read)), rtol=1e-10, atol=1e-10
    )


def test_a_detector_refuses_batches_that_lack_a_layer(store):
    model = make_model("gnn_det_lstm", ModelConfig.from_store(store, **SIZES))
    inputs = feed_of(store, "gnn_det_lstm").next_batches(1)[0].inputs
    whole = type(inputs).from_batch(next(iter(all_layers(feed_of(store, "gnn_det_lstm")))), 0.0, inputs.answer)
    for other in (select_layers(inputs, [8]), whole):
        with pytest.raises(ValueError, match="found graphs of the layers"):
            model(other)
    with pytest.raises(ValueError, match="sequences of 3 layers, expected 30"):
        make_model("lstm_solo", ModelConfig.from_store(store, **SIZES))(torch.zeros(2, 3, 16))


def equal_inputs(mine, theirs):
    """Return whether two prepared inputs hold the same values."""
    pairs = list(zip(mine.tensors(), theirs.tensors(), strict=True))
    return mine.index.ptr == theirs.index.ptr and all(torch.equal(p.nan_to_num(-9), q.nan_to_num(-9)) for p, q in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_sinks": 0, "mask_diagonal": False},
        {"mask_sinks": 3},
        {"mask_sinks": 99},
        {"skip": "last", "pooling": "all"},
        {"skip": "none", "pooling": "last"},
        {"aggregation": "sum", "normalization": "graph"},
        {"neighbors": 2},
        {"edges": False},
        {"edges": False, "skip": "last"},
        {"edges": False, "pooling": "all"},
        {"message_passing": "pyg", "layers": (0, 7, 9)},
    ],
)
@pytest.mark.parametrize("rule", [{}, {"attention_threshold": 0.3}, {"top_k": 0.4}])
def test_the_loader_prepares_what_the_model_would_derive(store, options, rule):
    feed = feed_of(store, "gnn_det_lstm", options, **rule)
    (batch,) = feed.next_batches(1)
    whole = next(iter(all_layers(feed, **rule)))
    plain = type(batch.inputs).from_batch(whole, batch.inputs.threshold, batch.inputs.answer)
    expected = select_layers(plain, feed.layers).prepare(feed.model_config)
    mine = batch.inputs
    if expected.in_degree is None:  # sums and PyG need no degrees, which the loader counts with the masks
        mine = replace(mine, in_degree=None)
    assert equal_inputs(mine, expected)
    for begin, end in ((0, 1), (2, 5), (5, 6)):
        part = select_layers(plain.traces(begin, end), feed.layers)
        assert equal_inputs(mine.traces(begin, end), part.prepare(feed.model_config))


class Device:
    """Stands for a GPU with room for some batches; records what happens in the order of the program."""

    def __init__(self, room=9):
        self.room, self.events, self.live = room, [], []

    def copy(self, name, value):
        self.live = [w for w in self.live if w() is not None]
        if len(self.live) >= self.room:
            self.events.append(f"no room for {name}")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        moved = Copied(value)
        self.live.append(weakref.ref(moved))
        return moved

    def stream(self):
        """Return a replacement of CopyStream."""
        device = self

        class Stream:
            def run(self, copy):
                device.events.append("copy ahead")
                return copy(), "done"

            def join(self, event, tensors):
                assert event == "done"
                device.events.append("wait")

        return Stream()


class Copied:
    """Inputs on the device."""

    def __init__(self, value):
        self.value = value


@pytest.fixture
def feed_on(store, monkeypatch):
    """Return a function from a device to a feed of three batches that copies to it."""

    def make(device):
        config = TrainConfig(batch_size=2, loader_threads=1)
        model_config = ModelConfig.from_store(store, **SIZES)
        feed = BatchFeed("lstm_solo", store, np.arange(6), config, model_config, DistributedContext(), shuffle="none")

        def copy(self, begin, end):
            name = f"{self.number}[{begin}:{end}]"
            moved = device.copy(name, self.inputs[begin:end])
            device.events.append(name)
            return batches.StepInputs(moved, self.y[begin:end])

        monkeypatch.setattr(batches.DeviceBatch, "_copy", copy)
        feed.copies = device.stream()
        return feed

    return make


def test_the_next_batch_is_copied_before_the_step_of_the_current_one(feed_on):
    device = Device()
    feed = feed_on(device)
    for number in range(3):
        (batch,) = feed.next_batches(1)
        assert batch.number == number
        device.events.append("step")
        given = batch.traces(0, 2)
        assert torch.equal(given.inputs.value, batch.inputs) and torch.equal(given.y, batch.y)
        feed.gather_ahead(1)
        del given, batch
    assert device.events == [
        *("copy ahead", "0[0:2]", "step", "wait", "copy ahead", "1[0:2]"),
        *("step", "wait", "copy ahead", "2[0:2]", "step", "wait"),
    ]
    assert feed.next_batches(1) == []


def test_a_batch_that_failed_is_copied_again_without_the_batch_ahead(feed_on):
    device = Device()
    feed = feed_on(device)
    (batch,) = feed.next_batches(1)
    first = batch.traces(0, 2)
    feed.gather_ahead(1)
    assert len([w for w in device.live if w() is not None]) == 2
    del first
    second = batch.traces(0, 2)
    assert [type(w()) for w in device.live if w() is not None] == [Copied]
    assert torch.equal(second.inputs.value, batch.inputs)
    halves = [batch.traces(0, 1).inputs.value, batch.traces(1, 2).inputs.value]
    assert torch.equal(torch.cat(halves), batch.inputs)
    device.events.clear()
    (batch,) = feed.next_batches(1)
    assert device.events == [] and batch.number == 1
    assert torch.equal(batch.traces(0, 2).inputs.value, batch.inputs)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_without_room_for_a_batch_ahead_each_batch_is_copied_in_its_step(feed_on, accumulated):
    device = Device(room=1)
    feed = feed_on(device)
    found, y = [], []
    while step := feed.next_batches(accumulated):
        for batch in step:
            given = batch.traces(0, batch.size)
            found.append(given.inputs.value)
            y.append(given.y)
            del batch
            if len(found) % accumulated == 0:
                feed.gather_ahead(accumulated)
            del given
        del step
    assert torch.equal(torch.cat(found), feed_on(Device()).loader.gather(np.arange(6)).sequences)
    assert sum(event.startswith("no room") for event in device.events) == 1 and feed.copies is None


@pytest.mark.long
def test_a_step_without_room_for_the_batch_ahead_recovers_at_the_same_size(feed_on):
    """The guard tries the whole batch again, which fits when the batch ahead is dropped."""
    device = Device()
    feed = feed_on(device)
    model = torch.nn.Linear(1, 1)
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_of(begin, end):
        inputs = batch.traces(begin, end).inputs
        if len([w for w in device.live if w() is not None]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return model(inputs.value.float().mean().view(1, 1)).sum()

    for _ in range(3):
        (batch,) = feed.next_batches(1)
        feed.gather_ahead(1)
        guard.step(2, loss_of)
    assert [(e["size_before"], e["size_after"]) for e in guard.events] == [(2, 2)] and guard.micro_batch is None


@pytest.mark.parametrize("name", ["gnn_det_lstm", "lstm_solo"])
def test_statistics_are_those_of_the_layers_that_are_read(store, name):
    model = make_model(name, ModelConfig.from_store(store, **SIZES))
    view = MODELS[name].view
    fit_standardizer(model, store, np.arange(5), view, DistributedContext())
    standardizer = (model if view == "sequence" else model.encoder).standardiser
    for layer in range(LAYERS):
        rows = [
            t.last_token[layer][None] if view == "sequence" else t.hidden_states[layer]
            for t in (store[k] for k in range(5))
        ]
        rows = np.concatenate(rows).astype("f8")
        is_read = layer in model.layers_read
        mean, std = (rows.mean(0), rows.std(0).clip(1e-6)) if is_read else (np.zeros(16), np.ones(16))
        np.testing.assert_allclose(standardizer.mean[layer], mean, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(standardizer.std[layer], std, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("name", ["gnn_det_lstm", "lstm_solo"])
def test_a_column_that_is_constant_in_training_is_only_centered(name, dtype, tmp_path):
    """All training traces end with the same token, or have a padded column; others need not."""
    traces = make_traces(40, tokens=7, layers=LAYERS, dim=16, dtype=dtype)
    for trace in traces:
        for hidden in trace["hidden_states"]:
            hidden[:, 3], hidden[:, 4], hidden[:, 5] = 300.3, 0, -1e-3 * (1 + hidden[:, 5] % 1)
    store = tracestore.open(write_store(tmp_path / "s.zarr", traces, dtype="keep"))
    model = make_model(name, ModelConfig.from_store(store, **SIZES))
    fit_standardizer(model, store, np.arange(40), MODELS[name].view, DistributedContext())
    standardizer = (model if name == "lstm_solo" else model.encoder).standardiser
    layer = model.layers_read[0]
    assert standardizer.std[layer, 3:5].tolist() == [1, 1]
    np.testing.assert_allclose(standardizer.mean[layer, 3:5], [np.dtype(dtype).type(300.3), 0])
    rows = [t.last_token[layer][None] if name == "lstm_solo" else t.hidden_states[layer] for t in store]
    np.testing.assert_allclose(standardizer.std[layer, 5], np.concatenate(rows).astype("f8")[:, 5].std(), rtol=1e-4)


def test_a_constant_column_is_found_in_a_hundred_thousand_rows(tmp_path):
    """Every sum of squares is rounded in the same direction: the variance was 2e-12 of the squared mean."""
    hidden = np.full((100_000, 16), 1.6419066, "f4")
    trace = {"question_id": "q", "hidden_states": [hidden]}
    store = tracestore.open(write_store(tmp_path / "s.zarr", [trace], dtype="keep", attention="none"))
    model = make_model("lstm_solo", ModelConfig.from_store(store, **SIZES))
    fit_standardizer(model, store, np.arange(1), "graph", DistributedContext())
    assert model.standardiser.std.unique().tolist() == [1]
