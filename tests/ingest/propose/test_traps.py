"""Test folders in which a guess would be wrong: nothing is used by itself, and no candidate is harmful.

Each test has the number of the rule that catches the trap in its name.
"""

import json

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

import tracestore
from tests.ingest.execute.folders import dump, save, states, table
from tests.ingest.propose.folders import accept, check_candidates, proposal_of, refuse


def attention(*shape):
    """Return causal weights whose rows sum to 1."""
    size = shape[-1]
    weights = np.tril(np.ones((size, size), "f4"))
    return np.broadcast_to(weights / weights.sum(1, keepdims=True), shape).copy()


def rows(count=3, *, layers=2, dim=8, key="hs", lengths=(4, 6, 5), **more):
    """Return dicts with an id, states (L, S, D), attention and tokens, which are proved."""
    return [
        {
            "id": f"q{k}",
            key: states(layers, lengths[k % 3], dim, seed=k),
            "attn": attention(layers, 3, lengths[k % 3], lengths[k % 3]),
            "input_ids": np.arange(5, 5 + lengths[k % 3]),
            **{name: values[k] for name, values in more.items()},
        }
        for k in range(count)
    ]


# The table of cases


def test_case_token_labels_are_no_traces_rule_15(tmp_path):
    dump(tmp_path / "in/a.pkl", {"hs": states(6, 8), "attn": attention(1, 6, 6), "token_labels": [0, 1, 0, 0, 1, 0]})
    refuse(tmp_path)


def test_case_states_with_as_many_labels_as_rows_rule_15(tmp_path):
    np.savez(_in(tmp_path) / "a.npz", hidden_states=states(6, 8), labels=np.array([0, 1, 0, 0, 1, 0]))
    refuse(tmp_path)


def test_case_ranks_with_indices_from_0_rule_20(tmp_path):
    for rank in range(2):
        found = [{"idx": k, "hidden_states": states(2, 4 + k, 8, seed=9 * rank + k)} for k in range(3)]
        dump(tmp_path / f"in/rank{rank}.pkl", found)
    table(tmp_path / "in/labels.csv", [{"idx": k, "is_correct": k % 2} for k in range(6)])
    refuse(tmp_path)


def test_case_rank_0_alone_rule_20(tmp_path):
    found = [{**row, "id": k} for k, row in enumerate(rows())]
    dump(tmp_path / "in/rank0.pkl", [{"idx": row.pop("id"), **row} for row in found])
    table(tmp_path / "in/labels.csv", [{"idx": k, "is_correct": k % 2} for k in range(6)])
    refuse(tmp_path)


@pytest.mark.parametrize("word", ["rank", "part", "gpu", "worker", "batch"])
def test_integer_ids_beside_a_rank_or_part_rule_20(tmp_path, word):
    for n in range(2):
        found = rows()
        for k, row in enumerate(found):
            row["idx"] = 3 * n + k
            del row["id"]
        dump(tmp_path / f"in/{word}_{n}.pkl", found)
    refuse(tmp_path)


