"""Keys that other programs use for ids, texts, arrays and layers."""

import pickle

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of

HIDDEN = np.random.default_rng(0).random((3, 4, 8), np.float32).astype("f2")


def convert_trace(tmp_path, trace):
    """Convert one trace without attention and return the trace of the store."""
    (tmp_path / "in.pkl").write_bytes(pickle.dumps([trace]))
    convert(tmp_path / "in.pkl", tmp_path / "s.zarr", "--attention", "none")
    return tracestore.open(tmp_path / "s.zarr")[0]


@pytest.mark.parametrize("name", ["hs", "activations", "representations", "all_hidden_states"])
def test_names_of_hidden_states(tmp_path, name):
    trace = convert_trace(tmp_path, {"qid": "q7", name: list(HIDDEN), "response": "Paris", "prompt": "where?"})
    np.testing.assert_array_equal(trace.hidden_states, HIDDEN)
    assert (trace.question_id, trace.question, trace.answer) == ("q7", "where?", "Paris")


@pytest.mark.parametrize("name", ["layer_{}", "model.layers.{}", "blocks.{}.hook_resid_post"])
def test_a_key_for_each_layer(tmp_path, name):
    layers = {name.format(k): HIDDEN[k] for k in (2, 0, 1)}
    trace = convert_trace(tmp_path, {"id": 5, **layers})
    np.testing.assert_array_equal(trace.hidden_states, HIDDEN)
    assert trace.question_id == "5"


@pytest.mark.parametrize("name", ["example_id", "sample_id"])
def test_a_number_that_may_count_the_traces_of_a_file_is_no_id(tmp_path, name):
    assert convert_trace(tmp_path, {name: 3, "hidden_states": list(HIDDEN)}).question_id == "in.pkl:0"


@pytest.mark.parametrize("name", ["idx", "question_idx"])
@pytest.mark.parametrize("first, ids", [(2, ["0", "1", "2", "3"]), (0, ["0.pkl:0", "0.pkl:1", "1.pkl:0", "1.pkl:1"])])
def test_an_index_is_an_id_unless_it_begins_again_with_each_file(tmp_path, name, first, ids):
    for k, begin in enumerate((0, first)):
        traces = [{name: begin + i, "hidden_states": list(HIDDEN)} for i in range(2)]
        (tmp_path / f"{k}.pkl").write_bytes(pickle.dumps(traces))
    dry = convert(tmp_path, tmp_path / "s.zarr", "--dry-run").stdout
    assert ("question_id '0'" in dry) == (first == 2)
    convert(tmp_path, tmp_path / "s.zarr")
    assert list(tracestore.open(tmp_path / "s.zarr").question_ids) == ids


@pytest.mark.parametrize(
    "names", ["hiddenStates questionId Answer", "HIDDEN_STATES QUESTION_ID ANSWER", "HiddenStates question-id RESPONSE"]
)
def test_names_in_other_spellings(tmp_path, names):
    states, question_id, answer = names.split()
    trace = convert_trace(tmp_path, {states: list(HIDDEN), question_id: "q7", answer: "Paris"})
    np.testing.assert_array_equal(trace.hidden_states, HIDDEN)
    assert (trace.question_id, trace.answer) == ("q7", "Paris")


def test_nested_dicts_give_the_fields_that_they_name(tmp_path):
    value = {"meta": {"question_id": "q7", "note": 1}, "states": {"hidden": HIDDEN}, "config": {"id": "run", "seed": 3}}
    trace = convert_trace(tmp_path, value)
    np.testing.assert_array_equal(trace.hidden_states, HIDDEN)
    assert trace.question_id == "q7" and trace.extras["meta"]["note"] == 1


def test_attention_of_another_name_next_to_hidden_states_is_stored(tmp_path):
    weights = np.tril(np.ones((len(HIDDEN), 2, 4, 4), "f4")) / 4
    trace = {"hiddenStates": HIDDEN, "attentionWeights": weights}
    (tmp_path / "in.pkl").write_bytes(pickle.dumps([trace]))
    convert(tmp_path / "in.pkl", tmp_path / "s.zarr")
    trace = tracestore.open(tmp_path / "s.zarr")[0]
    np.testing.assert_allclose(trace.attention, weights.mean(1), atol=1e-3)


@pytest.mark.parametrize("count, is_used", [(4, True), (5, True), (2, False)])
def test_token_ids_are_the_tokens_if_they_fit(tmp_path, count, is_used):
    trace = convert_trace(tmp_path, {"hidden_states": list(HIDDEN), "token_ids": np.arange(count)})
    assert (None if trace.tokens is None else trace.tokens.tolist()) == (list(range(count)) if is_used else None)


def test_a_batch_with_ids_under_a_plural_counts_the_answers_of_each_question(tmp_path):
    ids = ["a", "a", "b"]
    batch = {"question_ids": ids, "hidden_states": [np.stack([h] * 3) for h in HIDDEN], "lengths": [4, 3, 2]}
    (tmp_path / "in.pkl").write_bytes(pickle.dumps(batch))
    convert(tmp_path / "in.pkl", tmp_path / "s.zarr")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert [(t.question_id, t.sample, t.num_tokens) for t in store] == [("a", 0, 4), ("a", 1, 3), ("b", 0, 2)]


