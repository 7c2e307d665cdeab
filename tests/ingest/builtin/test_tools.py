"""Test built-in layouts of tools on files as their scripts write them, and on copies that differ in one thing."""

import json

import numpy as np
import pytest
import torch

import tracestore
from tests.ingest.builtin.checks import write
from tracestore.errors import InvalidInputError
from tracestore.ingest.builtin.claiming import claim
from tracestore.ingest.builtin.library import builtins

RNG = np.random.default_rng(11)


def states(*shape):
    return RNG.standard_normal(shape).astype("f4")


def owners(tmp_path, files):
    """Write files; return the tool of each, None without one."""
    for name, value in files.items():
        write(tmp_path / "in" / name, value)
    found = claim({name: tmp_path / "in" / name for name in files}, builtins())
    tools = {name: builtin.name for builtin, own in found.owned.items() for name in own}
    return {tools.get(name) for name in files}


def converted(tmp_path, **options):
    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", **options)
    return {(trace.question_id, trace.sample): trace for trace in tracestore.open(tmp_path / "s.zarr")}


def specforge(length=6, padding=0):
    """Return a row of a batch whose ids and states continue behind the tokens."""
    size = length + padding
    ids = torch.tensor([*range(5, 5 + length), *[0] * padding])
    mask = torch.tensor([0] * 3 + [1] * (length - 3) + [0] * padding)
    return {"input_ids": ids, "loss_mask": mask, "hidden_state": torch.from_numpy(states(1, size, 8)),
            "aux_hidden_state": torch.from_numpy(states(1, size, 24))}  # fmt: skip


def test_padding_of_a_batch_of_specforge_is_no_token(tmp_path):
    rows = [specforge(6, 0), specforge(4, 2)]
    assert owners(tmp_path, {f"rows_0-2000/data_{k}.ckpt": row for k, row in enumerate(rows)}) == {"specforge"}

    traces = converted(tmp_path, attention="none").values()

    assert sorted(trace.num_tokens for trace in traces) == [4, 6]
    short = min(traces, key=lambda trace: trace.num_tokens)
    np.testing.assert_allclose(short.hidden_states[0], rows[1]["hidden_state"][0, :4], atol=2e-3)


def answer(prompt=4, new=3, **info):
    """Return a response of SGLang: the states of the prompt, then a vector for each new token but the last."""
    hidden = [states(prompt, 8).tolist(), *states(new - 1, 8).tolist()]
    meta = {"id": "r", "prompt_tokens": 4, "completion_tokens": new, "cached_tokens": 0, "hidden_states": hidden}
    return {"text": "an answer", "output_ids": list(range(new)), "meta_info": meta | info}


def test_responses_of_sglang(tmp_path):
    rows = [answer(id="a"), answer(id="b", new=2)]
    assert owners(tmp_path, {"a.jsonl": rows}) == {"sglang"}

    traces = converted(tmp_path, attention="none")

    assert traces["a", 0].prompt_length == 4 and traces["a", 0].num_tokens == 6
    np.testing.assert_allclose(traces["b", 0].hidden_states[0, :4], rows[1]["meta_info"]["hidden_states"][0], atol=2e-3)


@pytest.mark.parametrize("rows", [[answer(cached_tokens=2)], [answer(prompt=2)], [answer(), answer(id="b", prompt=2)]])
def test_prompts_of_which_a_part_was_cached_are_refused(tmp_path, rows):
    owners(tmp_path, {"a.jsonl": rows})

    with pytest.raises(InvalidInputError):
        converted(tmp_path, attention="none")


def csv_of(rows):
    return "statement,label,embeddings\n" + "".join(f'{text},{label},"{list(v)}"\n' for text, label, v in rows)


