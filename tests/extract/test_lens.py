"""Test `tracestore extract --lens`: the final norm and the unembedding matrix of a model in a store."""

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import command, error_of, make_traces
from tracestore.errors import UsageError
from tracestore.extract.hooks import capture
from tracestore.extract.model import LanguageModel, lens_of

VOCABULARY, DIM = 97, 16


def arguments(model, tmp_path, out, *more):
    questions = tmp_path / "questions.csv"
    questions.write_text("question_id,question,answers\nq0,What is 0?,0\nq1,What is 1?,1\n")
    words = ["extract", "--model", model, "--questions", questions, "--out", out, "--max-new-tokens", 6]
    return [*words, "--lens", *more]


def assert_explains(store, trace, logits):
    """Require that the logits of the last states agree with those of a model, (S, V)."""
    found = store.lens.logits(trace.hidden_states[-1], normalized=True)
    np.testing.assert_allclose(found, logits, atol=5e-3 * np.abs(logits).max())


@pytest.mark.long
def test_logits_are_those_of_the_model(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    path = tmp_path / "s.zarr"
    command(*arguments(tiny_model, tmp_path, path), check=0)
    command(*arguments(tiny_model, tmp_path, path), check=0)
    command("verify", path, check=0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    with tracestore.open(path) as store:
        assert len(store) == 2 and store.lens.norm == "rms" and store.lens.provenance == store.provenance[0]
        assert store.lens.provenance.final_norm and store.lens.eps == model.config.rms_norm_eps
        weight = model.get_output_embeddings().weight.detach().half().numpy()
        assert store.lens.unembedding.tobytes() == weight.tobytes()
        for trace in store:
            with torch.inference_mode():
                out = model(torch.from_numpy(trace.tokens.astype("i8"))[None], output_hidden_states=True)
                # States of the first block, which come before the norm.
                normed = model.lm_head(model.model.norm(out.hidden_states[1]))[0].numpy()
            assert_explains(store, trace, out.logits[0].numpy())
            first = store.lens.logits(trace.hidden_states[0])
            np.testing.assert_allclose(first, normed, atol=5e-3 * np.abs(normed).max())


def model_of(kind):
    """Return a model of two layers whose norms have random weights and biases."""
    import transformers as hf

    common = {"vocab_size": VOCABULARY, "hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 2}
    common |= {"intermediate_size": 32, "attn_implementation": "eager"}
    grouped = {"num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = hf.GPT2Config(vocab_size=VOCABULARY, n_embd=DIM, n_layer=2, n_head=2, attn_implementation="eager")
        model = hf.GPT2LMHeadModel(config)
    elif kind == "neox":
        model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**common))
    elif kind == "phi":
        model = hf.PhiForCausalLM(hf.PhiConfig(**common))
    elif kind == "gemma":
        model = hf.GemmaForCausalLM(hf.GemmaConfig(**common, **grouped))
    elif kind == "gemma2":
        model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**common, **grouped, final_logit_softcapping=0.1))
    elif kind == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**common, num_key_value_heads=1))
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name or name.endswith("head.bias"):
            torch.nn.init.normal_(parameter)
    return LanguageModel(model.eval(), None, kind, None)


@pytest.mark.parametrize("kind", ["gpt2", "neox", "phi", "gemma", "qwen2"])
def test_other_kinds_of_models(tmp_path, kind):
    lm, path = model_of(kind), tmp_path / "s.zarr"
    ids = torch.arange(20, 30)[None]
    with torch.inference_mode(), capture(lm.model) as states:
        logits = lm.model(ids).logits[0].numpy()
    with tracestore.create(path) as writer:
        writer.set_lens(**lens_of(lm))
        writer.append(states.trace() | {"question_id": "q"})
    with tracestore.open(path) as store:
        assert store.lens.norm == ("layer" if kind in ("gpt2", "neox", "phi") else "rms")
        assert_explains(store, store[0], logits)
        # The lens normalizes states of earlier layers as the model's norm does.
        hidden = torch.from_numpy(store[0].hidden_states[0].copy()).float()
        norms = [m for n, m in lm.model.named_modules() if n.endswith((".norm", "ln_f", "l_layernorm", "l_layer_norm"))]
        with torch.inference_mode():
            expected = norms[-1](hidden).numpy()
        np.testing.assert_allclose(store.lens.normalize(store[0].hidden_states[0]), expected, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_lower_precision(dtype):
    lm = model_of("qwen2")
    lm.model.to(dtype)
    assert lens_of(lm)["norm"] == "rms"


def test_unknown_kinds_are_refused():
    with pytest.raises(UsageError, match="changes the logits"):
        lens_of(model_of("gemma2"))
    lm = model_of("qwen2")
    lm.model.model.norm = torch.nn.Tanh()
    with pytest.raises(UsageError, match="unknown kind"):
        lens_of(lm)
    lm.model.set_output_embeddings(None)
    with pytest.raises(UsageError, match="no unembedding matrix"):
        lens_of(lm)


def test_errors_are_one_line(tiny_model, tmp_path):
    assert "needs a store" in error_of(*arguments(tiny_model, tmp_path, tmp_path / "folder"), code=2)
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append(make_traces(1, layers=2, dim=DIM, heads=4)[0])
        writer.set_lens(np.ones((5, DIM), "f2"))
    assert "another lens" in error_of(*arguments(tiny_model, tmp_path, tmp_path / "s.zarr"), code=2)