def test_the_error_proposes_values_with_the_shape_of_hidden_states(tmp_path):
    traces = [{"key": "q7", "kept": HIDDEN, "other": HIDDEN[:, :2], "maps": np.ones((3, 2, 4, 4)), "text": "a b"}]
    (tmp_path / "in.pkl").write_bytes(pickle.dumps(traces))
    message = error_of("convert", tmp_path / "in.pkl", tmp_path / "s.zarr", code=3)
    proposed = "--map hidden_states=kept,question_id=key or --map hidden_states=other,question_id=key"
    assert proposed in message and "maps" not in message.partition("try")[2]


def test_a_value_with_the_shape_of_attention_is_not_left_out_silently(tmp_path):
    traces = [{"hidden_states": HIDDEN, "maps": np.ones((3, 2, 4, 4), "f4")}]
    (tmp_path / "in.pkl").write_bytes(pickle.dumps(traces))
    assert "try --map attentions=maps" in error_of("convert", tmp_path / "in.pkl", tmp_path / "s.zarr", code=3)


def test_fields_of_the_schema_take_precedence(tmp_path):
    given = {"question_id": "a", "id": "b", "hidden_states": list(HIDDEN), "hs": "kept", "generated_answer": "x"}
    trace = convert_trace(tmp_path, given | {"response": "y"})
    assert (trace.question_id, trace.answer) == ("a", "x")
    assert trace.extras == {"id": "b", "hs": "kept", "response": "y"}


def test_the_output_of_a_model_is_merged_into_its_trace(tmp_path):
    output = {"hidden_states": list(HIDDEN), "attentions": None, "logits": np.ones(3)}
    trace = convert_trace(tmp_path, {"question_id": "q", "output": output, "k": 3})
    np.testing.assert_array_equal(trace.hidden_states, HIDDEN)
    assert trace.question_id == "q" and trace.extras["k"] == 3


def test_two_nested_dicts_with_hidden_states_are_refused(tmp_path):
    (tmp_path / "in.pkl").write_bytes(pickle.dumps([{k: {"hidden_states": list(HIDDEN)} for k in ("a", "b")}]))
    error = convert(tmp_path / "in.pkl", tmp_path / "s.zarr", check=3).stderr
    assert "missing key" in error and "--map hidden_states=a.hidden_states" in error


def test_the_error_does_not_propose_attention_as_hidden_states(tmp_path):
    (tmp_path / "in.pkl").write_bytes(pickle.dumps([{"question_id": "q7", "attentions": np.ones((3, 2, 4, 4))}]))
    message = error_of("convert", tmp_path / "in.pkl", tmp_path / "s.zarr", code=3)
    assert "hidden_states=attentions" not in message and message.endswith("name it with --map hidden_states=KEY\n")


