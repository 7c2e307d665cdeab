"""The batches that a detector is trained and evaluated on."""

import numpy as np
import pytest
import torch

from tests.helpers import make_traces, write_store
from tracestore.data.loader import TraceLoader
from tracestore.detectors.config import ModelConfig
from tracestore.detectors.registry import DETECTORS, make_model
from tracestore.store.read.batch_sources import chunk_keys
from tracestore.store.read.store import open_store
from tracestore.train.batches import BatchFeed
from tracestore.train.config import TrainConfig
from tracestore.train.distributed import DistributedContext
from tracestore.train.standardize import fit_standardizer

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
@pytest.mark.parametrize("name", [n for n, spec in DETECTORS.items() if spec.reads_middle])
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


@pytest.mark.parametrize("name", DETECTORS)
def test_batches_of_fewer_layers_give_the_results_of_batches_of_all(store, name):
    options = {"layers": (3, 4, 9, 20)} if DETECTORS[name].view == "sequence" else {}
    feed = feed_of(store, name, options)
    torch.manual_seed(0)
    model = make_model(name, ModelConfig.from_store(store, **SIZES, **options)).eval()
    view = DETECTORS[name].view
    fit_standardizer(model, store, np.arange(len(store)), view, DistributedContext())
    (batch,) = feed.next_batches(1)
    whole = next(iter(all_layers(feed)))
    if view == "sequence":
        expected = model(whole.sequences).logits
    else:
        every = type(batch.inputs).from_batch(whole, 0.0, batch.inputs.answer)
        expected = model(every).logits
    assert torch.equal(model(batch.traces(0, batch.size)[0]).logits, expected)


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
    one_by_one = [encoder.encode(inputs.select_layers([k])) for k in model.layers_read]
    torch.testing.assert_close(torch.cat(one_by_one, dim=1), encoder(inputs), rtol=1e-10, atol=1e-10)


def test_a_detector_refuses_batches_that_lack_a_layer(store):
    model = make_model("gnn_det_lstm", ModelConfig.from_store(store, **SIZES))
    inputs = feed_of(store, "gnn_det_lstm").next_batches(1)[0].inputs
    with pytest.raises(ValueError, match="layer 9 is not among"):
        model(inputs.select_layers([8]))
    with pytest.raises(ValueError, match="sequences of 3 layers, expected 30"):
        make_model("lstm_solo", ModelConfig.from_store(store, **SIZES))(torch.zeros(2, 3, 16))