def test_case_padded_rows_without_a_mask_rule_17(tmp_path):
    ids = np.array([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
    dump(tmp_path / "in/a.pkl", {"hidden_states": states(2, 5, 8), "input_ids": ids, "question_id": ["a", "b"]})
    refuse(tmp_path)


def test_padding_after_a_single_id_without_a_mask_rule_17(tmp_path):
    ids = np.array([[5, 6, 7, 8, 9], [5, 6, 7, 8, 0]])
    dump(
        tmp_path / "in/a.pkl",
        {
            "hidden_states": states(2, 3, 5, 8),
            "attentions": attention(2, 3, 2, 5, 5),
            "input_ids": ids,
            "question_id": ["a", "b"],
        },
    )
    refuse(tmp_path)


def test_case_layers_taken_for_tokens_rule_15(tmp_path):
    save(tmp_path / "in/hidden_states.npy", states(6, 3, 8))
    table(tmp_path / "in/t.csv", [{"id": f"q{k}", "is_correct": k % 2} for k in range(24)])
    refuse(tmp_path)


def test_case_passes_without_a_cache_rule_5(tmp_path):
    passes = [[states(2, size, 8, seed=size) for _ in range(3)] for size in range(4, 10)]
    dump(tmp_path / "in/a.pkl", {"hidden_states": passes, "ids": ["a", "b"]})
    refuse(tmp_path)


def test_passes_with_an_id_too_few_rule_3(tmp_path):
    """generate() gives one id more than states: as many may be moved by one."""
    for count in (7, 6):
        passes = [[states(2, size, 8, seed=9 * size + k) for k in range(2)] for size in (4, 1, 1)]
        dump(
            tmp_path / "in/a.pkl",
            {
                "hidden_states": passes,
                "sequences": np.arange(2 * count).reshape(2, count) + 3,
                "attention_mask": np.ones((2, 4), "i8"),
                "ids": ["a", "b"],
            },
        )
        if count == 7:
            assert accept(tmp_path)["a", 0].num_tokens == 6
        else:
            refuse(tmp_path)


def test_case_fewer_states_than_ids_rule_2(tmp_path):
    found = [{"id": f"q{k}", "hidden_states": states(2, 4 + k, 8), "output_ids": np.arange(9)} for k in range(3)]
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def test_case_layers_of_lists_of_samples_rule_21(tmp_path):
    found = {k: [{"sample_idx": i, "activation": states(8, seed=10 * k + i)} for i in range(3)] for k in (4, 8)}
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def test_case_statements_with_a_label_rule_22(tmp_path):
    for layer in (8, 16):
        save(tmp_path / f"in/last_token_layer_{layer}.npy", states(3, 8, seed=layer))
    table(tmp_path / "in/statements.csv", [{"statement": f"s{k}", "label": k % 2} for k in range(3)])
    proposal = refuse(tmp_path, "is_correct")
    assert "is_hallucinated" in proposal.message()


# Axes


def test_sentences_taken_for_tokens_rule_16(tmp_path):
    for word in ("sentence", "sent", "claim", "chunk", "step", "gen"):
        found = {f"q{k}": states(3 + k, 8, seed=k) for k in range(3)}
        dump(tmp_path / f"in/{word}_hidden_states.pkl", found)
        refuse(tmp_path)
        (tmp_path / f"in/{word}_hidden_states.pkl").unlink()


def test_more_tokens_than_characters_rule_16(tmp_path):
    found = [{"id": f"q{k}", "hidden": states(9 + k, 8, seed=k), "question": "a?", "answer": "b"} for k in range(3)]
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def test_constant_tokens_without_ids_of_tokens_rule_16(tmp_path):
    dump(tmp_path / "in/layer_3.pkl", {f"q{k}": states(4, 8, seed=k) for k in range(3)})
    refuse(tmp_path)


def test_last_hidden_state_of_a_batch_rule_18(tmp_path):
    save(tmp_path / "in/last_hidden_state.npy", states(3, 5, 8))
    refuse(tmp_path)


def test_batch_without_layers_rule_18(tmp_path):
    save(tmp_path / "in/batch_0.npy", states(8, 5, 16))
    refuse(tmp_path)


def test_first_axis_without_numbers_of_layers_rule_18(tmp_path):
    found = [{"id": f"q{k}", "hs": states(3, 4 + k, 8, seed=k), "input_ids": np.arange(4 + k)} for k in range(3)]
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


@pytest.mark.parametrize(
    "more",
    [{}, {"answers": ["one", "two", "three"]}, {"input_ids": np.zeros((3, 4), "i8")}, {"question": "which one?"}],
)
def test_several_answers_taken_for_layers_rule_18(tmp_path, more):
    """States (K, S, D) of several answers, padded to the longest, under the name of those of all layers."""
    found = []
    for k in range(3):
        size = {name: v[:, :1].repeat(4 + k, 1) if isinstance(v, np.ndarray) else v for name, v in more.items()}
        found.append({"id": f"q{k}", "hidden_states": states(3, 4 + k, 8, seed=k), **size})
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


@pytest.mark.parametrize("name", ["samples", "beams", "heads", "seeds"])
def test_words_of_another_axis_rule_18(tmp_path, name):
    found = [
        {"id": f"q{k}", name: {"hidden_states": states(3, 4 + k, 8, seed=k)}, "input_ids": np.arange(4 + k)}
        for k in range(3)
    ]
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def test_passes_of_beams_rule_5(tmp_path):
    """Two of three beams of generate(): no candidate takes the rows of a pass for those of the one before."""
    steps = [[states(3, size, 8, seed=10 * p + k) for k in range(2)] for p, size in enumerate((4, 1, 1))]
    found = {"hidden_states": steps, "sequences": np.arange(14).reshape(2, 7)}
    dump(tmp_path / "in/q0.pkl", found | {"beam_indices": np.array([[0, 2, 1], [1, 0, 0]])})

    assert proposal_of(tmp_path).candidates == []


def test_last_layer_of_a_batch_with_ids_rule_18(tmp_path):
    np.savez(_in(tmp_path) / "a.npz", hidden_states=states(3, 5, 8), ids=np.array(["a", "b", "c"]))
    refuse(tmp_path)


def test_more_layers_than_width_rule_19(tmp_path):
    found = rows(layers=12, dim=8)
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


@pytest.mark.parametrize(("layers", "tokens", "dim", "heads"), [(4, 4, 8, 2), (2, 8, 8, 2), (4, 4, 4, 4), (3, 3, 9, 3)])
def test_equal_sizes_within_a_trace(tmp_path, layers, tokens, dim, heads):
    """L = S, S = D, H = L: more than one order of the axes fits."""
    found = [
        {
            "id": f"q{k}",
            "hs": states(layers, tokens, dim, seed=k),
            "attn": attention(layers, heads, tokens, tokens),
            "input_ids": np.arange(tokens) + k,
        }
        for k in range(3)
    ]
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


@pytest.mark.parametrize(("count", "layers", "tokens"), [(3, 3, 5), (5, 2, 5), (4, 4, 4)])
def test_equal_sizes_of_a_stack(tmp_path, count, layers, tokens):
    """N = L, N = S."""
    np.savez(
        _in(tmp_path) / "a.npz",
        hidden_states=states(count, layers, tokens, 9),
        attentions=attention(count, layers, 2, tokens, tokens),
        input_ids=np.arange(count * tokens).reshape(count, tokens),
        attention_mask=np.ones((count, tokens), "i8"),
        question_id=np.array([f"q{k}" for k in range(count)]),
    )
    refuse(tmp_path)


def test_heads_equal_layers(tmp_path):
    found = [
        {"id": f"q{k}", "hs": states(2, 4 + k, 8, seed=k), "attn": attention(2, 2, 4 + k, 4 + k)} for k in range(3)
    ]
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


# Traces and ids


@pytest.mark.parametrize("word", ["mean", "avg", "pool", "cls", "mean_pooled"])
def test_pooled_vectors_rule_21(tmp_path, word):
    table_ids = [f"q{k}" for k in range(4)]
    np.savez(_in(tmp_path) / "layer_3.npz", **{f"{word}_hidden_states": states(4, 8), "ids": np.array(table_ids)})
    refuse(tmp_path)


def test_vectors_without_a_word_rule_21(tmp_path):
    np.savez(_in(tmp_path) / "layer_3.npz", hidden_states=states(4, 8), ids=np.array([f"q{k}" for k in range(4)]))
    refuse(tmp_path)


@pytest.mark.parametrize("ones", ["1.0", "1"])
def test_temperature_in_a_name_rule_23(tmp_path, ones):
    for name in ("q1_t0.7", f"q1_t{ones}", "q2_t0.7", f"q2_t{ones}"):
        found = rows(1)[0]
        del found["id"]
        dump(tmp_path / f"in/{name}.pkl", found)
    refuse(tmp_path)


def test_rank_in_a_name_rule_23(tmp_path):
    for name in ("rank0_q1", "rank1_q1"):
        found = rows(1)[0]
        del found["id"]
        dump(tmp_path / f"in/{name}.pkl", found)
    refuse(tmp_path)


def test_part_of_an_id_taken_for_a_group_rule_23(tmp_path):
    """The keys nq/0 and nq/1 are ids, or numbers below a group."""
    (tmp_path / "in").mkdir()
    for k in range(3):
        tensors = {f"nq/{n}": np.random.default_rng(k).normal(size=(5 + n, 8)).astype("f4") for n in range(3)}
        save_file(tensors, tmp_path / f"in/layer_{k:02d}.safetensors")
    refuse(tmp_path, "nq may be a part of the ids")


def test_other_ids_beside_numbered_files_rule_20(tmp_path):
    """The names of files are numbers, and another file of each trace says its id."""
    (tmp_path / "in").mkdir()
    for k, row in enumerate(rows()):
        np.savez(tmp_path / f"in/{k:05d}.npz", hidden_states=np.stack(row["hs"]), input_ids=row["input_ids"])
        (tmp_path / f"in/{k:05d}.json").write_text(json.dumps({"question_id": f"nq-{k}", "question": "why?"}))
    refuse(tmp_path, "question_id")


def test_two_keys_that_may_be_the_id_rule_12(tmp_path):
    dump(tmp_path / "in/a.pkl", [{**row, "id": 2 - k, "sample_id": k} for k, row in enumerate(rows())])
    table(tmp_path / "in/labels.csv", [{"sample_id": k, "is_correct": k % 2} for k in range(3)])
    refuse(tmp_path)


def test_a_table_with_two_keys_that_may_be_the_id_rule_12(tmp_path):
    dump(tmp_path / "in/a.pkl", [{**row, "id": k} for k, row in enumerate(rows())])
    table(tmp_path / "in/labels.csv", [{"row_id": 2 - k, "example_id": k, "is_correct": k % 2} for k in range(3)])
    refuse(tmp_path)


def test_prompt_and_answer_that_may_overlap_rule_16(tmp_path):
    found = [{"id": f"q{k}", "layers": [3, 7]} for k in range(3)]
    for k, row in enumerate(found):
        row |= {"prompt_states": states(2, 3 + k, 8, seed=k), "answer_states": states(2, 5 + k, 8, seed=9 + k)}
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def test_length_of_a_padded_prompt_rule_16(tmp_path):
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    np.savez(
        _in(tmp_path) / "a.npz",
        hidden_states=states(2, 3, 5, 9),
        layers=np.array([1, 2, 3]),
        attention_mask=mask,
        input_ids=np.where(mask, np.arange(10).reshape(2, 5) + 5, 0),
        ids=np.array(["a", "b"]),
        prompt_length=np.array([4, 4]),
    )
    refuse(tmp_path)


def padded_prompts(tmp_path, form, left, prompts):
    """Write a stack of four traces of 6, 4, 6 and 5 tokens, padded at one side, and the lengths of their prompts."""
    sizes = np.array([6, 4, 6, 5])
    mask = (np.arange(6) < sizes[:, None]).astype("i8")
    mask = mask[:, ::-1] if left else mask
    np.savez(
        _in(tmp_path) / "a.npz",
        hidden_states=states(4, 3, 6, 9) * mask[:, None, :, None],
        layers=np.array([1, 2, 3]),
        input_ids=np.arange(1, 25).reshape(4, 6) * mask,
        ids=np.array(["a", "b", "c", "d"]),
        prompt_length=np.array(prompts),
        **({"attention_mask": mask} if form == "mask" else {"lengths": sizes}),
    )


@pytest.mark.parametrize("form", ["mask", "lengths"])
@pytest.mark.parametrize("prompts", [[2, 3, 4, 2], [3, 3, 4, 3], [3, 2, 2, 2]])
def test_a_prompt_length_counts_no_padding_behind_the_tokens_rule_16(tmp_path, form, prompts):
    padded_prompts(tmp_path, form, False, prompts)
    assert [trace.prompt_length for trace in accept(tmp_path).values()] == prompts


@pytest.mark.parametrize("form", ["mask", "lengths"])
@pytest.mark.parametrize(
    ("left", "prompts"),
    [(True, [2, 3, 4, 2]), (True, [4, 4, 4, 4]), (False, [3, 3, 3, 3]), (False, [2, 2, 3, 3]), (False, [3, 3, 3, 2])],
)
def test_a_prompt_length_may_count_padding_of_its_batch_rule_16(tmp_path, form, left, prompts):
    """[padding in front of the tokens; the columns of batches of prompts, whose answers were padded again]"""
    padded_prompts(tmp_path, form, left, prompts)
    refuse(tmp_path, "" if left else "prompt_length: it may count padding")


def test_columns_of_batches_next_to_traces_without_a_prompt_rule_16(tmp_path):
    found = rows(4, prompt_length=[3, None, 3, None])
    for row in found:
        row["attention_mask"] = np.ones(len(row["input_ids"]), "i8")
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path, "prompt_length: it may count padding")


def test_weights_of_a_model_are_no_states_rule_18(tmp_path):
    for k in range(3):
        save(tmp_path / f"in/q{k}_layer0_weight.npy", states(4 + k, 8, seed=k))
    refuse(tmp_path)


def test_steps_in_a_list_rule_16(tmp_path):
    dump(tmp_path / "in/a.pkl", {f"q{k}": [{"layer_3": states(8, seed=n)} for n in range(2 + k)] for k in range(3)})
    refuse(tmp_path)


def test_rows_in_order_over_chunks_rule_13a(tmp_path):
    for n in range(2):
        np.savez(_in(tmp_path) / f"batch_{n}.npz", last_token=states(3, 2, 8, seed=n), layers=np.array([4, 8]))
    table(tmp_path / "in/labels.csv", [{"is_correct": k % 2, "question": f"question {k}"} for k in range(6)])
    refuse(tmp_path)


def test_rows_in_order_over_ranks_rule_13a(tmp_path):
    for n in range(2):
        np.savez(_in(tmp_path) / f"rank{n}.npz", last_token=states(3, 2, 8, seed=n), layers=np.array([4, 8]))
    table(tmp_path / "in/labels.csv", [{"is_correct": k % 2} for k in range(6)])
    refuse(tmp_path)


def test_numbers_from_0_and_from_1_rule_12b(tmp_path):
    found = rows()
    for k, row in enumerate(found):
        row["id"] = f"q{k}"
    dump(tmp_path / "in/a.pkl", found)
    table(tmp_path / "in/labels.csv", [{"id": f"q{k + 1}", "is_correct": k % 2} for k in range(3)])
    refuse(tmp_path)


def test_more_rows_than_traces_rule_13(tmp_path):
    np.savez(_in(tmp_path) / "a.npz", last_token=states(4, 2, 8), layers=np.array([4, 8]))
    table(tmp_path / "in/labels.csv", [{"is_correct": k % 2, "question": f"question {k}"} for k in range(5)])
    refuse(tmp_path)


# Labels


@pytest.mark.parametrize("name", ["label", "labels", "y", "target"])
def test_label_without_a_meaning_rule_22(tmp_path, name):
    dump(tmp_path / "in/a.pkl", rows(**{name: [0, 1, 1]}))
    proposal = refuse(tmp_path)
    meanings = {name for c in proposal.candidates for name in c.layout.addresses if name.startswith("is_")}
    assert meanings == {"is_correct", "is_hallucinated"}


@pytest.mark.long
@pytest.mark.parametrize("names", [["correct", "hallucinated"], ["hallucinated", "correct"]])
def test_classes_of_a_data_set_say_what_labels_mean_rule_22(tmp_path, names):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "layer_4": datasets.Array2D((5, 8), "float32"),
            "input_ids": datasets.Sequence(datasets.Value("int64"), 5),
            "label": datasets.ClassLabel(names=names),
        }
    )
    found = [
        {"id": f"q{k}", "layer_4": states(5, 8, seed=k), "input_ids": list(range(k, k + 5)), "label": v}
        for k, v in enumerate([0, 1, 1])
    ]
    datasets.Dataset.from_list(found, features=features).save_to_disk(tmp_path / "in/ds")
    traces = accept(tmp_path)
    assert [traces[f"q{k}", 0].score for k in range(3)] == [names[v] == "correct" for v in (0, 1, 1)]


