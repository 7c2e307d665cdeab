"""Python objects: records smaller than a trace, batches by layer, sparse attention, objects of libraries."""

import collections
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import (
    attention_of,
    dump,
    forward,
    make_samples,
    pad,
    prompts,
    save_pt,
    states_of,
    tensor,
    tiny_model,
)

# Records smaller than a trace


@kind()
def pkl_record_per_token(folder):
    """Write a list with a dict per token: question_id, position, token_id, hidden_states (L, D)."""
    samples = make_samples(3)
    rows = [
        {"question_id": s.question_id, "position": k, "token_id": int(s.tokens[k]), "hidden_states": s.hidden[:, k]}
        for s in samples
        for k in range(len(s.tokens))
    ]
    dump(folder / "tokens.pkl", rows)
    return [s.expect("id tokens") for s in samples]


@kind("torch")
def pt_record_per_layer(folder):
    """Write a list with a dict per sample and layer: sample_id, layer, hidden (1, S, D)."""
    samples = make_samples(3, ids="s{}")
    rows = [
        {"sample_id": s.question_id, "layer": k, "hidden": tensor(s.hidden[k : k + 1])}
        for k in range(3)
        for s in samples
    ]
    save_pt(folder / "layers.pt", rows)
    return [s.expect("id") for s in samples]


@kind()
def pkl_tuples_of_id_and_layer(folder):
    """Write a list of tuples (id, layer, array (S, D))."""
    samples = make_samples(3)
    dump(folder / "t.pkl", [(s.question_id, k, s.hidden[k]) for s in samples for k in range(3)])
    return [s.expect("id") for s in samples]


@kind()
def pkl_dict_by_id_layer_and_token(folder):
    """Write a dict from (id, layer, position) to a vector (D,)."""
    samples = make_samples(3)
    value = {(s.question_id, k, t): s.hidden[k, t] for s in samples for k in range(3) for t in range(len(s.tokens))}
    dump(folder / "v.pkl", value)
    return [s.expect("id") for s in samples]


@kind("torch")
def pt_dict_by_joined_names(folder):
    """Write a dict with keys such as "q0_layer_2" and "q0_attn_2"."""
    samples = make_samples(3)
    value = {f"{s.question_id}_layer_{k}": tensor(s.hidden[k]) for s in samples for k in range(3)}
    value |= {f"{s.question_id}_attn_{k}": tensor(s.attention[k]) for s in samples for k in range(3)}
    save_pt(folder / "states.pt", value)
    return [s.expect("id attention") for s in samples]


@kind()
def pkl_layers_then_ids(folder):
    """Write a dict from layer to a dict from id to (S, D)."""
    samples = make_samples(3)
    dump(folder / "by_layer.pkl", {f"layer_{k}": {s.question_id: s.hidden[k] for s in samples} for k in range(3)})
    return [s.expect("id") for s in samples]


@kind("torch")
def pt_fields_then_ids(folder):
    """Write a dict by field of dicts by id: hidden_states, attentions, question, label."""
    samples = make_samples(3)
    value = {
        "hidden_states": {s.question_id: tensor(s.hidden) for s in samples},
        "attentions": {s.question_id: tensor(s.attention) for s in samples},
        "question": {s.question_id: s.question for s in samples},
        "label": {s.question_id: int(s.score < 0.5) for s in samples},
    }
    save_pt(folder / "all.pt", value)
    return [s.expect("id attention question label") for s in samples]


@kind()
def pkl_trace_with_list_of_steps(folder):
    """Write a dict per trace whose "steps" are dicts with token_id, token and hidden, a list of vectors by layer."""
    samples = make_samples(3)
    rows = [
        {
            "question_id": s.question_id,
            "question": s.question,
            "steps": [
                {"step": k, "token_id": int(s.tokens[k]), "token": s.words[k], "hidden": list(s.hidden[:, k])}
                for k in range(len(s.tokens))
            ],
        }
        for s in samples
    ]
    dump(folder / "steps.pkl", rows)
    return [s.expect("id question tokens words") for s in samples]


