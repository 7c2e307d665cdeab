"""Test what transformers returns, in all its forms: files that the library writes, and copies that differ in one thing."""

import dataclasses
import itertools
import pickle

import numpy as np
import pytest

import tracestore
from tests.ingest.corpus.samples import forward, prompts, tiny_model
from tracestore.errors import InvalidInputError
from tracestore.ingest.builtin.claiming import claim
from tracestore.ingest.builtin.library import builtins

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NEW = 4


def generated(model=None, count=NEW, **options):
    """Return the output of generate() for one prompt of 7 tokens."""
    ids = prompts(1, lengths=(7,))[0]
    with torch.no_grad():
        return (model or tiny_model()).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
            return_dict_in_generate=True, output_hidden_states=True, output_attentions=True, **{"do_sample": False, **options},
        )  # fmt: skip


def sliding(window=4):
    """Return a model of which each token attends to the last ones alone."""
    torch.manual_seed(0)
    width = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(
            **width, vocab_size=64, num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=None,
            attn_implementation="eager", sliding_window=window,
        )
    ).eval()  # fmt: skip


def owner(tmp_path, value, name="q1.pt"):
    """Write a value in tmp_path/in; return the tool that owns it, None without."""
    (tmp_path / "in").mkdir(exist_ok=True)
    path = tmp_path / "in" / name
    if name.endswith(".pkl"):
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path)
    return next((builtin.name for builtin in claim({name: path}, builtins()).owned), None)


def converted(tmp_path, **options):
    """Convert tmp_path/in without a layout; return the traces."""
    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", **options)
    return list(tracestore.open(tmp_path / "s.zarr"))


def expected_of(model, sequence):
    """Return states (L, S, D) and attention (L, H, S, S) of one forward pass over the ids of a sequence but the last."""
    with torch.no_grad():
        output = model(sequence[None, :-1], output_hidden_states=True, output_attentions=True, use_cache=False)
    states, attention = (np.stack([x[0].numpy() for x in found]) for found in (output.hidden_states, output.attentions))
    return states[1:], attention


