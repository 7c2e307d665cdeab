"""The default graph detectors compared with plain PyG, their options, and their edge-free twins."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import BatchNorm, GINEConv, GraphNorm, LayerNorm, global_mean_pool

from tests.helpers import make_traces, write_store
from tracestore.data.loader import TraceLoader
from tracestore.data.tokens.answers import answer_bounds
from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.detectors.layers.dropout import TraceMasks
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.models import detector_loss
from tracestore.detectors.registry import MODELS, make_model
from tracestore.errors import UsageError
from tracestore.store.read.store import open_store

LAYERS, DIM, HIDDEN = 3, 24, 16
NORMS = {
    "layer": lambda: LayerNorm(HIDDEN, mode="node"),
    "graph": lambda: GraphNorm(HIDDEN),
    "batch": lambda: BatchNorm(HIDDEN),
}


def config(**changes):
    options = {"dropout": 0.0, "gnn_hidden": HIDDEN, "latent_dim": 12, "lstm_hidden": 10, "layers": (0, 1, 2)}
    return ModelConfig(LAYERS, DIM, **(options | changes))


@pytest.fixture
def inputs_of(tmp_path):
    """Return a function from a form of edges to the inputs of 6 traces with answers."""

    def read(form="packed", threshold=0.2):
        path = tmp_path / f"{form}-{threshold}.zarr"
        is_causal, attention = form != "square", "heads" if form == "heads" else "mean"
        traces = make_traces(6, tokens=lambda k: 3 + 2 * k, layers=LAYERS, dim=DIM, heads=3, causal=is_causal)
        traces = [t | {"prompt_length": 1 + k} for k, t in enumerate(traces)]
        write_store(path, traces, score=lambda k: k % 2, attention=attention)
        edges = "coo" if form == "square" else form
        options = {"edge_format": edges, "attention_threshold": threshold, "shuffle": "none", "as_pyg": False}
        batch = next(iter(TraceLoader(path, "graph", batch_size=6, **options)))
        with open_store(path) as store:
            answer = torch.from_numpy(answer_bounds(store, batch.trace_index))
        return GraphInputs.from_batch(batch, threshold, answer), batch.y

    return read


class Reference(nn.Module):
    """The encoder in plain PyG, one layer of the language model at a time, with the weights of a model."""

    def __init__(self, model, kind):
        super().__init__()
        self.model, self.norms = model, []
        self.convs = nn.ModuleList()
        for mine, norm in ((model.encoder.conv1, model.encoder.norm1), (model.encoder.conv2, model.encoder.norm2)):
            source = mine.conv
            mlp = nn.Sequential(nn.Linear(source.nn[0].in_features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
            conv = GINEConv(mlp, edge_dim=source.lin.weight.shape[1], aggr="mean").double()
            conv.load_state_dict(source.state_dict())
            self.convs.append(conv)
            # One BatchNorm per layer of the language model.
            of_layers = [NORMS[kind]().double() for _ in range(LAYERS if kind == "batch" else 1)]
            for layer in of_layers:
                target = layer.module if kind == "batch" else layer
                for name, parameter in norm.named_parameters():
                    setattr(target, name, parameter)
            self.norms.append(of_layers)

    def forward(self, inputs):
        edge_index, weight = inputs.coo()
        graph = inputs.graph_of_rows()
        source, target = edge_index
        local = source - inputs.node_ptr[graph[source]]
        keep = (source != target) & (local >= 1)
        encoded = torch.zeros(len(inputs.node_ptr) - 1, HIDDEN + DIM, dtype=torch.float64)
        for layer in range(LAYERS):
            nodes = torch.nonzero(graph % LAYERS == layer).squeeze(1)
            at = torch.full((len(graph),), -1)
            at[nodes] = torch.arange(len(nodes))
            mine = keep & (graph[source] % LAYERS == layer)
            edges, x = at[edge_index[:, mine]], inputs.x[nodes].double()
            of, h = graph[nodes] // LAYERS, x
            for k, conv in enumerate(self.convs):
                norm = self.norms[k][layer % len(self.norms[k])]
                out = conv(h, edges, weight[mine].double())
                out = F.relu(norm(out) if isinstance(norm, BatchNorm) else norm(out, of))
                h = out + h if k else out
            position = torch.cat([torch.arange(n) for n in inputs.node_ptr.diff()[layer::LAYERS]])
            begin, end = inputs.answer[of].unbind(1)
            is_answer = (position >= begin) & (position < end)
            read = [global_mean_pool(v[is_answer], of[is_answer]) for v in (h, x)]
            encoded[layer::LAYERS] = torch.cat(read, dim=1)
        return encoded.view(-1, LAYERS, HIDDEN + DIM)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("form", ["packed", "heads", "square"])
@pytest.mark.parametrize("message_passing", ["fused", "pyg"])
def test_the_encoder_equals_plain_pyg(inputs_of, form, kind, message_passing):
    inputs, _ = inputs_of(form)
    features = {"edge_features": "heads", "num_heads": 3} if form == "heads" else {}
    options = {"normalization": kind, "message_passing": message_passing, "standardize": False}
    torch.manual_seed(0)
    model = make_model("gnn_det_lstm", config(**options, **features)).double()
    for parameter in (*model.encoder.norm1.parameters(), *model.encoder.norm2.parameters()):
        nn.init.uniform_(parameter, 0.5, 1.5)
    model.encoder.dropout.p = 0.0
    reference = Reference(model, kind)
    cotangent = torch.randn(6, LAYERS, HIDDEN + DIM, dtype=torch.float64)
    results = []
    for run in (model.encoder, reference):
        model.zero_grad()
        reference.zero_grad()
        out = run(inputs)
        (out * cotangent).sum().backward()
        convs = [c.conv for c in (model.encoder.conv1, model.encoder.conv2)] if run is model.encoder else run.convs
        norms = [*model.encoder.norm1.parameters(), *model.encoder.norm2.parameters()]
        gradients = [p.grad.clone() for c in convs for _, p in sorted(c.named_parameters())]
        results.append([out.detach(), *gradients, *(p.grad.clone() for p in norms)])
    for mine, theirs in zip(*results, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def test_the_graph_vae_reads_mu_and_the_skipped_states_and_detaches_its_target(inputs_of):
    inputs, y = inputs_of()
    model = make_model("gvae_lstm", config(standardize=False, skip="last")).double().eval()
    eps = torch.randn(6, LAYERS, 12, dtype=torch.float64)

    output = model(inputs, None, eps)

    encoded = model.encoder(inputs)
    pooled, last = encoded[..., :HIDDEN], encoded[..., HIDDEN:]
    assert torch.equal(last[:, 0], inputs.x[inputs.node_ptr[1::LAYERS] - 1].double())
    mu, logvar = model.mu(pooled), model.logvar(pooled).clamp(-10, 10)
    assert torch.allclose(output.logits, model.readers(torch.cat([mu, last], -1)).mean(1))
    z = mu + (logvar / 2).exp() * eps
    reconstruction = (model.decoder(z) - pooled.detach()).square().mean()
    assert torch.allclose(output.auxiliary["reconstruction"], reconstruction)
    wanted = torch.autograd.grad(reconstruction, model.encoder.conv1.conv.nn[0].weight)[0]
    found = torch.autograd.grad(output.auxiliary["reconstruction"], model.encoder.conv1.conv.nn[0].weight)[0]
    assert torch.allclose(found, wanted)
    assert detector_loss(output, y, 0.01).isfinite()


@pytest.mark.parametrize("kind", ["layer", "graph", "none"])
@pytest.mark.parametrize("name", [n for n, spec in MODELS.items() if spec.view == "graph"])
def test_a_divided_batch_has_the_logits_of_the_whole_one(inputs_of, name, kind):
    inputs, _ = inputs_of()
    model = make_model(name, config(normalization=kind, neighbors=2)).double()

    def logits(begin, end):
        return model(inputs.traces(begin, end), TraceMasks(3, begin, end - begin)).logits

    whole = logits(0, 6)

    assert torch.allclose(whole, torch.cat([logits(0, 1), logits(1, 4), logits(4, 6)]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["layer", "graph"])
def test_an_edge_free_twin_equals_its_detector_on_graphs_without_edges(inputs_of, kind):
    inputs, _ = inputs_of(threshold=2.0)
    models = [make_model(n, config(normalization=kind)).eval() for n in ("gnn_det_lstm", "gnn_det_lstm_no_edges")]
    models[1].load_state_dict({k: v for k, v in models[0].state_dict().items() if "lin." not in k and "eps" not in k})

    with_edges, without = (model(inputs).logits for model in models)

    assert torch.allclose(with_edges, without, rtol=1e-5, atol=1e-6)


def test_only_the_detector_with_edges_depends_on_attention(inputs_of):
    few, _ = inputs_of(threshold=0.6)
    many, _ = inputs_of(threshold=0.1)
    for name, depends in (("gnn_det_lstm", True), ("gnn_det_lstm_no_edges", False)):
        model = make_model(name, config()).eval()
        assert torch.equal(model(few).logits, model(many).logits) != depends


def test_batch_normalization_uses_running_statistics_in_evaluation(inputs_of):
    inputs, _ = inputs_of()
    model = make_model("gnn_det_lstm", config(normalization="batch"))
    for _ in range(3):
        model(inputs)
    model.eval()
    whole = model(inputs).logits
    parts = torch.cat([model(inputs.traces(0, 2)).logits, model(inputs.traces(2, 6)).logits])
    assert torch.allclose(whole, parts, rtol=1e-4, atol=1e-5)
    assert len(model.encoder.norm1.running_mean.unique(dim=0)) == LAYERS


def remaining(inputs, **masks):
    """Return the edges of each graph as a set of (source, target), local."""
    masked = inputs.mask_edges(**masks)
    (source, target), _ = masked.coo()
    graph = inputs.graph_of_rows()[source]
    first = inputs.node_ptr[graph]
    return set(zip(graph.tolist(), (source - first).tolist(), (target - first).tolist(), strict=True))


@pytest.mark.parametrize("form", ["packed", "coo", "heads", "square"])
def test_masks_and_neighbors_remove_edges(inputs_of, form):
    inputs, _ = inputs_of(form)
    all_edges = remaining(inputs)

    assert remaining(inputs, diagonal=True) == {e for e in all_edges if e[1] != e[2]}
    assert remaining(inputs, sinks=2) == {e for e in all_edges if e[1] >= 2}
    both = {e for e in all_edges if e[1] != e[2] and e[1] >= 1}
    assert remaining(inputs, diagonal=True, sinks=1) == both
    (source, target), weight = inputs.coo()
    graph = inputs.graph_of_rows()[source]
    keys = zip(
        graph.tolist(),
        (source - inputs.node_ptr[graph]).tolist(),
        (target - inputs.node_ptr[graph]).tolist(),
        strict=True,
    )
    value = dict(zip(keys, weight.double().mean(1).tolist(), strict=True))
    rows = {}
    for edge in sorted(both, key=lambda e: (-value[e], e[1])):
        rows.setdefault((edge[0], edge[2]), []).append(edge)
    expected = {edge for row in rows.values() for edge in row[:2]}
    assert remaining(inputs, diagonal=True, sinks=1, neighbors=2) == expected
    degree = torch.bincount(inputs.coo()[0][1], minlength=len(inputs.x)).clamp_min(1)
    assert torch.equal(inputs.count_edges(), degree.int())


def test_graph_detectors_read_the_middle_layers_unless_the_options_name_others():
    for num_layers, expected in ((30, range(8, 26)), (32, range(8, 28)), (3, (1, 2)), (1, (0,))):
        for name, spec in MODELS.items():
            first_version = name.endswith("_v0") or spec.view == "sequence"
            read = make_model(name, ModelConfig(num_layers, 2)).layers_read
            assert list(read) == list(range(num_layers) if first_version else expected)
    assert make_model("gvae_lstm", ModelConfig(30, 2, layers=(0, 29))).layers_read == (0, 29)


def test_options_out_of_range_are_refused():
    for name, value in (("normalization", "instance"), ("aggregation", "max"), ("pooling", ""), ("mask_sinks", -1)):
        with pytest.raises(UsageError, match=name):
            config(**{name: value})
    with pytest.raises(UsageError, match="neighbors 0"):
        config(neighbors=0)


def test_answer_bounds_come_from_the_span_the_mask_or_the_prompt(tmp_path):
    fields = (
        {"answer_span": (2, 4), "prompt_length": 1},
        {"generated_mask": np.array([0, 0, 0, 1, 1, 0], "u1"), "prompt_length": 1},
        {"prompt_length": 4},
        {"prompt_length": 6},
        {},
        {"generated_mask": np.array([0, 1, 1, 0, 1, 1], "u1")},
        {"answer_span": (2, -1)},  # of which only a part is known
        {"answer_span": (2, -1), "prompt_length": 3},
    )
    traces = [t | more for t, more in zip(make_traces(8, tokens=lambda _: 6), fields, strict=True)]
    expected = [[2, 4], [3, 5], [4, 6], [5, 6], [0, 6], [4, 6], [0, 6], [3, 6]]
    with open_store(write_store(tmp_path / "s.zarr", traces)) as store:
        assert answer_bounds(store, range(8)).tolist() == expected
