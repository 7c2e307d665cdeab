"""Test folders whose meaning is proved: the proposal is used by itself."""

import itertools

import numpy as np
import pytest

import tracestore
from tests.helpers import make_optional
from tests.ingest.execute.folders import dump, save, states, table
from tests.ingest.propose.folders import accept, refuse
from tests.ingest.propose.test_traps import attention, rows
from tracestore.store.format.schema import PER_TOKEN_FIELDS


def test_a_list_of_dicts(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(is_correct=[0, 1, 1]))
    found = accept(tmp_path)
    assert [found[f"q{k}", 0].score for k in range(3)] == [0, 1, 1]
    np.testing.assert_allclose(found["q1", 0].hidden_states, rows()[1]["hs"], rtol=2e-3, atol=1e-3)


def test_parquet_of_datasets(tmp_path):
    """`Dataset.to_parquet()` describes its columns and its pages in the metadata of the file."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    items = [{"id": row["id"], "hs": row["hs"].tolist(), "input_ids": row["input_ids"]} for row in rows()]
    data = pa.Table.from_pylist([item | {"hidden_states": item.pop("hs")} for item in items])
    (tmp_path / "in").mkdir()
    with pq.ParquetWriter(tmp_path / "in/a.parquet", data.schema) as writer:
        writer.write_table(data)
        writer.add_key_value_metadata({"huggingface": "{}", "content_defined_chunking": '{"norm_level": 0}'})
    assert accept(tmp_path)["q2", 0].hidden_states.shape == (2, 5, 8)


@pytest.mark.parametrize("beside", [{"tokens": [1, 2, 3, 4, 5, 6]}, {"generated_answer": "It is number 3."}])
def test_states_of_all_layers_with_one_row_of_tokens_rule_18(tmp_path, beside):
    found = []
    for k in range(3):
        own = {name: value[: 4 + k] if isinstance(value, list) else value for name, value in beside.items()}
        found.append({"id": f"q{k}", "hidden_states": states(3, 4 + k, 8, seed=k), **own})
    dump(tmp_path / "in/a.pkl", found)
    assert accept(tmp_path)["q2", 0].hidden_states.shape == (3, 6, 8)


def test_values_per_token_of_the_names_of_fields(tmp_path):
    found = [row | make_optional(len(row["input_ids"]), k) for k, row in enumerate(rows())]
    for row in found:
        row["generated_mask"][-1] = 1
    names = ("answer_span", "spans", "temperature", "seed", "top_ids", "top_logprobs")
    dump(tmp_path / "in/a.pkl", [{name: row[name] for name in row if name not in names} for row in found])
    traces = accept(tmp_path)
    for k, name in itertools.product(range(3), PER_TOKEN_FIELDS):
        np.testing.assert_array_equal(traces[f"q{k}", 0].optional(name), found[k][name])


@pytest.mark.parametrize(
    "key", ["self_attn.weights", "self_attn", "self_attn.attn_weights", "attn_weights", "attn_probs", "attention_probs"]
)
@pytest.mark.parametrize("heads", [(3,), ()])
def test_attention_by_the_names_of_modules(tmp_path, key, heads):
    found = []
    for row in rows():
        weights = attention(2, *heads, *row.pop("attn").shape[-2:])
        layers = {f"model.layers.{k}": layer for k, layer in enumerate(row.pop("hs"))}
        found.append(row | layers | {f"model.layers.{k}.{key}": one for k, one in enumerate(weights)})
    dump(tmp_path / "in/a.pkl", found)
    traces = accept(tmp_path)
    np.testing.assert_allclose(
        np.array(traces["q1", 0].attention).reshape(2, -1, 6, 6)[:, 0], attention(2, 6, 6), atol=2e-3
    )


@pytest.mark.parametrize("key", ["a", "arr", "data", "dataset", "tensor", "t"])
def test_the_name_of_a_file_counts_where_a_key_says_nothing(tmp_path, key):
    found = rows()
    for name, of_row in {"hidden_states": "hs", "attn": "attn", "input_ids": "input_ids"}.items():
        for row in found:
            (tmp_path / "in" / name).mkdir(exist_ok=True, parents=True)
            np.savez(tmp_path / f"in/{name}/{row['id']}.npz", **{key: row[of_row]})
    trace = accept(tmp_path)["q2", 0]
    assert trace.num_tokens == 5 and trace.attention is not None and list(trace.tokens) == [5, 6, 7, 8, 9]


def test_tokens_before_layers(tmp_path):
    found = rows()
    for row in found:
        row["hs"] = row["hs"].transpose(1, 0, 2)
    dump(tmp_path / "in/a.pkl", found)
    traces = accept(tmp_path)
    np.testing.assert_allclose(traces["q1", 0].hidden_states, rows()[1]["hs"], rtol=2e-3, atol=1e-3)


def test_a_padded_stack_with_a_mask(tmp_path):
    (tmp_path / "in").mkdir()
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    np.savez(
        tmp_path / "in/a.npz",
        hidden_states=states(3, 2, 5, 9),
        layers=np.array([4, 8]),
        attention_mask=mask,
        input_ids=np.where(mask, np.arange(15).reshape(3, 5) + 5, 0),
        question_id=np.array(["a", "b", "c"]),
    )
    found = accept(tmp_path)
    assert [found[name, 0].num_tokens for name in "abc"] == [3, 5, 4]


@pytest.mark.parametrize("names", ["{}_layer{}.npy", "{}/layer_{}.npy", "layer_{1}/{0}.npy"])
def test_a_file_per_id_and_layer(tmp_path, names):
    for k in range(3):
        for layer in (4, 8):
            save(tmp_path / "in" / names.format(f"q{k}", layer), states(4 + k, 8, seed=10 * k + layer))
    table(tmp_path / "in/labels.csv", [{"id": f"q{k}", "hallucinated": k % 2} for k in range(3)])
    found = accept(tmp_path)
    assert [found[f"q{k}", 0].score for k in range(3)] == [0, 1, 0]
    np.testing.assert_allclose(found["q2", 0].hidden_states[1], states(6, 8, seed=28), rtol=2e-3, atol=1e-3)


def test_words_that_agree_with_a_label_rule_22(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(label=[0, 1, 0], verdict=["correct", "hallucinated", "correct"]))
    accept(tmp_path)
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.named_scores("is_hallucinated").tolist() == [0, 1, 0]
        assert store.named_scores("is_correct").tolist() == [1, 0, 1]


def test_correct_with_booleans_rule_22(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(correct=[False, True, True]))
    assert accept(tmp_path)["q1", 0].score == 1


def test_last_tokens_with_numbers_of_layers(tmp_path):
    for layer in (4, 8):
        np.savez(
            _made(tmp_path) / f"layer_{layer}.npz",
            last_token=states(4, 8, seed=layer),
            ids=np.array([f"q{k}" for k in range(4)]),
            hallucinated=np.array([0, 1, 0, 1]),
        )
    assert accept(tmp_path)["q1", 0].last_token.shape == (2, 8)


def test_heads_are_averaged_where_there_is_one_attention_per_layer(tmp_path):
    dump(
        tmp_path / "in/a.pkl",
        {
            f"q{k}": {"hidden_states": states(3, 4 + k, 8, seed=k), "attentions": attention(3, 4 + k, 4 + k)}
            for k in range(3)
        },
    )
    assert accept(tmp_path)["q2", 0].hidden_states.shape == (3, 6, 8)


def heads_and_layers(order, *, batch=False):
    """Return records of three layers with attention of three heads, whose values tell heads from layers."""
    found = []
    for k, size in enumerate((4, 6, 5)):
        weights = np.tril(np.exp(states(3, 3, size, size, seed=k)))  # layer, head, row, column
        weights = (weights / weights.sum(-1, keepdims=True)).transpose(order)
        hs, weights = (values[:, None] if batch else values for values in (states(3, size, 8, seed=k), weights))
        found.append({"id": f"q{k}", "hidden_states": list(hs), "attentions": list(weights)})
    return found


def test_attention_of_as_many_heads_as_layers_in_batches_of_one_rule_19(tmp_path):
    """The batch axis of a forward pass lies between layers and heads."""
    found = heads_and_layers((0, 1, 2, 3), batch=True)
    dump(tmp_path / "in/a.pkl", found)
    weights = np.stack(found[1]["attentions"])[:, 0]
    np.testing.assert_allclose(accept(tmp_path)["q1", 0].attention, weights.mean(1), atol=2e-3)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("form", ["no batch", "batch in front", "batch behind"])
def test_attention_of_as_many_heads_as_layers_without_a_batch_between_them_rule_19(tmp_path, order, form):
    at = {"batch in front": 0, "batch behind": 2}
    found = heads_and_layers(order)
    for row in found if form in at else ():
        row["attentions"] = np.expand_dims(np.stack(row["attentions"]), at[form])
    dump(tmp_path / "in/a.pkl", found)
    refuse(tmp_path)


def _made(tmp_path):
    (tmp_path / "in").mkdir(exist_ok=True)
    return tmp_path / "in"


@pytest.mark.parametrize("name", ["prompt_length", "prompt_len", "n_prompt_tokens", "prompt_tokens"])
@pytest.mark.parametrize(("lengths", "is_taken"), [([3, 4, 4], True), ([30, 42, 51], False), ([0, 4, 5], False)])
def test_rule_16_a_prompt_length_beside_texts_of_tokens(tmp_path, name, lengths, is_taken):
    """[a number of characters]"""
    found = rows()
    for row, length in zip(found, lengths, strict=True):
        tokens = [f"w{k}" for k in range(row["hs"].shape[1])]
        row |= {"tokens": tokens, name: length}
        del row["input_ids"]
    dump(tmp_path / "in/a.pkl", found)

    traces = accept(tmp_path).values()

    assert [trace.prompt_length for trace in traces] == (lengths if is_taken else [None] * 3)