def test_words_that_contradict_a_label_rule_22(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(label=[0, 1, 1], verdict=["correct", "hallucinated", "correct"]))
    refuse(tmp_path)


@pytest.mark.parametrize("beside", ["choices", "options", "prediction", "gold"])
def test_correct_beside_choices_rule_22(tmp_path, beside):
    dump(tmp_path / "in/a.pkl", rows(correct=[0, 1, 1], **{beside: ["a", "b", "c"]}))
    refuse(tmp_path)


@pytest.mark.parametrize("name", ["p_hallucination", "selfcheck_score", "hallucination_prob"])
def test_output_of_a_detector_rule_22b(tmp_path, name):
    dump(tmp_path / "in/a.pkl", rows(**{name: [0.1, 0.9, 0.4]}))
    refuse(tmp_path)


def test_selfcheck_is_no_score_rule_22b(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(selfcheck=[0.1, 0.9, 0.4]))
    assert all(np.isnan(trace.score) for trace in accept(tmp_path).values())


@pytest.mark.parametrize("values", [[0, 1, 1], [True, False, True], ["yes", "no", "no"]])
def test_column_of_0_and_1_without_a_word_rule_8a(tmp_path, values):
    dump(tmp_path / "in/a.pkl", rows(ok=values))
    refuse(tmp_path)