@kind("torch")
def pt_prompt_and_response_states(folder):
    """Write prompt_hidden_states (L, P, D) and response_hidden_states (L, R, D) with prompt_ids and response_ids."""
    samples = make_samples(3)
    rows = [
        {
            "question_id": s.question_id,
            "prompt_hidden_states": tensor(s.hidden[:, : s.prompt_length]),
            "response_hidden_states": tensor(s.hidden[:, s.prompt_length :]),
            "prompt_ids": tensor(s.tokens[: s.prompt_length]),
            "response_ids": tensor(s.tokens[s.prompt_length :]),
        }
        for s in samples
    ]
    save_pt(folder / "states.pt", rows)
    return [s.expect("id tokens", prompt_length=s.prompt_length) for s in samples]


@kind()
def pkl_record_per_generation_step(folder):
    """Write one pickle.dump per generated step: id, step and the layers of the pass, (P, D) and then (1, D)."""
    samples = make_samples(3)
    records = []
    for s in samples:
        bounds = [0, *range(s.prompt_length, len(s.tokens) + 1)]
        for k, (begin, end) in enumerate(pairwise(bounds)):
            records.append({"id": s.question_id, "step": k, "hidden_states": [h[begin:end] for h in s.hidden]})
    dump(folder / "steps.pkl", *records)
    return [s.expect("id") for s in samples]


# Batches


@kind("torch")
def pt_padded_batch_per_layer(folder):
    """Write layer_0, layer_1, ... each (B, S, D) padded on the right, attention_mask, input_ids and ids in one dict."""
    samples = make_samples(3)
    value = {f"layer_{k}": tensor(pad([s.hidden[k] for s in samples])[0]) for k in range(3)}
    ids, mask = pad([s.tokens for s in samples])
    value |= {"input_ids": tensor(ids), "attention_mask": tensor(mask), "ids": [s.question_id for s in samples]}
    save_pt(folder / "batch.pt", value)
    return [s.expect("id tokens") for s in samples]


@kind("torch")
def pt_ragged_total_with_cu_seqlens(folder):
    """Write layers (total, D) in a list, input_ids (total,), cu_seqlens (N + 1,) and ids."""
    samples = make_samples(3)
    value = {
        "hidden_states": [tensor(np.concatenate([s.hidden[k] for s in samples])) for k in range(3)],
        "input_ids": tensor(np.concatenate([s.tokens for s in samples])),
        "cu_seqlens": tensor(np.cumsum([0, *(len(s.tokens) for s in samples)]).astype("i4")),
        "question_ids": [s.question_id for s in samples],
    }
    save_pt(folder / "packed.pt", value)
    return [s.expect("id tokens") for s in samples]


@kind()
def pkl_ragged_total_with_lengths(folder):
    """Write one array (L, total, D) with the lengths and ids of its traces."""
    samples = make_samples(3)
    value = {
        "hidden_states": np.concatenate([s.hidden for s in samples], 1),
        "lengths": [len(s.tokens) for s in samples],
        "ids": [s.question_id for s in samples],
    }
    dump(folder / "packed.pkl", value)
    return [s.expect("id") for s in samples]


@kind()
def pkl_batch_of_responses(folder):
    """Write batches of last tokens: (L, B, D) for each batch in a list, with ids and labels."""
    samples = make_samples(4)
    batches = [
        {
            "ids": [s.question_id for s in part],
            "labels": [int(s.score < 0.5) for s in part],
            "last_token_hidden": np.stack([s.hidden[:, -1] for s in part], 1),
        }
        for part in (samples[:2], samples[2:])
    ]
    dump(folder / "batches.pkl", batches)
    return [s.expect_last("id label") for s in samples]


# Sparse attention


@kind("scipy")
def pkl_scipy_sparse_attention(folder):
    """Write attention averaged over heads as a scipy.sparse.csr_matrix per layer."""
    from scipy import sparse

    samples = make_samples(3)
    rows = [
        {
            "question_id": s.question_id,
            "hidden_states": s.hidden,
            "attentions": [sparse.csr_matrix(a) for a in s.attention.mean(1)],
        }
        for s in samples
    ]
    dump(folder / "sparse.pkl", rows)
    return [s.expect("id mean") for s in samples]