def test_layers_of_saplma_count_from_the_end(tmp_path):
    """The script takes the absolute value of the numbers of layers, which are negative."""
    rows = {layer: [(f"s {k}", k % 2, map(float, states(8))) for k in range(3)] for layer in (1, 4)}
    rows = {layer: [(text, label, list(v)) for text, label, v in found] for layer, found in rows.items()}
    files = {f"embeddings_cities6.7b_{layer}_rmv_period.csv": csv_of(found) for layer, found in rows.items()}
    assert owners(tmp_path, files) == {"saplma"}

    found = converted(tmp_path, attention="none")

    assert sorted(found) == [(f"cities6.7b_rmv_period_{k}", 0) for k in range(3)]
    traces = [trace for _, trace in sorted(found.items())]
    assert [trace.score for trace in traces] == [0, 1, 0]  # label 1 is a true statement
    for k, trace in enumerate(traces):
        np.testing.assert_allclose(trace.last_token, [rows[4][k][2], rows[1][k][2]], atol=2e-3)


def test_a_number_next_to_the_word_layer_does_not_count_from_the_end(tmp_path):
    files = {f"embeddings_animals_layer_{k}.csv": csv_of([("s", 1, states(8).tolist())]) for k in (2, 10)}
    assert owners(tmp_path, files) == {None}


@pytest.mark.parametrize("column", ["", "Unnamed: 0"])
@pytest.mark.parametrize(("numbers", "is_read"), [((0, 1, 2), True), ((0, 2, 3), False), (("a", "b", "c"), False)])
def test_saplma_reads_the_index_that_counts_rows(tmp_path, column, numbers, is_read):
    for layer in (1, 4):
        text = csv_of([(f"s {k}", k % 2, states(8).tolist()) for k in range(3)]).splitlines()
        text = [f"{first},{line}" for first, line in zip((column, *numbers), text, strict=True)]
        write(tmp_path / f"in/embeddings_x_{layer}.csv", "\n".join(text) + "\n")

    if is_read:
        assert [len(trace.last_token) for trace in converted(tmp_path, attention="none").values()] == [2] * 3
    else:
        with pytest.raises(tracestore.TracestoreError, match="this column of ids is left out"):
            converted(tmp_path, attention="none")


def test_a_pattern_of_transformer_lens_is_one_a_layer(tmp_path):
    """The file has two heads and three layers."""
    cache = {f"blocks.{k}.hook_resid_post": torch.from_numpy(states(1, 5, 8)) for k in range(3)}
    cache |= {f"blocks.{k}.attn.hook_pattern": torch.eye(5).expand(1, 2, 5, 5).clone() for k in range(3)}
    cache |= {"hook_embed": torch.from_numpy(states(1, 5, 8)), "ln_final.hook_scale": torch.ones(1, 5, 1)}
    assert owners(tmp_path, {"q1.pt": cache}) == {"transformer_lens"}

    (trace,) = converted(tmp_path, attention="heads").values()

    assert trace.hidden_states.shape == (3, 5, 8) and trace.attention.shape == (3, 2, 5, 5)


def batch(size=7, **changes):
    """Return what LapEigvals stores of a batch of one: a prompt of 4 tokens, 4 new ones."""
    value = {
        "attention_mask": torch.ones(1, 4, dtype=torch.long), "special_token_mask": torch.zeros(1, 8, dtype=torch.long),
        "decoder_token_mask": torch.zeros(1, 8, dtype=torch.bool), "input_length": 4,
        "generated_tokens": torch.arange(5, 13)[None],
        "hidden_states": [torch.from_numpy(states(1, size, 16)) for _ in range(3)],
    }  # fmt: skip
    return {name: entry for name, entry in (value | changes).items() if entry is not None}


def test_batches_of_lapeigvals(tmp_path):
    assert owners(tmp_path, {"activations/batch_0.pt": batch(), "activations/batch_1.pt": batch()}) == {"lapeigvals"}

    traces = converted(tmp_path, attention="none").values()

    assert [trace.prompt_length for trace in traces] == [4, 4] and {trace.num_tokens for trace in traces} == {7}


LAPEIGVALS = {
    "a batch of two": {"generated_tokens": torch.zeros(2, 8, dtype=torch.long)},
    "no mask": {"special_token_mask": None},
    "a padded prompt": {"attention_mask": torch.tensor([[0, 1, 1, 1]])},
    "another array": {"logits": torch.ones(1, 8, 30)},
    "integers": {"hidden_states": [torch.ones(1, 7, 16, dtype=torch.long)] * 3},
    "ids of the answer alone": {"generated_tokens": torch.arange(4)[None]},
}


