"""Test the examples that docs/extraction.md shows, where the libraries that they use are installed."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import ROOT

IDS = torch.arange(5, 12)[None]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Return a function that imports the example that contains some text."""

    def load(text):
        codes = [path.read_text() for path in (ROOT / "docs/examples").glob("*.py")]
        [code] = [code for code in codes if text in code]
        path = tmp_path / "recipe.py"
        path.write_text(code)
        spec = importlib.util.spec_from_file_location("recipe", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "recipe", module)
        spec.loader.exec_module(module)
        return module

    return load


def assert_stores_the_states_of(model, trace, path):
    """Store a trace, and compare it with a forward pass; the last layer is that before the final norm."""
    last = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda _module, _args, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.inference_mode():
        out = model(IDS, output_hidden_states=True, output_attentions=True, use_cache=False)
    handle.remove()
    with tracestore.create(path, attention="heads", provenance={"final_norm": False}) as writer:
        writer.append(trace | {"question_id": "q0"})
    with tracestore.open(path) as store:
        [stored] = store
        assert stored.tokens.tolist() == IDS[0].tolist()
        expected = torch.stack([*out.hidden_states[1:-1], last[0].reshape(out.hidden_states[1].shape)])[:, 0]
        np.testing.assert_allclose(stored.hidden_states.astype("f4"), expected.numpy(), atol=2e-3)
        np.testing.assert_allclose(stored.attention.astype("f4"), torch.cat(out.attentions).numpy(), atol=2e-3)


@pytest.fixture
def model(tiny_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager").eval()


@pytest.mark.long
def test_capture_records_answers(recipe, tiny_model, model, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    module = recipe("def record(")
    select = module.Select
    module.Select = lambda layers, **options: select(layers=(1, -1), **options)
    module.record(model, tokenizer, [("q0", "Who?"), ("q1", "Where?")], tmp_path / "s.zarr")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.question_ids == ["q0", "q1"] and store.num_layers == 2


def test_capture_records_modules_by_name(recipe, capsys):
    recipe("torch.nn.Sequential(")
    assert capsys.readouterr().out == "2 (6, 8) [0 1 2 3 4 5]\n"


def test_a_stored_lens_gives_the_logits_of_each_layer(recipe, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe("writer.set_lens(")
    assert capsys.readouterr().out == "(3, 5, 100)\n(5, 2)\n"


def test_recipe_for_transformer_lens(recipe, tiny_model, model, tmp_path):
    # Version 4 has this module.
    bridges = pytest.importorskip("transformer_lens.model_bridge")
    bridge = bridges.TransformerBridge.boot_transformers(str(tiny_model), device="cpu")
    with torch.inference_mode():
        trace = recipe("def trace_of_transformer_lens").trace_of_transformer_lens(bridge, IDS)
    assert_stores_the_states_of(model, trace, tmp_path / "s.zarr")


def test_recipe_for_nnsight(recipe, model, tmp_path):
    nnsight = pytest.importorskip("nnsight")
    trace = recipe("def trace_of_nnsight").trace_of_nnsight(nnsight.NNsight(model), IDS)
    assert_stores_the_states_of(model, trace, tmp_path / "s.zarr")
