"""Kinds whose structure differs strongly from that of the main corpus."""

import functools
import hashlib

import numpy as np

from tests.ingest.corpus import registry
from tests.ingest.corpus.samples import (
    dump,
    expect_generated,
    generate,
    joined_states,
    make_samples,
    pad,
    prompts,
    save_pt,
    tensor,
    tiny_model,
    write_json,
    write_lines,
    write_table,
)

kind = functools.partial(registry.kind, register=registry.UNSEEN)


@kind()
def bert_extract_features(folder):
    """Write JSON Lines of BERT's extract_features.py: tokens with the last four layers, numbered from -1 backwards."""
    samples = make_samples(3, layers=4)
    rows = []
    for i, s in enumerate(samples):
        features = [
            {
                "token": s.words[j],
                "layers": [{"index": -1 - k, "values": s.hidden[3 - k, j].tolist()} for k in range(4)],
            }
            for j in range(len(s.words))
        ]
        rows.append({"linex_index": i, "features": features})
    write_lines(folder / "output.jsonl", rows)
    return [s.expect("words") for s in samples]


@kind("transformers")
def t5_generate_objects(folder):
    """Write GenerateEncoderDecoderOutput of T5: the trace is that of the decoder."""
    import torch

    rows, traces = [], []
    for i, ids in enumerate(prompts()):
        torch.manual_seed(1)
        options = {"return_dict_in_generate": True, "output_hidden_states": True, "do_sample": False}
        output = tiny_model("t5").generate(ids, max_new_tokens=4, min_new_tokens=4, **options)
        rows.append({"question_id": f"q{i}", "output": output})
        steps = output.decoder_hidden_states
        hidden = np.stack([np.concatenate([s[k][0].numpy() for s in steps]) for k in range(len(steps[0]))])
        traces.append({"question_id": f"q{i}", "hidden_states": hidden, "has_embeddings": True})
    save_pt(folder / "t5.pt", rows)
    return traces


@kind()
def numpy_record_array(folder):
    """Write an npy file of a structured dtype: id, hidden (L, S, D), label."""
    samples = make_samples(4, lengths=(7,))
    dtype = [("id", "U8"), ("hidden", "f4", (3, 7, 12)), ("label", "i4")]
    np.save(
        folder / "records.npy", np.array([(s.question_id, s.hidden, int(s.score < 0.5)) for s in samples], dtype=dtype)
    )
    return [s.expect("id label") for s in samples]


@kind()
def tuple_keys(folder):
    """Write a pickled dict by (question id, layer) of arrays (S, D)."""
    samples = make_samples(3)
    dump(folder / "acts.pkl", {(s.question_id, k): h for s in samples for k, h in enumerate(s.hidden)})
    return [s.expect("id") for s in samples]


@kind()
def names_of_id_and_layer(folder):
    """Write an npz whose names join id and layer: q0_layer_0."""
    samples = make_samples(3, ids="ex-{}")
    np.savez(folder / "acts.npz", **{f"{s.question_id}_layer_{k}": h for s in samples for k, h in enumerate(s.hidden)})
    return [s.expect("id") for s in samples]


@kind()
def folder_per_layer(folder):
    """Write layer_10/q0.npy, layer_20/q0.npy ... (S, D)."""
    samples = make_samples(3)
    for k, layer in enumerate((10, 20, 30)):
        base = folder / f"layer_{layer}"
        base.mkdir()
        for s in samples:
            np.save(base / f"{s.question_id}.npy", s.hidden[k])
    return [s.expect("id", layers=[10, 20, 30]) for s in samples]


@kind()
def file_per_sample_and_layer(folder):
    """Write q0_layer0.pt, q0_layer1.pt ... tensors (S, D), with questions.json by id."""
    samples = make_samples(3)
    for s in samples:
        for k, h in enumerate(s.hidden):
            save_pt(folder / f"{s.question_id}_layer{k}.pt", tensor(h))
    write_json(folder / "questions.json", {s.question_id: s.question for s in samples})
    return [s.expect("id") for s in samples]