@pytest.mark.parametrize("trap", LAPEIGVALS)
def test_traps_of_lapeigvals(tmp_path, trap):
    assert owners(tmp_path, {"activations/batch_0.pt": batch(**LAPEIGVALS[trap])}) == {None}


def test_a_padded_prompt_in_a_later_batch_of_lapeigvals(tmp_path):
    padded = batch(attention_mask=torch.tensor([[0, 1, 1, 1]]))
    owners(tmp_path, {"activations/batch_0.pt": batch(), "activations/batch_1.pt": padded})

    with pytest.raises(InvalidInputError):
        converted(tmp_path, attention="none")


def generations(shape=(1, 8), **changes):
    """Return what semantic_uncertainty stores of a question."""
    likely = {
        "response": "a",
        "token_log_likelihoods": [-0.1],
        "embedding": torch.from_numpy(states(*shape)),
        "accuracy": 1.0,
    }
    row = {"question": "q?", "context": None, "most_likely_answer": likely | changes, "reference": {"id": "x"}}
    return {"x": row | {"responses": [("b", [-0.2], torch.from_numpy(states(*shape)), 0.0)]}}


def test_generations_of_semantic_uncertainty(tmp_path):
    files = {"validation_generations.pkl": generations()}
    assert owners(tmp_path, files) == {"semantic_uncertainty"}

    (trace,) = converted(tmp_path, attention="none").values()

    assert trace.last_token.shape == (1, 8) and trace.score == 1 and trace.answer == "a"


@pytest.mark.parametrize(
    "value", [generations((3, 1, 8)), generations((8,)), generations(accuracy=None), generations(label=1)]
)
def test_traps_of_semantic_uncertainty(tmp_path, value):
    assert owners(tmp_path, {"validation_generations.pkl": value}) == {None}


def test_haloscope_with_the_answers_that_its_script_leaves(tmp_path):
    base = "save_for_eval/tqa_hal_det"
    files = {
        f"{base}/most_likely_m_gene_embeddings_layer_wise.npy": states(3, 4, 12),
        "ml_tqa_bleurt_score.npy": np.array([0.2, 0.9, 0.5]),
    }
    files |= {f"{base}/answers/most_likely_hal_det_m_tqa_answers_index_{k}.npy": np.array(["x"]) for k in range(3)}
    assert owners(tmp_path, files) == {"haloscope"}

    assert sorted(trace.score for trace in converted(tmp_path, attention="none").values()) == pytest.approx(
        [0.2, 0.5, 0.9]
    )


@pytest.mark.parametrize("layers", [states(3, 12, 4), states(3, 12), np.ones((3, 4, 12), "i4")])
def test_traps_of_haloscope(tmp_path, layers):
    name = "save_for_eval/tqa_hal_det/most_likely_m_gene_embeddings_layer_wise.npy"
    assert owners(tmp_path, {name: layers, "ml_tqa_bleurt_score.npy": np.ones(3)}) == {None}


def test_every_url_names_a_commit():
    for builtin in builtins():
        defined = builtin.source["defined"]
        assert defined == "docs/inputs.md" or (
            "/blob/" in defined and len(defined.split("/blob/")[1].split("/")[0]) >= 12
        )


def test_activations_of_geometry_of_truth(tmp_path):
    files = {f"acts/LLaMA/cities/layer_12_{k}.pt": torch.from_numpy(states(25, 8)) for k in (0, 25)}
    files["datasets/cities.csv"] = "statement,label\n" + "".join(f"s {k},{k % 2}\n" for k in range(50))
    assert owners(tmp_path, files) == {"geometry_of_truth"}

    found = {trace.question: trace for trace in converted(tmp_path, attention="none").values()}

    assert found["s 26"].score == 0 and found["s 27"].score == 1  # label 1 is a true statement
    np.testing.assert_allclose(found["s 26"].last_token[0], files["acts/LLaMA/cities/layer_12_25.pt"][1], atol=2e-3)

    table = tmp_path / "in/datasets/cities.csv"
    table.write_text(table.read_text().replace("s 26,0", "s 26,1"))
    found = {trace.question: trace for trace in converted(tmp_path, attention="none").values()}
    assert found["s 26"].score == 1, "a table of a built-in layout belongs to every file"


