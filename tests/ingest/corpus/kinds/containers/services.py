"""JSON of tools and services: extracted features, responses, outputs of inference engines, tables of pandas."""

import json

import numpy as np

from tests.ingest.corpus.kinds.hdf5 import create
from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import make_samples, open_binary, save_pt, tensor, write_json, write_lines


@kind(expect="words")
def json_of_extract_features(folder, samples):
    """Write a line per text of BERT's extract_features: features with a token and layers with an index and values."""
    rows = [
        {
            "linex_index": i,
            "features": [
                {"token": word, "layers": [{"index": k - 3, "values": s.hidden[k, j].tolist()} for k in (2, 1, 0)]}
                for j, word in enumerate(s.words)
            ],
        }
        for i, s in enumerate(samples)
    ]
    write_lines(folder / "features.jsonl", rows)


@kind(count=4, layers=1, expect_last="")
def embeddings_response(folder, samples):
    """Write the response of an embeddings service: data with index and embedding, and the usage."""
    data = [{"object": "embedding", "index": i, "embedding": s.hidden[0, -1].tolist()} for i, s in enumerate(samples)]
    value = {"object": "list", "data": data, "model": "e5", "usage": {"prompt_tokens": 9, "total_tokens": 9}}
    write_json(folder / "embeddings.json", value)


@kind(expect="id answer words", rows="responses.jsonl")
def chat_responses_with_states(s):
    """Write a line per chat completion with choices, their log-probabilities, and hidden_states of the answer."""
    return {
        "id": s.question_id,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": s.answer},
                "logprobs": {
                    "content": [
                        {"token": w, "logprob": -0.5, "top_logprobs": [{"token": w, "logprob": -0.5}]} for w in s.words
                    ]
                },
                "hidden_states": s.hidden.tolist(),
            }
        ],
    }


@kind(refused=True)
def chat_responses_without_states(folder):
    """Write a line per chat completion with log-probabilities: there are no states."""
    rows = [
        {
            "id": s.question_id,
            "choices": [{"text": s.answer, "logprobs": {"tokens": s.words, "token_logprobs": [-0.25] * len(s.words)}}],
        }
        for s in make_samples(2)
    ]
    write_lines(folder / "responses.jsonl", rows)
    return []


@kind(expect="id question answer tokens")
def vllm_outputs(folder, samples):
    """Write request outputs of vLLM with prompt_token_ids, outputs (text, token_ids) and hidden_states by layer."""
    rows = []
    for s in samples:
        p = s.prompt_length
        rows.append(
            {
                "request_id": s.question_id,
                "prompt": s.question,
                "prompt_token_ids": s.tokens[:p].tolist(),
                "outputs": [
                    {"index": 0, "text": s.answer, "token_ids": s.tokens[p:].tolist(), "finish_reason": "stop"}
                ],
                "hidden_states": {str(k): h.tolist() for k, h in enumerate(s.hidden)},
            }
        )
    write_lines(folder / "outputs.jsonl", rows)


@kind(count=2, expect="id question tokens")
def json_gz_samples_below_run(folder, samples):
    """Write .json.gz: settings and samples, whose steps hold a token and the states of all layers."""
    value = {
        "config": {"model": "gpt2", "layers": 3},
        "version": 2,
        "date": "2026-01-01",
        "samples": [
            {
                "id": s.question_id,
                "question": s.question,
                "steps": [
                    {"token_id": int(t), "hidden_states": s.hidden[:, j].tolist()} for j, t in enumerate(s.tokens)
                ],
            }
            for s in samples
        ],
    }
    with open_binary(folder / "run.json.gz") as file:
        file.write(json.dumps(value).encode())


@kind(expect="id answer")
def json_split_of_pandas(folder, samples):
    """Write DataFrame.to_json(orient="split"): columns, index and data."""
    data = [[s.question_id, s.hidden.tolist(), s.answer] for s in samples]
    value = {"columns": ["id", "hidden_states", "answer"], "index": [0, 1, 2], "data": data}
    write_json(folder / "frame.json", value)