@kind()
def records_per_token(folder):
    """Write each trace as a list of token records: text, id, log-probability, vectors of all layers."""
    samples = make_samples(3)
    rows = []
    for s in samples:
        tokens = [
            {"text": s.words[j], "id": int(s.tokens[j]), "logprob": -0.5, "hidden_states": s.hidden[:, j]}
            for j in range(len(s.words))
        ]
        rows.append({"request": {"id": s.question_id, "prompt": s.question}, "completion": {"tokens": tokens}})
    dump(folder / "scenario_state.pkl", rows)
    return [s.expect("id tokens") for s in samples]


@kind("polars")
def polars_struct_column(folder):
    """Write Parquet by polars: a struct column of layers, each a list of lists."""
    import polars as pl

    samples = make_samples(3)
    rows = [
        {"question_id": s.question_id, "states": {f"layer_{k}": h.tolist() for k, h in enumerate(s.hidden)}}
        for s in samples
    ]
    pl.DataFrame(rows).write_parquet(folder / "states.parquet")
    return [s.expect("id") for s in samples]


@kind()
def tensor_dataset_object(folder):
    """Write torch.save(TensorDataset(X, y)): last tokens (N, L, D) and labels."""
    from torch.utils.data import TensorDataset

    samples = make_samples(5)
    features = tensor(np.stack([s.hidden[:, -1] for s in samples]))
    save_pt(folder / "train.pt", TensorDataset(features, tensor(np.array([int(s.score < 0.5) for s in samples]))))
    return [s.expect_last("label") for s in samples]


@kind()
def long_csv(folder):
    """Write a CSV in long form: a row per question, layer and token, a column per dimension."""
    samples = make_samples(2)
    rows = [
        {"question_id": s.question_id, "layer": k, "token": j}
        | {f"d{d}": float(v) for d, v in enumerate(s.hidden[k, j])}
        for s in samples
        for k in range(3)
        for j in range(len(s.tokens))
    ]
    write_table(folder / "hidden_states_long.csv", rows)
    return [s.expect("id") for s in samples]


@kind()
def harness_tensor_states(folder):
    """Write a states wrapper of lm-evaluation-harness: tensor_states/md5 of the prompt.pt, samples_task.jsonl."""
    samples = make_samples(3)
    rows = []
    for i, s in enumerate(samples):
        name = hashlib.md5(s.question.encode(), usedforsecurity=False).hexdigest()
        value = {"hidden_states": tuple(tensor(s.hidden[:, None])), "attentions": tuple(tensor(s.attention[:, None]))}
        save_pt(folder / "tensor_states" / f"{name}.pt", value)
        rows.append({"doc_id": i, "arguments": [[s.question]], "resps": [[s.answer]], "acc": s.score, "hash": name})
    write_lines(folder / "samples_triviaqa.jsonl", rows)
    return [s.expect("attention") for s in samples]


@kind()
def pooling_responses(folder):
    """Write responses of vLLM's pooling server (one vector per token, one layer), a JSON file per request."""
    samples = make_samples(3, layers=1)
    for s in samples:
        data = [{"index": 0, "object": "pooling", "data": s.hidden[0].tolist()}]
        usage = {"prompt_tokens": len(s.tokens), "total_tokens": len(s.tokens)}
        value = {"id": f"pool-{s.question_id}", "object": "list", "model": "m", "data": data, "usage": usage}
        write_json(folder / f"pool-{s.question_id}.json", value)
    return [s.expect() for s in samples]


@kind("scipy")
def sparse_attention(folder):
    """Write attention of each layer as a scipy CSR matrix (head mean), hidden states as arrays."""
    from scipy.sparse import csr_matrix

    samples = make_samples(3)
    rows = [
        {
            "question_id": s.question_id,
            "hidden_states": list(s.hidden),
            "attentions": [csr_matrix(a) for a in s.attention.mean(1)],
        }
        for s in samples
    ]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id mean") for s in samples]


@kind()
def prompt_and_response_states(folder):
    """Write the states of the prompt and of the response in two arrays, to be joined."""
    samples = make_samples(3)
    rows = [
        {
            "question_id": s.question_id,
            "prompt_hidden_states": s.hidden[:, : s.prompt_length],
            "response_hidden_states": s.hidden[:, s.prompt_length :],
        }
        for s in samples
    ]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id") for s in samples]