def test_each_data_set_of_geometry_of_truth_counts_its_rows(tmp_path):
    files = {}
    for name, rest in (("cities", 1), ("neg_cities", 3)):
        files |= {
            f"acts/M/{name}/layer_12_{first}.pt": torch.from_numpy(states(count, 8))
            for first, count in ((0, 25), (25, rest))
        }
        rows = (f"{name} {k},{k % 2}\n" for k in range(25 + rest))
        files[f"datasets/{name}.csv"] = "statement,label\n" + "".join(rows)
    owners(tmp_path, files)

    found = {trace.question: trace for trace in converted(tmp_path, attention="none").values()}

    assert len(found) == 26 + 28
    for name in ("cities", "neg_cities"):
        expected = files[f"acts/M/{name}/layer_12_25.pt"][0]
        np.testing.assert_allclose(found[f"{name} 25"].last_token[0], expected, atol=2e-3)
        assert found[f"{name} 24"].score == 0 and found[f"{name} 25"].score == 1


def test_two_models_of_geometry_of_truth_are_not_joined_to_the_same_rows(tmp_path):
    files = {f"acts/{model}/cities/layer_12_0.pt": torch.from_numpy(states(25, 8)) for model in "AB"}
    files["datasets/cities.csv"] = "statement,label\n" + "s,1\n" * 25
    owners(tmp_path, files)

    with pytest.raises(InvalidInputError, match=r"found the chunk 0 also as acts/A/.*: convert one after the other"):
        converted(tmp_path, attention="none")


@pytest.mark.parametrize(
    "changes",
    [
        {"acts/LLaMA/cities/layer_12_0.pt": torch.ones(25, 3, 8)},  # all tokens, or several layers
        {"acts/LLaMA/cities/layer_12_0.pt": torch.ones(25, 8, dtype=torch.long)},
        {"datasets/cities.csv": "statement,truth\n" + "s,1\n" * 25},
    ],
)
def test_traps_of_geometry_of_truth(tmp_path, changes):
    files = {"acts/LLaMA/cities/layer_12_0.pt": torch.from_numpy(states(25, 8))}
    files["datasets/cities.csv"] = "statement,label\n" + "s,1\n" * 25
    assert None in owners(tmp_path, files | changes)

    with pytest.raises(InvalidInputError):
        converted(tmp_path, attention="none")


def test_a_lost_file_of_geometry_of_truth_is_refused(tmp_path):
    files = {f"acts/LLaMA/cities/layer_12_{k}.pt": torch.from_numpy(states(25, 8)) for k in (0, 50)}
    files["datasets/cities.csv"] = "statement,label\n" + "s,1\n" * 75
    owners(tmp_path, files)

    with pytest.raises(InvalidInputError):
        converted(tmp_path, attention="none")


def features(index, words=("[CLS]", "a", "[SEP]"), **changes):
    """Return a line of extract_features.py: two layers of each token, counted from the end."""
    layers = [[{"index": -k, "values": states(8).tolist()} for k in (1, 2)] for _ in words]
    tokens = [{"token": word, "layers": found} for word, found in zip(words, layers, strict=True)]
    return {"linex_index": index, "features": tokens} | changes


def test_lines_of_bert_features(tmp_path):
    rows = [features(0), features(1, ("[CLS]", "[SEP]"))]
    assert owners(tmp_path, {"output.jsonl": rows}) == {"bert_features"}

    traces = converted(tmp_path, attention="none")

    assert list(traces["1", 0].tokens_decoded) == ["[CLS]", "[SEP]"]
    np.testing.assert_allclose(
        traces["0", 0].hidden_states[1, 1], rows[0]["features"][1]["layers"][0]["values"], atol=2e-3
    )


@pytest.mark.parametrize(
    "row",
    [
        features(0, label=1),
        features("0"),
        {"linex_index": 0, "features": [{"token": "a", "layers": [{"index": -1, "values": [[1.0, 2.0]]}]}]},
        {"linex_index": 0, "features": [{"token": 7, "layers": [{"index": -1, "values": [1.0, 2.0]}]}]},
    ],
)
def test_traps_of_bert_features(tmp_path, row):
    assert owners(tmp_path, {"output.jsonl": [row]}) == {None}


