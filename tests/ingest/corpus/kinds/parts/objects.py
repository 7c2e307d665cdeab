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
    pad,
    prompts,
    save_pt,
    states_of,
    tensor,
    tiny_model,
)

# Records smaller than a trace


@kind(expect="id tokens")
def pkl_record_per_token(folder, samples):
    """Write a list with a dict per token: question_id, position, token_id, hidden_states (L, D)."""
    rows = [
        {"question_id": s.question_id, "position": k, "token_id": int(s.tokens[k]), "hidden_states": s.hidden[:, k]}
        for s in samples
        for k in range(len(s.tokens))
    ]
    dump(folder / "tokens.pkl", rows)


@kind("torch", ids="s{}", expect="id")
def pt_record_per_layer(folder, samples):
    """Write a list with a dict per sample and layer: sample_id, layer, hidden (1, S, D)."""
    rows = [
        {"sample_id": s.question_id, "layer": k, "hidden": tensor(s.hidden[k : k + 1])}
        for k in range(3)
        for s in samples
    ]
    save_pt(folder / "layers.pt", rows)


@kind(expect="id")
def pkl_tuples_of_id_and_layer(folder, samples):
    """Write a list of tuples (id, layer, array (S, D))."""
    dump(folder / "t.pkl", [(s.question_id, k, s.hidden[k]) for s in samples for k in range(3)])


@kind(expect="id")
def pkl_dict_by_id_layer_and_token(folder, samples):
    """Write a dict from (id, layer, position) to a vector (D,)."""
    value = {(s.question_id, k, t): s.hidden[k, t] for s in samples for k in range(3) for t in range(len(s.tokens))}
    dump(folder / "v.pkl", value)


@kind("torch", expect="id attention")
def pt_dict_by_joined_names(folder, samples):
    """Write a dict with keys such as "q0_layer_2" and "q0_attn_2"."""
    value = {f"{s.question_id}_layer_{k}": tensor(s.hidden[k]) for s in samples for k in range(3)}
    value |= {f"{s.question_id}_attn_{k}": tensor(s.attention[k]) for s in samples for k in range(3)}
    save_pt(folder / "states.pt", value)


@kind(expect="id")
def pkl_layers_then_ids(folder, samples):
    """Write a dict from layer to a dict from id to (S, D)."""
    dump(folder / "by_layer.pkl", {f"layer_{k}": {s.question_id: s.hidden[k] for s in samples} for k in range(3)})


@kind("torch", expect="id attention question label")
def pt_fields_then_ids(folder, samples):
    """Write a dict by field of dicts by id: hidden_states, attentions, question, label."""
    value = {
        "hidden_states": {s.question_id: tensor(s.hidden) for s in samples},
        "attentions": {s.question_id: tensor(s.attention) for s in samples},
        "question": {s.question_id: s.question for s in samples},
        "label": {s.question_id: int(s.score < 0.5) for s in samples},
    }
    save_pt(folder / "all.pt", value)


@kind(expect="id question tokens words", rows="steps.pkl")
def pkl_trace_with_list_of_steps(s):
    """Write a dict per trace whose "steps" are dicts with token_id, token and hidden, a list of vectors by layer."""
    return {
        "question_id": s.question_id,
        "question": s.question,
        "steps": [
            {"step": k, "token_id": int(s.tokens[k]), "token": s.words[k], "hidden": list(s.hidden[:, k])}
            for k in range(len(s.tokens))
        ],
    }


@kind("torch")
def pt_prompt_and_response_states(folder, samples):
    """Write prompt_hidden_states (L, P, D) and response_hidden_states (L, R, D) with prompt_ids and response_ids."""
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


@kind(expect="id")
def pkl_record_per_generation_step(folder, samples):
    """Write one pickle.dump per generated step: id, step and the layers of the pass, (P, D) and then (1, D)."""
    records = []
    for s in samples:
        bounds = [0, *range(s.prompt_length, len(s.tokens) + 1)]
        for k, (begin, end) in enumerate(pairwise(bounds)):
            records.append({"id": s.question_id, "step": k, "hidden_states": [h[begin:end] for h in s.hidden]})
    dump(folder / "steps.pkl", *records)


# Batches


@kind("torch", expect="id tokens")
def pt_padded_batch_per_layer(folder, samples):
    """Write layer_0, layer_1, ... each (B, S, D) padded on the right, attention_mask, input_ids and ids in one dict."""
    value = {f"layer_{k}": tensor(pad([s.hidden[k] for s in samples])[0]) for k in range(3)}
    ids, mask = pad([s.tokens for s in samples])
    value |= {"input_ids": tensor(ids), "attention_mask": tensor(mask), "ids": [s.question_id for s in samples]}
    save_pt(folder / "batch.pt", value)


@kind("torch", expect="id tokens")
def pt_ragged_total_with_cu_seqlens(folder, samples):
    """Write layers (total, D) in a list, input_ids (total,), cu_seqlens (N + 1,) and ids."""
    value = {
        "hidden_states": [tensor(np.concatenate([s.hidden[k] for s in samples])) for k in range(3)],
        "input_ids": tensor(np.concatenate([s.tokens for s in samples])),
        "cu_seqlens": tensor(np.cumsum([0, *(len(s.tokens) for s in samples)]).astype("i4")),
        "question_ids": [s.question_id for s in samples],
    }
    save_pt(folder / "packed.pt", value)