def test_score_without_a_direction_rule_22(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(score=[0.1, 0.9, 0.4]))
    proposal = refuse(tmp_path)
    meanings = {name.partition(".")[0] for c in proposal.candidates for name in c.layout.addresses if "score" in name}
    assert meanings == {"correctness", "hallucination"}


def test_several_scores_rule_22(tmp_path):
    """Labels come from one score of a store; of several columns no word tells which one."""
    dump(tmp_path / "in/a.pkl", rows())
    scores = [{"id": f"q{k}", "bleurt": 0.9 - 0.3 * k, "rougeL": 0.3, "exact_match": k % 2} for k in range(3)]
    table(tmp_path / "in/scores.csv", scores)
    refuse(tmp_path)


@pytest.mark.parametrize("value", [0.3, "maybe", -1, [1]])
def test_label_of_the_wrong_kind_rule_22a(tmp_path, value):
    dump(tmp_path / "in/a.pkl", rows(is_correct=[0, 1, value]))
    refuse(tmp_path)


def test_array_that_nothing_names_rule_8(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(other=[states(3, 7), states(3, 7), states(3, 7)]))
    refuse(tmp_path)


def test_file_that_nothing_names_rule_8(tmp_path):
    dump(tmp_path / "in/a.pkl", rows())
    (tmp_path / "in/judgments.json").write_text(json.dumps([{"who": "x", "grade": 1}]))
    refuse(tmp_path)