def test_a_layer_that_a_token_lacks_in_bert_features_is_refused(tmp_path):
    row = features(0)
    del row["features"][1]["layers"][1]
    write(tmp_path / "in/output.jsonl", [row])

    with pytest.raises(InvalidInputError):
        converted(tmp_path, attention="none")


def pooled(request_id="r", size=4, data=None, **changes):
    """Return what LLM.encode() of vLLM returns for a request."""
    data = torch.from_numpy(states(size, 8)) if data is None else data
    row = {"request_id": request_id, "prompt_token_ids": list(range(size)), "outputs": {"data": data}, "finished": True}
    return row | changes


def test_requests_of_vllm_pooling(tmp_path):
    rows = [pooled("a"), pooled("b", 6)]
    assert owners(tmp_path, {"pooled.pt": rows}) == {"vllm_pooling"}

    traces = converted(tmp_path, attention="none")

    assert traces["b", 0].tokens.tolist() == list(range(6))
    np.testing.assert_allclose(traces["a", 0].hidden_states[0], rows[0]["outputs"]["data"], atol=2e-3)


@pytest.mark.parametrize(
    "row",
    [
        pooled(data=torch.ones(8)),  # one vector: pooled over the tokens
        pooled(data=torch.ones(3, 8)),  # fewer states than ids
        pooled(num_cached_tokens=16),
        pooled(label=1),
    ],
)
def test_traps_of_vllm_pooling(tmp_path, row):
    assert owners(tmp_path, {"pooled.pt": [row]}) == {None}


def save_contexts(folder, **changes):
    """Save contexts as CacheActivationsRunner of SAELens does."""
    datasets = pytest.importorskip("datasets")
    rows = {"blocks.3.hook_resid_post": [states(5, 8).tolist() for _ in range(3)], "token_ids": [list(range(5))] * 3}
    rows = {name: values for name, values in (rows | changes).items() if values is not None}
    datasets.Dataset.from_dict(rows).save_to_disk(folder)
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def test_contexts_of_saelens(tmp_path):
    files = save_contexts(tmp_path / "in")
    assert {builtin.name for builtin in claim(files, builtins()).owned} == {"saelens"}

    traces = converted(tmp_path, attention="none").values()

    assert {trace.hidden_states.shape for trace in traces} == {(1, 5, 8)}
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.provenance[0].layer_ids == (3,)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [list(range(4))] * 3},  # fewer ids than activations
        {"token_ids": None},
        {"label": [0, 1, 0]},
        {"blocks.3.hook_resid_post": [[float(k) for k in range(5)]] * 3},  # a number for each token
    ],
)
def test_traps_of_saelens(tmp_path, changes):
    files = save_contexts(tmp_path / "in", **changes)
    assert not claim(files, builtins()).owned


def save_requests(folder, layers=(2, 16, 29), **changes):
    """Save files of speculators: S 6, D 8, and config.json with the numbers of the layers."""
    from safetensors.numpy import save_file

    (folder / "hidden_states").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"target_layer_ids": list(layers), "verifier": "m"}))
    for k in range(2):
        found = {"hidden_states": states(6 + k, 3, 8), "token_ids": np.arange(6 + k)} | changes
        save_file(found, folder / f"hidden_states/hs_{k}.safetensors")
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def test_requests_of_speculators(tmp_path):
    files = save_requests(tmp_path / "in")
    assert {builtin.name for builtin in claim(files, builtins()).owned} == {"speculators"}

    assert sorted(trace.num_tokens for trace in converted(tmp_path, attention="none").values()) == [6, 7]

    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.provenance[0].layer_ids == (2, 16, 29)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": (2, 16)},  # of another run: the states have three layers
        {"token_ids": np.arange(5)},
        {"values": states(6, 3, 8)},  # states without a name of their own
        {"hidden_states": states(6, 12, 8)},  # layers behind the hidden size
    ],
)
def test_traps_of_speculators(tmp_path, changes):
    save_requests(tmp_path / "in", **changes)

    with pytest.raises(InvalidInputError):
        converted(tmp_path, attention="none")
