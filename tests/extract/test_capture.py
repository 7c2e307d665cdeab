"""Test `capture` against the outputs of one forward pass over the whole text."""

import numpy as np
import pytest
import torch

import tracestore
from tracestore.errors import UsageError
from tracestore.extract import capture


def make_model(kind, **options):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, eos_token_id=0, bos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        network = LlamaForCausalLM
    else:
        config = GPT2Config(
            vocab_size=50, n_embd=16, n_layer=3, n_head=4, eos_token_id=0, bos_token_id=0, pad_token_id=0
        )  # fmt: skip
        network = GPT2LMHeadModel
    return network._from_config(config, **({"attn_implementation": "eager"} | options)).eval()


@torch.inference_mode()
def forward(model, ids):
    """Return hidden states and attention of one forward pass over a row of tokens."""
    out = model(ids[None], output_hidden_states=True, output_attentions=True, use_cache=False)
    return [h[0] for h in out.hidden_states[1:]], [a[0] for a in out.attentions]


def assert_trace(trace, model, ids, atol=2e-3):
    """Assert that a trace holds the outputs of one forward pass."""
    hidden, attention = forward(model, ids)
    assert trace["tokens"].tolist() == ids.tolist() and trace["tokens"].dtype == np.int32
    assert len(trace["hidden_states"]) == len(trace["attentions"]) == 3
    for found, expected in zip(trace["hidden_states"] + trace["attentions"], hidden + attention, strict=True):
        assert found.dtype == np.float16 and found.shape == tuple(expected.shape)
        np.testing.assert_allclose(found.astype("f4"), expected.numpy(), atol=atol)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_records_generate(kind, use_cache):
    model = make_model(kind)
    ids = torch.arange(1, 8)[None]
    with torch.inference_mode(), capture(model) as states:
        for _ in range(2):
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, use_cache=use_cache
            )
            # The last token never goes through the model.
            assert_trace(states.trace(), model, answer[0, :-1])
            states.clear()  # the pass of assert_trace was recorded as well
    assert states.num_tokens == 0
    model(ids)
    assert states.num_tokens == 0, "the hooks are still there"


def test_output_of_the_model_is_unchanged():
    model, ids = make_model("llama"), torch.arange(1, 8)[None]
    expected = model(ids).logits
    with capture(model) as states:
        assert torch.equal(model(ids).logits, expected)
        states.trace()
        assert torch.equal(model(input_ids=ids).logits, expected)
        assert states.trace()["tokens"].tolist() == ids[0].tolist()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(kind, side):
    model = make_model(kind)
    rows = [torch.arange(1, 4), torch.arange(5, 12), torch.arange(3, 8)]
    ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    for k, row in enumerate(rows):
        columns = slice(7 - len(row), 7) if side == "left" else slice(0, len(row))
        ids[k, columns], mask[k, columns] = row, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode(), capture(model) as states:
        model(input_ids=ids, attention_mask=mask, position_ids=positions)
        traces = states.traces()
        for trace, row in zip(traces, rows, strict=True):
            assert_trace(trace, model, row)
            states.clear()


def test_lengths_cut_finished_rows(tmp_path):
    model = make_model("llama")
    ids, mask = torch.tensor([[0, 0, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    with torch.inference_mode(), capture(model) as states, tracestore.create(tmp_path / "s.zarr") as writer:
        answer = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, min_new_tokens=4)
        traces = states.traces([2, 5])
        assert_trace(traces[0], model, answer[0, 2:4])
        states.clear()
        for k, trace in enumerate(traces):
            writer.append(trace | {"question_id": f"q{k}", "tokens_decoded": ["?"] * len(trace["tokens"])}, score=k)
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.num_tokens.tolist() == [2, 5] and store.num_heads == 4 and store.num_layers == 3
        assert np.array_equal(store[1].hidden_states, np.stack(traces[1]["hidden_states"]))


@pytest.mark.parametrize("use_cache", [True, False])
def test_new_text_starts_a_new_recording(use_cache):
    model, ids = make_model("llama"), torch.arange(1, 8)[None]
    with torch.inference_mode(), capture(model, attention=False) as states:
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, use_cache=use_cache
        )
        assert states.trace()["tokens"].tolist() == answer[0, :-1].tolist()
        model(ids, use_cache=use_cache)
        model(ids + 1, use_cache=use_cache)
        assert states.trace()["tokens"].tolist() == (ids + 1)[0].tolist()


def test_caller_controls_the_output_of_the_model():
    model, ids = make_model("llama"), torch.arange(1, 8)[None]
    expected = model(ids, return_dict=False, use_cache=False)
    with capture(model) as states:
        found = model(ids, return_dict=False, use_cache=False)
        assert isinstance(found, tuple) and len(found) == len(expected) and torch.equal(found[0], expected[0])
        assert model(ids).attentions is None and len(model(ids, output_hidden_states=True).hidden_states) == 4
        states.clear()
        embedded = model.get_input_embeddings()(ids)
        model(inputs_embeds=embedded)
        assert "tokens" not in states.trace()
    with pytest.raises(UsageError, match="dtype"), capture(model, dtype=torch.bfloat16):
        pass


def test_records_hidden_states_only():
    model, ids = make_model("llama", attn_implementation="sdpa"), torch.arange(1, 8)[None]
    with torch.inference_mode(), capture(model, attention=False, dtype=torch.float32) as states:
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
        trace = states.trace()
    assert "attentions" not in trace and trace["tokens"].tolist() == answer[0, :-1].tolist()
    hidden, _ = forward(make_model("llama"), answer[0, :-1])
    for found, expected in zip(trace["hidden_states"], hidden, strict=True):
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_wrong_use_raises_usage_error():
    model, ids = make_model("llama"), torch.arange(1, 8)[None]
    with torch.inference_mode(), capture(model) as states:
        with pytest.raises(UsageError, match="nothing was recorded"):
            states.trace()
        past = model(ids, use_cache=True).past_key_values
        states.clear()
        with pytest.raises(UsageError, match="begin with the whole prompt"):
            model(ids[:, :1], past_key_values=past)
        model(ids.repeat(2, 1))
        with pytest.raises(UsageError, match="2 rows"):
            states.trace()
        with pytest.raises(UsageError, match="3 lengths"):
            states.traces([1, 2, 3])
        with pytest.raises(UsageError, match="length of 8"):
            states.traces([1, 8])
    linear = torch.nn.Linear(2, 2)
    with capture(linear), pytest.raises(TypeError, match="output_hidden_states"):
        linear(torch.ones(2))
    fast = make_model("llama", attn_implementation="sdpa")
    with capture(fast), pytest.raises((UsageError, ValueError), match="eager"):
        fast(ids)