@pytest.mark.parametrize("name", ["mask", "attn_mask", "attention_masks"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_of_batches_under_other_names(tmp_path, name, side):
    lengths = (2, 4, 3)
    mask = np.array([np.arange(4) < n if side == "right" else np.arange(4) >= 4 - n for n in lengths])
    np.savez(tmp_path / "in.npz", hidden=np.stack([HIDDEN[:2]] * 3), ids=["a", "b", "c"], **{name: mask})
    convert(tmp_path / "in.npz", tmp_path / "s.zarr")
    for trace, kept in zip(tracestore.open(tmp_path / "s.zarr"), mask, strict=True):
        np.testing.assert_array_equal(trace.hidden_states, HIDDEN[:2, kept])


@pytest.mark.parametrize("rows", [[[0, 1, 1, 0], [0, 0, 1, 1]], [[0, 0, 1, 1], [0, 0, 0, 1]]])
def test_a_mask_that_is_not_of_padding_removes_no_token(tmp_path, rows):
    np.savez(tmp_path / "in.npz", hidden=np.stack([HIDDEN[:2]] * 2), ids=["a", "b"], mask=np.array(rows))
    convert(tmp_path / "in.npz", tmp_path / "s.zarr")
    assert [t.hidden_states.shape for t in tracestore.open(tmp_path / "s.zarr")] == [(2, 4, 8)] * 2


def test_names_of_tokens_their_texts_and_nested_scores(tmp_path):
    given = {"item": 7, "hs": HIDDEN, "generated_ids": [4, 5, 6, 7], "str_tokens": list("abcd")}
    trace = convert_trace(tmp_path, given | {"metrics": {"exact_match": 1.0}})
    assert (trace.question_id, trace.tokens.tolist(), trace.tokens_decoded, trace.score) == (
        "7",
        [4, 5, 6, 7],
        list("abcd"),
        1.0,
    )


def test_ids_and_texts_of_another_number_are_extras(tmp_path):
    trace = convert_trace(tmp_path, {"hs": HIDDEN, "generated_ids": [4, 5], "words": ["one", "word"]})
    assert trace.tokens is None and trace.extras == {"generated_ids": [4, 5], "words": ["one", "word"]}


@pytest.mark.parametrize("name", ["X", "features", "samples"])
def test_the_only_array_with_a_weak_name_is_that_of_the_states(tmp_path, name):
    (tmp_path / "in.pkl").write_bytes(pickle.dumps({name: HIDDEN[:, 0], "ids": ["a", "b", "c"], "y": [0, 1, 0]}))
    convert(tmp_path / "in.pkl", tmp_path / "s.zarr")
    store = tracestore.open(tmp_path / "s.zarr")
    assert list(store.question_ids) == ["a", "b", "c"]
    np.testing.assert_array_equal(store[1].last_token, HIDDEN[1:2, 0])


def test_an_array_with_a_weak_name_next_to_others_is_not_guessed(tmp_path):
    (tmp_path / "in.pkl").write_bytes(pickle.dumps({"X": HIDDEN[:, 0], "Z": HIDDEN[:, 1], "ids": ["a", "b", "c"]}))
    message = error_of("convert", tmp_path / "in.pkl", tmp_path / "s.zarr", code=3)
    assert "found X, Z, ids; name it with --map hidden_states=KEY" in message


@pytest.mark.parametrize("word, score", [("correct", 1.0), ("Hallucinated", 0.0)])
def test_words_of_a_judge_in_a_table_of_texts_are_scores(tmp_path, word, score):
    np.savez(tmp_path / "q1.npz", hidden_states=HIDDEN)
    (tmp_path / "judge.jsonl").write_text(f'{{"id": "q1", "question": "where?", "verdict": "{word}"}}\n')
    convert(tmp_path, tmp_path / "s.zarr")
    (trace,) = tracestore.open(tmp_path / "s.zarr")
    assert (trace.question, trace.score) == ("where?", score)


def test_names_of_one_answer_among_several(tmp_path):
    value = {"question_id": ["q7"], "most_likely_generation": "Paris", "generated_texts": ["a", "b"]}
    value |= {
        "most_likely_generation_ids": np.arange(4),
        "most_likely_generation_hidden_states": [h[None] for h in HIDDEN],
    }
    trace = convert_trace(tmp_path, value)
    np.testing.assert_array_equal(trace.hidden_states, HIDDEN)
    assert (trace.question_id, trace.answer, trace.tokens.tolist()) == ("q7", "Paris", [0, 1, 2, 3])


@pytest.mark.parametrize("others, answer", [({}, "Paris"), ({"correct_answers": ["Paris"]}, None)])
def test_the_best_answer_next_to_other_references_is_one(tmp_path, others, answer):
    assert convert_trace(tmp_path, {"id": 1, "best_answer": "Paris", "hs": HIDDEN} | others).answer == answer


@pytest.mark.parametrize("name", ["input_tokens", "model_output_tokens"])
@pytest.mark.parametrize("values, field", [(list("abcd"), "tokens_decoded"), ([1, 2, 3, 4], "tokens")])
def test_a_name_of_ids_or_texts_of_tokens(tmp_path, name, values, field):
    trace = convert_trace(tmp_path, {"id": 1, "hidden_states": HIDDEN, name: values})
    assert list(getattr(trace, field)) == values


@pytest.mark.parametrize("name", ["label_hallucinated", "rougeL_to_target", "accuracy_reward", "human_correct"])
def test_names_of_scores_with_an_affix(tmp_path, name):
    assert convert_trace(tmp_path, {"id": 1, "hidden_states": HIDDEN, name: 1.0}).score == 1
    direction = "hallucination" if "hallucinated" in name else "correct"
    assert tracestore.open(tmp_path / "s.zarr").score_direction == direction


def test_a_matrix_of_the_last_token_or_layer_is_proposed(tmp_path):
    (tmp_path / "in.pkl").write_bytes(pickle.dumps([{"id": f"q{k}", "hs_last": HIDDEN[:, k]} for k in range(3)]))
    assert "try --map last_token=hs_last" in error_of("convert", tmp_path / "in.pkl", tmp_path / "s.zarr", code=3)


@pytest.mark.parametrize(
    "value, texts",
    [
        ({"prompt": "where?", "text": "Paris"}, ("where?", "Paris")),
        ({"prompt": "where?", "text": "where? Paris"}, ("where?", None)),
        ({"statement": "where?", "llm_response": "Paris", "answer": "Rome"}, ("where?", "Paris")),
        (
            {"messages": [{"role": "user", "content": "where?"}, {"role": "assistant", "content": "Paris"}]},
            ("where?", "Paris"),
        ),
    ],
)
def test_texts_under_other_names(tmp_path, value, texts):
    trace = convert_trace(tmp_path, {"id": 1, "layers": {0: HIDDEN[0], 1: HIDDEN[1]}} | value)
    assert (trace.question, trace.answer) == texts