@kind()
def padded_batch_per_layer(folder):
    """Write layer_5, layer_6, ... (N, S, D) padded, attention_mask and texts in one .pt file."""
    samples = make_samples(4)
    hidden, mask = pad([s.hidden for s in samples], axis=1)
    value = {f"layer_{5 + k}": tensor(hidden[:, k], "float16") for k in range(3)}
    value |= {"attention_mask": tensor(mask), "texts": [s.question for s in samples]}
    save_pt(folder / "activations.pt", value)
    return [s.expect(layers=[5, 6, 7]) for s in samples]


@kind("h5py")
def h5_demonstrations(folder):
    """Write HDF5 in the layout of demonstrations: data/demo_0/hidden_states (S, L, D), and mask/train with names."""
    import h5py

    samples = make_samples(3)
    with h5py.File(folder / "rollouts.hdf5", "w") as file:
        for i, s in enumerate(samples):
            group = file.create_group(f"data/demo_{i}")
            group["hidden_states"], group["tokens"] = s.hidden.transpose(1, 0, 2), s.tokens
            group.attrs["num_samples"] = len(s.tokens)
        file["mask/train"] = np.array([b"demo_0", b"demo_1"])
    return [s.expect("tokens") for s in samples]


@kind("safetensors")
def st_file_per_layer(folder):
    """Write layer_00.safetensors ... with a tensor (S, D) per question id in each."""
    from safetensors.numpy import save_file

    samples = make_samples(3, ids="triviaqa/{}")
    for k in range(3):
        save_file({s.question_id: s.hidden[k].copy() for s in samples}, folder / f"layer_{k:02d}.safetensors")
    return [s.expect("id") for s in samples]


@kind("h5py", "transformers")
def h5_generation_steps(folder):
    """Write HDF5 of generate(): q0/step_0/layer_0 (P, D), then (1, D) per step."""
    import h5py

    traces = []
    with h5py.File(folder / "generations.h5", "w") as file:
        for i, ids in enumerate(prompts()):
            output = generate(ids, new=3 + i, attentions=False)
            for n, step in enumerate(output.hidden_states):
                for k, h in enumerate(step):
                    file[f"q{i}/step_{n}/layer_{k}"] = h[0].numpy()
            file[f"q{i}"].attrs["answer"] = f"A {i}"
            hidden = joined_states(output.hidden_states)
            traces.append({"question_id": f"q{i}", "hidden_states": hidden, "has_embeddings": True, "answer": f"A {i}"})
    return traces


@kind("pyarrow")
def parquet_files_to_join(folder):
    """Write hidden.parquet, attention.parquet and questions.parquet with rows in different order, joined by id."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    samples = make_samples(3)
    tables = {
        "hidden": [{"id": s.question_id, "hidden_states": s.hidden.tolist()} for s in samples],
        "attention": [{"id": s.question_id, "attention": s.attention.mean(1).tolist()} for s in reversed(samples)],
        "questions": [{"id": s.question_id, "question": s.question, "answer": s.answer} for s in samples],
    }
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return [s.expect("id mean question answer") for s in samples]


@kind()
def pickles_to_join(folder):
    """Write hidden_states.pkl, attentions.pkl and answers.json, each a dict by question id."""
    samples = make_samples(3)
    dump(folder / "hidden_states.pkl", {s.question_id: s.hidden for s in samples})
    dump(folder / "attentions.pkl", {s.question_id: s.attention for s in samples})
    write_json(folder / "answers.json", {s.question_id: s.answer for s in samples})
    return [s.expect("id attention answer") for s in samples]


@kind("transformers")
def npz_generation_steps(folder):
    """Write an npz per question with step_0_layer_0 (1, P, D), step_1_layer_0 (1, 1, D) ... and sequences."""
    traces = []
    for i, ids in enumerate(prompts()):
        output = generate(ids, new=3 + i, attentions=False)
        states = {f"step_{n}_layer_{k}": h.numpy() for n, s in enumerate(output.hidden_states) for k, h in enumerate(s)}
        np.savez(folder / f"gen_{i}.npz", **states, sequences=output.sequences.numpy())
        traces.append(expect_generated(output, attention=False))
    return traces