def test_two_states_of_one_trace_rule_8(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(answer_states=[states(2, 3, 8), states(2, 4, 8), states(2, 5, 8)]))
    refuse(tmp_path)


def test_transposed_attention_rule_6a(tmp_path):
    found = rows()
    for row in found:
        row["attn"] = np.swapaxes(row["attn"], -1, -2)
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def test_gap_in_layers_of_one_trace_rule_1(tmp_path):
    for k in range(3):
        for layer in (0, 1, 2):
            if (k, layer) != (1, 1):
                save(tmp_path / f"in/q{k}_layer{layer}.npy", states(4 + k, 8, seed=layer))
    refuse(tmp_path)


def _in(tmp_path):
    (tmp_path / "in").mkdir(exist_ok=True)
    return tmp_path / "in"


def test_a_folder_of_one_class_rule_22(tmp_path):
    """The traces of the other class are elsewhere: the name of the folder is a label that no line takes."""
    for row in rows():
        name = row.pop("id")
        dump(tmp_path / f"in/correct/{name}.pkl", row)
    refuse(tmp_path, "may say the class")


def test_one_row_of_a_table_next_to_one_file_rule_15(tmp_path):
    """The id of the row is not the name of the file."""
    row = rows(1)[0]
    del row["id"]
    dump(tmp_path / "in/7.pkl", row)
    table(tmp_path / "in/labels.csv", [{"qid": "07", "is_correct": 1}])
    refuse(tmp_path, "the number 1 joins a row")