@kind(expect="id answer")
def json_columns_of_pandas(folder, samples):
    """Write DataFrame.to_json(): a dict by column of dicts by row number."""
    columns = {
        "id": [s.question_id for s in samples],
        "hidden_states": [s.hidden.tolist() for s in samples],
        "answer": [s.answer for s in samples],
    }
    value = {name: {str(i): v for i, v in enumerate(values)} for name, values in columns.items()}
    write_json(folder / "frame.json", value)


@kind(expect="id words tokens", rows="tokens.jsonl")
def jsonl_tokens_with_layers(s):
    """Write a line per text: tokens as objects with text, id and a list of vectors by layer."""
    return {
        "doc_id": s.question_id,
        "tokens": [
            {"text": w, "id": int(t), "layers": {str(k): s.hidden[k, j].tolist() for k in range(3)}}
            for j, (w, t) in enumerate(zip(s.words, s.tokens, strict=True))
        ],
    }


@kind(layers=1, expect="id mean words")
def json_graphs_of_nodes_and_links(folder, samples):
    """Write graphs as networkx.node_link_data gives them: nodes with hidden (D,) and token, links with the attention."""
    for s in samples:
        weights = s.attention[0].mean(0)
        count = range(len(s.tokens))
        nodes = [{"id": i, "token": s.words[i], "hidden": s.hidden[0, i].tolist()} for i in count]
        links = [{"source": j, "target": i, "weight": float(weights[i, j])} for i in count for j in range(i + 1)]
        write_json(folder / f"{s.question_id}.json", {"directed": True, "graph": {}, "nodes": nodes, "links": links})


@kind(count=4, layers=1, expect_last="id")
def jsonl_batch_output_of_embeddings(folder, samples):
    """Write lines of a batch of requests: id, custom_id and response.body.data with an embedding."""
    rows = []
    for k, s in enumerate(samples):
        data = [{"object": "embedding", "index": 0, "embedding": s.hidden[0, -1].tolist()}]
        response = {"status_code": 200, "body": {"object": "list", "data": data}}
        rows.append({"id": f"batch_{k}", "custom_id": s.question_id, "response": response, "error": None})
    write_lines(folder / "batch_output.jsonl", rows)


@kind(layers=1, expect="id answer")
def jsonl_meta_info_of_answers(folder, samples):
    """Write text and meta_info with id and hidden_states: the prompt (P, D), then a vector for each token."""
    rows = []
    for s in samples:
        prompt, rest = np.split(s.hidden[0], [s.prompt_length])
        info = {
            "id": s.question_id,
            "prompt_tokens": s.prompt_length,
            "hidden_states": [prompt.tolist(), *rest.tolist()],
        }
        rows.append({"text": s.answer, "meta_info": info})
    write_lines(folder / "answers.jsonl", rows)


@kind(layers=1, expect="id mean")
def pt_graphs_of_x_and_edge_index(folder, samples):
    """Write graphs as dicts: x (S, D), edge_index (2, E), edge_weight (E,), y and qid."""
    rows = []
    for s in samples:
        weights = s.attention.mean(1)[0]
        later, earlier = np.nonzero(weights)
        edges = {"edge_index": np.stack([earlier, later]), "edge_weight": weights[later, earlier]}
        rows.append({"x": tensor(s.hidden[0]), "qid": s.question_id, "y": 0} | {k: tensor(v) for k, v in edges.items()})
    save_pt(folder / "graphs.pt", rows)


@kind("h5py", count=4, expect_last="label")
def nc_with_dimension_scales(folder, samples):
    """Write a file of netCDF 4: hidden_states (question, layer, hidden) with scales, and label."""
    with create(folder / "a.nc") as file:
        file["question"] = [s.question_id for s in samples]
        file["layer"], file["hidden"] = np.array([8, 16, 24]), np.arange(12)
        states = file.create_dataset("hidden_states", data=np.stack([s.hidden[:, -1] for s in samples]))
        file["label"] = [int(s.score < 0.5) for s in samples]
        for k, name in enumerate(("question", "layer", "hidden")):
            file[name].make_scale(name)
            states.dims[k].attach_scale(file[name])