FORMS = {
    "plain": ("transformers_generate", tiny_model, {}),
    "scores": ("transformers_generate", tiny_model, {"output_scores": True, "output_logits": True}),
    "one new token": ("transformers_generate", tiny_model, {"count": 1}),
    "drafts": ("transformers_generate", tiny_model, {"prompt_lookup_num_tokens": 2}),
    "static cache": ("transformers_generate", tiny_model, {"cache_implementation": "static"}),
    "no cache": ("transformers_uncached", tiny_model, {"use_cache": False}),
    "sliding window": ("transformers_generate", sliding, {}),
    "beams": ("transformers_beams", tiny_model, {"num_beams": 2}),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_generate(tmp_path, form):
    """The states and attention of passes are those of one pass over the whole sequence."""
    tool, make, options = FORMS[form]
    model = make()
    output = generated(model, **options)

    assert owner(tmp_path, output) == tool
    (trace,) = converted(tmp_path, attention="heads")

    states, attention = expected_of(model, output.sequences[0])
    np.testing.assert_allclose(trace.hidden_states, states, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(trace.attention, attention, atol=2e-3)
    assert trace.tokens.tolist() == output.sequences[0].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_padded_sequence_is_refused(tmp_path, side):
    """Without a mask in the file, the attention shows that tokens at an end are masked."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 1, 0, 0]])
    model = tiny_model()
    with torch.no_grad():
        output = model(
            mask * 5, attention_mask=mask, output_hidden_states=True, output_attentions=True, use_cache=False
        )
    (tmp_path / "in").mkdir()
    torch.save(output, tmp_path / "in/q.pt")

    with pytest.raises(InvalidInputError, match=f"token {0 if side == 'left' else 5} is masked"):
        tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr")
    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", padding="none")


@pytest.mark.parametrize(
    ("side", "form", "has_attention"),
    [
        case
        for case in itertools.product(("left", "right"), ("generate", "no cache", "forward"), (True, False))
        if case[1:] != ("no cache", False)  # nothing tells where the prompt ends
    ],
)
def test_padded_sequences_in_files_of_their_own_are_refused(tmp_path, side, form, has_attention):
    """[padding as tokens] Without attention, prompts of one length of which one has an id twice at one end are padded."""
    model = tiny_model()
    for k in range(3):
        ids = torch.zeros((1, 8), dtype=torch.int64)
        ids[0, 4 - k : 8] = torch.arange(5, 9 + k)
        ids = ids if side == "left" else ids.flip(1)
        mask, asked = (ids > 0).long(), {"output_hidden_states": True, "output_attentions": has_attention}
        with torch.no_grad():
            if form == "forward":
                output = {**model(ids, attention_mask=mask, use_cache=False, **asked), "input_ids": ids}
            else:
                count = 3 + k * (form == "generate")
                output = model.generate(
                    ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                    use_cache=form == "generate", return_dict_in_generate=True, **asked,
                )  # fmt: skip
        assert owner(tmp_path, output, f"q{k}.pt")

    with pytest.raises(InvalidInputError, match=r"--padding none") as raised:
        converted(tmp_path)
    assert ("is masked" if has_attention else "tokens, and one has the id") in str(raised.value)
    assert len(converted(tmp_path, padding="none")) == 3


def test_sequences_of_several_lengths_may_end_with_an_id_twice(tmp_path):
    for k in range(3):
        ids = torch.tensor([[5, 6, 7, 9, 10] + [8] * k])
        with torch.no_grad():
            output = tiny_model()(ids, output_hidden_states=True, use_cache=False)
        owner(tmp_path, {**output, "input_ids": ids}, f"q{k}.pt")

    assert len(converted(tmp_path)) == 3


@pytest.mark.parametrize("form", ["plain", "no cache"])
def test_dicts_and_lists_of_outputs(tmp_path, form):
    tool, make, options = FORMS[form]
    outputs = [dict(generated(make(), count=n, **options)) for n in (3, 4)]
    for output in outputs:
        output.pop("cache", None)

    assert owner(tmp_path, outputs, "a.pkl") == tool
    assert owner(tmp_path, {"x": outputs[0]}, "b.pkl") == tool
    assert sorted(trace.num_tokens for trace in converted(tmp_path)) == [9, 9, 10]


@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # until 5.23, and since
@pytest.mark.parametrize("form", ["plain", "beams", "encoder", "dict"])
def test_a_cache_is_left_out_of_a_dict(tmp_path, form, name):
    ids = prompts(1)[0]
    makers = {"encoder": encoded, "dict": lambda: dict(cached(ids)) | {"input_ids": ids}}
    output = makers[form]() if form in makers else generated(**FORMS[form][2])
    tool = owner(tmp_path, {k: v for k, v in output.items() if k != "cache"})
    assert tool is not None and output["cache"] is not None

    assert owner(tmp_path, {name if k == "cache" else k: v for k, v in output.items()}) == tool


@pytest.mark.parametrize("model, tool", [("llama", "transformers_forward"), ("t5", "transformers_seq2seq_forward")])
def test_a_cache_is_left_out_of_a_pass(tmp_path, model, tool):
    assert owner(tmp_path, cached(prompts(1)[0], model)) == tool


def test_layers_of_attention_that_were_not_kept(tmp_path):
    output = generated()
    output.attentions = tuple((None,) * len(layers) for layers in output.attentions)

    assert owner(tmp_path, output) == "transformers_generate"
    (trace,) = converted(tmp_path, attention="none")
    assert trace.hidden_states.shape == (4, 10, 16)


def changed(output, **fields):
    return type(output)(**{**output, **fields})


def of_layers(output):
    """Return the passes of the states as layers of passes."""
    return tuple(zip(*output.hidden_states, strict=True))


TRAPS = {
    "a batch without a mask": lambda: generated(num_return_sequences=2, do_sample=True),
    "states of some layers": lambda: changed(
        o := generated(), hidden_states=tuple((h[0], None, *h[2:]) for h in o.hidden_states)
    ),
    "layers of passes": lambda: changed(o := generated(), hidden_states=of_layers(o)),
    "ids of the answer alone": lambda: changed(o := generated(), sequences=o.sequences[:, -NEW:]),
    "a pass too few": lambda: changed(o := generated(), hidden_states=o.hidden_states[:-1]),
    "an id more": lambda: changed(o := generated(), sequences=torch.cat([o.sequences, o.sequences[:, :1]], 1)),
    "columns of the prompt alone": lambda: changed(
        o := generated(), attentions=(o.attentions[0], *[tuple(a[..., :7] for a in s) for s in o.attentions[1:]])
    ),
    "columns behind the tokens that are not zero": lambda: changed(
        o := generated(), attentions=tuple(tuple(torch.nn.functional.pad(a, (0, 3), value=0.1) for a in s) for s in o.attentions)
    ),
    "windows of several sizes": lambda: changed(
        o := generated(sliding()),
        attentions=(*o.attentions[:-1], tuple(a[..., 1:] / a[..., 1:].sum(-1, keepdim=True) for a in o.attentions[-1])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_traps_of_generate_are_refused(tmp_path, trap):
    owner(tmp_path, TRAPS[trap]())

    with pytest.raises(InvalidInputError):
        converted(tmp_path, attention="heads")


def test_a_batch_of_one_prompt_and_four_tokens_in_float32_and_bfloat16(tmp_path):
    """Read outputs of as many layers as tokens, whose class gives their axes."""
    ids = prompts(1, lengths=(4,))[0]
    for k, dtype in enumerate(("float32", "bfloat16")):
        output = forward(ids, dtype=dtype)
        assert len(output.hidden_states) == 4
        assert owner(tmp_path, output, f"q{k}.pt") == "transformers_forward"

    one, two = converted(tmp_path, attention="heads")
    states = np.stack([h[0].float().numpy() for h in forward(ids).hidden_states[1:]])
    np.testing.assert_allclose(one.hidden_states, states, rtol=2e-3, atol=2e-3)
    assert two.hidden_states.shape == one.hidden_states.shape
    tiny_model.cache_clear()


def test_a_dict_of_an_output_needs_what_shows_its_axes(tmp_path):
    ids = prompts(1, lengths=(4,))[0]
    output = dict(forward(ids)) | {"input_ids": ids}

    assert owner(tmp_path, output) == "transformers_dict"
    for key in ("attentions", "logits"):  # as many layers as tokens; steps of a layer
        rest = {name: value for name, value in output.items() if name != key}
        assert owner(tmp_path, rest) is None


def cached(ids, model="llama"):
    """Return the output of a forward pass with its cache."""
    more = {"decoder_input_ids": ids} if model == "t5" else {}
    with torch.no_grad():
        output = tiny_model(model)(input_ids=ids, output_hidden_states=True, output_attentions=True, **more)
    assert output["cache"] is not None
    return output


def encoded(new=4):
    ids = prompts(1)[0]
    with torch.no_grad():
        return tiny_model("t5").generate(
            ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, return_dict_in_generate=True,
            output_hidden_states=True, output_attentions=True,
        )  # fmt: skip


def test_models_with_an_encoder(tmp_path):
    output = encoded()
    assert owner(tmp_path, output) == "transformers_seq2seq_generate"
    (trace,) = converted(tmp_path, attention="heads")

    steps = output.decoder_hidden_states
    states = np.stack([np.concatenate([step[k][0].numpy() for step in steps]) for k in range(1, len(steps[0]))])
    np.testing.assert_allclose(trace.hidden_states, states, rtol=2e-3, atol=2e-3)
    assert trace.tokens.tolist() == output.sequences[0].tolist()


@pytest.mark.parametrize("key", ["sequences", "decoder_hidden_states"])
def test_outputs_of_models_with_an_encoder_lack_nothing(tmp_path, key):
    assert owner(tmp_path, {k: v for k, v in encoded().items() if k not in (key, "cache")}) is None


def test_every_class_of_outputs_of_generate_is_known():
    """The classes of the installed version have the fields that the built-in layouts name."""
    from transformers.generation import utils

    for name, tool in (
        ("GenerateDecoderOnlyOutput", "transformers_generate"),
        ("GenerateBeamDecoderOnlyOutput", "transformers_beams"),
        ("GenerateEncoderDecoderOutput", "transformers_seq2seq_generate"),
    ):
        fields = {field.name for field in dataclasses.fields(getattr(utils, name))}
        (signature,) = next(b for b in builtins() if b.name == tool).signatures.values()
        assert fields <= {*signature.must, *signature.may}, tool