@kind(expect="id")
def pkl_ragged_total_with_lengths(folder, samples):
    """Write one array (L, total, D) with the lengths and ids of its traces."""
    value = {
        "hidden_states": np.concatenate([s.hidden for s in samples], 1),
        "lengths": [len(s.tokens) for s in samples],
        "ids": [s.question_id for s in samples],
    }
    dump(folder / "packed.pkl", value)


@kind(count=4, expect_last="id label")
def pkl_batch_of_responses(folder, samples):
    """Write batches of last tokens: (L, B, D) for each batch in a list, with ids and labels."""
    batches = [
        {
            "ids": [s.question_id for s in part],
            "labels": [int(s.score < 0.5) for s in part],
            "last_token_hidden": np.stack([s.hidden[:, -1] for s in part], 1),
        }
        for part in (samples[:2], samples[2:])
    ]
    dump(folder / "batches.pkl", batches)


# Sparse attention


@kind("scipy", expect="id mean", rows="sparse.pkl")
def pkl_scipy_sparse_attention(s):
    """Write attention averaged over heads as a scipy.sparse.csr_matrix per layer."""
    from scipy import sparse

    return {
        "question_id": s.question_id,
        "hidden_states": s.hidden,
        "attentions": [sparse.csr_matrix(a) for a in s.attention.mean(1)],
    }


@kind("scipy", expect="id attention", rows="sparse.pkl")
def pkl_scipy_arrays_per_head(s):
    """Write a scipy.sparse.coo_array per layer and head."""
    from scipy import sparse

    return {
        "id": s.question_id,
        "hidden_states": list(s.hidden),
        "attentions": [[sparse.coo_array(a) for a in heads] for heads in s.attention],
    }


@kind("torch", expect="id attention", rows="sparse.pt")
def pt_sparse_attention(s):
    """Write attention (L, H, S, S) of each trace as a sparse COO tensor."""
    return {
        "question_id": s.question_id,
        "hidden_states": tensor(s.hidden),
        "attentions": tensor(s.attention).to_sparse(),
    }


@kind("torch", expect="id mean", rows="sparse.pt")
def pt_sparse_csr_per_layer(s):
    """Write the mean over heads of each layer as a sparse CSR tensor."""
    return {
        "question_id": s.question_id,
        "hidden_states": tensor(s.hidden),
        "attention": [tensor(a).to_sparse_csr() for a in s.attention.mean(1)],
    }


@kind(expect="id mean")
def pkl_attention_edges(folder, samples):
    """Write attention of each layer as a pair (edge_index (2, E), weight (E,)): the row attends to the column."""
    rows = []
    for s in samples:
        layers = []
        for a in s.attention.mean(1):
            target, source = np.nonzero(a)
            layers.append({"edge_index": np.stack([source, target]), "edge_weight": a[target, source]})
        rows.append({"question_id": s.question_id, "hidden_states": s.hidden, "attentions": layers})
    dump(folder / "edges.pkl", rows)


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
        output.cache = None
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


@kind("torch", count=4, expect_last="")
def pt_tensor_dataset(folder, samples):
    """Write a TensorDataset of last tokens (N, L, D) and labels (N,)."""
    import torch

    last = tensor(np.stack([s.hidden[:, -1] for s in samples]))
    labels = torch.tensor([int(s.score < 0.5) for s in samples])
    save_pt(folder / "dataset.pt", torch.utils.data.TensorDataset(last, labels))


@dataclass(slots=True)
class Generation:
    """A class with slots of the user's script."""

    question_id: str
    hidden_states: np.ndarray
    answer: str


Answer = collections.namedtuple("Answer", "question_id hidden_states answer")


@kind(expect="id answer", rows="g.pkl")
def pkl_dataclass_with_slots(s):
    """Write instances of a dataclass with slots."""
    return Generation(s.question_id, s.hidden, s.answer)


@kind(expect="id", rows="a.pkl")
def pkl_namedtuples(s):
    """Write instances of a namedtuple, whose field names are not in the file: the values show what each is."""
    return Answer(s.question_id, s.hidden, s.answer)


@kind("pandas", count=4, expect="id attention answer score")
def pkl_dataframe_by_index(folder, samples):
    """Write df.to_pickle with the id as index, lists of layers in the cells, scores as floats."""
    import pandas as pd

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


@kind("pandas", expect="id")
def pkl_dataframe_per_layer(folder, samples):
    """Write df.to_pickle.gz with a row per id and layer, and a column of vectors (last tokens)."""
    import pandas as pd

    rows = [{"question_id": s.question_id, "layer": k, "hidden_states": s.hidden[k]} for s in samples for k in range(3)]
    pd.DataFrame(rows).to_pickle(folder / "frame.pkl.gz")


@kind("pandas", "torch", expect="id question")
def pkl_dataframe_in_dict(folder, samples):
    """Write a dict of a frame with ids, questions and labels, and a list of arrays in the order of its rows."""
    import pandas as pd

    frame = pd.DataFrame({"question_id": [s.question_id for s in samples], "question": [s.question for s in samples]})
    dump(folder / "both.pkl", {"data": frame, "hidden_states": [s.hidden for s in samples]})


@kind("transformers")
def pipeline_feature_extraction(folder):
    """Write the lists of pipeline("feature-extraction"): [1][S][D] floats for each text."""
    outputs = [forward(ids, "bert").hidden_states[-1] for ids in prompts()]
    dump(folder / "features.pkl", [output.tolist() for output in outputs])
    return [{"question_id": None, "hidden_states": output.numpy()} for output in outputs]


@kind()
def embedding_service_responses(folder, samples):
    """Write the responses of an embedding service, as dicts: data[k].embedding, with index and usage."""
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