def test_as_many_traces_as_ids_rule_3a(tmp_path):
    """The right one of both orders of square ids needs a statement about padding."""
    steps = [[states(5, 1, 8, seed=9 * k + n) for n in range(3)] for k in range(4)]
    ids = np.arange(25).reshape(5, 5) + 10
    ids[4, 2:] = 2
    found = {"hidden_states": steps, "sequences": ids, "attention_mask": np.ones((5, 1), int)}
    dump(tmp_path / "in/g.pkl", found)
    table(tmp_path / "in/labels.csv", [{"qid": f"q{k}", "is_correct": k % 2} for k in range(5)])
    refuse(tmp_path)


@pytest.mark.parametrize("is_padded", [False, True])
def test_generated_ids_that_repeat_the_last_one_rule_3a(tmp_path, is_padded):
    """A file with one row of generate() may hold a row of a larger batch that ended early."""
    for n in range(3):
        sizes = [4 + n, 1, 1, 1]
        steps = [[states(1, size, 8, seed=9 * n + 3 * k + x) for x in range(3)] for k, size in enumerate(sizes)]
        ids = np.arange(sum(sizes) + 1)[None] + 9
        ids[0, -2:] = (2, 2 if is_padded else 3)
        dump(tmp_path / f"in/q{n}.pkl", {"hidden_states": steps, "sequences": ids})
    assert any(candidate.is_proved for candidate in refuse(tmp_path).candidates) != is_padded