@kind("scipy")
def pkl_scipy_arrays_per_head(folder):
    """Write a scipy.sparse.coo_array per layer and head."""
    from scipy import sparse

    samples = make_samples(3)
    rows = [
        {
            "id": s.question_id,
            "hidden_states": list(s.hidden),
            "attentions": [[sparse.coo_array(a) for a in heads] for heads in s.attention],
        }
        for s in samples
    ]
    dump(folder / "sparse.pkl", rows)
    return [s.expect("id attention") for s in samples]


@kind("torch")
def pt_sparse_attention(folder):
    """Write attention (L, H, S, S) of each trace as a sparse COO tensor."""
    samples = make_samples(3)
    rows = [
        {
            "question_id": s.question_id,
            "hidden_states": tensor(s.hidden),
            "attentions": tensor(s.attention).to_sparse(),
        }
        for s in samples
    ]
    save_pt(folder / "sparse.pt", rows)
    return [s.expect("id attention") for s in samples]


@kind("torch")
def pt_sparse_csr_per_layer(folder):
    """Write the mean over heads of each layer as a sparse CSR tensor."""
    samples = make_samples(3)
    rows = [
        {
            "question_id": s.question_id,
            "hidden_states": tensor(s.hidden),
            "attention": [tensor(a).to_sparse_csr() for a in s.attention.mean(1)],
        }
        for s in samples
    ]
    save_pt(folder / "sparse.pt", rows)
    return [s.expect("id mean") for s in samples]


@kind()
def pkl_attention_edges(folder):
    """Write attention of each layer as a pair (edge_index (2, E), weight (E,)): the row attends to the column."""
    samples = make_samples(3)
    rows = []
    for s in samples:
        layers = []
        for a in s.attention.mean(1):
            target, source = np.nonzero(a)
            layers.append({"edge_index": np.stack([source, target]), "edge_weight": a[target, source]})
        rows.append({"question_id": s.question_id, "hidden_states": s.hidden, "attentions": layers})
    dump(folder / "edges.pkl", rows)
    return [s.expect("id mean") for s in samples]


# Objects of libraries


@kind("transformers")
def t5_generate_output(folder):
    """Write the output of generate() of T5: decoder states by step, encoder states, cross attention."""
    import torch

    traces = []
    for i, ids in enumerate(prompts()):
        torch.manual_seed(1)
        with torch.no_grad():
            output = tiny_model("t5").generate(
                ids,
                max_new_tokens=4,
                min_new_tokens=4,
                do_sample=False,
                return_dict_in_generate=True,
                output_hidden_states=True,
                output_attentions=True,
            )
        output.past_key_values = None
        save_pt(folder / f"q{i}.pt", output)
        steps = output.decoder_hidden_states
        hidden = np.stack([np.concatenate([step[k][0].numpy() for step in steps]) for k in range(len(steps[0]))])
        traces.append({"question_id": None, "hidden_states": hidden, "has_embeddings": True})
    return traces


@kind("transformers")
def t5_forward_output(folder):
    """Write Seq2SeqLMOutput of one forward pass of T5 with labels, by question id."""
    import torch

    value, traces = {}, []
    for i, ids in enumerate(prompts()):
        with torch.no_grad():
            output = tiny_model("t5")(
                input_ids=ids,
                decoder_input_ids=ids[:, :4],
                output_hidden_states=True,
                output_attentions=True,
                use_cache=False,
            )
        value[f"q{i}"] = output
        traces.append(
            {
                "question_id": f"q{i}",
                "hidden_states": states_of(output.decoder_hidden_states),
                "attention": attention_of(output.decoder_attentions),
                "has_embeddings": True,
            }
        )
    save_pt(folder / "t5.pt", value)
    return traces


