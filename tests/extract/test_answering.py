"""Test what is recorded of an answer, and how it is generated, with a model of two layers and random weights."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import tracestore
from tracestore.errors import UsageError
from tracestore.extract.answering import AnswerOptions, answer_questions, provenance_of
from tracestore.extract.decoding import generate, seed_of_answer
from tracestore.extract.model import load_model
from tracestore.extract.prompts import PLAIN_PROMPT, PromptTemplate, read_template, template_of
from tracestore.extract.questions import Question, with_samples
from tracestore.extract.select import Select

OPTIONS = AnswerOptions("Say it", 12)
QUESTIONS = [Question(f"q{k}", f"What is {'very ' * k}{k}?", ("a",)) for k in range(3)]


@pytest.fixture(scope="module")
def lm(tiny_model):
    return load_model(str(tiny_model), device="cpu")


def answers(lm, questions=QUESTIONS, **options):
    return answer_questions(lm, questions, replace(OPTIONS, **options))


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_token_values_are_those_of_log_softmax(lm, temperature):
    for trace in answers(lm, temperature=temperature, top_logprobs=4):
        ids = torch.from_numpy(trace["tokens"].astype("i8"))
        with torch.inference_mode():
            log_p = lm.model(ids[None]).logits[0].double().log_softmax(-1).numpy()
        begin, end = trace["answer_span"]
        assert begin == trace["prompt_length"] and end == len(ids) > begin
        assert trace["generated_mask"].tolist() == [0] * begin + [1] * (end - begin)
        for name in ("token_logprob", "token_entropy", "top_logprobs"):
            assert np.isnan(trace[name][:begin]).all() and trace[name].dtype == np.float32
        assert (trace["top_ids"][:begin] == -1).all() and trace["top_ids"].shape == (len(ids), 4)
        for k in range(begin, end):
            row = log_p[k - 1]
            assert trace["token_logprob"][k] == pytest.approx(row[ids[k]], abs=1e-5)
            assert trace["token_entropy"][k] == pytest.approx(-(np.exp(row) * row).sum(), abs=1e-5)
            assert trace["top_ids"][k].tolist() == np.argsort(-row, kind="stable")[:4].tolist()
            np.testing.assert_allclose(trace["top_logprobs"][k], np.sort(row)[::-1][:4], atol=1e-5)
            if not temperature:
                assert trace["top_ids"][k][0] == ids[k]


def test_values_are_stored(lm, tmp_path):
    traces = answers(lm, with_samples(QUESTIONS[:1], 2), temperature=0.9, seed=5, top_logprobs=2)
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for sample, trace in enumerate(traces):
            writer.append(trace | {"question_id": "q0", "sample": sample})
    with tracestore.open(tmp_path / "s.zarr") as store:
        for sample, trace in enumerate(traces):
            stored = store[store.index_of("q0", sample)]
            for name in ("token_logprob", "token_entropy", "top_ids", "top_logprobs", "generated_mask", "special_mask"):
                np.testing.assert_array_equal(getattr(stored, name), trace[name])
            assert stored.answer_span == trace["answer_span"] and stored.temperature == pytest.approx(0.9)
            assert stored.seed == seed_of_answer(5, "q0", sample)


def test_special_tokens_are_marked(lm):
    template = PromptTemplate("{{ eos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}", True)
    [trace] = answers(lm, QUESTIONS[:1], template=template)
    assert np.flatnonzero(trace["special_mask"][: trace["prompt_length"]]).tolist() == [0]


def test_samples_depend_on_their_seed_alone(lm):
    samples = with_samples(QUESTIONS, 3)
    together = [t["tokens"].tolist() for t in answers(lm, samples, temperature=1.0)]
    assert [t["tokens"].tolist() for t in answers(lm, samples[::-1], temperature=1.0)] == together[::-1]
    assert len({tuple(tokens) for tokens in together}) == 9
    assert together != [t["tokens"].tolist() for t in answers(lm, samples, temperature=1.0, seed=1)]


def test_tokens_are_drawn_from_the_tempered_distribution(lm):
    prompt, count = [5, 9, 20], 4000
    generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
    ends = generate(lm, [prompt] * count, max_new_tokens=1, temperature=0.7, generators=generators)
    found = np.bincount([end.tokens[0] for end in ends], minlength=lm.model.config.vocab_size)
    with torch.inference_mode():
        p = (lm.model(torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1).double().numpy()
    chi_square = ((found - count * p) ** 2 / (count * p)).sum()
    assert chi_square < len(p) + 5 * np.sqrt(2 * len(p))


def test_only_the_recording_pass_uses_eager_attention(lm):
    used = []
    handle = lm.model.register_forward_pre_hook(lambda model, _: used.append(model.config._attn_implementation))
    try:
        usual = lm.model.config._attn_implementation
        answers(lm)
        assert usual == "sdpa" and used[-1] == "eager" and set(used[:-1]) == {"sdpa"} and len(used) > 2
        assert lm.model.config._attn_implementation == usual
        used.clear()
        assert "attentions" not in answers(lm, select=Select(heads="none"))[0]
        assert set(used) == {"sdpa"}
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "settings, cache",
    [({}, "DynamicCache"), ({"use_cache": False}, "NoneType"), ({"cache_implementation": "static"}, "StaticCache"),
     ({"repetition_penalty": 5.0, "num_beams": 3, "do_sample": True}, "DynamicCache")],
)  # fmt: skip
def test_the_cache_is_that_of_the_model_and_the_tokens_are_not(lm, monkeypatch, settings, cache):
    prompts, used = [[5, 9, 20], [7, 8]], []
    expected = [end.tokens for end in generate(lm, prompts, max_new_tokens=6)]
    own = GenerationConfig(eos_token_id=lm.model.generation_config.eos_token_id, **settings)
    monkeypatch.setattr(lm.model, "generation_config", own)
    handle = lm.model.register_forward_pre_hook(
        lambda *call: used.append(type(call[2].get("cache")).__name__), with_kwargs=True
    )
    try:
        assert [end.tokens for end in generate(lm, prompts, max_new_tokens=6)] == expected
    finally:
        handle.remove()
    assert set(used) == {cache} and lm.model.generation_config is own


def test_decoded_tokens_are_linear_in_the_length_of_answers(lm, monkeypatch):
    """Without an end, the longest answer has all tokens that are allowed."""
    decode, counts = lm.tokenizer.decode, {}
    monkeypatch.setattr(lm.model.generation_config, "eos_token_id", None)
    template = PromptTemplate("{question}", False)
    for length in (8, 32, 128):
        decoded = []
        monkeypatch.setattr(
            lm.tokenizer, "decode", lambda ids, seen=decoded, **o: seen.append(len(ids)) or decode(ids, **o)
        )
        traces = answers(lm, template=template, max_new_tokens=length, select=Select(heads="none"))
        counts[length] = sum(decoded) / sum(len(t["tokens"]) for t in traces)
    assert max(counts.values()) < 20


def test_plain_template_replaces_its_names(lm, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("{instruction} {x} {question}\n")
    template = read_template(path)
    [trace] = answers(lm, QUESTIONS[:1], template=template)
    prompt = "".join(trace["tokens_decoded"][: trace["prompt_length"]])
    assert prompt == lm.tokenizer.decode(lm.tokenizer("Say it {x} What is 0?\n")["input_ids"])


def test_chat_template_of_a_file_replaces_that_of_the_model(lm, tmp_path):
    path = tmp_path / "prompt.jinja"
    path.write_text("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}")
    template = read_template(path)
    traces = [answers(lm, QUESTIONS[:1], template=template, instruction=text)[0] for text in ("Say it", "")]
    prompts = ["".join(t["tokens_decoded"][: t["prompt_length"]]).replace(" ", "") for t in traces]
    assert prompts == ["[system]Sayit[user]Whatis0?", "[user]Whatis0?"]
    hashes = {provenance_of(lm, replace(OPTIONS, template=t)).prompt_sha256 for t in (None, template)}
    assert len(hashes) == 2
    assert provenance_of(lm, replace(OPTIONS, template=template_of(lm))).prompt_sha256 in hashes


def test_unusable_templates_are_usage_errors(lm, tmp_path):
    with pytest.raises(UsageError, match="no prompt template"):
        read_template(tmp_path / "none.txt")
    (tmp_path / "a.txt").write_text("no question")
    with pytest.raises(UsageError, match="question"):
        read_template(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="chat template fails"):
        answers(lm, template=PromptTemplate("{{ raise_exception('no system message') }}", True))
    turns = [Question("q", "And?", ("a",), earlier=("Who?",))]
    with pytest.raises(UsageError, match="several turns"):
        answers(lm, turns, template=PromptTemplate(PLAIN_PROMPT, False))
    with pytest.raises(UsageError, match="earlier answers"):
        answers(lm, turns, template=PromptTemplate("{{ messages[-1]['content'] }}", True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_turns_form_one_trace(lm, temperature):
    """Each answer has the tokens that were generated, and follows the same tokens as in a trace of fewer turns."""
    texts = ("Who?", "Where, if it is known?", "When?")
    questions = [Question("q", texts[k], ("a",), earlier=texts[:k]) for k in range(3)]
    traces = answers(lm, questions, temperature=temperature, max_new_tokens=5)
    longest = traces[2]["tokens"].tolist()
    for turn, trace in enumerate(traces):
        runs = np.diff(np.concatenate([[0], trace["generated_mask"], [0]]).astype("i4"))
        assert (runs == 1).sum() == turn + 1
        assert trace["question"] == texts[turn] and trace["answer_span"] == (
            trace["prompt_length"],
            len(trace["tokens"]),
        )
        known = np.isfinite(trace["token_logprob"])
        assert np.array_equal(known, trace["generated_mask"] == 1)
        if not temperature:
            assert longest[: len(trace["tokens"])] == trace["tokens"].tolist()
    [alone] = answers(lm, questions[2:], temperature=temperature, max_new_tokens=5)
    assert alone["tokens"].tolist() == longest


@pytest.mark.parametrize("positions", ["answer", 3])
@pytest.mark.parametrize("heads", ["all", "mean"])
def test_selected_layers_and_positions_are_those_of_whole_traces(lm, positions, heads):
    whole = answers(lm, top_logprobs=2)
    select = Select([-1], positions, heads)
    for full, trace in zip(whole, answers(lm, top_logprobs=2, select=select), strict=True):
        begin, end = full["answer_span"]
        first = begin if positions == "answer" else end - 3
        assert trace["first_position"] == first and trace["num_layers"] == 1
        np.testing.assert_array_equal(trace["hidden_states"][0], full["hidden_states"][1][first:])
        expected = full["attentions"][1][:, first:, first:].astype("f4")
        expected = expected.mean(0, keepdims=True) if heads == "mean" else expected
        np.testing.assert_allclose(trace["attentions"][0].astype("f4"), expected, atol=1e-3)
        for name in ("tokens", "token_logprob", "token_entropy", "top_ids", "top_logprobs", "generated_mask"):
            np.testing.assert_array_equal(trace[name], full[name][first:])
        assert trace["tokens_decoded"] == full["tokens_decoded"][first:]
        assert trace["answer_span"] == (max(0, begin - first), end - first)
        assert trace["prompt_length"] == max(0, begin - first) and trace["generated_text"] == full["generated_text"]


def test_empty_answer_keeps_the_token_before_it(lm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(lm.model.generation_config, "eos_token_id", list(range(lm.model.config.vocab_size)))
        [trace] = answers(lm, QUESTIONS[:1], select=Select(positions="answer"))
    assert len(trace["tokens"]) == 1 and trace["answer_span"] == (1, 1) and trace["generated_mask"].tolist() == [0]


def test_provenance_names_the_selected_layers(lm):
    first = provenance_of(lm, replace(OPTIONS, select=Select([1])))
    assert first.layer_ids == (1,) and first.final_norm is False
    last = provenance_of(lm, replace(OPTIONS, select=Select([-1])))
    assert last.layer_ids == (2,) and last.final_norm is True
    for layers in ([3], [0], [-3], [2, 1], [1, 1]):
        with pytest.raises(UsageError, match="layers: found"):
            provenance_of(lm, replace(OPTIONS, select=Select(layers)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 50.0}, {"no_repeat_ngram_size": 1}, {"num_beams": 3}, {"min_new_tokens": 7},
     {"suppress_tokens": list(range(0, 60, 2))}, {"bad_words_ids": [[3], [5], [7]]}, {"do_sample": True, "top_k": 1},
     {"temperature": 30.0, "top_p": 0.1}, {"max_length": 1}, {"sequence_bias": [[[4], 20.0]]}, {"typical_p": 0.1}],
)  # fmt: skip
def test_settings_of_the_model_change_no_answer(lm, monkeypatch, settings, temperature):
    """The tokens are the most likely ones, or draws at the temperature: what the provenance of the traces says."""
    expected = answers(lm, temperature=temperature, max_new_tokens=8)
    for name, value in settings.items():
        monkeypatch.setattr(lm.model.generation_config, name, value)
    own = lm.model.generation_config
    found = answers(lm, temperature=temperature, max_new_tokens=8)
    assert [t["tokens"].tolist() for t in found] == [t["tokens"].tolist() for t in expected]
    assert lm.model.generation_config is own


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_batch_equals_questions_answered_alone(tiny_model, temperature):
    from tracestore.extract.answering import AnswerOptions, answer_questions
    from tracestore.extract.model import load_model

    lm = load_model(str(tiny_model), device="cpu")
    texts = ["?", "What is it that is so very much longer?", "Who?", "What is it that is so very much longer?"]
    questions = [Question(f"q{k}", text, ("a",)) for k, text in enumerate(texts)]
    options = AnswerOptions("Say it", 12, temperature=temperature, top_logprobs=3)
    together = answer_questions(lm, questions, options)
    alone = [answer_questions(lm, [question], options)[0] for question in questions]
    assert len({len(t["tokens"]) for t in alone}) > 1
    for one, other in zip(together, alone, strict=True):
        assert one.keys() == other.keys()
        close = {"token_logprob", "token_entropy", "top_logprobs"}
        for name in one.keys() - {"hidden_states", "attentions", *close}:
            assert np.array_equal(one[name], other[name]), name
        for name in close:
            assert np.allclose(one[name], other[name], atol=1e-5, equal_nan=True), name
        for name in ("hidden_states", "attentions"):
            for a, b in zip(one[name], other[name], strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype == np.float16
                assert np.allclose(a, b, rtol=2e-3, atol=2e-3)


def test_the_revision_of_a_local_model_depends_on_its_weights(tiny_model, tmp_path):
    from tracestore.extract.model import load_model

    copy = tmp_path / tiny_model.name
    shutil.copytree(tiny_model, copy)
    one, two = load_model(str(tiny_model)), load_model(str(copy))
    assert (one.name, one.revision) == (two.name, two.revision)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert load_model(str(copy)).revision != one.revision
