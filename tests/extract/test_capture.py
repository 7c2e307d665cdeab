"""Test `capture` against the outputs of one forward pass over the whole text."""

import numpy as np
import pytest
import torch

import tracestore
from tracestore.errors import UsageError
from tracestore.extract import Select, capture


def make_model(kind, **options):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    common = {"vocab_size": 50, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
        network, config = LlamaForCausalLM, LlamaConfig(**common, **sizes, num_key_value_heads=2)
    else:
        network, config = GPT2LMHeadModel, GPT2Config(**common, n_embd=16, n_layer=3, n_head=4)
    return network._from_config(config, **({"attn_implementation": "eager"} | options)).eval()


@torch.inference_mode()
def forward(model, ids):
    """Return hidden states and attention of one forward pass over a row of tokens."""
    out = model(ids[None], output_hidden_states=True, output_attentions=True, use_cache=False)
    return [h[0] for h in out.hidden_states[1:]], [a[0] for a in out.attentions]


def assert_trace(trace, model, ids, *, layers=(0, 1, 2), last=None, heads="all"):
    """Assert that a trace holds the outputs of one forward pass, of its last tokens, or of all."""
    hidden, attention = forward(model, ids)
    first = 0 if last is None else len(ids) - last
    assert trace["tokens"].tolist() == ids[first:].tolist() and trace["tokens"].dtype == np.int32
    expected = [hidden[k][first:] for k in layers]
    if heads != "none":
        squares = [attention[k][:, first:, first:] for k in layers]
        expected += [s.mean(0, keepdim=True) for s in squares] if heads == "mean" else squares
    found = [*trace["hidden_states"], *trace.get("attentions", ())]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == np.float16 and a.shape == tuple(b.shape)
        np.testing.assert_allclose(a.astype("f4"), b.numpy(), atol=2e-3)


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


def padded(rows, side):
    """Return the arguments of a model for rows of ids that are padded to 7."""
    ids, mask = torch.zeros(len(rows), 7, dtype=torch.long), torch.zeros(len(rows), 7, dtype=torch.long)
    for k, row in enumerate(rows):
        columns = slice(7 - len(row), 7) if side == "left" else slice(0, len(row))
        ids[k, columns], mask[k, columns] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize(("kind", "positions"), [("llama", "all"), ("gpt2", "all"), ("llama", 2)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(kind, side, positions):
    model = make_model(kind)
    rows = [torch.arange(1, 4), torch.arange(5, 12), torch.arange(3, 8)]
    with torch.inference_mode(), capture(model, select=Select(positions=positions)) as states:
        model(**padded(rows, side))
        traces = states.traces()
    for trace, row in zip(traces, rows, strict=True):
        assert_trace(trace, model, row, last=len(row) if positions == "all" else positions)


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
    with torch.inference_mode(), capture(model, select=Select(heads="none")) as states:
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


def test_wrong_use_raises_usage_error():
    model, ids = make_model("llama"), torch.arange(1, 8)[None]
    with torch.inference_mode(), capture(model) as states:
        with pytest.raises(UsageError, match="nothing was recorded"):
            states.trace()
        past = model(ids, use_cache=True).cache
        states.clear()
        with pytest.raises(UsageError, match="begin with the whole prompt"):
            model(ids[:, :1], cache=past)
        two = model(ids.repeat(2, 1), use_cache=True).cache
        states.clear()
        model(ids)
        with pytest.raises(UsageError, match="the batch size changed"):
            model(ids[:, :1].repeat(2, 1), cache=two)
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


def generated(model, ids, **options):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **options)[0]


@pytest.mark.parametrize("positions", ["answer", 4, 100])
@pytest.mark.parametrize("heads", ["all", "mean", "none"])
def test_records_the_selection(positions, heads):
    """Hidden states alone need no eager attention."""
    model = make_model("llama", attn_implementation="sdpa" if heads == "none" else "eager")
    ids = torch.arange(1, 8)[None]
    with torch.inference_mode(), capture(model, select=Select((1, -1), positions, heads)) as states:
        answer = generated(model, ids)[:-1]
        trace = states.trace()
    last = {"answer": len(answer) - 7, 4: 4, 100: len(answer)}[positions]
    assert_trace(trace, make_model("llama"), answer, layers=(0, 2), last=last, heads=heads)


def test_recording_of_the_last_positions_stays_small():
    model, ids = make_model("llama"), torch.arange(1, 8)[None]
    with torch.inference_mode(), capture(model, select=Select(positions=3)) as states:
        for _ in range(2):
            generated(model, ids, min_new_tokens=6)
            assert states.num_tokens == 3
            assert len(states.trace()["tokens"]) == 3


class Recurrent(torch.nn.Module):
    """A model of another library: no config, no attention; its second layer changes its input in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.rnn = torch.nn.Embedding(50, 8), torch.nn.GRU(8, 8, batch_first=True)
        self.act = torch.nn.ReLU(inplace=True)

    def forward(self, tokens, attention_mask=None):
        return self.act(self.rnn(self.embedding(tokens))[0]).sum(-1)


@pytest.mark.parametrize("by_name", [True, False])
def test_records_modules_by_name(tmp_path, by_name):
    model, ids = Recurrent(), torch.tensor([[3, 4, 5], [6, 7, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with torch.inference_mode():
        embedded = model.embedding(ids)
        states = model.rnn(embedded)[0]
        with capture(model, select=Select(["embedding", "rnn"], heads="none"), dtype=torch.float32) as recorded:
            model(ids, attention_mask=mask) if by_name else model(ids, mask)
            traces = recorded.traces()
        with tracestore.create(tmp_path / "s.zarr", attention="none", dtype="keep") as writer:
            for k, trace in enumerate(traces):
                writer.append(trace | {"question_id": f"q{k}"})
    with tracestore.open(tmp_path / "s.zarr") as store:
        for k, length in enumerate((3, 2)):
            assert store[k].tokens.tolist() == ids[k, :length].tolist()
            np.testing.assert_array_equal(store[k].hidden_states, torch.stack([embedded[k], states[k]])[:, :length])
    model(ids)
    assert recorded.num_tokens == 0, "the hooks are still there"


@pytest.mark.parametrize("use_cache", [True, False])
def test_modules_of_a_hugging_face_model_by_name(use_cache):
    model, ids = make_model("gpt2", attn_implementation="sdpa"), torch.arange(1, 8)[None]
    select = Select(["transformer.h.0", "transformer.ln_f"], heads="none")
    with torch.inference_mode(), capture(model, select=select) as states:
        answer = generated(model, ids, use_cache=use_cache)[:-1]
        trace = states.trace()
    assert_trace(trace, make_model("gpt2"), answer, layers=(0, 2), heads="none")


def test_wrong_selections_are_usage_errors():
    for options, words in (
        ({"heads": "first"}, "heads: found"),
        ({"positions": 0}, "positions: found"),
        ({"positions": "prompt"}, "positions: found"),
        ({"positions": True}, "positions: found"),
        ({"layers": []}, "layers: found none"),
        ({"layers": ["rnn"]}, "heads='none'"),
    ):
        with pytest.raises(UsageError, match=words):
            Select(**options)
    with (
        pytest.raises(UsageError, match="no module 'cell'"),
        capture(Recurrent(), select=Select(["cell"], heads="none")),
    ):
        pass
    model = Recurrent()
    with capture(model, select=Select([""], heads="none")), pytest.raises(UsageError, match="no tensor"):
        model(torch.ones(1, 2, dtype=torch.long))
    model, ids = make_model("llama"), torch.arange(1, 8)[None]
    with capture(model, select=Select([4])), pytest.raises(UsageError, match="expected 1 to 3"):
        model(ids)
    with capture(model, select=Select(positions="answer")) as states:
        model(ids)
        with pytest.raises(UsageError, match="no token at the selected positions"):
            states.trace()