@kind("torch")
def pt_tensor_dataset(folder):
    """Write a TensorDataset of last tokens (N, L, D) and labels (N,)."""
    import torch

    samples = make_samples(4)
    last = tensor(np.stack([s.hidden[:, -1] for s in samples]))
    labels = torch.tensor([int(s.score < 0.5) for s in samples])
    save_pt(folder / "dataset.pt", torch.utils.data.TensorDataset(last, labels))
    return [s.expect_last() for s in samples]


@dataclass(slots=True)
class Generation:
    """A class with slots of the user's script."""

    question_id: str
    hidden_states: np.ndarray
    answer: str


Answer = collections.namedtuple("Answer", "question_id hidden_states answer")


@kind()
def pkl_dataclass_with_slots(folder):
    """Write instances of a dataclass with slots."""
    samples = make_samples(3)
    dump(folder / "g.pkl", [Generation(s.question_id, s.hidden, s.answer) for s in samples])
    return [s.expect("id answer") for s in samples]


@kind()
def pkl_namedtuples(folder):
    """Write instances of a namedtuple, whose field names are not in the file: the values show what each is."""
    samples = make_samples(3)
    dump(folder / "a.pkl", [Answer(s.question_id, s.hidden, s.answer) for s in samples])
    return [s.expect("id") for s in samples]


@kind("pandas")
def pkl_dataframe_by_index(folder):
    """Write df.to_pickle with the id as index, lists of layers in the cells, scores as floats."""
    import pandas as pd

    samples = make_samples(4)
    frame = pd.DataFrame(
        {
            "hidden_states": [list(s.hidden) for s in samples],
            "attentions": [list(s.attention) for s in samples],
            "answer": [s.answer for s in samples],
            "score": [s.score for s in samples],
            "label": [int(s.score < 0.5) for s in samples],
        },
        index=pd.Index([s.question_id for s in samples], name="question_id"),
    )
    frame.to_pickle(folder / "frame.pkl")
    return [s.expect("id attention answer score") for s in samples]


@kind("pandas")
def pkl_dataframe_per_layer(folder):
    """Write df.to_pickle.gz with a row per id and layer, and a column of vectors (last tokens)."""
    import pandas as pd

    samples = make_samples(3)
    rows = [{"question_id": s.question_id, "layer": k, "hidden_states": s.hidden[k]} for s in samples for k in range(3)]
    pd.DataFrame(rows).to_pickle(folder / "frame.pkl.gz")
    return [s.expect("id") for s in samples]


@kind("pandas", "torch")
def pkl_dataframe_in_dict(folder):
    """Write a dict of a frame with ids, questions and labels, and a list of arrays in the order of its rows."""
    import pandas as pd

    samples = make_samples(3)
    frame = pd.DataFrame({"question_id": [s.question_id for s in samples], "question": [s.question for s in samples]})
    dump(folder / "both.pkl", {"data": frame, "hidden_states": [s.hidden for s in samples]})
    return [s.expect("id question") for s in samples]


@kind("transformers")
def pipeline_feature_extraction(folder):
    """Write the lists of pipeline("feature-extraction"): [1][S][D] floats for each text."""
    outputs = [forward(ids, "bert").hidden_states[-1] for ids in prompts()]
    dump(folder / "features.pkl", [output.tolist() for output in outputs])
    return [{"question_id": None, "hidden_states": output.numpy()} for output in outputs]


@kind()
def embedding_service_responses(folder):
    """Write the responses of an embedding service, as dicts: data[k].embedding, with index and usage."""
    samples = make_samples(3)
    value = [
        {
            "id": s.question_id,
            "text": s.question,
            "response": {
                "object": "list",
                "data": [{"object": "embedding", "index": 0, "embedding": s.hidden[-1, -1].astype(float).tolist()}],
                "model": "text-embedding-3-small",
                "usage": {"prompt_tokens": len(s.tokens), "total_tokens": len(s.tokens)},
            },
        }
        for s in samples
    ]
    dump(folder / "responses.pkl", value)
    return [s.expect_last("id", last_token=s.hidden[-1:, -1]) for s in samples]