def test_attention_with_rows_and_columns_exchanged_where_heads_are_as_many_as_traces_rule_6a(tmp_path):
    """The values refuse the usual order of the axes, not the one with heads in front."""
    mask = np.arange(6) < np.array([[6], [4], [5]])
    weights = np.stack(
        [np.stack([np.pad(attention(3, n, n), [(0, 0), (0, 6 - n), (0, 6 - n)])] * 2) for n in (6, 4, 5)]
    )
    hidden = np.stack([np.pad(states(2, n, 8, seed=n), [(0, 0), (0, 6 - n), (0, 0)]) for n in (6, 4, 5)])
    found = {"hidden_states": hidden, "attentions": weights.swapaxes(3, 4), "attention_mask": mask.astype("i8")}
    dump(tmp_path / "in/a.pkl", found)
    table(tmp_path / "in/labels.csv", [{"qid": f"q{k}", "is_correct": k % 2} for k in range(3)])
    refuse(tmp_path)


def test_an_id_beside_that_is_not_the_name_of_the_folder_rule_10(tmp_path):
    for k, row in enumerate(rows()):
        name = row.pop("id")
        dump(tmp_path / f"in/{name}/trace.pkl", row)
        (tmp_path / f"in/{name}/meta.json").write_text(json.dumps({"question_id": f"q{k // 2}", "question": "a b c d"}))
    refuse(tmp_path, "question_id")


@pytest.mark.parametrize("name", ["semantic_entropy", "perplexity", "p_true", "uncertainty_estimate", "my_metric"])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_column_of_numbers_may_be_a_score_rule_8a(tmp_path, name, suffix):
    for row in rows(lengths=(6, 7, 8)):
        np.savez(_in(tmp_path) / f"{row.pop('id')}.npz", **row)
    lines = [{"qid": f"q{k}", "question": f"why {k}?", name: 0.25 + k / 8} for k in range(3)]
    table(tmp_path / f"in/rows.{suffix}", lines)
    refuse(tmp_path)


@pytest.mark.parametrize("name", ["prompt_lens", "prompt_lengths", "input_lens"])
def test_lengths_of_prompts_are_no_lengths_of_traces_rule_9(tmp_path, name):
    sizes = [6, 7, 8]
    arrays = {
        "hidden": np.concatenate([states(2, size, 8, seed=size) for size in sizes], axis=1),
        "tokens": np.arange(5, 5 + sum(sizes)),
        "cu_seqlens": np.array([0, 6, 13, 21]),
        name: np.array([2, 3, 4]),
    }
    np.savez(_in(tmp_path) / "dump.npz", **arrays)
    (tmp_path / "in/meta.json").write_text(json.dumps({"ids": ["a", "b", "c"], "layers": [0, 1]}))
    assert [trace.prompt_length for trace in accept(tmp_path).values()] == [2, 3, 4]


def test_a_column_without_a_name_is_read(tmp_path):
    for row in rows(lengths=(6, 7, 8)):
        np.savez(_in(tmp_path) / f"{row.pop('id')}.npz", **row)
    table(tmp_path / "in/rows.csv", [{"": 10 + k, "qid": f"q{k}", "question": f"why {k}?"} for k in range(3)])
    assert [trace.question for trace in accept(tmp_path).values()] == ["why 0?", "why 1?", "why 2?"]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize("sizes", [(33, 16), (16, 33)])
def test_reduced_states_may_have_more_layers_than_columns_rule_19(tmp_path, order, sizes):
    """Principal components: 33 layers and 16 columns fit the order in which layers and columns are swapped."""
    (tmp_path / "in").mkdir()
    for k in range(3):
        hidden = states(sizes[0], 5 + k, sizes[1], seed=k).transpose(order)
        np.savez(tmp_path / f"in/q{k}.npz", hidden_states=hidden, input_ids=np.arange(5 + k))
    axes = "".join("LSD"[k] for k in order)
    if sizes[0] < sizes[1] and axes[-1] == "D":
        assert accept(tmp_path)["q1", 0].hidden_states.shape == (16, 6, 33)
    else:
        refuse(tmp_path, "an axis behind it may be the columns of reduced states")


@pytest.mark.parametrize("rank", [2, 3])
def test_last_tokens_with_more_layers_than_columns_rule_19(tmp_path, rank):
    found = [{"id": f"q{k}", "last_token": states(33, 16, seed=k), "answer": f"A{k}."} for k in range(4)]
    if rank == 3:
        found = {"last_token": np.stack([row["last_token"] for row in found]), "id": [row["id"] for row in found]}
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def test_numbers_of_layers_prove_columns_in_front_rule_19(tmp_path):
    found = [
        {
            "id": f"q{k}",
            "hidden_states": states(16, 5 + k, 3, seed=k),
            "layers": [4, 8, 12],
            "tokens": list(range(5 + k)),
        }
        for k in range(3)
    ]
    dump(tmp_path / "in/a.pkl", found)
    np.testing.assert_allclose(
        accept(tmp_path)["q1", 0].hidden_states, found[1]["hidden_states"].transpose(2, 1, 0), rtol=2e-3, atol=1e-3
    )


def test_ids_of_a_list_in_another_order(tmp_path):
    """[a table sorted by id next to a list of the ids of the rows]"""
    save(tmp_path / "in/hidden_states.npy", states(3, 2, 4, 8))
    save(tmp_path / "in/attention_mask.npy", np.ones((3, 4), "i8"))
    (tmp_path / "in/ids.txt").write_text("c\na\nb\n")
    table(tmp_path / "in/answers.csv", [{"question_id": q, "answer": q, "is_correct": 1} for q in "abc"])

    proposal = proposal_of(tmp_path)

    assert not proposal.candidates
    assert "ids.txt: has the ids of question_id in another order" in proposal.refusals


def test_two_files_of_one_letter_are_no_ids(tmp_path):
    """[X.npy and y.npy]"""
    save(tmp_path / "in/X.npy", states(6, 5, 12))
    save(tmp_path / "in/y.npy", np.array([0, 1, 0, 1, 1, 0]))

    proposal = proposal_of(tmp_path)
    stores = check_candidates(tmp_path, proposal)

    assert {"X.npy", "y.npy"} == set(proposal.observation.files)
    assert any(c.outcome.is_last_token and c.outcome.counts.get("is_correct") == (3, 3, 6) for c, _ in stores)


def test_names_of_axes_in_hdf5_are_no_labels(tmp_path):
    """[DIMENSION_LABELS]"""
    (tmp_path / "in").mkdir()
    with h5py.File(tmp_path / "in/a.h5", "w") as file:
        for k in range(3):
            group = file.create_group(f"q{k}")
            hidden = group.create_dataset("hidden_states", data=states(2, 3 + k, 8))
            for axis, name in enumerate(("layer", "token", "dim")):
                hidden.dims[axis].label = name
            group["input_ids"] = np.arange(3 + k)

    assert "DIMENSION" not in "".join(proposal_of(tmp_path).tree())
    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr")
    assert len(tracestore.open(tmp_path / "s.zarr")) == 3
